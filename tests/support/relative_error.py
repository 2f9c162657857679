"""Relative error of values: the root mean square of their differences, over that of the expected values."""

import numpy as np


def relative_error(found, expected):
    expected = np.asarray(expected, np.float64)
    return np.sqrt(np.mean((found - expected) ** 2) / np.mean(expected**2))
