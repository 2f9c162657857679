"""Work on many prompts at once: each in its own session and thread, so their tokens share chunks."""

from __future__ import annotations

import atexit
import os
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from threading import Thread, get_ident
from typing import TypeVar

from chunkrt.engine.session import Session
from chunkrt.gate import MOST_SECONDS_AT_END, Outbox
from chunkrt.runtime.scheduler import Scheduler

Result = TypeVar("Result")

MOST_AT_ONCE = 16
"""Default maximum number of sessions in progress."""


_parts: weakref.WeakSet[_WorkThread] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """End the parts of unfinished generators before the process exits, because a thread that returns from C++ code of
    NumPy after the interpreter has shut down would abort the process. Do not wait for a thread that is stuck.
    """
    parts = [part for part in tuple(_parts) if part.process_id == os.getpid() and part.is_alive()]
    for part in parts:
        part.stop()
    until = time.monotonic() + MOST_SECONDS_AT_END
    for part in parts:
        part.join(max(0.0, until - time.monotonic()))


class _WorkThread(Thread):
    """Thread that puts the results of a part into a channel, and at its end the error, or None."""

    def __init__(
        self,
        index: int,
        session: Session,
        results: Iterator[Result],
        channel: Outbox[tuple[int, Result | None, BaseException | None]],
    ) -> None:
        super().__init__(name=f"chunkrt-part-{index}", daemon=True)
        self.session, self._is_stopped, self.process_id = session, False, os.getpid()
        self._index, self._results, self._channel = index, results, channel
        _parts.add(self)

    def stop(self) -> None:
        """End the part early. Its thread closes the session."""
        self._is_stopped = True
        self.session.cancel()

    def run(self) -> None:
        """Do the work of the part."""
        error = None
        try:
            with self.session:
                for result in self._results:
                    self._channel.put((self._index, result, None))
                    if self._is_stopped:
                        return
        except BaseException as failure:
            error = failure
        self._channel.put((self._index, None, error))
        del error, self._channel  # the traceback of the error refers to this frame


def in_sessions(
    num_parts: int,
    open_session: Callable[[int, bool], Session | None],
    work: Callable[[Session, int], Iterator[Result]],
    most: int,
    scheduler: Scheduler,
) -> Iterator[tuple[int, Result]]:
    """Do the work of all parts, at most `most` at a time.

    Args:
        num_parts: number of parts.
        open_session: returns a session for the part with a given index, or None if the part cannot begin yet. If its
            second argument is True, no part is in progress, so it waits until the part can begin.
        work: yields the results of a part.
        most: maximum number of parts in progress. One part at a time is done in the calling thread.
        scheduler: the engine's scheduler.

    Yields:
        Results, each with the index of its part.

    Raises:
        BaseException: the error of a part. After an error, or if the caller closes the generator, all other parts are
            ended.
    """
    if min(num_parts, most) == 1:
        for index in range(num_parts):
            session = open_session(index, True)
            assert session is not None
            with session:
                for result in work(session, index):
                    yield index, result
        return
    num_begun, active = 0, dict[int, _WorkThread]()
    channel: Outbox[tuple[int, Result | None, BaseException | None]] = Outbox()
    shared, caller = ExitStack(), get_ident()
    try:
        shared.enter_context(scheduler.sharing())
        while True:
            while num_begun < num_parts and len(active) < most:
                session = open_session(num_begun, not active)
                if session is None:
                    break
                active[num_begun] = _WorkThread(num_begun, session, work(session, num_begun), channel)
                active[num_begun].start()
                num_begun += 1
            if not active:
                return
            index, found, error = channel.get()
            if error is not None:
                try:
                    raise error
                finally:
                    del error  # its traceback refers to this frame
            if found is None:
                active.pop(index).join()
            else:
                yield index, found
                caller = get_ident()
    finally:
        shared.close()
        for part in active.values():
            part.stop()
        if get_ident() == caller:  # otherwise the garbage collector ends this generator in a thread that may not wait
            for part in active.values():
                part.session.close()
            for part in active.values():
                if part.ident is not None:
                    part.join()
