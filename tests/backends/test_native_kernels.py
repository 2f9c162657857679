"""Quantisation, norms and elementwise kernels against NumPy, for every instruction set of this processor."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from native_isas import isa_parameters

from chunkrt import _native

ISAS = isa_parameters("reference", "neon", "avx2", "avx512vnni")
WIDTHS = [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 576, 577]
EPSILON = float(np.finfo(np.float32).eps)
CANARY = 77


def guarded(shape: tuple[int, ...], dtype: type) -> tuple[np.ndarray, np.ndarray]:
    """An array in the middle of a larger one that is full of canaries."""
    count = int(np.prod(shape))
    whole = np.full(count + 128, CANARY, dtype)
    return whole, whole[64 : 64 + count].reshape(shape)


def intact(whole: np.ndarray) -> bool:
    return bool((whole[:64] == CANARY).all() and (whole[-64:] == CANARY).all())


def quantize(x: np.ndarray, isa: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rows, width = x.shape
    whole, values = guarded((rows, -(-width // 4) * 4), np.int8)
    scales, sums = np.empty(rows, np.float32), np.empty(rows, np.int32)
    _native.kernels.quantize(x, values, scales, sums, isa=isa)
    assert intact(whole)
    assert (values[:, width:] == 0).all()
    np.testing.assert_array_equal(sums, values.sum(axis=1, dtype=np.int32))
    return values[:, :width], scales, sums


@pytest.mark.parametrize("isa", isa_parameters())
def test_forcing_an_instruction_set_selects_nothing_above_it(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    order = ["reference", "neon", "neon_dotprod", "neon_i8mm", "avx2", "avxvnni", "avx512vnni"]
    monkeypatch.setenv("CHUNKRT_FORCE_ISA", isa)
    selected = set(_native.selected_kernels().values())
    assert isa in selected
    assert all(order.index(name) <= order.index(isa) for name in selected)


@pytest.mark.parametrize("isa", ISAS)
@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(1, 5), width=st.sampled_from(WIDTHS))
@settings(max_examples=60, deadline=None)
def test_quantize_equals_numpy_exactly(isa: str, seed: int, rows: int, width: int) -> None:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, width), np.float32) * rng.choice(np.float32([1e-30, 1e-3, 1, 1e30]), (rows, 1))
    limit = np.abs(x).max(axis=1, keepdims=True)
    values, scales, _ = quantize(x, isa)
    np.testing.assert_array_equal(values, np.rint(x * (np.float32(127) / limit)))
    np.testing.assert_array_equal(scales, limit[:, 0] / np.float32(127))


@pytest.mark.parametrize("isa", ISAS)
def test_quantize_rounds_ties_to_even(isa: str) -> None:
    ties = np.arange(-126.5, 127, 1, np.float32)
    x = np.concatenate([ties, [127]])[None].astype(np.float32)
    values, scales, _ = quantize(x, isa)
    assert scales[0] == 1
    np.testing.assert_array_equal(values[0], np.rint(x[0]))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("width", [1, 5, 16, 40])
def test_quantize_odd_rows(isa: str, width: int) -> None:
    """Zeros and rows too small to scale give zeros; a row that is not finite gives a scale that is not a number."""
    x = np.zeros((6, width), np.float32)
    x[1] = 1e-37
    x[2, -1], x[3, -1], x[4, 0] = np.inf, np.nan, -np.inf
    x[5, 0] = -3
    values, scales, _ = quantize(x, isa)
    assert (values[:5] == 0).all()
    assert (scales[:2] == 0).all()
    assert np.isnan(scales[2:5]).all()
    assert (values[5, 0], scales[5]) == (-127, np.float32(3) / np.float32(127))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("num_digits", "levels"), [(1, 127), (2, 32639)])
@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(1, 5), width=st.sampled_from(WIDTHS))
@settings(max_examples=40, deadline=None)
def test_quantize_on_a_grid_equals_numpy_exactly(
    isa: str, num_digits: int, levels: int, seed: int, rows: int, width: int
) -> None:
    rng = np.random.default_rng(seed)
    step = np.float32(rng.random() + 0.1)
    # Halves of a step, so that many are near a tie; some beyond the grid.
    x = rng.integers(-3 * levels, 3 * levels, (rows, width)).astype(np.float32) * (step / np.float32(2))
    whole, values = guarded((num_digits, rows, -(-width // 4) * 4), np.int8)
    scales, sums = np.empty((num_digits, rows), np.float32), np.empty((num_digits, rows), np.int32)
    _native.kernels.quantize_on_grid(x, values, scales, sums, step=step, isa=isa)
    assert intact(whole)
    assert (values[:, :, width:] == 0).all()
    np.testing.assert_array_equal(sums, values.sum(axis=2, dtype=np.int32))
    np.testing.assert_array_equal(scales, np.float32([[1], [256]])[:num_digits].repeat(rows, axis=1))
    found = (values.astype(np.int64) * scales[:, :, None].astype(np.int64)).sum(axis=0)[:, :width]
    np.testing.assert_array_equal(found, np.clip(np.rint(x / step), -levels, levels))


@pytest.mark.parametrize("isa", ISAS)
@given(seed=st.integers(0, 2**32 - 1), count=st.sampled_from(WIDTHS), levels=st.sampled_from([127, 32639]))
@settings(max_examples=60, deadline=None)
def test_round_to_grid_is_numpys(isa: str, seed: int, count: int, levels: int) -> None:
    rng = np.random.default_rng(seed)
    steps = rng.random(count, np.float32) + np.float32(0.1)
    x = rng.integers(-3 * levels, 3 * levels, count).astype(np.float32) * (steps / np.float32(2))
    x[rng.random(count) < 0.1] = rng.choice([np.inf, -np.inf, np.nan])
    whole, out = guarded((count,), np.float32)
    _native.kernels.round_to_grid(x, steps, out, levels=levels, isa=isa)
    assert intact(whole)
    np.testing.assert_array_equal(out, np.clip(np.rint(x / steps), -levels, levels) * steps)


@pytest.mark.parametrize("isa", ISAS)
@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(1, 4), width=st.sampled_from(WIDTHS))
@settings(max_examples=40, deadline=None)
def test_rms_norm(isa: str, seed: int, rows: int, width: int) -> None:
    rng = np.random.default_rng(seed)
    x, weight = rng.standard_normal((rows, width), np.float32), rng.standard_normal(width, np.float32)
    whole, out = guarded(x.shape, np.float32)
    _native.kernels.rms_norm(x, weight, out, epsilon=1e-5, isa=isa)
    assert intact(whole)
    wide = x.astype(np.float64)
    truth = wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + np.float32(1e-5)) * weight
    # Half the sum's relative error, and one rounding each for the mean, epsilon, root, quotient and two products.
    tolerance = ((width / 16 + 6) / 2 + 6) * EPSILON / 2
    np.testing.assert_allclose(out, truth, rtol=tolerance, atol=0)

    portable = np.empty_like(x)
    _native.kernels.rms_norm(x, weight, portable, epsilon=1e-5, isa="reference")
    np.testing.assert_array_equal(out, portable)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("count", WIDTHS)
def test_add_and_mul_are_numpys(isa: str, count: int) -> None:
    rng = np.random.default_rng(count)
    left, right = rng.standard_normal((2, count), np.float32)
    for kernel, truth in [(_native.kernels.add, left + right), (_native.kernels.mul, left * right)]:
        whole, out = guarded((count,), np.float32)
        kernel(left, right, out, isa=isa)
        assert intact(whole)
        np.testing.assert_array_equal(out, truth)


def sigmoid_inputs() -> np.ndarray:
    rng = np.random.default_rng(0)
    return np.concatenate(
        [np.linspace(-87, 100, 200_001), rng.standard_normal(100_000) * 5, [0.0, -0.0, np.inf]]
    ).astype(np.float32)


@pytest.mark.parametrize("isa", ISAS)
def test_sigmoid_is_within_its_error(isa: str) -> None:
    x = sigmoid_inputs()
    out = np.empty_like(x)
    _native.kernels.sigmoid(x, out, isa=isa)
    truth = 1 / (1 + np.exp(-x.astype(np.float64)))
    units = np.abs(out - truth) / np.spacing(truth.astype(np.float32))
    assert units.max() < 2.5


@pytest.mark.parametrize("isa", ISAS)
def test_sigmoid_far_out(isa: str) -> None:
    x = np.float32([-88, -1000, -np.inf, np.nan, 1000])
    out = np.empty_like(x)
    _native.kernels.sigmoid(x, out, isa=isa)
    assert (out[:3] >= 0).all()
    assert (out[:3] < 2.0**-125).all()
    assert np.isnan(out[3])
    assert out[4] == 1


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("count", WIDTHS)
def test_silu_mul_is_made_of_its_parts(isa: str, count: int) -> None:
    """Fused and unfused give the same bits, and every instruction set the same."""
    rng = np.random.default_rng(count)
    gate, up = rng.standard_normal((2, count), np.float32) * 10
    sigmoid = np.empty_like(gate)
    _native.kernels.sigmoid(gate, sigmoid, isa="reference")
    whole, out = guarded((count,), np.float32)
    _native.kernels.silu_mul(gate, up, out, isa=isa)
    assert intact(whole)
    np.testing.assert_array_equal(out, (gate * sigmoid) * up)


@pytest.mark.parametrize("isa", ISAS)
def test_widen_every_half(isa: str) -> None:
    bits = np.arange(2**16, dtype=np.uint16)
    whole, out = guarded(bits.shape, np.float32)
    _native.kernels.widen(bits, out, isa=isa)
    assert intact(whole)
    np.testing.assert_array_equal(out, bits.view(np.float16).astype(np.float32))
    for count in (1, 7, 17):
        short = np.empty(count, np.float32)
        _native.kernels.widen(bits[:count], short, isa=isa)
        np.testing.assert_array_equal(short, out[:count])


def test_a_kernel_is_asked_for_an_instruction_set_that_it_lacks() -> None:
    x, out = np.zeros(4, np.float32), np.zeros(4, np.float32)
    with pytest.raises(ValueError, match="unknown instruction set 'sse9'; there are: reference, neon"):
        _native.kernels.sigmoid(x, out, isa="sse9")
    missing = next(name for name, built in _native.built_isas().items() if not built)
    with pytest.raises(ValueError, match=f"the {missing} kernels are not built: this binary is for"):
        _native.kernels.sigmoid(x, out, isa=missing)
