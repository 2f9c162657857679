"""Who may begin: so many sequences at a time, and so many requests more that wait."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from chunkrt.errors import BusyError, ClosedError
from chunkrt.server.errors import RequestError


class Turn:
    """A request's. Its prompts wait for places one after the other, so that of those that wait it is one."""

    def __init__(self) -> None:
        self.has_begun = False
        self.lock = asyncio.Lock()


class Admission:
    """Lets sequences begin, first come, first served. It belongs to one event loop.

    Args:
        most: that are under way at a time.
        most_waiting: requests that wait; one more is refused at once.
    """

    def __init__(self, most: int, most_waiting: int) -> None:
        self.most, self.most_waiting = most, most_waiting
        self.num_active = 0
        self.num_waiting = 0
        self.is_closed = False
        self._free, self._gate = asyncio.Semaphore(most), asyncio.Lock()
        self._bounds: dict[asyncio.Timeout, Turn] = {}
        """Of all that wait or are under way: none by itself, `close` and `end` set it."""

    def check(self, number: int = 1) -> None:
        """Whether a request may come in, whose prompts have so many choices each.

        Raises:
            BusyError: all places are taken, and as many wait as may.
            ClosedError: nothing may begin any more.
            RequestError: there will never be so many places.
        """
        if self.is_closed:
            raise ClosedError("nothing new is begun")
        if number > self.most:
            raise RequestError(f"n is {number}, but {self.most} sequences run at a time (--max-sessions)", param="n")
        must_wait = self.num_waiting or self.num_active + number > self.most  # behind those that do
        if must_wait and self.num_waiting >= self.most_waiting:
            raise BusyError(
                f"{self.num_active} sequences are under way and {self.num_waiting} requests wait (--max-sessions, "
                "--max-waiting); try again later"
            )

    @asynccontextmanager
    async def places(self, number: int, turn: Turn) -> AsyncIterator[None]:
        """Places for some sequences of a request, once there are that many for who has waited longest.

        Raises ClosedError, out of what is done in them too, when that may not go on any more.
        """
        if self.is_closed and not turn.has_begun:
            raise ClosedError("nothing new is begun")
        taken = 0
        try:
            async with asyncio.timeout(None) as bound:
                self._bounds[bound] = turn
                try:
                    async with turn.lock:
                        self.num_waiting += 1
                        try:
                            async with self._gate:  # who has some of theirs gets the rest before anybody else
                                while taken < number:
                                    await self._free.acquire()
                                    taken += 1
                        finally:
                            self.num_waiting -= 1
                    turn.has_begun = True
                    self.num_active += number
                    try:
                        yield
                    finally:
                        self.num_active -= number
                finally:
                    del self._bounds[bound]
        except TimeoutError:
            if not bound.expired():
                raise
            raise ClosedError("the server ends") from None
        finally:
            for _ in range(taken):
                self._free.release()

    def close(self) -> None:
        """Let no request begin any more, not one that waits either. Those that have begun go on."""
        self.is_closed = True
        self._end([bound for bound, turn in self._bounds.items() if not turn.has_begun])

    def end(self) -> None:
        """End all that is under way, too."""
        self.close()
        self._end(list(self._bounds))

    def _end(self, bounds: list[asyncio.Timeout]) -> None:
        for bound in bounds:
            if bound.when() is None:
                bound.reschedule(0)
