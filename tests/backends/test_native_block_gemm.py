"""A program's linear with 4-bit blocks against NumPy."""

from __future__ import annotations

from dataclasses import dataclass

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from chunkrt._native import ProgramBuilder, ThreadPool

ROWS = [1, 2, 3, 4, 5, 7, 8, 9, 16, 31, 32, 33]
DEPTH_BLOCKS = [1, 2, 3, 5, 18, 48]
COLUMNS = [1, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 47, 48, 49, 65, 97]


@dataclass(frozen=True)
class Weight:
    """A weight [K, N] in blocks of 32 of K: 4-bit q, and float16 scales and minima [K / 32, N]."""

    q: np.ndarray
    scales: np.ndarray
    minima: np.ndarray

    @property
    def columns(self) -> int:
        return self.q.shape[1]

    def packed(self) -> tuple[np.ndarray, np.ndarray]:
        """Pack as in block_gemm.h: uint8 [N / 16, K / 32, 4, 16, 4] and float16 [N / 16, K / 32, 2, 16]."""
        depth_blocks, columns = self.scales.shape
        blocks = -(-columns // 16)
        q = np.zeros((depth_blocks, 4, 2, 4, blocks * 16), np.uint8)
        q[..., :columns] = self.q.reshape(depth_blocks, 4, 2, 4, columns)
        low, high = q.reshape(depth_blocks, 4, 2, 4, blocks, 16).transpose(2, 4, 0, 1, 5, 3)
        scales = np.zeros((depth_blocks, 2, blocks * 16), np.float16)
        scales[:, 0, :columns], scales[:, 1, :columns] = self.scales, self.minima
        scales = scales.reshape(depth_blocks, 2, blocks, 16).transpose(2, 0, 1, 3)
        return np.ascontiguousarray(low | high << 4), np.ascontiguousarray(scales)

    def dequantised(self) -> np.ndarray:
        scales, minima = (np.repeat(array.astype(np.float64), 32, axis=0) for array in (self.scales, self.minima))
        return self.q * scales + minima


def random_weight(rng: np.random.Generator, depth_blocks: int, columns: int) -> Weight:
    shape = depth_blocks, columns
    scales = rng.random(shape) * 0.01
    return Weight(
        q=rng.integers(0, 16, (depth_blocks * 32, columns), np.uint8),
        scales=scales.astype(np.float16),
        minima=(scales * rng.uniform(-16, 1, shape)).astype(np.float16),
    )


def fma(left: np.ndarray, right: np.ndarray, addend: np.ndarray) -> np.ndarray:
    """Return left * right + addend of float32 in one rounding.

    The product is exact in float64. The sum is rounded to odd, after which rounding to float32 is correct (Boldo and
    Melquiond, "Emulation of FMA and correctly rounded sums", 2008).
    """
    product, other = left.astype(np.float64) * right, addend.astype(np.float64)
    total = product + other
    part = total - product
    error = (product - (total - part)) + (other - part)
    bits = total.view(np.int64)
    is_inexact_and_even = (error != 0) & (bits & 1 == 0)
    bits[is_inexact_and_even] += np.where((error > 0) == (total > 0), 1, -1)[is_inexact_and_even]
    return total.astype(np.float32)


def product(left: np.ndarray, weight: Weight) -> np.ndarray:
    """Return float32 [rows, N]: the "value" of block_gemm.h."""
    value = np.zeros((len(left), weight.columns), np.float32)
    for block, (scale, minimum) in enumerate(zip(weight.scales, weight.minima, strict=True)):
        depth = slice(block * 32, block * 32 + 32)
        activations = left[:, depth].astype(np.int64)
        sums = activations @ weight.q[depth].astype(np.int64)
        value = fma(sums.astype(np.float32), scale.astype(np.float32), value)
        value = fma(activations.sum(axis=1, keepdims=True).astype(np.float32), minimum.astype(np.float32), value)
    return value


def quantized(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return int8 rows and their float32 scales [rows, 1]."""
    largest = np.abs(x).max(axis=1, keepdims=True)
    inverse = np.where(largest > 0, np.float32(127) / np.where(largest > 0, largest, 1), 0).astype(np.float32)
    return np.rint(x * inverse).astype(np.int8), largest / np.float32(127)


OUTLIERS = 3000.0, 3300.0
"""Range of outliers: three of them in a row of 32 exceed 8 times its mean magnitude; normal values do not."""


def rows_with_outliers(rng: np.random.Generator, rows: int, depth: int) -> np.ndarray:
    """Return normal rows, most of which have one to three outliers at random places and some of which are zero."""
    x = rng.standard_normal((rows, depth), np.float32)
    for row in x[rng.random(rows) < 0.7]:
        channels = rng.choice(depth, rng.integers(1, 4), replace=False)
        row[channels] = rng.uniform(*OUTLIERS, len(channels)) * rng.choice([-1, 1], len(channels))
    x[rng.random(rows) < 0.1] = 0
    return x


def without_outliers(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < 1000, x, np.float32(0))


def product_of_outliers(x: np.ndarray, weight: Weight) -> np.ndarray:
    """Return float32 [rows, N], as in kernels/outliers: channel after channel."""
    outliers, total = x - without_outliers(x), np.zeros((len(x), weight.columns), np.float32)
    scales, minima = (np.repeat(array.astype(np.float32), 32, axis=0) for array in (weight.scales, weight.minima))
    values = fma(weight.q.astype(np.float32), scales, minima)
    for channel in np.flatnonzero(outliers.any(axis=0)):
        rows = outliers[:, channel] != 0
        total[rows] = fma(outliers[rows, channel, None], values[channel], total[rows])
    return total


def run_linear(
    x: np.ndarray, weight: Weight, *, bias: np.ndarray | None = None, residual: np.ndarray | None = None
) -> np.ndarray:
    builder = ProgramBuilder(ThreadPool(2), max_rows=len(x))
    value, inputs = builder.input("x", "float32", ["R", x.shape[1]]), [x]
    added = None
    if residual is not None:
        added, inputs = builder.input("residual", "float32", ["R", weight.columns]), [x, residual]
    packed, scales = (builder.constant(array) for array in weight.packed())
    biases = None if bias is None else builder.constant(bias)
    builder.output("y", builder.block_linear(value, packed, scales, weight.columns, biases, added))
    out = np.full((len(x), weight.columns), np.nan, np.float32)
    builder.build().run(inputs, [out])
    return out


@given(
    seed=st.integers(0, 2**32 - 1),
    rows=st.sampled_from(ROWS),
    depth_blocks=st.sampled_from(DEPTH_BLOCKS),
    columns=st.sampled_from(COLUMNS),
    bias=st.booleans(),
    residual=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_linear_equals_numpy_exactly(
    seed: int, rows: int, depth_blocks: int, columns: int, bias: bool, residual: bool
) -> None:
    rng = np.random.default_rng(seed)
    weight = random_weight(rng, depth_blocks, columns)
    x = rows_with_outliers(rng, rows, depth_blocks * 32)
    biases = rng.standard_normal(columns, np.float32) if bias else None
    added = rng.standard_normal((rows, columns), np.float32) if residual else None
    found = run_linear(x, weight, bias=biases, residual=added)

    left, scale = quantized(without_outliers(x))
    truth = product(left, weight) * scale
    if biases is not None:
        truth = truth + biases
    if added is not None:
        truth = truth + added
    np.testing.assert_array_equal(found, truth + product_of_outliers(x, weight))


def test_linear_approximates_the_weight() -> None:
    """The error is that of quantising all values except outliers: at most half a step of the row for each input."""
    rng = np.random.default_rng(3)
    weight = random_weight(rng, 18, 49)
    x = rows_with_outliers(rng, 9, 576)
    truth = x.astype(np.float64) @ weight.dequantised()
    _, scale = quantized(without_outliers(x))
    magnitude = 15.0 * weight.scales.max() + np.abs(weight.minima).max()
    rounding = 2.0**-24 * 4 * 18 * np.abs(x).sum(axis=1, keepdims=True) * magnitude
    bound = 0.5 * scale * np.abs(weight.dequantised()).sum(axis=0) + rounding
    found = run_linear(x, weight)
    assert (np.abs(found - truth) <= bound).all()


def test_linear_of_rows_that_are_not_finite() -> None:
    weight = random_weight(np.random.default_rng(4), 2, 17)
    x = np.ones((4, 64), np.float32)
    x[1, 5], x[2, 40] = np.nan, np.inf
    found = run_linear(x, weight)
    assert np.isnan(found[1:3]).all()
    np.testing.assert_array_equal(found[0], found[3])
    assert np.isfinite(found[0]).all()


def test_builder_checks_operands() -> None:
    builder = ProgramBuilder(ThreadPool(1), 4)
    x = builder.input("x", "float32", ["T", 64])
    packed, scales = (builder.constant(array) for array in random_weight(np.random.default_rng(5), 2, 17).packed())
    with pytest.raises(ValueError, match="expected inputs in complete blocks of 32, got 40 inputs"):
        builder.block_linear(builder.input("short", "float32", ["T", 40]), packed, scales, 17)
    with pytest.raises(
        ValueError, match=r"packed weight: expected a constant uint8 \[3, 2, 4, 16, 4\], got uint8 \[2, 2"
    ):
        builder.block_linear(x, packed, scales, 33)
    with pytest.raises(ValueError, match=r"scales and minima: expected a constant float16 \[2, 2, 2, 16\], got uint8"):
        builder.block_linear(x, packed, packed, 17)
    with pytest.raises(ValueError, match="at least 1 column"):
        builder.block_linear(x, packed, scales, 0)
    with pytest.raises(ValueError, match=r"bias: expected a constant float32 \[17\], got float32 \[16\]"):
        builder.block_linear(x, packed, scales, 17, builder.constant(np.ones(16, np.float32)))
    with pytest.raises(ValueError, match="the residual's shape differs from the result's"):
        builder.block_linear(x, packed, scales, 17, residual=x)
