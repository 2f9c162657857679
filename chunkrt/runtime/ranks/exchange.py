"""Exchange of a sum over ranks in one step or in two, and the number of bytes that a rank sends.

Short sums take one step: every rank sends its complete part to every other. Longer ones take two: every rank owns an
even part of the sum; it gets that part from all others, adds up, and sends the result back to them (a reduce-scatter
and an all-gather, by owner).
"""

from __future__ import annotations

from typing import NamedTuple

AT_ONCE_BYTES = 16 * 1024
"""Sums are sent complete to every rank if that takes at most about this many bytes more than parts: it saves a step."""


class Exchange(NamedTuple):
    """Cost of one sum. `steps`: number of messages that depend on each other. `sent_bytes`: bytes that a rank sends; it
    receives the same number."""

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
