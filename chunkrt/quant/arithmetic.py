"""Linears under a scheme, in NumPy: quantisation of their weights, and products of rows with the weights.

The reference computes in float64, in which every sum of integers is exact. Trials of schemes compute in float32, in
which sums below 2^24 are exact. Sums of 8-bit inputs are practically always below 2^24; larger sums are rounded.

The few large values of a row, its outliers, are removed before the other values are quantised to int8. A value a
thousand times larger than the median would make the grid too coarse for the other values. Dettmers et al., LLM.int8()
(2022), section 3.2, remove channels that are fixed beforehand; here every row determines its own outliers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from chunkrt.checkpoints.source import BLOCK_DEPTH, BlockTensor
from chunkrt.errors import QuantizationError
from chunkrt.quant.grid import LinearGrids, excess_over_grid, round_to_grid
from chunkrt.quant.scheme import BLOCK_LENGTH, Scheme, Storage

Float32 = NDArray[np.float32]
Dtype = type[np.float64] | type[np.float32]
Quantize = Callable[[Float32], tuple[NDArray[np.int8], Float32]]
"""Function that quantises rows: from x float32 [T, K] to integers [T, K] and the scale of each row [T, 1]. chunkrt's is
`quantize_rows`.
"""

LEAST_4_BIT, MOST_4_BIT, MOST_MULTIPLIER = -8, 7, 16

COLUMNS_AT_ONCE = 1024
"""Number of output channels that are quantised at once, which bounds the temporary copies of a large linear."""

MOST = 15
"""The largest unsigned integer of 4 bits."""

SMALLEST_MAGNITUDE = np.float32(2.0**-120)
"""Rows of smaller values count as zero, because 127 / max|x| would overflow (csrc/kernels/quantize/quantize.h)."""


class Integers(NamedTuple):
    """A linear's weight [K, N] ~ values * scale.

    Attributes:
        values: int8, or the same integers as floats.
        scale: float32 [N].
        multipliers: for 4-bit integers, the factors that `values` include: int8 [ceil(K / BLOCK_LENGTH), N].
    """

    values: NDArray[Any]
    scale: Float32
    multipliers: NDArray[np.int8] | None = None


def quantize_linear(weight: Float32, storage: Storage, *, name: str) -> Integers | BlockTensor:
    """Quantise a linear's weight float32 [K, N] for a scheme. Raises QuantizationError if a weight is infinite or not a
    number.
    """
    if storage == "blocks":
        return quantize_to_blocks(weight, name=name)
    if storage == "int4":
        products, scale, multipliers = quantize_weight_in_blocks(weight, name=name)
        return Integers(products, scale, multipliers)
    return Integers(*quantize_weight(weight, name=name))


def quantize_weight(weight: Float32, *, name: str = "weight") -> tuple[NDArray[np.int8], Float32]:
    """Quantise a weight to symmetric int8 with a scale for each output channel.

    Args:
        weight: float32 [K, N], as in `X @ W`; any strides.

    Returns:
        int8 [K, N] in [-127, 127] and float32 scales [N]: weight ~ q * scale, scale = max|column| / 127, ties to even.
        A column of zeros has scale 0.

    Raises:
        QuantizationError: a weight is infinite or not a number.
    """
    depth, columns = weight.shape
    quantized = np.empty((depth, columns), np.int8)
    scale = np.empty(columns, np.float32)
    for begin in range(0, columns, COLUMNS_AT_ONCE):
        part = weight[:, begin : begin + COLUMNS_AT_ONCE]
        limit = _column_limits(part, name)
        part_scale = (limit / np.float32(127)).astype(np.float32)
        divisor = np.where(part_scale > 0, part_scale, np.float32(1))
        quantized[:, begin : begin + COLUMNS_AT_ONCE] = np.rint(part / divisor).clip(-127, 127)
        scale[begin : begin + COLUMNS_AT_ONCE] = part_scale
    return quantized, scale


def quantize_weight_in_blocks(
    weight: Float32, *, name: str = "weight"
) -> tuple[NDArray[np.int8], Float32, NDArray[np.int8]]:
    """Quantise a weight to 4 bits in blocks of BLOCK_LENGTH along the depth, whose scales are integer multiples of
    their column's scale.

    A block takes the multiplier with the least squared error; the block that needs a column's largest step always takes
    16. Hexagon's compiler divides a column's largest block scale by 16 again, so it finds the same integers.

    Args:
        weight: float32 [K, N], as in `X @ W`; any strides.

    Returns:
        int8 [K, N], the products q * multiplier, -128 to 112; float32 scales [N], weight ~ product * scale; and the
        multipliers, int8 [ceil(K / BLOCK_LENGTH), N] in 1..16.

    Raises:
        QuantizationError: a weight is infinite or not a number.
    """
    depth, columns = weight.shape
    num_blocks = -(-depth // BLOCK_LENGTH)
    products = np.empty((num_blocks, BLOCK_LENGTH, columns), np.int8)
    multipliers = np.ones((num_blocks, columns), np.int8)
    scale = np.empty(columns, np.float32)
    for begin in range(0, columns, COLUMNS_AT_ONCE):
        part = slice(begin, begin + COLUMNS_AT_ONCE)
        _column_limits(weight[:, part], name)
        padded = np.zeros((num_blocks * BLOCK_LENGTH, weight[:, part].shape[1]), np.float32)
        padded[:depth] = weight[:, part]
        scale[part] = reach_of(padded, axis=0) / np.float32(MOST_MULTIPLIER)
        padded /= np.where(scale[part] > 0, scale[part], np.float32(1))
        blocks = padded.reshape(num_blocks, BLOCK_LENGTH, -1)
        widest = reach_of(blocks, axis=1)
        least = np.full(widest.shape, np.inf, np.float32)
        for multiplier in range(1, MOST_MULTIPLIER + 1):
            rounded = np.rint(blocks / np.float32(multiplier)).clip(LEAST_4_BIT, MOST_4_BIT) * np.float32(multiplier)
            error = np.square(rounded - blocks).sum(axis=1)
            if multiplier == MOST_MULTIPLIER:
                error[widest == widest.max(axis=0)] = -1
            better = error < least
            least[better] = error[better]
            multipliers[:, part][better] = multiplier
            products[:, :, part] = np.where(better[:, None], rounded, products[:, :, part])
    return products.reshape(-1, columns)[:depth], scale, multipliers


def reach_of(blocks: NDArray[Any], axis: int) -> NDArray[Any]:
    """Return the smallest step with which 4-bit integers reach all values of each block."""
    reach: NDArray[Any] = np.maximum(blocks.max(axis=axis) / MOST_4_BIT, blocks.min(axis=axis) / LEAST_4_BIT)
    return reach


def quantize_to_blocks(weight: NDArray[np.float32], *, name: str = "weight") -> BlockTensor:
    """Quantise a weight to blocks as in Q4_1; the range of a block extends from its smallest to its largest weight.

    Args:
        weight: float32 [K, N], as in `X @ W`; any strides; K a multiple of BLOCK_DEPTH.

    Returns:
        A tensor [N, K]: minimum = min(block) and scale = (max(block) - minimum) / 15, both rounded to float16, then
        integer = round((w - minimum) / scale), ties to even. A block of equal weights has scale 0.

    Raises:
        QuantizationError: a weight is not finite, or a block's minimum or scale is too large for float16.
    """
    depth, columns = weight.shape
    integers = np.empty((columns, depth), np.uint8)
    scales, minima = (np.empty((columns, depth // BLOCK_DEPTH), np.float16) for _ in range(2))
    for begin in range(0, columns, COLUMNS_AT_ONCE):
        part = slice(begin, begin + COLUMNS_AT_ONCE)
        blocks = weight[:, part].T.reshape(-1, depth // BLOCK_DEPTH, BLOCK_DEPTH)
        with np.errstate(over="ignore", invalid="ignore"):
            minima[part] = blocks.min(axis=-1)
            minimum = minima[part].astype(np.float32)
            scales[part] = (blocks.max(axis=-1) - minimum) / np.float32(MOST)
        if not (np.isfinite(minima[part]).all() and np.isfinite(scales[part]).all()):
            if not np.isfinite(blocks).all():
                raise QuantizationError(f"{name} holds values that are not finite; the checkpoint is damaged")
            raise QuantizationError(
                f"{name} holds values too large for blocks of 4 bits with float16 scales; use the scheme 'w8a8-dynamic'"
            )
        scale = scales[part].astype(np.float32)
        steps = (blocks - minimum[..., None]) / np.where(scale > 0, scale, np.float32(np.inf))[..., None]
        integers[part] = np.rint(steps).clip(0, MOST).reshape(-1, depth)
    return BlockTensor(integers=integers, scales=scales, minima=minima)


def _column_limits(weight: Float32, name: str) -> Float32:
    limit: Float32 = np.abs(weight).max(axis=0)
    if not np.isfinite(limit).all():
        raise QuantizationError(f"{name} holds values that are not finite; the checkpoint is damaged")
    return limit


def quantize_rows(x: Float32) -> tuple[NDArray[np.int8], Float32]:
    """Quantise the rows of x float32 [T, K] to int8: return q = round-half-even(x * (127 / max|x|)) and the scales
    max|x| / 127. A row whose max|x| is below 2^-120 counts as zero, as in the native kernels.
    """
    limit = np.abs(x).max(axis=-1, keepdims=True)
    limit = np.where(limit < SMALLEST_MAGNITUDE, np.float32(0), limit)
    multiplier = np.float32(127) / np.where(limit > 0, limit, np.float32(1))
    return np.rint(x * multiplier).astype(np.int8), (limit / np.float32(127)).astype(np.float32)


class IntegerWeight:
    """An int8 weight with its scales, stored unchanged; products convert COLUMNS_AT_ONCE columns at a time.

    Attributes:
        integers: int8 [K, N] as stored, or the same integers as floats.
        scale: float32 [N].
        shape: [K, N].
    """

    def __init__(self, integers: NDArray[Any], scale: Float32, dtype: Dtype = np.float64) -> None:
        self.integers, self.scale = integers, scale
        self._dtype = dtype  # float64 uses BLAS, and is exact up to a depth of 2^29

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape [K, N]."""
        return self.integers.shape

    def dequantise(self) -> Float32:
        """Return the weight in float32 [K, N], as a new array."""
        values: Float32 = np.multiply(self.integers, self.scale).astype(np.float32, copy=False)
        return values

    def _products(self, *lefts: NDArray[Any]) -> list[NDArray[Any]]:
        """Multiply each left [T, K] by the integers."""
        wide: list[NDArray[Any]] = [left.astype(self._dtype, copy=False) for left in lefts]
        if self.integers.dtype == self._dtype:
            return [left @ self.integers for left in wide]
        results = [np.empty((len(left), self.shape[1]), self._dtype) for left in lefts]
        for begin in range(0, self.shape[1], COLUMNS_AT_ONCE):
            part = slice(begin, begin + COLUMNS_AT_ONCE)
            integers = self.integers[:, part].astype(self._dtype)
            for left, result in zip(wide, results, strict=True):
                result[:, part] = left @ integers
        return results


