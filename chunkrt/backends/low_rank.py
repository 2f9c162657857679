"""The products of LoRA adapters that are added to the results of linears, row by row.

    y + (x @ a) @ b,   a [K, r], b [r, N] of the row's adapter; float32

Every row is multiplied alone, so its result does not depend on the other rows of its chunk. Rows without an adapter
keep their bits. Adapters have numbers from 1 that are unique in the process; 0 means no adapter.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Mapping
from itertools import count
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from chunkrt.backends.registry import REFERENCE, operators

Float32 = NDArray[np.float32]


class Factors(NamedTuple):
    """Two factors whose product is added to a weight [K, N]: float32 [K, r] and [r, N]."""

    a: Float32
    b: Float32


_numbers = count(1)
_factors: dict[int, Mapping[str, Factors]] = {}


class LoadedAdapter:
    """An adapter in memory. Its factors are freed together with it.

    Args:
        name: the name by which sessions choose it.
        digest: digest of the adapter's content.
        factors: the factors by the names of weights.
    """

    def __init__(self, name: str, digest: str, factors: Mapping[str, Factors]) -> None:
        self.name, self.digest = name, digest
        self.number = next(_numbers)
        self.num_bytes = sum(array.nbytes for pair in factors.values() for array in pair)
        _factors[self.number] = factors
        self._finalizer = weakref.finalize(self, _factors.pop, self.number)

    def salted(self, salt: str) -> str:
        """Return a salt of the prefix cache that no session without the adapter has."""
        return hashlib.sha256(f"adapter {self.digest} {salt}".encode()).hexdigest()


@operators.register("low_rank_sum", REFERENCE)
def low_rank_sum(product: Float32, hidden: Float32, adapters: NDArray[np.int64], *, weight: str) -> Float32:
    """Return the result of a linear with the products of the rows' adapters.

    Args:
        product: float32 [T, N], the result without adapters.
        hidden: float32 [T, K], the input of the linear.
        adapters: int64 [T], the number of each row's adapter.
        weight: the name of the linear's weight.
    """
    if not adapters.any():
        return product
    result = product.copy()
    for number in np.unique(adapters):
        if number and (found := _factors[int(number)].get(weight)) is not None:
            rows = np.flatnonzero(adapters == number)
            result[rows] += (hidden[rows, None] @ found.a @ found.b)[:, 0]
    return result
