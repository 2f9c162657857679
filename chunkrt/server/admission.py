"""Admission: bounds on the number of sequences that run at a time, and on the number of requests that wait."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from chunkrt.errors import BusyError, ClosedError
from chunkrt.server.errors import RequestError


class Turn:
    """A request's place in the queue. Its prompts wait one after the other, so it counts as one waiting request."""

    def __init__(self) -> None:
        self.has_begun = False
        self.lock = asyncio.Lock()


class Admission:
    """Admits sequences in order of arrival. An object belongs to one event loop.

    Args:
        most: maximum number of sequences in progress at a time.
        most_waiting: maximum number of waiting requests; a further request is refused at once.
    """

    def __init__(self, most: int, most_waiting: int) -> None:
        self.most, self.most_waiting = most, most_waiting
        self.num_active = 0
        self.num_waiting = 0
        self.is_closed = False
        self._free, self._gate = asyncio.Semaphore(most), asyncio.Lock()
        self._bounds: dict[asyncio.Timeout, Turn] = {}
        """Timeouts of all waiting and running requests. A timeout has no deadline until `close` or `end` sets it.
        """

    def check(self, number: int = 1) -> None:
        """Check that a request whose prompts have `number` choices each may enter.

        Raises:
            BusyError: all places are taken, and the queue is full.
            ClosedError: the server accepts no new requests.
            RequestError: `number` exceeds the number of places.
        """
        if self.is_closed:
            raise ClosedError("the server accepts no new requests")
        if number > self.most:
            raise RequestError(
                f"n is {number}, but at most {self.most} sequences run at a time (--max-sessions)", param="n"
            )
        must_wait = self.num_waiting or self.num_active + number > self.most  # behind the requests in the queue
        if must_wait and self.num_waiting >= self.most_waiting:
            raise BusyError(
                f"{self.num_active} sequences are in progress and {self.num_waiting} requests wait (--max-sessions, "
                "--max-waiting); try again later"
            )

    @asynccontextmanager
    async def places(self, number: int, turn: Turn) -> AsyncIterator[None]:
        """Hold places for `number` sequences of a request, first come, first served.

        Raises ClosedError, also from within the body, when the request may not continue.
        """
        if self.is_closed and not turn.has_begun:
            raise ClosedError("the server accepts no new requests")
        taken = 0
        try:
            async with asyncio.timeout(None) as bound:
                self._bounds[bound] = turn
                try:
                    async with turn.lock:
                        self.num_waiting += 1
                        try:
                            # a request that has some of its places gets the rest before any other
                            async with self._gate:
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
            raise ClosedError("the server is shutting down") from None
        finally:
            for _ in range(taken):
                self._free.release()

    def close(self) -> None:
        """Admit no further requests, including those that wait. Requests in progress continue."""
        self.is_closed = True
        self._end([bound for bound, turn in self._bounds.items() if not turn.has_begun])

    def end(self) -> None:
        """End all requests in progress, too."""
        self.close()
        self._end(list(self._bounds))

    def _end(self, bounds: list[asyncio.Timeout]) -> None:
        for bound in bounds:
            if bound.when() is None:
                bound.reschedule(0)
