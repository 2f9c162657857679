"""Ranges against the complete data: the same limits for every division of the stream, in bounded memory."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chunkrt.quant.calibration import CANDIDATES_AN_OCTAVE, METHODS, PERCENTILE, Range

BIN = 2**-7
"""Largest width of a bin, relative to its lower edge."""
SMALLEST_BIN = 2.0**-133
"""Width of the smallest bins, where float32 has no smaller exponents."""

RNG = np.random.default_rng(7)
DATA = {
    "normal": RNG.standard_normal((400, 50)),
    "laplace": RNG.laplace(size=(400, 50)),
    "heavy tails": RNG.standard_t(3, size=(400, 50)),
    "even": RNG.uniform(-3, 3, (400, 50)),
    "one massive": np.where(np.arange(20000).reshape(400, 50) == 777, -9e3, RNG.standard_normal((400, 50))),
    "many zeros": RNG.laplace(size=(400, 50)).clip(min=0),
    "tiny": RNG.standard_normal((400, 50)) * 1e-39,
    "huge": RNG.uniform(-1, 1, (400, 50)) * np.finfo(np.float32).max,
}
DATA = {name: values.astype(np.float32) for name, values in DATA.items()}


def limit_of(method, *parts):
    found = Range(method)
    for part in parts:
        found.update(part)
    return found.limit


def square_error(values, limit):
    step = limit / 127
    return np.square(np.rint(values / step).clip(-127, 127) * step - values).sum()


@pytest.mark.parametrize("data", DATA.values(), ids=DATA)
def test_absmax_is_the_largest_magnitude(data):
    assert limit_of("absmax", data) == np.abs(data).max()


@pytest.mark.parametrize("data", DATA.values(), ids=DATA)
def test_percentile_is_the_quantile_to_a_bin(data):
    magnitudes = np.sort(np.abs(data), axis=None)
    quantile = magnitudes[int(np.ceil(PERCENTILE / 100 * magnitudes.size)) - 1]
    assert quantile <= limit_of("percentile", data) <= float(quantile) * (1 + BIN) + SMALLEST_BIN


@pytest.mark.parametrize("data", DATA.values(), ids=DATA)
def test_mse_is_close_to_the_best_of_all_limits(data):
    values = data.astype(np.float64)
    largest = np.abs(values).max()
    best = min(square_error(values, largest * k / 1000) for k in range(5, 1001))
    step_is_off = 2 ** (1 / CANDIDATES_AN_OCTAVE)
    assert square_error(values, limit_of("mse", data)) <= step_is_off**2 * best


def test_mse_clips_rare_values():
    data = DATA["laplace"]
    assert 0.2 < limit_of("mse", data) / np.abs(data).max() < 0.95
    assert limit_of("mse", DATA["one massive"]) > 8e3


@pytest.mark.parametrize("method", METHODS)
@given(st.sampled_from(list(DATA)), st.lists(st.integers(1, 399), max_size=6), st.randoms())
def test_division_of_the_stream_does_not_matter(method, name, cuts, random):
    parts = np.split(DATA[name], sorted(set(cuts)))
    random.shuffle(parts)
    assert limit_of(method, *parts) == limit_of(method, DATA[name])


@pytest.mark.parametrize("method", METHODS)
def test_views_with_strides(method):
    data = DATA["laplace"]
    assert limit_of(method, data[::3, 5:20]) == limit_of(method, data[::3, 5:20].copy())
    assert limit_of(method, data.T) == limit_of(method, data)


@pytest.mark.parametrize("method", METHODS)
def test_zeros_have_the_limit_0(method):
    assert limit_of(method, np.zeros((3, 4), np.float32)) == 0


@pytest.mark.parametrize("method", METHODS)
def test_one_value(method):
    value = np.float32(-0.3)
    limit = limit_of(method, np.array([[value]]))
    assert -value * np.float32(1 - BIN) <= limit <= -value
    assert np.float32(limit) == limit


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("wrong", [np.inf, -np.inf, np.nan])
def test_non_finite_values_are_visible(method, wrong):
    found = Range(method)
    found.update(DATA["normal"])
    found.update(np.array([[1, wrong, 2]], np.float32))
    found.update(DATA["normal"])
    assert not np.isfinite(found.largest)


@pytest.mark.parametrize("method", METHODS)
def test_memory_is_bounded(method):
    data = np.ones((2048, 4096), np.float32)
    found = Range(method)
    tracemalloc.start()
    try:
        found.update(data)
        found.update(data * np.float32(1e4))
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 2**20
    assert peak < data.nbytes + 2**23
