"""Drivers of the steps of sequences: in the calling thread, in an event loop, or for many sequences at once."""

from __future__ import annotations

import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar, copy_context
from functools import partial
from typing import TypeVar

from chunkrt.engine.sequence import Steps, Work
from chunkrt.errors import ConfigError
from chunkrt.runtime.run import Run, RunResult

Result = TypeVar("Result")


def drive(steps: Steps[Result], run: Callable[[Run], RunResult]) -> Result:
    """Run steps to their end in the calling thread.

    Args:
        steps: steps of a sequence that have not begun.
        run: computes a run; its errors are raised in the steps.
    """
    try:
        wanted = next(steps)
        while True:
            try:
                result = wanted.do() if isinstance(wanted, Work) else run(wanted)
            except BaseException as error:
                wanted = steps.throw(error)
            else:
                wanted = steps.send(result)
    except StopIteration as end:
        value: Result = end.value
        return value
    finally:
        steps.close()  # an interrupt may have come between a run and its processing by the sequence


async def drive_async(
    steps: Steps[Result], run: Callable[[Run], Awaitable[RunResult]], *, in_threads: bool = False
) -> Result:
    """Run steps to their end like `drive` without blocking the event loop: work is done in a thread. Cancelling the
    task ends the run at the next chunk.

    Args:
        in_threads: True if the steps process results for long, so that a thread does it.
    """
    try:
        wanted = next(steps)
        while True:
            try:
                result = await (in_thread(wanted.do) if isinstance(wanted, Work) else run(wanted))
            except BaseException as error:
                wanted = steps.throw(error)
                continue
            if not in_threads:
                wanted = steps.send(result)
                continue
            following, ended = await in_thread(partial(_send, steps, result))
            if ended is not None:
                return ended.value  # type: ignore[no-any-return]
            assert following is not None
            wanted = following
    except StopIteration as end:
        value: Result = end.value
        return value
    finally:
        steps.close()


async def in_thread(work: Callable[[], Result]) -> Result:
    """Do slow work in a thread, without blocking the event loop. A cancelled task waits for its end, because the work
    uses objects that would be deleted."""
    import asyncio

    context = copy_context()
    context.run(_acting_for.set, _thread_or_task())
    working = asyncio.get_running_loop().run_in_executor(None, context.run, work)
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        while not working.done():
            with suppress(asyncio.CancelledError):  # it is running already
                await asyncio.wait([working])
        working.cancelled() or working.exception()  # its result has no receiver any more
        raise
    finally:
        del context, working  # they hold the task, and errors, whose tracebacks hold this frame


def _send(steps: Steps[Result], result: RunResult | None) -> tuple[Run | Work | None, StopIteration | None]:
    """Return the next run, or the end: a future cannot raise StopIteration."""
    try:
        return steps.send(result), None
    except StopIteration as end:
        return None, end


class OneUser:
    """Guard of an object: rejects a second thread or task while one uses it."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._user: object = None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Enter the guard. Raises ConfigError if another user is inside. After an interrupt the same thread may enter
        again."""
        me, other = _thread_or_task(), self._user
        if other is not None and other != me:
            raise ConfigError(f"{self._what} is in use by another thread or task; create one for each")
        self._user = me
        try:
            yield
        finally:
            self._user = None


_acting_for: ContextVar[object] = ContextVar("acting for", default=None)
"""The task on whose behalf this thread works."""


def _thread_or_task() -> object:
    if (task := _acting_for.get()) is not None:
        return task
    asyncio = sys.modules.get("asyncio")
    if asyncio is not None:
        with suppress(RuntimeError):  # no event loop runs here
            if (current := asyncio.current_task()) is not None:
                return current
    return threading.get_ident()  # also for a callback of an event loop, which belongs to no task
