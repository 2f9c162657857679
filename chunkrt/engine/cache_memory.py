"""Memory for caches: how much the states of an engine may take together, and who waits for room."""

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
    """Hands out states as long as there is room, first come, first served.

    A state counts with all that is reserved for it, until it is gone.

    Args:
        limit: bytes of all together; None for no limit.
        most_waiting: that may wait for room.
    """

    def __init__(self, limit: int | None, most_waiting: int) -> None:
        self.limit = limit
        self.most_waiting = most_waiting
        self._states: weakref.WeakSet[State] = weakref.WeakSet()
        self._waiting: deque[Callable[[], object]] = deque()
        """What tells each of those that wait to look again, in the order in which they came."""
        self._lock = Lock()

    @property
    def num_states(self) -> int:
        """States that there are."""
        return len(self._states)

    @property
    def num_bytes(self) -> int:
        """That they take."""
        with self._lock:
            return self._taken()

    @property
    def num_waiting(self) -> int:
        """Who waits for room."""
        return len(self._waiting)

    def open(self, make: Callable[[], State]) -> State:
        """A state at once. Raises BusyError if there is no room for it, or others wait for it already."""
        if (state := self._at_once(make)) is None:
            raise BusyError(
                f"the caches of {self.num_states} sessions take all of the {self.limit} bytes that they may "
                "(cache_memory); close a session, or let the caches have more"
            )
        return state

    def queue(self, look: Callable[[], object]) -> None:
        """Wait for room.

        Args:
            look: called, in any thread, whenever `take` may find some.

        Raises:
            BusyError: as many as may wait do.
        """
        with self._lock:
            if len(self._waiting) >= self.most_waiting:
                raise BusyError(
                    f"{len(self._waiting)} sequences wait for room in the caches already (queue); try again later"
                )
            self._waiting.append(look)
        look()

    def take(self, look: Callable[[], object], make: Callable[[], State]) -> State | None:
        """A state for who waits with `look`; its turn is over then. None if there is no room, or others come first."""
        with self._lock:
            if not self._waiting or self._waiting[0] is not look or (state := self._try(make)) is None:
                return None
            self._waiting.popleft()
        self._tell()
        return state

    def leave(self, look: Callable[[], object]) -> None:
        """Wait no longer, if it still waits."""
        with self._lock:
            if look in self._waiting:
                self._waiting.remove(look)
        self._tell()

    def wait(self, make: Callable[[], State]) -> State:
        """A state as soon as there is room; this thread waits. Raises BusyError as `queue` does."""
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
        """As `wait`, while the event loop goes on."""
        import asyncio

        news, loop = asyncio.Event(), asyncio.get_running_loop()

        def look() -> None:
            with suppress(RuntimeError):  # the loop has ended
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
        """Have those that wait look whether there is room, or why there will be none."""
        self._tell()

    def _at_once(self, make: Callable[[], State]) -> State | None:
        """A state, unless others wait for room, or there is none."""
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
        """Have the first look. It may be called wherever the garbage collector runs, so it takes no lock."""
        try:
            first = self._waiting[0]  # in one step: another thread may be changing them
        except IndexError:
            return
        first()
