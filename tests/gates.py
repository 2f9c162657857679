"""Threads that wait at a gate: for prompts that are computed, for weights that prove whole."""

from __future__ import annotations

import sys
from collections.abc import Callable
from time import monotonic
from typing import Any

from chunkrt.gate import Gate

LONGEST_S = 60


def wait_until_waiting(thread: int | None, caller: Callable[..., Any] | None = None) -> None:
    """Come back when a thread, by its identifier, waits at a gate; at one that a function waits at, if it is given.

    Raises KeyError if it has ended, AssertionError if it does not wait.
    """
    assert thread is not None
    latest = monotonic() + LONGEST_S
    while monotonic() < latest:
        frame = sys._current_frames()[thread]
        if frame.f_code is Gate.wait.__code__ and (
            caller is None or (frame.f_back is not None and frame.f_back.f_code is caller.__code__)
        ):
            return
    raise AssertionError("the thread does not wait")
