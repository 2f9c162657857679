"""Rounding of weights to 4 bits with compensation: the error of each rounded weight is corrected by the weights that
are not rounded yet, as far as the linear's inputs are correlated.

Source: Frantar et al., GPTQ (ICLR 2023), algorithm 1, with the grids of `quant/arithmetic.py`. The grid of a block is
chosen after the weights before it are rounded. Its errors are weighted as in the algorithm.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from chunkrt.checkpoints.source import BLOCK_DEPTH, BlockTensor
from chunkrt.quant.arithmetic import LEAST_4_BIT, MOST, MOST_4_BIT, MOST_MULTIPLIER, Integers, reach_of
from chunkrt.quant.scheme import BLOCK_LENGTH

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]

DAMPING = 0.01
"""Share of the mean of the diagonal of X^T X that is added to the diagonal, as in GPTQ."""

SHARES = (1.0, 0.93, 0.86, 0.8, 0.74)
"""Tried ratios of a grid's range to the range of the weights. A smaller range clips the largest weights, and gives all
others smaller steps.
"""


def round_in_blocks(weight: Float32, products: Float64) -> Integers:
    """Round a weight like `quantize_weight_in_blocks`, with compensation. Here, too, the block that needs a column's
    largest step takes the multiplier 16.

    Args:
        weight: float32 [K, N], finite.
        products: X^T X of the linear's inputs X [T, K], float64 [K, K].
    """
    rows = _WeightRows(weight, products)
    widest = np.argmax([reach_of(weight[block], axis=0) for block in rows.blocks(BLOCK_LENGTH)], axis=0)
    scale = _column_scales(rows, widest)
    values = np.empty(weight.shape, np.int8)
    multipliers = np.ones((-(-len(weight) // BLOCK_LENGTH), weight.shape[1]), np.int8)
    for index, block in enumerate(rows.blocks(BLOCK_LENGTH)):
        factor, _ = _multipliers(rows.left[block] / scale, rows.importance[block], widest == index)
        values[block] = rows.round(block, scale * factor, 0.0, LEAST_4_BIT, MOST_4_BIT) * factor
        multipliers[index] = factor
    scale = np.where(np.abs(weight).max(axis=0) > 0, scale, 0.0)  # a grid of outputs depends on the largest scale
    return Integers(values, scale.astype(np.float32), multipliers)


def round_to_blocks(weight: Float32, products: Float64) -> BlockTensor:
    """Round a weight like `quantize_to_blocks`, with compensation.

    The arguments are those of `round_in_blocks`; K is a multiple of BLOCK_DEPTH, and float16 can hold the weights.
    """
    rows = _WeightRows(weight, products)
    integers = np.empty(weight.shape[::-1], np.uint8)
    scales, minima = (np.empty((weight.shape[1], len(weight) // BLOCK_DEPTH), np.float16) for _ in range(2))
    for index, block in enumerate(rows.blocks(BLOCK_DEPTH)):
        step, minimum = _range(rows.left[block], rows.importance[block])
        integers[:, block] = rows.round(block, step, minimum, 0, MOST).T
        scales[:, index], minima[:, index] = step, minimum
    return BlockTensor(integers=integers, scales=scales, minima=minima)


class _WeightRows:
    """The rows of a weight [K, N], which are rounded in ascending order.

    Attributes:
        left: float64 [K, N]; rows that are not rounded yet contain corrections.
        importance: weights of squared errors, float64 [K, 1].
    """

    def __init__(self, weight: Float32, products: Float64) -> None:
        damped = products.copy()
        diagonal = np.einsum("kk->k", damped)
        diagonal += max(DAMPING * float(diagonal.mean()), 1e-12)
        self.left = weight.astype(np.float64)
        self._upper = np.linalg.cholesky(np.linalg.inv(damped)).T
        self.importance = 1 / np.square(np.diag(self._upper))[:, None]

    def blocks(self, length: int) -> Iterator[slice]:
        """Yield the blocks of rows."""
        for begin in range(0, len(self.left), length):
            yield slice(begin, min(begin + length, len(self.left)))

    def round(self, block: slice, step: Float64, offset: Float64 | float, low: int, high: int) -> Float64:
        """Round the rows of a block to integers `low` to `high`, w ~ integer * step + offset, and correct later rows.
        Columns whose step is 0 get 0.
        """
        left, upper = self.left, self._upper
        divisor, errors = np.where(step > 0, step, np.inf), np.empty((block.stop - block.start, left.shape[1]))
        integers = np.empty_like(errors)
        for index in range(block.start, block.stop):
            rounded = np.rint((left[index] - offset) / divisor).clip(low, high)
            error = (left[index] - (rounded * step + offset)) / upper[index, index]
            left[index + 1 : block.stop] -= upper[index, index + 1 : block.stop, None] * error
            integers[index - block.start], errors[index - block.start] = rounded, error
        left[block.stop :] -= upper[block, block.stop :].T @ errors
        return integers


def _column_scales(rows: _WeightRows, widest: NDArray[np.int64]) -> Float64:
    """Return the scale of each column with the least error of nearest rounding, float64 [N].

    Args:
        widest: the block of each column that needs the largest step.
    """
    largest = reach_of(rows.left, axis=0) / MOST_MULTIPLIER
    largest = np.where(largest > 0, largest, 1.0).astype(np.float32).astype(np.float64)
    least, best = np.full(largest.shape, np.inf), largest
    for share in SHARES:
        scale = (largest * share).astype(np.float32).astype(np.float64)
        error = np.zeros(len(scale))
        for index, block in enumerate(rows.blocks(BLOCK_LENGTH)):
            error += _multipliers(rows.left[block] / scale, rows.importance[block], widest == index)[1]
        error *= np.square(scale)
        least, best = np.minimum(error, least), np.where(error < least, scale, best)
    return best


def _multipliers(block: Float64, importance: Float64, is_widest: NDArray[np.bool_]) -> tuple[Float64, Float64]:
    """Return the multiplier of each column of a block with the least error, and this error, float64 [N]. Columns for
    which `is_widest` is True take the largest multiplier.
    """
    widest = reach_of(block, axis=0)
    least, best = np.full(block.shape[1], np.inf), np.ones(block.shape[1])
    for share in SHARES:
        multiplier = np.where(is_widest, MOST_MULTIPLIER, np.ceil(widest * share).clip(1, MOST_MULTIPLIER))
        rounded = np.rint(block / multiplier).clip(LEAST_4_BIT, MOST_4_BIT) * multiplier
        error = (importance * np.square(rounded - block)).sum(axis=0)
        least, best = np.minimum(error, least), np.where(error < least, multiplier, best)
    return best, least


def _range(block: Float64, importance: Float64) -> tuple[Float64, Float64]:
    """Return the step and the minimum of each column of a block with the least error, in values of float16."""
    low, high = block.min(axis=0), block.max(axis=0)
    least = np.full(low.shape, np.inf)
    best = np.zeros(low.shape), low.astype(np.float16).astype(np.float64)
    for share in SHARES:
        cut = (1 - share) / 2 * (high - low)
        minimum = (low + cut).astype(np.float16).astype(np.float64)
        step = ((high - cut - minimum) / MOST).astype(np.float16).astype(np.float64)
        fields = np.rint((block - minimum) / np.where(step > 0, step, np.inf)).clip(0, MOST)
        error = (importance * np.square(fields * step + minimum - block)).sum(axis=0)
        better = error < least
        least = np.where(better, error, least)
        best = np.where(better, step, best[0]), np.where(better, minimum, best[1])
    return best
