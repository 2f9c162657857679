"""Ranges: from a stream of values to the limit of their grid, in bounded memory."""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

Method = Literal["absmax", "percentile", "mse"]
METHODS: tuple[Method, ...] = get_args(Method)

PERCENTILE = 99.99
NUM_BINS = 4096
MSE_LEVELS = 127
"""The error is that of an 8-bit grid; one of 16 bits hardly has any but beyond its limit."""

NUM_CANDIDATES = 128

Float32 = NDArray[np.float32]


class Range:
    """The magnitudes of one value, as they come.

    absmax keeps the largest. percentile and mse count magnitudes in a histogram whose reach doubles when a larger one
    comes: percentile is the magnitude that 99.99 % stay below; mse the limit whose 8-bit grid leaves the least square
    error, of rounding below and of saturation above it.
    """

    def __init__(self, method: Method) -> None:
        self.largest = 0.0
        self._method = method
        self._reach = 0.0
        self._counts = np.zeros(NUM_BINS, np.int64)

    def update(self, values: Float32) -> None:
        """Take more values, of any shape, all finite."""
        magnitudes = np.abs(values)
        self.largest = max(self.largest, float(magnitudes.max(initial=0)))
        if self._method == "absmax" or self.largest == 0:
            return
        if self._reach == 0:
            self._reach = self.largest
        while self._reach < self.largest:
            pairs = self._counts.reshape(-1, 2).sum(axis=1)
            self._counts = np.concatenate([pairs, np.zeros_like(pairs)])
            self._reach *= 2
        self._counts += np.histogram(magnitudes, NUM_BINS, (0, self._reach))[0]

    @property
    def limit(self) -> float:
        """The limit of a grid for these values; 0 if all were zero."""
        if self._method == "absmax" or self.largest == 0:
            return self.largest
        chosen = self._percentile() if self._method == "percentile" else self._least_square_error()
        return min(chosen, self.largest)

    def _percentile(self) -> float:
        below = np.cumsum(self._counts) / self._counts.sum()
        return float(np.searchsorted(below, PERCENTILE / 100) + 1) * self._reach / NUM_BINS

    def _least_square_error(self) -> float:
        centres = (np.arange(NUM_BINS) + 0.5) * (self._reach / NUM_BINS)
        candidates = np.linspace(0, self.largest, NUM_CANDIDATES + 1)[1:]
        beyond = np.clip(centres - candidates[:, None], 0, None) ** 2 @ self._counts
        inside = (centres <= candidates[:, None]) @ self._counts
        rounding = inside * (candidates / MSE_LEVELS) ** 2 / 12
        return float(candidates[np.argmin(beyond + rounding)])
