"""The few large values of a row, which are removed before the other values are quantised to int8.

A value a thousand times larger than the median would make the grid too coarse for the other values. Dettmers et al.,
LLM.int8() (2022), section 3.2, remove channels that are fixed beforehand; here every row determines its own outliers.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Float32 = NDArray[np.float32]

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
