"""Shares: the parts of an axis of a weight or a value that the ranks have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from chunkrt.checkpoints.source import BLOCK_DEPTH
from chunkrt.graph.plan import Ranks

Number = TypeVar("Number", bound=np.generic)
Indices = NDArray[np.int64]

MOST_PADDING = 1 / 16
"""Share of an axis that may be padded so that no block of 4-bit weights is divided."""


@dataclass(frozen=True, eq=False)
class Share:
    """Selection of elements of an axis of length `size`, by their indices in order. The index `size` stands for a zero
    of padding.

    Attributes:
        by_rank: the indices of every rank, int64 [N, L]; one row if all ranks have the same indices.
        rank: row of this rank.
    """

    size: int
    by_rank: Indices
    rank: int = 0

    @staticmethod
    def whole(size: int) -> Share:
        """Return the share that consists of the complete axis."""
        return Share.of(size, np.arange(size))

    @staticmethod
    def of(size: int, indices: Indices) -> Share:
        """Return the share of the same elements on all ranks."""
        return Share(size, indices[None])

    @staticmethod
    def even(size: int, ranks: Ranks) -> Share:
        """Return a rank's slice, which has the same length on all ranks. The last slices are padded if the axis cannot
        be cut evenly.

        An axis that consists of blocks of 4-bit weights is cut between blocks if this adds little padding.
        """
        length = -(-size // ranks.size)
        in_blocks = -(-length // BLOCK_DEPTH) * BLOCK_DEPTH
        if size % ranks.size and not size % BLOCK_DEPTH and (in_blocks - length) <= MOST_PADDING * length:
            length = in_blocks
        indices = np.arange(ranks.size * length).reshape(ranks.size, length)
        return Share(size, np.minimum(indices, size), ranks.rank)

    @staticmethod
    def joined(shares: Sequence[Share]) -> Share:
        """Concatenate shares of consecutive axes."""
        size = sum(share.size for share in shares)
        starts = np.cumsum([0, *(share.size for share in shares)])
        num_ranks = max(len(share.by_rank) for share in shares)
        parts = [
            np.broadcast_to(
                np.where(share.by_rank == share.size, size, share.by_rank + start), (num_ranks, share.length)
            )
            for share, start in zip(shares, starts, strict=False)
        ]
        return Share(size, np.concatenate(parts, axis=1), max(share.rank for share in shares))

    @staticmethod
    def together(shares: Sequence[Share]) -> Share:
        """Concatenate shares of one axis."""
        by_rank = np.concatenate([share.by_rank for share in shares], axis=1)
        return Share(shares[0].size, by_rank, shares[0].rank)

    @property
    def indices(self) -> Indices:
        """Indices of this rank's elements."""
        own: Indices = self.by_rank[self.rank]
        return own

    @property
    def length(self) -> int:
        """Number of elements, including padding."""
        return int(self.by_rank.shape[1])

    def of_rank(self, rank: int) -> Share:
        """Return the share of another rank."""
        return Share(self.size, self.by_rank, rank if len(self.by_rank) > 1 else 0)

    def spread(self, width: int, order: Indices | None = None) -> Share:
        """Return the share of an axis in which each element is replaced by `width` elements, in a given order."""
        return self._each(lambda indices: _spread(indices, self.size, width, order), self.size * width)

    def through(self, indices: Indices, size: int) -> Share:
        """Return the share of an axis of length `size`, in which element i of this axis is at `indices[i]`."""
        return self._each(lambda own: np.append(indices, size)[own], size)

    def within(self, complete: Share) -> Share:
        """Return this rank's elements as a share of `complete`, which has them in another order.

        If an element occurs several times, its occurrences are matched in order.
        """
        found: dict[int, list[int]] = {}
        for place, element in enumerate(complete.indices.tolist()):
            found.setdefault(element, []).append(place)
        num_taken = dict.fromkeys(found, 0)
        places = np.full(self.length, complete.length)
        for index, element in enumerate(self.indices.tolist()):
            if element < self.size:
                places[index] = found[element][min(num_taken[element], len(found[element]) - 1)]
                num_taken[element] += 1
        return Share.of(complete.length, places)

    def places(self) -> Indices:
        """Return the place of each element of the axis in the concatenation of all ranks' shares. An element that
        several ranks have is at the first of these places.

        Raises:
            ValueError: no rank has an element.
        """
        elements, first = np.unique(self.by_rank.ravel(), return_index=True)
        places: Indices = first[elements < self.size].astype(np.int64)
        if len(places) < self.size:
            raise ValueError(f"the ranks have {len(places)} of {self.size} elements")
        return places

    def take(self, array: NDArray[Number], axis: int = 0) -> NDArray[Number]:
        """Return the selected elements of an array along an axis; padding is zero."""
        if array.shape[axis] != self.size:
            raise ValueError(f"axis {axis} of {list(array.shape)} is cut as one of {self.size} elements")
        if np.array_equal(self.indices, np.arange(self.size)):
            return array
        if self.size in self.indices:
            shape: tuple[int, ...] = tuple(1 if i == axis else n for i, n in enumerate(array.shape))
            array = np.concatenate([array, np.zeros(shape, array.dtype)], axis=axis)
        taken: NDArray[Any] = np.take(array, self.indices, axis=axis)
        return taken

    def in_blocks(self, length: int) -> Share | None:
        """Return the share of an axis whose elements are blocks of `length` adjacent elements of this axis; None if the
        share splits a block.
        """
        if self.size % length or self.length % length:
            return None
        size = self.size // length
        blocks = Share(size, np.minimum(self.by_rank[:, ::length] // length, size), self.rank)
        return blocks if np.array_equal(blocks.spread(length).indices, self.indices) else None

    def _each(self, change: Callable[[Indices], Indices], size: int) -> Share:
        return Share(size, np.stack([change(indices) for indices in self.by_rank]), self.rank)


def _spread(indices: Indices, size: int, width: int, order: Indices | None) -> Indices:
    order = np.arange(width) if order is None else order
    columns: Indices = (indices[:, None] * width + order).ravel()
    return np.minimum(columns, size * width)
