"""Memory for caches: the limit for the states of an engine, and the queue of sequences that wait for memory."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from threading import Lock

from chunkrt.errors import BusyError
from chunkrt.runtime.state import State


class CacheMemory:
    """Allocator of states within a memory limit; requests are served in order of arrival.

    A state counts with all its reserved memory until it is deleted.

    Args:
        limit: maximum number of bytes of all states; None for no limit.
        most_waiting: maximum number of sequences that may wait for memory.
    """

    def __init__(self, limit: int | None, most_waiting: int) -> None:
        self.limit = limit
        self.most_waiting = most_waiting
        self._states: weakref.WeakSet[State] = weakref.WeakSet()
        self._waiting: deque[Callable[[], object]] = deque()
        """Callbacks that make the waiting sequences call `take` again, in order of arrival."""
        self._lock = Lock()

    @property
    def num_states(self) -> int:
        """Number of states."""
        return len(self._states)

    @property
    def num_bytes(self) -> int:
        """Number of bytes that the states reserve."""
        with self._lock:
            return self._taken()

    @property
    def num_waiting(self) -> int:
        """Number of sequences that wait for memory."""
        return len(self._waiting)

    def open(self, make: Callable[[], State]) -> State:
        """Return a state immediately. Raise BusyError if its memory exceeds the limit, or if other sequences already
        wait.
        """
        if (state := self._at_once(make)) is None:
            raise BusyError(
                f"the caches of {self.num_states} sessions leave no room within their limit of {self.limit} bytes "
                "(`cache_memory`); close a session, or raise the limit"
            )
        return state

    def queue(self, look: Callable[[], object]) -> None:
        """Add a sequence to the queue.

        Args:
            look: called, in any thread, whenever `take` may succeed. It also identifies the sequence.

        Raises:
            BusyError: the maximum number of waiting sequences is reached.
        """
        with self._lock:
            if len(self._waiting) >= self.most_waiting:
                raise BusyError(
                    f"{len(self._waiting)} sequences already wait for cache memory, the limit of `queue`; "
                    "try again later"
                )
            self._waiting.append(look)
        look()

    def take(self, look: Callable[[], object], make: Callable[[], State]) -> State | None:
        """Return a state for the sequence that waits with `look`, and remove the sequence from the queue. Return None
        if the memory is not available yet, or another sequence comes first.
        """
        with self._lock:
            if not self._waiting or self._waiting[0] is not look or (state := self._try(make)) is None:
                return None
            self._waiting.popleft()
        self._tell()
        return state

    def leave(self, look: Callable[[], object]) -> None:
        """Remove the sequence from the queue, if it still waits."""
        with self._lock:
            if look in self._waiting:
                self._waiting.remove(look)
        self._tell()

    def wait(self, make: Callable[[], State]) -> State:
        """Block this thread until memory is available, and return a state. Raise BusyError like `queue`."""
        news: SimpleQueue[None] = SimpleQueue()

        def look() -> None:
            news.put(None)

        if (state := self._at_once(make)) is not None:
            return state
        try:
            self.queue(look)
            while True:
                news.get()
                if (state := self.take(look, make)) is not None:
                    return state
        finally:
            self.leave(look)

    async def await_room(self, make: Callable[[], State]) -> State:
        """Wait until memory is available without blocking the event loop, and return a state."""
        import asyncio

        news, loop = asyncio.Event(), asyncio.get_running_loop()

        def look() -> None:
            with suppress(RuntimeError):  # the event loop has ended
                loop.call_soon_threadsafe(news.set)

        if (state := self._at_once(make)) is not None:
            return state
        try:
            self.queue(look)
            while (state := self.take(look, make)) is None:
                await news.wait()
                news.clear()
            return state
        finally:
            self.leave(look)

    def look_again(self) -> None:
        """Make the first waiting sequence check again for memory, or for an error."""
        self._tell()

    def _at_once(self, make: Callable[[], State]) -> State | None:
        """Return a state, or None if another sequence waits or the memory is not available."""
        with self._lock:
            return None if self._waiting else self._try(make)

    def _taken(self) -> int:
        return sum(state.num_bytes for state in self._states)

    def _try(self, make: Callable[[], State]) -> State | None:
        state = make()
        if self.limit is not None and self._taken() + state.num_bytes > self.limit:
            return None
        self._states.add(state)
        weakref.finalize(state, self._tell).atexit = False
        return state

    def _tell(self) -> None:
        """Make the first waiting sequence check again. The garbage collector may call this method at any point, so it
        takes no lock.
        """
        try:
            first = self._waiting[0]  # in a single step, because another thread may change the queue
        except IndexError:
            return
        first()
