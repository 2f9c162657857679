"""Shares: a rank's part of an axis, and its attention heads.

Heads are distributed in groups. A group consists of a key/value head and the query heads that read it. All ranks have
the same number of groups:

- If the number of ranks divides the number of groups, each rank has its groups.
- If the number of groups divides the number of ranks (fewer groups than ranks), each group is copied to several ranks,
  which divide its query heads. A group's query heads are padded with zeros if they cannot be divided evenly.
- Otherwise the groups are padded with groups of zeros up to the next multiple of the ranks. For example, with 3 groups
on 2 ranks each rank has 2 groups, and one of these four is padding. Padding costs no additional time, because the rank
with the largest share determines the time in any case.

A head of zeros has rows of zeros in q, k and v and columns of zeros in the output projection, so it does not change the
result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from chunkrt.graph.ranks import Ranks

Number = TypeVar("Number", bound=np.generic)


@dataclass(frozen=True, eq=False)
class Share:
    """Selection of elements of an axis of length `size`, by their `indices` in order. The index `size` stands for a
    zero of padding.
    """

    size: int
    indices: NDArray[np.int64]

    @staticmethod
    def whole(size: int) -> Share:
        """Return the share that consists of the complete axis."""
        return Share(size, np.arange(size))

    @staticmethod
    def even(size: int, ranks: Ranks) -> Share | None:
        """Return a rank's slice, of the same length on all ranks; None if the axis cannot be cut evenly."""
        length, rest = divmod(size, ranks.size)
        return None if rest else Share(size, np.arange(ranks.rank * length, (ranks.rank + 1) * length))

    @staticmethod
    def joined(shares: Sequence[Share]) -> Share:
        """Concatenate shares of consecutive axes."""
        size = sum(share.size for share in shares)
        starts = np.cumsum([0, *(share.size for share in shares)])
        parts = [
            np.where(share.indices == share.size, size, share.indices + start)
            for share, start in zip(shares, starts, strict=False)
        ]
        return Share(size, np.concatenate(parts))

    def spread(self, width: int) -> Share:
        """Return the share of an axis in which each element is replaced by `width` elements."""
        return Share(self.size * width, self._spread(width))

    def _spread(self, width: int) -> NDArray[np.int64]:
        columns: NDArray[np.int64] = (self.indices[:, None] * width + np.arange(width)).ravel()
        return np.minimum(columns, self.size * width)

    @property
    def length(self) -> int:
        """Number of elements, including padding."""
        return len(self.indices)

    def take(self, array: NDArray[Number], axis: int = 0) -> NDArray[Number]:
        """Return this part of an array along one of its axes, which has length `size`."""
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
        blocks = Share(self.size // length, self.indices[::length] // length)
        return blocks if np.array_equal(blocks._spread(length), self.indices) else None


@dataclass(frozen=True, kw_only=True, eq=False)
class HeadShare:
    """A rank's attention heads: `query` heads, and `key` heads, which also select the value heads."""

    query: Share
    key: Share
    head_dim: int

    @property
    def num_heads(self) -> int:
        """Number of query heads on the rank."""
        return self.query.length

    @property
    def num_kv_heads(self) -> int:
        """Number of key/value heads on the rank."""
        return self.key.length

    @property
    def q_columns(self) -> Share:
        """The rank's share of all query heads' columns."""
        return self.query.spread(self.head_dim)

    @property
    def kv_columns(self) -> Share:
        """The rank's share of all key heads' columns, or of all value heads'."""
        return self.key.spread(self.head_dim)


def share_heads(num_heads: int, num_kv_heads: int, head_dim: int, ranks: Ranks) -> HeadShare:
    """Return a rank's heads, distributed as the module's docstring describes.

    Args:
        num_heads: a multiple of `num_kv_heads`.
    """
    group = num_heads // num_kv_heads
    if num_kv_heads < ranks.size and ranks.size % num_kv_heads == 0:
        copies = ranks.size // num_kv_heads
        key, part = divmod(ranks.rank, copies)
        keys, length = np.array([key]), -(-group // copies)
        members = part * length + np.arange(length)
        queries = np.where(members < group, key * group + members, num_heads)
    else:
        length = -(-num_kv_heads // ranks.size)
        keys = np.minimum(ranks.rank * length + np.arange(length), num_kv_heads)
        queries = Share(num_kv_heads, keys).spread(group).indices
    return HeadShare(query=Share(num_heads, queries), key=Share(num_kv_heads, keys), head_dim=head_dim)
