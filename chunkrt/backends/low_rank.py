"""The products of LoRA adapters that are added to the results of linears, row by row.

    y + (x @ a) @ b,   a [K, r], b [r, N] of the row's adapter; float32

The native backend computes the products in `csrc/program/operators/low_rank_sum.cc`, and all other backends compute
them here. Every row is multiplied alone, so its result does not depend on the other rows of its chunk. Rows without an
adapter keep their bits. Adapters have numbers from 1 that are unique in the process; 0 means no adapter.
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

try:
    from chunkrt._native import AdapterTables
except ImportError:  # `dispatch` reports that the kernels are not built
    NATIVE_TABLES = None
else:
    NATIVE_TABLES = AdapterTables()
    """The adapters that native programs find by number."""

Float32 = NDArray[np.float32]

BLOCK = 16
"""Number of ranks, or of columns, in a block of packed factors."""

MAX_RANK = 2048
"""Largest number of ranks that an adapter may add to one linear."""


class Factors(NamedTuple):
    """Two factors whose product is added to a weight [K, N]: float32 [K, r] and [r, N]."""

    a: Float32
    b: Float32


class PackedFactors(NamedTuple):
    """Factors in the form of `csrc/kernels/low_rank/low_rank.h`.

    Attributes:
        a: float32 [ceil(r / 16), K, 16].
        b: float32 [stored rows, 16]: for each block of 16 columns the rows from its first to its last rank that is not
            zero. A linear that combines several tensors has zeros in the other tensors' columns.
        spans: int64 [ceil(N / 16), 2]: for each block of columns its first rank and its number of ranks.
        num_columns: N.
    """

    a: Float32
    b: Float32
    spans: NDArray[np.int64]
    num_columns: int


def pack(factors: Factors) -> PackedFactors:
    """Return factors in packed form."""
    depth, rank = factors.a.shape
    num_columns = factors.b.shape[1]
    rank_blocks, column_blocks = -(-rank // BLOCK), -(-num_columns // BLOCK)
    a = np.zeros((depth, rank_blocks * BLOCK), np.float32)
    a[:, :rank] = factors.a
    b = np.zeros((rank, column_blocks * BLOCK), np.float32)
    b[:, :num_columns] = factors.b
    blocks = b.reshape(rank, column_blocks, BLOCK).transpose(1, 0, 2)
    used: NDArray[np.bool_] = np.any(blocks, axis=2)
    first = used.argmax(axis=1)
    counts = np.where(used.any(axis=1), rank - used[:, ::-1].argmax(axis=1) - first, 0)
    ranks = np.arange(rank)
    is_stored = (ranks >= first[:, None]) & (ranks < (first + counts)[:, None])
    return PackedFactors(
        a=np.ascontiguousarray(a.reshape(depth, rank_blocks, BLOCK).transpose(1, 0, 2)),
        b=blocks[is_stored],
        spans=np.stack([first, counts], axis=1).astype(np.int64),
        num_columns=num_columns,
    )


def unpack(packed: PackedFactors) -> Factors:
    """Return packed factors as matrices; their rank is padded to a multiple of 16."""
    rank_blocks, depth, _ = packed.a.shape
    column_blocks, rank = len(packed.spans), rank_blocks * BLOCK
    first, counts = packed.spans.T[..., None]
    ranks = np.arange(rank)
    blocks = np.zeros((column_blocks, rank, BLOCK), np.float32)
    blocks[(ranks >= first) & (ranks < first + counts)] = packed.b
    b = blocks.transpose(1, 0, 2).reshape(rank, column_blocks * BLOCK)
    return Factors(packed.a.transpose(1, 0, 2).reshape(depth, rank), b[:, : packed.num_columns])


_numbers = count(1)
_packed: dict[int, Mapping[str, PackedFactors]] = {}


class LoadedAdapter:
    """An adapter in memory. Its factors are freed together with it.

    Args:
        name: the name by which sessions choose it.
        digest: digest of the adapter's content.
        factors: the factors by the names of weights; each rank is at most `MAX_RANK`.
    """

    def __init__(self, name: str, digest: str, factors: Mapping[str, Factors]) -> None:
        self.name, self.digest = name, digest
        self.number = next(_numbers)
        packed = {weight: pack(pair) for weight, pair in factors.items()}
        self.num_bytes = sum(each.a.nbytes + each.b.nbytes for each in packed.values())
        _packed[self.number] = packed
        self._finalizer = weakref.finalize(self, _forget, self.number)
        self._finalizer.atexit = False  # threads of unfinished generators may still use it
        if NATIVE_TABLES is not None:
            NATIVE_TABLES.add(self.number, packed)

    def salted(self, salt: str) -> str:
        """Return a salt of the prefix cache that no session without the adapter has."""
        return hashlib.sha256(f"adapter {self.digest} {salt}".encode()).hexdigest()


def _forget(number: int) -> None:
    del _packed[number]
    if NATIVE_TABLES is not None:
        NATIVE_TABLES.remove(number)


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
        if number and (found := _packed[int(number)].get(weight)) is not None:
            rows = np.flatnonzero(adapters == number)
            a, b = unpack(found)
            result[rows] += (hidden[rows, None] @ a @ b)[:, 0]
    return result
