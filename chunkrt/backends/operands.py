"""Weights as operators in NumPy take them: right operands of linears, a class a kind, multiplied by the scheme's rules.

They are the reference's, and what a plug-in's functions are called with.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chunkrt.backends.registry import REFERENCE, operators
from chunkrt.checkpoints.source import BLOCK_DEPTH, BlockTensor
from chunkrt.engine_directory.store import INPUT_STEP_SUFFIX, OUTPUT_STEP_SUFFIX, WeightStore
from chunkrt.graph.plan import Plan, Subgraph, expert_weights, linear_weights
from chunkrt.quant.grid import excess_over_grid, round_to_grid
from chunkrt.quant.outliers import take_outliers
from chunkrt.quant.scheme import Scheme

Float32 = NDArray[np.float32]
Quantize = Callable[[Float32], tuple[NDArray[np.int8], Float32]]
"""x float32 [T, K] to integers of the same shape and the scale of each row [T, 1]; `quantize_rows` is ours."""


def constants(subgraph: Subgraph, plan: Plan, scheme: Scheme, weights: WeightStore) -> dict[str, Any]:
    """The weights of a subgraph by name, as functions take them.

    Under "float" all are arrays. Otherwise the weight of a linear is a `QuantizedWeight`, that of routed experts a list
    of them.
    """
    linears, experts = linear_weights(plan), expert_weights(plan)

    def constant(name: str) -> Any:
        if scheme.weight_bits and name in linears:
            return _quantized_weight(name, scheme, weights)
        if scheme.weight_bits and name in experts:
            return _quantized_experts(name, weights)
        return weights.array(name)

    return {name: constant(name) for name in subgraph.weights}


@operators.register("quantize", REFERENCE)
def quantize_rows(x: Float32) -> tuple[NDArray[np.int8], Float32]:
    """Dynamic int8 per row: q = round-half-even(x * (127 / max|x|)) and max|x| / 127; x float32 [T, K]."""
    limit = np.abs(x).max(axis=-1, keepdims=True)
    multiplier = np.float32(127) / np.where(limit > 0, limit, np.float32(1))
    return np.rint(x * multiplier).astype(np.int8), (limit / np.float32(127)).astype(np.float32)


class DynamicWeight:
    """An int8 weight [K, N] with its scales [N], as MatMul's right operand; the left one is measured row by row."""

    def __init__(self, integers: NDArray[np.int8], scale: Float32) -> None:
        self._exact = integers.astype(np.float64)  # products of int8 sum exactly in float64, and by BLAS
        self._scale = scale

    def multiply(self, left: Float32, quantize: Quantize = quantize_rows) -> Float32:
        """left float32 [T, K] @ this, float32 [T, N]; what is left of rows without their outliers is quantised."""
        outliers, rest = take_outliers(left)
        quantized, row_scale = quantize(rest)
        result = (quantized.astype(np.float64) @ self._exact).astype(np.float32) * row_scale * self._scale
        taken: Float32 = ((outliers.astype(np.float64) @ self._exact) * self._scale).astype(np.float32)
        return result + taken

    def dequantise(self) -> Float32:
        """The weight in float32 [K, N]."""
        return (self._exact * self._scale).astype(np.float32)


class BlockWeight:
    """A weight [K, N] in blocks of 4 bits, as MatMul's right operand; the left one is measured row by row."""

    def __init__(self, blocks: BlockTensor) -> None:
        columns, depth = blocks.integers.shape
        integers = blocks.integers.T.reshape(depth // BLOCK_DEPTH, BLOCK_DEPTH, columns).astype(np.float64)
        self._blocks = list(zip(integers, blocks.scales.T, blocks.minima.T, strict=True))
        self._columns = columns

    def multiply(self, left: Float32, quantize: Quantize = quantize_rows) -> Float32:
        """left float32 [T, K] @ this, float32 [T, N]: block after block, each product and sum rounded once together."""
        outliers, rest = take_outliers(left)
        quantized, row_scale = quantize(rest)
        value = np.zeros((len(left), self._columns), np.float32)
        taken = np.zeros((len(left), self._columns))
        for index, (integers, scale, minimum) in enumerate(self._blocks):
            depth = slice(index * BLOCK_DEPTH, (index + 1) * BLOCK_DEPTH)
            rows = quantized[:, depth].astype(np.float64)
            value = (rows @ integers * scale + value).astype(np.float32)
            value = (rows.sum(axis=1, keepdims=True) * minimum + value).astype(np.float32)
            taken += outliers[:, depth].astype(np.float64) @ (integers * scale + minimum)
        result: Float32 = value * row_scale + taken.astype(np.float32)
        return result

    def dequantise(self) -> Float32:
        """The weight in float32 [K, N]."""
        return np.concatenate([i * scale + minimum for i, scale, minimum in self._blocks]).astype(np.float32)


class StaticWeight:
    """An int8 weight [K, N] with its scales [N], the grid of the left operand, and that of the result if it has one."""

    def __init__(
        self, integers: NDArray[np.int8], scale: Float32, *, bits: int, input_step: Float32, output_step: Float32 | None
    ) -> None:
        self._exact = integers.astype(np.float64)  # sums of 24-bit products are exact up to a depth of 2^29
        self._scale = scale
        self._bits = bits
        self._input_step = input_step
        self._output_step = output_step

    def multiply(self, left: Float32) -> Float32:
        """left float32 [T, K] @ this, float32 [T, N]."""
        accumulated = round_to_grid(left, self._input_step, self._bits).astype(np.float64) @ self._exact
        result: Float32 = accumulated.astype(np.float32) * (self._input_step * self._scale)
        if self._output_step is None:
            return result
        return round_to_grid(result, self._output_step, self._bits) * self._output_step

    def multiply_excess(self, left: Float32) -> Float32:
        """What `multiply` leaves out where left [T, K] is beyond its grid, float32 [T, N]."""
        excess = excess_over_grid(left, self._input_step).astype(np.float64)
        return ((excess @ self._exact) * self._scale).astype(np.float32)

    def dequantise(self) -> Float32:
        """The weight in float32 [K, N]."""
        return (self._exact * self._scale).astype(np.float32)


QuantizedWeight = DynamicWeight | BlockWeight | StaticWeight


def _quantized_weight(name: str, scheme: Scheme, weights: WeightStore) -> QuantizedWeight:
    if scheme.has_blocks(name):
        return BlockWeight(weights.blocks(name))
    integers, scale = weights.linear(name)
    if not scheme.is_static:
        return DynamicWeight(integers, scale)
    return StaticWeight(
        integers,
        scale,
        bits=scheme.activation_bits_of(name),
        input_step=weights.array(name + INPUT_STEP_SUFFIX),
        output_step=None if scheme.has_float_output(name) else weights.array(name + OUTPUT_STEP_SUFFIX),
    )


def _quantized_experts(name: str, weights: WeightStore) -> list[DynamicWeight]:
    integers, scales = weights.experts(name)
    return [DynamicWeight(one, scale) for one, scale in zip(integers, scales, strict=True)]
