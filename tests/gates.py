"""Threads that wait at a gate: for prompts that are computed, for weights that prove whole."""

from __future__ import annotations

import sys

from chunkrt.gate import Gate


def wait_until_waiting(thread: int | None) -> None:
    """Come back when a thread, by its identifier, waits at a gate. Raises KeyError if it has ended."""
    assert thread is not None
    while sys._current_frames()[thread].f_code is not Gate.wait.__code__:
        pass
