"""Ranges: from a stream of values to the limit of their grid, in bounded memory."""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

Method = Literal["absmax", "percentile", "mse"]
METHODS: tuple[Method, ...] = get_args(Method)

PERCENTILE = 99.99
MSE_LEVELS = 127
"""The error is that of an 8-bit grid; one of 16 bits hardly has any but beyond its limit."""

OCTAVES, CANDIDATES_AN_OCTAVE = 6, 24
"""Where mse looks for a limit: so far below the largest magnitude, in steps of 3 %."""

NEGLIGIBLE = 2.0**-24
"""Of the largest magnitude; what is smaller is rounded to nothing, and its square is nothing beside the largest's."""

BIN_SHIFT = 16
"""A magnitude's bin is what this shift leaves of its float32's bits: the exponent and 7 bits of the mantissa."""

NUM_BINS = 1 << 31 - BIN_SHIFT
_STARTS = np.arange(0x7F800000 >> BIN_SHIFT, dtype=np.uint32) << BIN_SHIFT
EDGES = np.append(_STARTS.view(np.float32).astype(np.float64), 2.0**128)
"""Bin i counts magnitudes from EDGES[i] up to, not with, EDGES[i + 1]; the bins above hold what is not finite."""

VALUES_AT_ONCE = 1 << 17
"""Values that are put in bins together: bounds the temporary copies, and keeps them in the processor's cache."""

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]


class Range:
    """The magnitudes of one value, as they come.

    absmax keeps the largest. percentile and mse count them in bins, 128 an octave, that suit any float32, so that it
    does not matter in which pieces the stream comes: percentile is the magnitude that 99.99 % stay below; mse the limit
    whose 8-bit grid leaves the least square error, of rounding below and of saturation above it.

    counts: without them there is only the largest.
    largest: so far; infinite or not a number if a value was.
    """

    def __init__(self, method: Method, *, counts: bool = True) -> None:
        self.largest = np.float32(0)
        self._counts = np.zeros(NUM_BINS, np.int64) if counts else None
        self._method = method

    def update(self, values: Float32) -> None:
        """Take more values, float32 [T, N]."""
        largest = np.maximum(values.max(initial=0), -values.min(initial=0))
        self.largest = np.maximum(self.largest, largest)
        if self._counts is not None:
            num_rows = max(VALUES_AT_ONCE // values.shape[1], 1)
            for begin in range(0, len(values), num_rows):
                magnitudes = np.abs(values[begin : begin + num_rows], order="C")
                bins = magnitudes.view(np.uint32) >> BIN_SHIFT
                self._counts += np.bincount(bins.ravel(), minlength=NUM_BINS)

    @property
    def limit(self) -> float:
        """The limit of a grid for these values, a float32's; 0 if all were zero."""
        if self._counts is None or self._method == "absmax" or self.largest == 0:
            return float(self.largest)
        if self._method == "percentile":
            return self.quantile(PERCENTILE / 100)
        return float(min(np.float32(_least_square_error(self._counts, float(self.largest))), self.largest))

    def quantile(self, share: float) -> float:
        """A magnitude, a float32's, that this share of the values stay below, or a little more; they were counted."""
        assert self._counts is not None
        num_below = np.cumsum(self._counts)
        found = int(np.searchsorted(num_below, num_below[-1] * share))
        return float(min(EDGES[found + 1], np.float64(self.largest)))


def _least_square_error(counts: NDArray[np.int64], largest: float) -> float:
    """Values are taken to lie evenly within their bin."""
    first = np.searchsorted(EDGES, largest * NEGLIGIBLE)
    last = int(counts.nonzero()[0][-1]) + 1
    edges = EDGES[first : last + 1]
    density = counts[first:last] / np.diff(edges)
    limits = largest * 2.0 ** (-np.arange(OCTAVES * CANDIDATES_AN_OCTAVE) / CANDIDATES_AN_OCTAVE)
    errors = [density @ np.diff(_integral(edges, limit / MSE_LEVELS)) for limit in limits]
    return float(limits[np.argmin(errors)])


def _integral(x: Float64, step: float) -> Float64:
    """Of the square error from 0 to x, when each magnitude is rounded to a grid."""
    levels = np.minimum(np.rint(x / step), MSE_LEVELS)
    error = x - levels * step
    integral: Float64 = levels * (step**3 / 12) + error * error * error / 3
    return integral
