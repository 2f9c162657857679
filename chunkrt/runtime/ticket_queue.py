"""The queue of tickets: who shares chunks, who has gone, and who may come back in a moment."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from queue import SimpleQueue
from threading import Lock
from time import perf_counter_ns

from chunkrt.errors import ClosedError
from chunkrt.runtime.job import Job
from chunkrt.runtime.ticket import Ticket

LINGER = 0.25
"""The share of the last chunk's time for which the next waits for those that had a row in it and may come back: with
them it costs little more than without."""


class TicketQueue:
    """Tickets come from any thread; all else is for whoever has the turn of the executors."""

    def __init__(self) -> None:
        self.tickets: list[Ticket] = []
        """Those that have not ended, in the order in which they came."""
        self._inbox: SimpleQueue[Ticket | None] = SimpleQueue()
        """New tickets; None stands for a look at those that there are."""
        self._bell = Lock()
        """Free once a message has come. `SimpleQueue.get` itself is not given a timeout: before Python 3.13 it waits
        for ever if its thread is put aside for longer than that while it begins."""
        self._bell.acquire()
        self._is_closed = False
        self._last_states: frozenset[int] = frozenset()
        """The states, by their serials, whose last row was in the last chunk; and until when they are waited for."""
        self._linger_until_ns = 0

    @property
    def num_tickets(self) -> int:
        """How many there are, with those that nobody has looked at."""
        return len(self.tickets) + self._inbox.qsize()

    @property
    def is_quiet(self) -> bool:
        """Whether there is no message."""
        return self._inbox.empty()

    def put(self, ticket: Ticket) -> None:
        """Have a ticket taken in, or looked at again. Nothing is locked, wherever an interrupt falls."""
        self._inbox.put(ticket)
        self._ring()

    def wake(self) -> None:
        """Have all looked at."""
        self._inbox.put(None)
        self._ring()

    def close(self) -> None:
        """End all that there are and that come."""
        self._is_closed = True
        self.wake()

    def wait(self) -> None:
        """Wait for a message."""
        self._take_in(self._inbox.get())

    def somebody_waits(self) -> bool:
        """Wait a little for those that may come back from the last chunk; whether there is anything to compute then."""
        self._take_in()
        if len(self._last_states) < 2 and not self.tickets:
            return False
        while self._absent() and (left_ns := self._linger_until_ns - perf_counter_ns()) > 0:
            if not self._bell.acquire(timeout=left_ns / 1e9):  # it may have been for messages that are taken by now
                break
            self._take_in()
        return bool(self.tickets)

    @property
    def waiting(self) -> list[Ticket]:
        """Those with tokens that wait for a chunk."""
        return [ticket for ticket in self.tickets if ticket.job.num_left and ticket.error is None]

    def note_end(self, took_ns: int, done: Sequence[Job]) -> None:
        """A chunk has ended just now, after so long, and with it the last row of some jobs."""
        self._last_states = frozenset(job.run.state.serial for job in done)
        self._linger_until_ns = perf_counter_ns() + int(LINGER * took_ns)

    def let_go(self) -> None:
        """End those that nothing more is computed of."""
        for ticket in self.tickets:
            if not ticket.num_in_flight and (ticket.error is not None or not ticket.job.num_left):
                ticket.end()
        self.tickets = [ticket for ticket in self.tickets if not ticket.is_ended]

    def end_all(self, error: BaseException) -> None:
        """Nothing more is computed of anybody; nothing of them is in flight."""
        for ticket in self.tickets:
            ticket.end(error)
        self.tickets = []

    def _ring(self) -> None:
        with suppress(RuntimeError):  # it is free already
            self._bell.release()

    def _absent(self) -> frozenset[int]:
        """The states that had their last row in the last chunk and have not come back."""
        return self._last_states.difference(ticket.job.run.state.serial for ticket in self.tickets)

    def _take_in(self, *messages: Ticket | None) -> None:
        """Take what lies in the inbox, and let go whoever wants no more rows."""
        while not self._inbox.empty():
            messages = (*messages, self._inbox.get())
        news = [ticket for ticket in dict.fromkeys(messages) if ticket and ticket not in self.tickets]
        self.tickets += [ticket for ticket in news if not ticket.is_ended]  # one may have been cancelled too late
        for ticket in self.tickets:
            if self._is_closed:
                ticket.stop(ClosedError("the engine was closed; load the model again"))
            elif ticket.is_over:
                ticket.stop(ClosedError(f"the run was cancelled after {ticket.job.num_taken} tokens"))
        self.let_go()
