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
    """Execute steps to their end in the calling thread.

    Args:
        steps: steps of a sequence that have not begun.
        run: function that computes a run; its errors are raised in the steps.
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
        steps.close()  # an interrupt may have occurred before the sequence processed the run's result


async def drive_async(
    steps: Steps[Result], run: Callable[[Run], Awaitable[RunResult]], *, in_threads: bool = False
) -> Result:
    """Execute steps to their end like `drive`, without blocking the event loop. If the task is cancelled, the run ends
    at the next chunk.

    Args:
        in_threads: True if the steps take long to process results, so this is also done in a thread.
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
    """Do slow work in a thread, without blocking the event loop. A cancelled task waits for the end of the work,
    because the work uses objects that would otherwise be deleted.
    """
    import asyncio

    context = copy_context()
    context.run(_acting_for.set, _thread_or_task())
    working = asyncio.get_running_loop().run_in_executor(None, context.run, work)
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        while not working.done():
            with suppress(asyncio.CancelledError):  # the work is running already
                await asyncio.wait([working])
        working.cancelled() or working.exception()  # the result is no longer needed
        raise
    finally:
        del context, working  # these refer to the task and to errors, whose tracebacks refer to this frame


def _send(steps: Steps[Result], result: RunResult | None) -> tuple[Run | Work | None, StopIteration | None]:
    """Return the next run, or the end of the steps, because a future cannot raise StopIteration."""
    try:
        return steps.send(result), None
    except StopIteration as end:
        return None, end


class OneUser:
    """Guard of an object, which rejects a second thread or task while another one uses the object."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._user: object = None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Enter the guard. Raise ConfigError if another thread or task is inside. After an interrupt the same thread
        may enter again.
        """
        me, other = _thread_or_task(), self._user
        if other is not None and other != me:
            raise ConfigError(f"{self._what} is in use by another thread or task; create one for each")
        self._user = me
        try:
            yield
        finally:
            self._user = None


_acting_for: ContextVar[object] = ContextVar("acting for", default=None)
"""Task for which this thread works."""


def _thread_or_task() -> object:
    if (task := _acting_for.get()) is not None:
        return task
    asyncio = sys.modules.get("asyncio")
    if asyncio is not None:
        with suppress(RuntimeError):  # no event loop runs in this thread
            if (current := asyncio.current_task()) is not None:
                return current
    return threading.get_ident()  # None also for a callback of an event loop, which belongs to no task
