"""4-bit weights in blocks, against exact arithmetic."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from chunkrt.errors import QuantizationError
from chunkrt.quant.arithmetic import quantize_weight_in_blocks
from chunkrt.quant.scheme import BLOCK_LENGTH

DEPTHS = st.sampled_from([1, 31, 32, 33, 64, 70])
COLUMNS = st.sampled_from([1, 2, 5])
FLOATS = st.floats(-1e6, 1e6, width=32, allow_subnormal=False)


def blocks_of(array):
    """Split along the depth; the last block may be shorter."""
    return [array[begin : begin + BLOCK_LENGTH] for begin in range(0, len(array), BLOCK_LENGTH)]


def rounded(value, multiplier):
    """Return the nearest integer multiple in 4 bits, exactly."""
    return max(-8, min(7, round(Fraction(value, multiplier)))) * multiplier


def steps_of(values):
    """Return the smallest step of each column with which 4-bit integers, -8 to 7, reach all values."""
    return np.maximum(values.max(axis=0) / 7, values.min(axis=0) / -8)


@given(st.tuples(DEPTHS, COLUMNS).flatmap(lambda shape: arrays(np.float32, shape, elements=FLOATS)))
def test_products_are_of_4_bits_and_a_multiplier(weight):
    products, scale, multipliers = quantize_weight_in_blocks(weight)
    assert (products.dtype, scale.dtype, multipliers.dtype) == (np.int8, np.float32, np.int8)
    assert multipliers.shape == (-(-len(weight) // BLOCK_LENGTH), weight.shape[1])
    assert ((multipliers >= 1) & (multipliers <= 16)).all()
    expected = np.maximum(steps_of(weight.astype(np.float64)), 0) / 16
    np.testing.assert_allclose(scale, expected, rtol=2.0**-22, atol=2.0**-149)
    for block, by_column in zip(blocks_of(products.astype(int)), multipliers.astype(int), strict=True):
        assert (block % by_column == 0).all()
        assert ((block // by_column >= -8) & (block // by_column <= 7)).all()


@given(st.tuples(DEPTHS, COLUMNS).flatmap(lambda shape: arrays(np.float32, shape, elements=FLOATS)))
def test_block_that_needs_a_column_s_largest_step_has_the_largest_multiplier(weight):
    """The NPU's compiler, which takes a column's scale from its largest block, then finds the same integers."""
    _, _, multipliers = quantize_weight_in_blocks(weight)
    largest = np.argmax([steps_of(block) for block in blocks_of(weight)], axis=0)
    assert (multipliers[largest, np.arange(weight.shape[1])] == 16).all()


def test_multipliers_are_the_best_by_exact_arithmetic():
    """Weights are integers from -128 to 112, so that the scale is 1; blocks are narrow and wide, the last one short."""
    rng = np.random.default_rng(0)
    reach = rng.integers(1, 113, (4, 6)).repeat(BLOCK_LENGTH, axis=0)[:100]
    weight = rng.integers(-reach, reach + 1)
    weight[40] = 112, -128, 112, -128, 112, -128
    products, scale, multipliers = quantize_weight_in_blocks(weight.astype(np.float32))
    np.testing.assert_array_equal(scale, 1)
    for column in range(weight.shape[1]):
        parts = zip(
            *(blocks_of(a[:, column].tolist()) for a in (weight, products)), multipliers[:, column], strict=True
        )
        for values, found, multiplier in parts:
            errors = {m: sum((rounded(v, m) - v) ** 2 for v in values) for m in range(1, 17)}
            best = 16 if 112 in values or -128 in values else min(errors, key=errors.get)
            assert multiplier == best
            assert found == [rounded(v, best) for v in values]


@pytest.mark.parametrize("depth", [64, 90])
def test_error_is_never_above_that_of_the_smallest_sufficient_multiplier(depth):
    weight = np.random.default_rng(0).standard_normal((depth, 40)).astype(np.float32)
    products, scale, _ = quantize_weight_in_blocks(weight)
    in_steps = weight / scale.astype(np.float64)
    for values, found in zip(blocks_of(in_steps), blocks_of(products), strict=True):
        plain = np.ceil(steps_of(values) - 1e-6)
        error, plain_error = (((v - values) ** 2).sum(axis=0) for v in (found, np.rint(values / plain) * plain))
        assert (error <= plain_error * (1 + 2.0**-16)).all()
        assert (error < plain_error).mean() > 0.25


def test_column_of_zeros_has_scale_zero():
    weight = np.zeros((40, 2), np.float32)
    weight[35, 1] = -7
    products, scale, multipliers = quantize_weight_in_blocks(weight)
    np.testing.assert_array_equal(products, weight * 16 * 8 / 7)
    np.testing.assert_array_equal(scale, np.array([0, 7 / 128], np.float32))
    assert multipliers[1, 1] == 16


def test_columns_are_independent():
    weight = np.random.default_rng(0).standard_normal((40, 1500)).astype(np.float32)
    together = quantize_weight_in_blocks(weight)
    for column in (0, 1023, 1024, 1499):
        alone = quantize_weight_in_blocks(weight[:, [column]])
        for found, expected in zip(together, alone, strict=True):
            np.testing.assert_array_equal(found[..., column], expected[..., 0])


def test_strides_do_not_matter():
    weight = np.random.default_rng(0).standard_normal((6, 40)).astype(np.float32)
    for found, expected in zip(
        quantize_weight_in_blocks(weight.T), quantize_weight_in_blocks(weight.T.copy()), strict=True
    ):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_weight_that_is_not_finite_is_refused_by_name(bad):
    weight = np.ones((40, 1501), np.float32)
    weight[39, 1500] = bad
    with pytest.raises(QuantizationError, match=r"o_proj.weight holds values that are not finite"):
        quantize_weight_in_blocks(weight, name="o_proj.weight")
