"""Threads that wait at a gate: for prompts that are computed, for weights that prove whole."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from threading import Thread
from typing import Any, TypeVar

from fake_backend import wait_until

from chunkrt.engine.engine import Engine
from chunkrt.gate import Gate
from chunkrt.runtime.ticket import Ticket

Result = TypeVar("Result")

MOST_TO_COMPUTE_S = 300  # on an emulated NPU, beside whatever else runs


def wait_until_waiting(thread: int | None, caller: Callable[..., Any] | None = None) -> None:
    """Come back when a thread, by its identifier, waits at a gate; at one that a function waits at, if it is given.

    Raises KeyError if it has ended, AssertionError if it does not wait.
    """
    assert thread is not None

    def waits() -> bool:
        frame = sys._current_frames()[thread]
        return frame.f_code is Gate.wait.__code__ and (
            caller is None or (frame.f_back is not None and frame.f_back.f_code is caller.__code__)
        )

    wait_until(waits)


def asked_before_any_is_computed(engine: Engine, calls: Sequence[Callable[[], Result]]) -> list[Result | None]:
    """What calls return that run tokens, each in a thread of its own, asked for in their order.

    Whether calls meet is not left to the machine: the executors are held until all have asked.
    """
    found: list[Result | None] = [None] * len(calls)

    def target(index: int) -> None:
        found[index] = calls[index]()

    threads = [Thread(target=target, args=(index,), daemon=True) for index in range(len(calls))]
    with engine._conductor._turn:
        for thread in threads:
            thread.start()
            wait_until_waiting(thread.ident, Ticket.wait)
    for thread in threads:
        thread.join(MOST_TO_COMPUTE_S)
        assert not thread.is_alive(), "deadlock"
    return found
