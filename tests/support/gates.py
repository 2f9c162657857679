"""Helpers for threads that wait at a gate."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from threading import Barrier, Thread
from typing import Any, TypeVar

from fake_backend import wait_until

from chunkrt.engine.engine import Engine
from chunkrt.gate import Bell, Gate
from chunkrt.runtime.request import Request

Result = TypeVar("Result")

MOST_TO_COMPUTE_S = 300  # on an emulated NPU, next to other work


def wait_until_waiting(thread: int | None, caller: Callable[..., Any] | None = None) -> None:
    """Return when the thread with this identifier waits at a gate; with `caller`, in that function's call of wait.

    Raises KeyError if the thread has ended, AssertionError if it does not wait.
    """
    assert thread is not None

    def waits() -> bool:
        frame = sys._current_frames()[thread]
        return frame.f_code in (Gate.wait.__code__, Bell.wait.__code__) and (
            caller is None or (frame.f_back is not None and frame.f_back.f_code is caller.__code__)
        )

    wait_until(waits)


def asked_before_any_is_computed(engine: Engine, calls: Sequence[Callable[[], Result]]) -> list[Result | None]:
    """Return the results of calls that run tokens, each in a new thread, started in their order.

    The executors are held until all calls wait, so that the calls always overlap.
    """
    found: list[Result | None] = [None] * len(calls)

    def target(index: int) -> None:
        found[index] = calls[index]()

    threads = [Thread(target=target, args=(index,), daemon=True) for index in range(len(calls))]
    with engine.loaded.scheduler.held():
        for thread in threads:
            thread.start()
            wait_until_waiting(thread.ident, Request.wait)
    for thread in threads:
        thread.join(MOST_TO_COMPUTE_S)
        assert not thread.is_alive(), "deadlock"
    return found


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """Make calls at the same time, each in a thread, and return the result or error of each."""
    found: list[Any] = [None] * len(calls)
    together = Barrier(len(calls), timeout=MOST_TO_COMPUTE_S)

    def target(index: int) -> None:
        try:
            together.wait()
            found[index] = calls[index]()
        except BaseException as error:
            found[index] = error

    threads = [Thread(target=target, args=(index,), daemon=True) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(MOST_TO_COMPUTE_S)
        assert not thread.is_alive(), "deadlock"
    return found
