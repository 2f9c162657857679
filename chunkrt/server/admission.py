"""Who may begin: so many sequences at a time, and so many more that wait."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from chunkrt.errors import BusyError, ClosedError
from chunkrt.server.errors import RequestError


class Admission:
    """Lets sequences begin, first come, first served. It belongs to one event loop.

    Args:
        most: that are under way at a time.
        most_waiting: that wait; one more is refused at once.
    """

    def __init__(self, most: int, most_waiting: int) -> None:
        self.most, self.most_waiting = most, most_waiting
        self.num_active = 0
        self.num_waiting = 0
        self.is_closed = False
        self._free, self._gate = asyncio.Semaphore(most), asyncio.Lock()

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
        if self.num_active + number > self.most and self.num_waiting >= self.most_waiting:
            raise BusyError(
                f"{self.num_active} sequences are under way and {self.num_waiting} wait (--max-sessions, "
                "--max-waiting); try again later"
            )

    @asynccontextmanager
    async def places(self, number: int) -> AsyncIterator[None]:
        """Places for some sequences, once there are that many for who has waited longest."""
        self.num_waiting += 1
        taken = 0
        try:
            try:
                async with self._gate:  # who has some of theirs gets the rest before anybody else
                    while taken < number:
                        await self._free.acquire()
                        taken += 1
            finally:
                self.num_waiting -= 1
            self.num_active += number
            try:
                yield
            finally:
                self.num_active -= number
        finally:
            for _ in range(taken):
                self._free.release()
