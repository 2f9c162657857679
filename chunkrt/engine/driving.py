"""Driving the steps of sequences: in the calling thread, in an event loop, or those of many at once."""

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
    """Take steps to their end in the calling thread.

    Args:
        steps: of a sequence, not begun.
        run: computes a run; what it raises is raised in the steps.
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
        steps.close()  # an interrupt may have fallen between a run and what the sequence makes of it


async def drive_async(
    steps: Steps[Result], run: Callable[[Run], Awaitable[RunResult]], *, in_threads: bool = False
) -> Result:
    """As `drive`, while the event loop goes on: work is done in a thread. A task that is cancelled ends the run at the
    next chunk.

    Args:
        in_threads: what the steps make of a result takes a while, and is done beside the event loop.
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
    """Do what takes a while beside the event loop. Who is cancelled waits for its end: it uses what would go."""
    import asyncio

    context = copy_context()
    context.run(_acting_for.set, _thread_or_task())
    working = asyncio.get_running_loop().run_in_executor(None, context.run, work)
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        while not working.done():
            with suppress(asyncio.CancelledError):  # it is on its way already
                await asyncio.wait([working])
        working.cancelled() or working.exception()  # nobody asks for it any more
        raise
    finally:
        del context, working  # they hold the task, and what was raised: errors, whose tracebacks hold this frame


def _send(steps: Steps[Result], result: RunResult | None) -> tuple[Run | Work | None, StopIteration | None]:
    """The next run, or the end: no future can raise StopIteration."""
    try:
        return steps.send(result), None
    except StopIteration as end:
        return None, end


class OneUser:
    """Refuses a second thread or task while one uses what it stands for."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._user: object = None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Raises ConfigError if somebody else is within. What an interrupt left behind, its own thread may enter."""
        me, other = _thread_or_task(), self._user
        if other is not None and other != me:
            raise ConfigError(f"{self._what} is in use by another thread or task; make one for each")
        self._user = me
        try:
            yield
        finally:
            self._user = None


_acting_for: ContextVar[object] = ContextVar("acting for", default=None)
"""The task that has this thread do something for it."""


def _thread_or_task() -> object:
    if (task := _acting_for.get()) is not None:
        return task
    asyncio = sys.modules.get("asyncio")
    if asyncio is not None:
        with suppress(RuntimeError):  # no event loop runs here
            if (current := asyncio.current_task()) is not None:
                return current
    return threading.get_ident()  # of a callback of an event loop, too, which belongs to no task
