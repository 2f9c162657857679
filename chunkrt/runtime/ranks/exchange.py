"""How a sum over ranks is exchanged: in one step or in two, and how many bytes a rank sends.

Short ones in one step: every rank sends all that it has to every other. Longer ones in two: every rank owns an even
part of the sum; it gets that part from all others, adds up, and sends the result back to them (a reduce-scatter and an
all-gather, by owner).
"""

from __future__ import annotations

from typing import NamedTuple

AT_ONCE_BYTES = 16 * 1024
"""Sums are sent whole to every rank if that takes at most about so many bytes more than parts: it is a step less."""


class Exchange(NamedTuple):
    """Of one sum. `steps`: messages that wait for one another. `sent_bytes`: that a rank sends; it gets as many."""

    steps: int
    sent_bytes: float


def is_sent_whole(num_bytes: int, size: int) -> bool:
    """Whether a sum of so many bytes over `size` ranks is exchanged in one step."""
    return num_bytes * (size - 2) <= AT_ONCE_BYTES


def exchange_of(num_bytes: int, size: int) -> Exchange:
    """What a sum of `num_bytes` over `size` ranks, 2 at least, takes."""
    if is_sent_whole(num_bytes, size):
        return Exchange(1, float(num_bytes * (size - 1)))
    return Exchange(2, 2 * (size - 1) / size * num_bytes)
