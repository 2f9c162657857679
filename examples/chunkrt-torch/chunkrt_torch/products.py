"""Exact products of int8 matrices."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

MULTIPLE = 8
"""Divisor of the depth and the columns of CUDA's int8 products."""
ROWS_MULTIPLE = 32
"""Divisor of their rows, of which there must be more than 16."""


class Int8Matrix:
    """A weight int8 [K, N] on a device, as a product's right operand.

    Args:
        has_int8_products: whether the device multiplies int8; otherwise float64 is used, in which all sums are also
            exact.
    """

    def __init__(self, integers: NDArray[np.int8], device: torch.device, has_int8_products: bool) -> None:
        self._depth, self._columns = integers.shape
        self._has_int8_products = has_int8_products
        padding = [(0, -size % MULTIPLE) for size in integers.shape]
        padded = np.pad(integers, padding) if has_int8_products else integers.astype(np.float64)
        self._matrix = torch.tensor(np.ascontiguousarray(padded.T), device=device).t()  # column-major for CUDA

    def multiply(self, left: torch.Tensor) -> torch.Tensor:
        """Return left int8 [T, K] @ this, exact: int32 [T, N], or float64."""
        if not self._has_int8_products:
            return left.double() @ self._matrix
        rows = len(left)
        padding = (0, -self._depth % MULTIPLE, 0, -rows % ROWS_MULTIPLE)
        return torch._int_mm(torch.nn.functional.pad(left, padding), self._matrix)[:rows, : self._columns]

    def rows(self, channels: torch.Tensor) -> torch.Tensor:
        """Return rows of some input channels, int64 [C]: float64 [C, N]."""
        return self._matrix[channels, : self._columns].double()


def multiplies_exactly(device: torch.device) -> bool:
    """Return whether PyTorch has an exact int8 product on the device, tested on the largest values.

    On processors without dot-product instructions, pairs of products may saturate at 16 bits.
    """
    try:
        left = torch.full((ROWS_MULTIPLE, 256), -128, dtype=torch.int8, device=device)
        right = torch.full((64, 256), 127, dtype=torch.int8, device=device).t()
        right[:, ::2] = -128
        found = torch._int_mm(left, right)
    except (AttributeError, RuntimeError):
        return False
    return torch.equal(found.cpu().double(), left.cpu().double() @ right.cpu().double())
