"""Folding: transformations of a decoder's float weights that keep its results and make the decoder easier to quantise.

One weight is multiplied by a factor by which another is divided; one weight applies a rotation that the next weight
undoes. `quant/equalisation.py` and `quant/rotation.py` find such transformations. A folding holds them, and is applied
when weights are loaded.

A rotation spreads every channel evenly over all others, for any width.

    R = diag(signs) (F1 x F2 x ...) / sqrt(width)        x: the Kronecker product

The factors are Hadamard matrices, with entries of 1 and -1, for the powers of two in the width, and a Hartley matrix,
whose entries are below 1.5, for the odd part. R itself is never computed, because products with its factors are
cheaper. Without the signs, a component common to all channels would accumulate in the one column without sign changes.
Source: Ashkboos et al., QuaRot (2024), section 3; Bracewell, Discrete Hartley transform (1983).
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from chunkrt.errors import ModelError, QuantizationError

Float32 = NDArray[np.float32]
FACTORS = ("gains", "rows", "columns")


@dataclass(frozen=True, kw_only=True)
class Folding:
    """Transformations of a plan's weights by name, applied in this order; empty by default.

    ones: weights of norms that become 1, because linears absorbed them.
    gains: float32 [K], the weights of these norms, which are factors of the rows of the linears.
    rotated_rows: linears that read the rotated residual stream: W becomes R^T W.
    rotated_columns: linears and tables that write the stream: W becomes W R; and their biases: b becomes b R.
    rows: float32 [K]: factors of the rows of a linear's weight.
    columns: float32 [N]: factors of the columns of a linear's weight, or of the values of a vector.

    R depends only on the width (`rotate`) and is not stored.
    """

    ones: frozenset[str] = frozenset()
    gains: Mapping[str, Float32] = field(default_factory=dict)
    rotated_rows: frozenset[str] = frozenset()
    rotated_columns: frozenset[str] = frozenset()
    rows: Mapping[str, Float32] = field(default_factory=dict)
    columns: Mapping[str, Float32] = field(default_factory=dict)

    @property
    def has_rotation(self) -> bool:
        """True if the residual stream is rotated."""
        return bool(self.rotated_rows or self.rotated_columns)

    def then(self, later: Folding) -> Folding:
        """Return this folding followed by `later`.

        Raises:
            QuantizationError: `later` rotates, and this folding is not empty.
        """
        if later.has_rotation and self != Folding():
            raise QuantizationError(
                "cannot rotate weights that are already transformed; rotate first, calibrate the result, then equalise"
            )
        first = later if later.has_rotation else self
        return Folding(
            ones=first.ones,
            gains=first.gains,
            rotated_rows=first.rotated_rows,
            rotated_columns=first.rotated_columns,
            rows=_products(self.rows, later.rows),
            columns=_products(self.columns, later.columns),
        )

    def digest(self) -> str:
        """Return the SHA-256 of the complete folding, in hexadecimal."""
        found = hashlib.sha256()
        for name, array in sorted(self.arrays().items()):
            found.update(f"{name} {array.dtype} {array.shape}".encode())
            found.update(np.ascontiguousarray(array).tobytes())
        return found.hexdigest()

    def apply(self, name: str, weight: Float32) -> Float32:
        """Return a weight's transformed values.

        Args:
            weight: float32 [K, N], any strides, or a vector [N]; it is not modified.

        Returns:
            float32 of the same shape; the same array if no transformation applies.

        Raises:
            QuantizationError: the weight's shape differs from the shape that the folding was made for.
        """
        if not self._changes(name):
            return weight
        self._check(name, weight)
        folded = np.ones_like(weight) if name in self.ones else weight.copy("K")
        if name in self.gains:
            folded *= self.gains[name][:, None]
        if name in self.rotated_rows:
            folded = rotate(folded.T).T
        if name in self.rotated_columns:
            folded = rotate(np.atleast_2d(folded)).reshape(folded.shape)
        if name in self.rows:
            folded *= self.rows[name][:, None]
        if name in self.columns:
            folded *= self.columns[name]
        return folded

    def apply_to_product(self, name: str, a: Float32, b: Float32) -> tuple[Float32, Float32]:
        """Return the transformed factors of a product a @ b that is added to a weight.

        Args:
            a: float32 [K, r].
            b: float32 [r, N].

        Raises:
            QuantizationError: see `apply`.
        """
        of_rows = Folding(gains=self.gains, rotated_rows=self.rotated_rows, rows=self.rows)
        of_columns = Folding(rotated_columns=self.rotated_columns, columns=self.columns)
        return of_rows.apply(name, a), of_columns.apply(name, b)

    def only(self, names: Collection[str]) -> Folding:
        """Return the transformations of the named weights."""
        kept: dict[str, Any] = {}
        for kind in (member.name for member in fields(self)):
            held = getattr(self, kind)
            is_map = kind in FACTORS
            kept[kind] = {n: held[n] for n in held if n in names} if is_map else held.intersection(names)
        return Folding(**kept)

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return the folding as arrays of numbers and of text by key, such as "rows/lm_head.weight"."""
        found: dict[str, NDArray[Any]] = {}
        for kind in (member.name for member in fields(self)):
            held = getattr(self, kind)
            if kind in FACTORS:
                found |= {f"{kind}/{name}": factors for name, factors in held.items()}
            elif held:
                found[kind] = np.array(sorted(held))
        return found

    @staticmethod
    def from_arrays(arrays: Mapping[str, NDArray[Any]]) -> Folding:
        """Return the folding that a result of `arrays` describes.

        Raises:
            ModelError: an array is not part of a folding.
        """
        sets: dict[str, frozenset[str]] = {}
        factors: dict[str, dict[str, Float32]] = {kind: {} for kind in FACTORS}
        for key, array in arrays.items():
            kind, _, name = key.partition("/")
            is_factors = kind in FACTORS and name and array.dtype == np.float32 and np.isfinite(array).all()
            if array.ndim == 1 and is_factors:
                factors[kind][name] = array
            elif array.ndim == 1 and key in ("ones", "rotated_rows", "rotated_columns") and array.dtype.kind == "U":
                sets[key] = frozenset(array.tolist())
            else:
                raise ModelError(
                    f"{key!r}, {array.dtype} {list(array.shape)}, is not part of a folding; calibrate again"
                )
        return Folding(**sets, **factors)  # type: ignore[arg-type]

    def _changes(self, name: str) -> bool:
        return any(name in getattr(self, member.name) for member in fields(self))

    def _check(self, name: str, weight: Float32) -> None:
        """Check that every factor has the length of its axis, and that only matrices have rows."""
        axes: dict[str, Literal[0, -1]] = {"gains": 0, "rows": 0, "columns": -1}
        lengths = {kind: getattr(self, kind)[name].shape for kind in FACTORS if name in getattr(self, kind)}
        needs_matrix = name in self.rotated_rows or lengths.keys() & {"gains", "rows"}
        fits = all(shape == (weight.shape[axes[kind]],) for kind, shape in lengths.items())
        if not fits or (needs_matrix and weight.ndim != 2):
            found = ", ".join(f"{shape[0]} {kind}" for kind, shape in lengths.items())
            raise QuantizationError(
                f"the folding is of another model: it has {found or 'a rotation'} for {name}, which is "
                f"{list(weight.shape)}; calibrate this model again"
            )


def _products(first: Mapping[str, Float32], second: Mapping[str, Float32]) -> dict[str, Float32]:
    both = {name: first[name] * second[name] for name in first.keys() & second.keys()}
    return {**first, **second, **both}


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
