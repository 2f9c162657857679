"""Admission of sequences: the limits on their number and on the memory of their caches, with one queue for both."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from threading import RLock

from chunkrt.errors import BusyError, ClosedError
from chunkrt.runtime.scheduler import CLOSED
from chunkrt.runtime.state import State

_Waiter = tuple[int, Callable[[], object]]
"""Number of places that a request waits for, and a function that makes it look for them. Any thread may call the
function. It raises RuntimeError if the event loop of the request has ended.
"""


class _Places:
    """Places that a request has taken, one for each of its states. They are free when nothing refers to them."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.num_left = number - 1
        """Number of places for states that do not exist yet, apart from the one that is being made."""


class Admission:
    """Allocator of states within limits; requests are served in order of arrival.

    A request takes all of its places at once, so requests for several places never wait for each other. A place is
    taken until the states of its request are deleted.

    Args:
        max_bytes: maximum number of bytes of the caches of all states; None for no limit.
        state_bytes: number of bytes of the caches of one state.
        max_waiting: maximum number of requests that may wait.
    """

    def __init__(self, max_bytes: int | None, state_bytes: int, max_waiting: int) -> None:
        self.max_sequences: int | None = None
        """Maximum number of sequences, which a server sets; None for no limit."""
        self.max_waiting = max_waiting
        self._max_states = None if max_bytes is None else max_bytes // max(state_bytes, 1)
        self._taken: weakref.WeakSet[_Places] = weakref.WeakSet()
        self._places: weakref.WeakKeyDictionary[State, _Places] = weakref.WeakKeyDictionary()
        """The places of each state."""
        self._waiting: deque[_Waiter] = deque()
        self._lock = RLock()
        self._is_closed = False

    @property
    def most(self) -> int | None:
        """Maximum number of places; None for no limit."""
        return min((n for n in (self.max_sequences, self._max_states) if n is not None), default=None)

    @property
    def num_taken(self) -> int:
        """Number of places that are taken, including those for copies that do not exist yet."""
        with self._lock:
            return sum(places.number for places in self._taken)

    @property
    def num_states(self) -> int:
        """Number of states."""
        return len(self._places)

    @property
    def num_bytes(self) -> int:
        """Number of bytes that the states reserve."""
        # An iterator over the dictionary would delay the removal of states that are deleted in the meantime.
        return sum(state.num_bytes for key in self._places.keyrefs() if (state := key()) is not None)

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait."""
        return len(self._waiting)

    def open(self, make: Callable[[], State]) -> State:
        """Return a state immediately. Raise BusyError if no place is free, or if requests already wait."""
        with self._lock:
            places = self._take_free()
        return self._use(places, make)

    def fork(self, state: State) -> State:
        """Return a copy of a state. It uses one of the places that the state's request has taken, or else is opened
        like `open`.
        """
        with self._lock:
            places = self._places.get(state)
            if places is not None and places.num_left:
                places.num_left -= 1
            else:
                places = self._take_free()
        return self._use(places, state.fork)

    def wait(self, make: Callable[[], State]) -> State:
        """Block this thread until a place is free, and return a state.

        Raises:
            BusyError: the queue is full.
            ClosedError: the engine is closed.
        """
        news: SimpleQueue[None] = SimpleQueue()
        waiter: _Waiter = 1, lambda: news.put(None)
        try:
            places = self._enter(waiter)
            while places is None:
                news.get()
                places = self._take(waiter)
        finally:
            self._leave(waiter)
        return self._use(places, make)

    async def await_room(
        self,
        make: Callable[[], State],
        number: int = 1,
        *,
        has_entered: bool = False,
        on_entry: Callable[[], object] = bool,
    ) -> State:
        """Wait like `wait`, without blocking the event loop.

        Args:
            number: number of places to take, for the state and for copies of it (`fork`).
            has_entered: True if the request has had other places before, so that the queue cannot be too full for it.
            on_entry: called when the request has its places, or waits in the queue.
        """
        import asyncio

        news, loop = asyncio.Event(), asyncio.get_running_loop()

        waiter: _Waiter = number, lambda: loop.call_soon_threadsafe(news.set)
        try:
            places = self._enter(waiter, has_entered=has_entered)
            on_entry()
            while places is None:
                await news.wait()
                news.clear()
                places = self._take(waiter)
        finally:
            self._leave(waiter)
        return self._use(places, make)

    def close(self) -> None:
        """End all waits with ClosedError. This method takes no lock, because a signal handler may call it."""
        self._is_closed = True
        self._tell()  # a request that ends its wait wakes the next one

    def _enter(self, waiter: _Waiter, *, has_entered: bool = False) -> _Places | None:
        """Return the places of a request, or add the request to the queue and return None."""
        number, look = waiter
        with self._lock:
            if not self._must_wait(number):
                return self._new(number)
            if len(self._waiting) >= self.max_waiting and not has_entered:
                raise self._busy()
            self._waiting.append(waiter)
        look()  # places may have become free in the meantime
        return None

    def _take(self, waiter: _Waiter) -> _Places | None:
        """Return the places of a request, and remove the request from the queue. Return None if the places are not free
        yet, or another request comes first.
        """
        with self._lock:
            if self._is_closed:
                raise ClosedError(CLOSED)
            if self._waiting[0] is not waiter or not self._has_room(waiter[0]):
                return None
            self._waiting.popleft()
            return self._new(waiter[0])

    def _leave(self, waiter: _Waiter) -> None:
        """Remove a request from the queue, if it still waits, and wake the next one."""
        with self._lock, suppress(ValueError):
            self._waiting.remove(waiter)
        self._tell()

    def _take_free(self) -> _Places:
        """Return one place. Raise BusyError if none is free, or if requests wait."""
        if self._must_wait(1):
            raise self._busy()
        return self._new(1)

    def _new(self, number: int) -> _Places:
        places = _Places(number)
        self._taken.add(places)
        weakref.finalize(places, self._tell).atexit = False
        return places

    def _use(self, places: _Places, make: Callable[[], State]) -> State:
        """Make a state that uses one of the places. After an error, the place is free again."""
        try:
            state = make()
        except BaseException:
            with self._lock:
                places.num_left += 1
                if places.num_left == places.number:  # there is no state, but the traceback refers to the places
                    places.number = places.num_left = 0
            self._tell()
            raise
        with self._lock:
            self._places[state] = places
        return state

    def _must_wait(self, number: int) -> bool:
        return bool(self._waiting) or not self._has_room(number)

    def _has_room(self, number: int) -> bool:
        return self.most is None or self.num_taken + number <= self.most

    def _busy(self) -> BusyError:
        limit = "cache_memory" if self.most == self._max_states else "max_sessions"
        queue, advice = "queue", "close a session, raise a limit, or try again later"
        if self.max_sequences is not None:  # the client of a server can do neither
            queue, advice = "max_waiting", "try again later"
        return BusyError(
            f"{self.num_taken} of {self.most} places for sequences (`{limit}`) and {self.num_waiting} of "
            f"{self.max_waiting} places in the queue (`{queue}`) are taken; {advice}"
        )

    def _tell(self) -> None:
        """Make the first waiting request look for its places. Remove requests whose event loops have ended. The garbage
        collector may call this method at any point, so it takes no lock.
        """
        while True:
            try:
                waiter = self._waiting[0]  # in a single step, because another thread may change the queue
            except IndexError:
                return
            _, look = waiter
            try:
                look()
                return
            except RuntimeError:
                with suppress(ValueError):
                    self._waiting.remove(waiter)
