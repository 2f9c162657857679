"""Ranges: determine the limit of a grid from a stream of values, in bounded memory."""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

Method = Literal["absmax", "percentile", "mse"]
METHODS: tuple[Method, ...] = get_args(Method)

PERCENTILE = 99.99
MSE_LEVELS = 127
"""Levels of the 8-bit grid whose error is minimised. A 16-bit grid has hardly any error below its limit."""

OCTAVES, CANDIDATES_AN_OCTAVE = 6, 24
"""Candidate limits of the method "mse" relative to the largest magnitude, in steps of 3 %."""

NEGLIGIBLE = 2.0**-24
"""Smallest counted magnitude, relative to the largest; smaller values are rounded to zero, and their squares are
negligible."""

BIN_SHIFT = 16
"""Shift that maps the bits of a magnitude's float32 to its bin: the exponent and 7 bits of the mantissa."""

NUM_BINS = 1 << 31 - BIN_SHIFT
_STARTS = np.arange(0x7F800000 >> BIN_SHIFT, dtype=np.uint32) << BIN_SHIFT
EDGES = np.append(_STARTS.view(np.float32).astype(np.float64), 2.0**128)
"""Bin i counts magnitudes from EDGES[i] up to but excluding EDGES[i + 1]; the bins above hold values that are not
finite."""

VALUES_AT_ONCE = 1 << 17
"""Number of values that are binned at once, so that temporary copies are bounded and fit the processor's cache."""

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]


class Range:
    """The magnitudes of one value of the plan, accumulated from a stream.

    The method "absmax" keeps the largest magnitude. The methods "percentile" and "mse" count magnitudes in bins, 128
    per octave, for any float32, so the result does not depend on how the stream is divided. The limit by "percentile"
    is the magnitude that exceeds 99.99 % of the values. The limit by "mse" is the one whose 8-bit grid has the least
    squared error, which includes rounding below the limit and saturation above it.

    Attributes:
        counts: number of magnitudes in each bin; None for "absmax".
        largest: the largest magnitude so far; infinite or not a number if a value was.
    """

    def __init__(self, method: Method, *, counts: bool = True) -> None:
        self.largest = np.float32(0)
        self._counts = np.zeros(NUM_BINS, np.int64) if counts else None
        self._method = method

    def update(self, values: Float32) -> None:
        """Add values, float32 [T, N]."""
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
        """Limit of a grid for these values, a float32; 0 if all were zero."""
        if self._counts is None or self._method == "absmax" or self.largest == 0:
            return float(self.largest)
        if self._method == "percentile":
            return self.quantile(PERCENTILE / 100)
        return float(min(np.float32(_least_square_error(self._counts, float(self.largest))), self.largest))

    def quantile(self, share: float) -> float:
        """Return a magnitude, a float32, below which at least the given share of the counted values lies."""
        assert self._counts is not None
        num_below = np.cumsum(self._counts)
        found = int(np.searchsorted(num_below, num_below[-1] * share))
        return float(min(EDGES[found + 1], np.float64(self.largest)))


def _least_square_error(counts: NDArray[np.int64], largest: float) -> float:
    """Return the candidate with the least squared error, assuming that values are evenly distributed within their
    bins.
    """
    first = np.searchsorted(EDGES, largest * NEGLIGIBLE)
    last = int(counts.nonzero()[0][-1]) + 1
    edges = EDGES[first : last + 1]
    density = counts[first:last] / np.diff(edges)
    limits = largest * 2.0 ** (-np.arange(OCTAVES * CANDIDATES_AN_OCTAVE) / CANDIDATES_AN_OCTAVE)
    errors = [density @ np.diff(_integral(edges, limit / MSE_LEVELS)) for limit in limits]
    return float(limits[np.argmin(errors)])


def _integral(x: Float64, step: float) -> Float64:
    """Integrate the squared error of rounding magnitudes from 0 to x to a grid."""
    levels = np.minimum(np.rint(x / step), MSE_LEVELS)
    error = x - levels * step
    integral: Float64 = levels * (step**3 / 12) + error * error * error / 3
    return integral
