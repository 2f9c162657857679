"""Linears under a scheme: rounding before an int8 product, and scaling of its sums.

Each function follows one of chunkrt's reference backend, operation by operation.
"""

from __future__ import annotations

from typing import Protocol

import torch

from chunkrt.engine_directory.store import INPUT_STEP_SUFFIX, OUTPUT_STEP_SUFFIX, WeightStore
from chunkrt.quant.arithmetic import OUTLIER_RATIO
from chunkrt.quant.scheme import LEVELS, Scheme
from chunkrt_torch.products import Int8Matrix

BASE = 256
"""Base of the high and the low int8 digit of a 16-bit integer."""


class Linear(Protocol):
    """MatMul's right operand."""

    def multiply(self, left: torch.Tensor) -> torch.Tensor:
        """Return left float32 [T, K] @ this, float32 [T, N]."""
        ...


class DynamicLinear:
    """An int8 weight [K, N] with scales [N]; each row of the left operand is measured, without its outliers."""

    def __init__(self, matrix: Int8Matrix, scale: torch.Tensor) -> None:
        self._matrix = matrix
        self._scale = scale
        # Division by a plain number would multiply by its inverse, and round twice.
        self._levels = torch.tensor(LEVELS[8], dtype=torch.float32, device=scale.device)

    def multiply(self, left: torch.Tensor) -> torch.Tensor:
        """See `Linear`."""
        magnitudes = left.abs()
        is_outlier = magnitudes > OUTLIER_RATIO * magnitudes.sum(dim=1, keepdim=True) / left.shape[1]
        rest = left.masked_fill(is_outlier, 0)
        limit = rest.abs().amax(dim=1, keepdim=True)
        quantized = (rest * torch.div(self._levels, limit.masked_fill(limit == 0, 1))).round().to(torch.int8)
        result = self._matrix.multiply(quantized).float() * (limit / self._levels) * self._scale
        channels = is_outlier.any(dim=0).nonzero()[:, 0]
        if not len(channels):
            return result
        outliers = left.masked_fill(~is_outlier, 0)[:, channels].double()
        return result + (outliers @ self._matrix.rows(channels) * self._scale).float()


class StaticLinear:
    """An int8 weight [K, N] with scales [N], the grid of the left operand, and that of the result if it has one."""

    def __init__(
        self,
        matrix: Int8Matrix,
        scale: torch.Tensor,
        *,
        bits: int,
        input_step: torch.Tensor,
        output_step: torch.Tensor | None,
    ) -> None:
        self._matrix = matrix
        self._factor = input_step * scale
        self._bits = bits
        self._input_step = input_step
        self._output_step = output_step

    def multiply(self, left: torch.Tensor) -> torch.Tensor:
        """See `Linear`."""
        quantized = self._round(left, self._input_step)
        if self._bits == 8:
            accumulated = self._matrix.multiply(quantized.to(torch.int8))
        else:
            integers = quantized.int()
            low = (integers + BASE // 2) % BASE - BASE // 2
            high = (integers - low) // BASE
            digits = torch.cat([high, low]).to(torch.int8)
            sums = self._matrix.multiply(digits).long()  # the result may exceed 32 bits
            accumulated = sums[: len(left)] * BASE + sums[len(left) :]
        result = accumulated.float() * self._factor
        if self._output_step is None:
            return result
        return self._round(result, self._output_step) * self._output_step

    def _round(self, x: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        levels = LEVELS[self._bits]
        return (x / step).round().clamp(-levels, levels)


def make_linear(
    name: str, scheme: Scheme, weights: WeightStore, device: torch.device, has_int8_products: bool
) -> Linear:
    """Make a linear by its weight's name, on the device."""

    def on_device(stored: str) -> torch.Tensor:
        return torch.tensor(weights.array(stored), device=device)

    integers, scale = weights.linear(name)
    matrix, scales = Int8Matrix(integers, device, has_int8_products), torch.tensor(scale, device=device)
    if not scheme.is_static:
        return DynamicLinear(matrix, scales)
    return StaticLinear(
        matrix,
        scales,
        bits=scheme.activation_bits_of(name),
        input_step=on_device(name + INPUT_STEP_SUFFIX),
        output_step=None if scheme.has_float_output(name) else on_device(name + OUTPUT_STEP_SUFFIX),
    )
