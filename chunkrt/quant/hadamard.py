"""A rotation that spreads every channel evenly over all others, for any width.

    R = diag(signs) (F1 x F2 x ...) / sqrt(width)        x: the Kronecker product

The factors are Hadamard matrices, with entries of 1 and -1, for the powers of two in the width, and a Hartley matrix,
whose entries are below 1.5, for the odd part. R itself is never computed, because products with its factors are
cheaper. Without the signs, a component common to all channels would accumulate in the one column without sign changes.
Source: Ashkboos et al., QuaRot (2024), section 3; Bracewell, Discrete Hartley transform (1983).
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]

LARGEST_POWER = 64
"""Order of the largest Hadamard factor. The cost of a product is proportional to the sum of the orders."""

ROWS_AT_ONCE = 1024
"""Number of rows that are converted to float64 at a time."""


def rotate(x: Float32) -> Float32:
    """Return x R, float32 [M, width], computed in float64; R depends on the width alone."""
    width = x.shape[-1]
    signs, factors = _signs(width), orthogonal_factors(width)
    rotated = np.empty(x.shape, np.float32)
    for begin in range(0, len(x), ROWS_AT_ONCE):
        rows = x[begin : begin + ROWS_AT_ONCE] * signs
        num_rows = len(rows)
        for factor in factors:  # each factor moves the leading part of a row to its end: afterwards all are in order
            leading_last = rows.reshape(num_rows, len(factor), -1).swapaxes(1, 2)
            rows = (leading_last.reshape(-1, len(factor)) @ factor).reshape(num_rows, width)
        rotated[begin : begin + ROWS_AT_ONCE] = rows
    return rotated


@cache
def orthogonal_factors(width: int) -> tuple[Float64, ...]:
    """Return symmetric matrices F, float64 [n, n], whose orders multiply to `width`; F F = n I."""
    power = width & -width
    factors = [] if width == power else [hartley(width // power)]
    while power > 1:
        factors.append(hadamard(min(power, LARGEST_POWER)))
        power //= len(factors[-1])
    return tuple(factors)


def hadamard(order: int) -> Float64:
    """Return Sylvester's Hadamard matrix of an order that is a power of two."""
    matrix: Float64 = np.ones((1, 1))
    while len(matrix) < order:
        matrix = np.kron(matrix, np.array([[1.0, 1.0], [1.0, -1.0]]))
    return matrix


def hartley(order: int) -> Float64:
    """Return cos + sin of 2 pi i j / n: a real relative of the Fourier matrix, of any order."""
    numbers = np.arange(order)
    angles = 2 * np.pi / order * (np.outer(numbers, numbers) % order)
    matrix: Float64 = np.cos(angles) + np.sin(angles)
    return matrix


@cache
def _signs(width: int) -> Float64:
    """Return the signs divided by sqrt(width), from a generator whose values are the same in every release of NumPy."""
    drawn = np.random.RandomState(width).randint(0, 2, width)
    signs: Float64 = (2 * drawn - 1) / np.sqrt(width)
    return signs
