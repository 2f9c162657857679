"""Outliers of a row: their selection, and linears that multiply them in float, and the rest as one int8 digit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from native_isas import isa_parameters

from chunkrt._native import ProgramBuilder, ThreadPool
from chunkrt.checkpoints.source import BlockTensor
from chunkrt.engine_directory.store import pack, pack_blocks
from chunkrt.quant.arithmetic import OUTLIER_RATIO, BlockWeight, DynamicWeight, take_outliers

MAGNITUDES = st.sampled_from([0, 1e-30, 1e-3, 1, 3e3, 1e6, 1e30])
ROWS = st.integers(1, 130).flatmap(
    lambda width: st.tuples(
        arrays(np.float32, (3, width), elements=st.floats(-1, 1, width=32)),
        arrays(np.float32, (3, width), elements=MAGNITUDES.map(np.float32), fill=st.just(np.float32(1))),
    )
)


@given(ROWS)
@settings(deadline=None)
def test_every_value_is_either_an_outlier_or_in_the_rest(parts):
    x = parts[0] * parts[1]
    outliers, rest = take_outliers(x)
    assert outliers.dtype == rest.dtype == np.float32
    np.testing.assert_array_equal(outliers + rest, x)
    assert not ((outliers != 0) & (rest != 0)).any()
    assert ((outliers != 0).sum(axis=1) <= x.shape[1] / OUTLIER_RATIO).all()


@given(ROWS)
@settings(deadline=None)
def test_outliers_exceed_8_times_the_mean_magnitude(parts):
    x = parts[0] * parts[1]
    outliers, _ = take_outliers(x)
    exact = np.abs(x.astype(np.float64))
    limit = 8 * exact.mean(axis=1, keepdims=True)
    rounding = 2.0**-24 * (x.shape[1] / 16 + 8) * limit + 2.0**-140
    assert ((outliers != 0) >= (exact > limit + rounding)).all()
    assert ((outliers != 0) <= (exact > limit - rounding)).all()


def test_values_on_the_limit_are_no_outliers():
    x = np.zeros((2, 16), np.float32)
    x[:, 3], x[:, 4] = 1, 1
    x[1, 4] = 1 - 2.0**-10
    outliers, rest = take_outliers(x)
    assert not outliers[0].any()
    np.testing.assert_array_equal(np.flatnonzero(outliers[1]), [3])
    np.testing.assert_array_equal(rest[1, [3, 4]], [0, x[1, 4]])


def test_rows_are_independent():
    x = np.ones((4, 64), np.float32)
    x[1, 5], x[2, [0, 63]] = 1e4, (-2e4, 1e4)
    found = [np.flatnonzero(row).tolist() for row in take_outliers(x)[0]]
    assert found == [[], [5], [0, 63], []]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_rows_that_are_not_finite_have_no_outliers(bad):
    x = np.ones((2, 40), np.float32)
    x[:, 7], x[0, 20] = 1e4, bad
    outliers, rest = take_outliers(x)
    assert not outliers[0].any()
    np.testing.assert_array_equal(rest[0], x[0])
    assert np.flatnonzero(outliers[1]).tolist() == [7]


def test_overflowing_row_has_no_outliers():
    x = np.ones((1, 40), np.float32)
    x[0, [3, 19, 5]] = 3e38
    outliers, rest = take_outliers(x)
    assert not outliers.any()
    np.testing.assert_array_equal(rest, x)


DEPTH, COLUMNS = 160, 49


def rows_of_every_kind() -> np.ndarray:
    """Return rows with no, one or six outliers, with a single nonzero value, of various magnitudes, and zeros."""
    x = np.random.default_rng(0).standard_normal((8, DEPTH)).astype(np.float32)
    x[1, 17] = -4000.3
    x[2, [0, 31, 32, 100, 158, 159]] = (5000.1, -4000.7, 4500, 4100.9, -4999, 4300.2)
    x[3] = 0
    x[4] = 0
    x[4, 77] = 1234.567
    x[5] *= 1e-6
    x[5, 3] = 1e-2
    x[6] *= 1e6
    x[6, 150] = -1e12
    return x


def check_linear(multiply, matrix: np.ndarray) -> None:
    """Check products to half a step of the rest for each value, plus float32's rounding."""
    x = rows_of_every_kind()
    found = multiply(x)
    assert not found[3].any()
    x = x.astype(np.float64)
    is_outlier = np.abs(x) > 8 * np.abs(x).mean(axis=1, keepdims=True)
    assert is_outlier.sum(axis=1).tolist() == [0, 1, 6, 0, 1, 1, 1, 0]
    step = np.abs(np.where(is_outlier, 0, x)).max(axis=1, keepdims=True) / 127
    size = np.abs(matrix)
    steps = np.where(is_outlier, 0, np.rint(np.divide(x, step, out=np.zeros_like(x), where=step > 0)))
    exact = (steps * step + np.where(is_outlier, x, 0)) @ matrix
    rounding = 2.0**-24 * (DEPTH + 8) * (np.abs(x) @ size)
    assert (np.abs(found - exact) <= rounding).all()
    # A row whose outlier set the step would exceed this tolerance.
    coarse = np.abs(x).max(axis=1, keepdims=True) / 127
    wrong = np.rint(np.divide(x, coarse, out=np.zeros_like(x), where=coarse > 0)) * coarse @ matrix
    assert (np.abs(wrong - exact) > 2 * rounding)[[1, 2, 5, 6]].any(axis=1).all()


