"""Exchange of a sum over ranks in one or two steps, and the number of bytes that a rank sends.

A short sum takes one step: every rank sends its complete partial result to every other rank. A longer sum takes two
steps. Every rank owns a slice of equal size: it receives this slice from all other ranks, adds up the slices, and sends
the total back to all ranks (a reduce-scatter and an all-gather, by owner).
"""

from __future__ import annotations

from typing import NamedTuple

AT_ONCE_BYTES = 16 * 1024
"""Maximum number of additional bytes for an exchange in one step instead of two."""


class Exchange(NamedTuple):
    """Cost of one sum.

    Attributes:
        steps: number of messages that depend on each other.
        sent_bytes: number of bytes that a rank sends; it receives the same number.
    """

    steps: int
    sent_bytes: float


def is_sent_whole(num_bytes: int, size: int) -> bool:
    """Return True if a sum of `num_bytes` over `size` ranks is exchanged in one step."""
    return num_bytes * (size - 2) <= AT_ONCE_BYTES


def exchange_of(num_bytes: int, size: int) -> Exchange:
    """Return the cost of a sum of `num_bytes` over `size` ranks, at least 2."""
    if is_sent_whole(num_bytes, size):
        return Exchange(1, float(num_bytes * (size - 1)))
    return Exchange(2, 2 * (size - 1) / size * num_bytes)