class DynamicWeight(IntegerWeight):
    """An int8 weight [K, N] with its scales [N], as MatMul's right operand; the left operand is quantised row by
    row.
    """

    def multiply(self, left: Float32, quantize: Quantize = quantize_rows) -> Float32:
        """Return left float32 [T, K] @ this, float32 [T, N]; rows are quantised without their outliers."""
        outliers, rest = take_outliers(left)
        quantized, row_scale = quantize(rest)
        inner, outer = self._products(quantized, outliers)
        result = inner.astype(np.float32, copy=False) * row_scale * self.scale
        taken: Float32 = (outer * self.scale).astype(np.float32, copy=False)
        return result + taken


class BlockWeight:
    """A weight in blocks of 4 bits, as MatMul's right operand; the left operand is quantised row by row.

    Attributes:
        blocks: the stored blocks of the transposed weight [N, K].
        shape: [K, N].
    """

    def __init__(self, blocks: BlockTensor, dtype: Dtype = np.float64) -> None:
        self.blocks, self._dtype = blocks, dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape [K, N]."""
        return self.blocks.integers.shape[::-1]

    def multiply(self, left: Float32, quantize: Quantize = quantize_rows) -> Float32:
        """Return left float32 [T, K] @ this, float32 [T, N]. Blocks are added one after another by fused
        multiply-adds.
        """
        outliers, rest = take_outliers(left)
        quantized, row_scale = quantize(rest)
        value = np.zeros((len(left), self.shape[1]), np.float32)
        taken = np.zeros((len(left), self.shape[1]), self._dtype)
        for index, (scale, minimum) in enumerate(zip(self.blocks.scales.T, self.blocks.minima.T, strict=True)):
            depth = slice(index * BLOCK_DEPTH, (index + 1) * BLOCK_DEPTH)
            integers: NDArray[Any] = self.blocks.integers.T[depth].astype(self._dtype)
            rows = quantized[:, depth].astype(self._dtype)
            value = (rows @ integers * scale + value).astype(np.float32)
            value = (rows.sum(axis=1, keepdims=True) * minimum + value).astype(np.float32)
            taken += np.matmul(outliers[:, depth].astype(self._dtype, copy=False), integers * scale + minimum)
        result: Float32 = value * row_scale + taken.astype(np.float32)
        return result

    def dequantise(self) -> Float32:
        """Return the weight in float32 [K, N], as a new array."""
        return self.blocks.dequantise().T


class StaticWeight(IntegerWeight):
    """An int8 weight with its scales, the grid of the left operand, and optionally the grid of the result.

    Attributes:
        bits: number of bits of both grids.
        input_step: float32 [1].
        output_step: float32 [1] or [N]; None if the result is not rounded to a grid.
    """

    def __init__(
        self,
        integers: NDArray[Any],
        scale: Float32,
        *,
        bits: int,
        input_step: Float32,
        output_step: Float32 | None,
        dtype: Dtype = np.float64,
    ) -> None:
        super().__init__(integers, scale, dtype)
        self.bits, self.input_step, self.output_step = bits, input_step, output_step

    def multiply(self, left: Float32) -> Float32:
        """Return left float32 [T, K] @ this, float32 [T, N]."""
        (accumulated,) = self._products(round_to_grid(left, self.input_step, self.bits))
        result: Float32 = accumulated.astype(np.float32, copy=False) * (self.input_step * self.scale)
        if self.output_step is None:
            return result
        return round_to_grid(result, self.output_step, self.bits) * self.output_step

    def multiply_excess(self, left: Float32) -> Float32:
        """Return the part of the product that `multiply` omits because left [T, K] exceeds its grid, float32 [T, N]."""
        (excess,) = self._products(excess_over_grid(left, self.input_step))
        result: Float32 = (excess * self.scale).astype(np.float32, copy=False)
        return result


QuantizedWeight = DynamicWeight | BlockWeight | StaticWeight


def right_operand(
    quantized: Integers | BlockTensor, name: str, scheme: Scheme, grids: LinearGrids | None, dtype: Dtype = np.float64
) -> QuantizedWeight:
    """Return a linear's weight in the form that a scheme multiplies. Static schemes need `grids`."""
    if isinstance(quantized, BlockTensor):
        return BlockWeight(quantized, dtype)
    if grids is None:
        return DynamicWeight(quantized.values, quantized.scale, dtype)
    return StaticWeight(
        quantized.values,
        quantized.scale,
        bits=scheme.activation_bits_of(name),
        input_step=grids.input_step,
        output_step=grids.output_step,
        dtype=dtype,
    )


OUTLIER_RATIO = 8
"""Ratio of an outlier to its row's mean magnitude; fewer than an eighth of a row's values can exceed this ratio."""

NUM_SUMS = 64


def take_outliers(x: Float32) -> tuple[Float32, Float32]:
    """Split rows [T, K] into (outliers, rest); at each place, at least one of the two is 0. A row that is not finite
    has no outliers.

    The magnitudes are summed in the order of the native kernels, so that both find the same outliers.
    """
    rows, width = x.shape
    padded = np.zeros((rows, -(-width // NUM_SUMS) * NUM_SUMS), np.float32)
    padded[:, :width] = np.abs(x)
    sums = np.zeros((rows, NUM_SUMS), np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        for part in np.split(padded, padded.shape[1] // NUM_SUMS, axis=1):
            sums += part
        while sums.shape[1] > 1:
            low, high = np.split(sums, 2, axis=1)
            sums = low + high
        is_outlier = np.abs(x) > np.float32(OUTLIER_RATIO) * sums / np.float32(width)
    return np.where(is_outlier, x, np.float32(0)), np.where(is_outlier, np.float32(0), x)