def check_rows_that_are_not_finite(multiply) -> None:
    """Check that such rows are NaN, and that the other rows are the same as alone."""
    x = rows_of_every_kind()
    x[[0, 2], 40] = np.nan, np.inf
    found, alone = multiply(x), multiply(rows_of_every_kind())
    assert np.isnan(found[[0, 2]]).all()
    others = [1, *range(3, len(x))]
    np.testing.assert_array_equal(found[others], alone[others])


def random_blocks() -> tuple[BlockTensor, np.ndarray]:
    """Return a weight and its values [K, N]."""
    rng = np.random.default_rng(2)
    scales, minima = (rng.standard_normal((COLUMNS, DEPTH // 32)).astype(np.float16) for _ in range(2))
    blocks = BlockTensor(integers=rng.integers(0, 16, (COLUMNS, DEPTH), np.uint8), scales=scales, minima=minima)
    scale, minimum = (np.repeat(part.astype(np.float64), 32, axis=1) for part in (scales, minima))
    return blocks, (blocks.integers * scale + minimum).T


def random_integers() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    return rng.integers(-127, 128, (DEPTH, COLUMNS)).astype(np.int8), rng.random(COLUMNS, np.float32)


def run(add_linear, x: np.ndarray) -> np.ndarray:
    """Run a native program of one linear, which `add_linear(builder, value)` adds."""
    builder = ProgramBuilder(ThreadPool(2), max_rows=len(x))
    builder.output("y", add_linear(builder, builder.input("x", "float32", ["T", DEPTH])))
    out = np.full((len(x), COLUMNS), 7, np.float32)
    builder.build().run([x], [out])
    return out


@pytest.mark.parametrize("isa", isa_parameters())
def test_native_linears(monkeypatch, isa):
    monkeypatch.setenv("CHUNKRT_FORCE_ISA", isa)
    integers, scale = random_integers()
    packed = pack(integers)

    def multiply(x):
        return run(lambda b, value: b.linear(value, b.constant(packed), b.constant(scale)), x)

    check_linear(multiply, integers * scale.astype(np.float64))
    check_rows_that_are_not_finite(multiply)


@pytest.mark.parametrize("isa", isa_parameters())
def test_native_linears_in_blocks(monkeypatch, isa):
    monkeypatch.setenv("CHUNKRT_FORCE_ISA", isa)
    blocks, matrix = random_blocks()
    parts = pack_blocks(blocks)

    def multiply(x):
        return run(lambda b, value: b.block_linear(value, *(b.constant(part) for part in parts), COLUMNS), x)

    check_linear(multiply, matrix)
    check_rows_that_are_not_finite(multiply)


def test_reference_linears():
    integers, scale = random_integers()
    check_linear(DynamicWeight(integers, scale).multiply, integers * scale.astype(np.float64))
    blocks, matrix = random_blocks()
    check_linear(BlockWeight(blocks).multiply, matrix)
