"""The queue of tickets that share chunks, with a short wait for sequences that are about to return."""

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
"""Time for which the next chunk waits for sequences that had a row in the last chunk and may return, as a share of the
last chunk's duration. With their rows the next chunk takes little longer than without them.
"""


class TicketQueue:
    """Queue of tickets. Any thread may put tickets in; only the thread that uses the executors calls the other
    methods."""

    def __init__(self) -> None:
        self.tickets: list[Ticket] = []
        """Tickets that have not ended, in order of arrival."""
        self._inbox: SimpleQueue[Ticket | None] = SimpleQueue()
        """New tickets. None requests another examination of the known tickets."""
        self._bell = Lock()
        """Unlocked once a message has arrived. `SimpleQueue.get` is not used with a timeout, because before Python 3.13
        it waits forever if its thread is suspended at the beginning for longer than the timeout.
        """
        self._bell.acquire()
        self._is_closed = False
        self._last_states: frozenset[int] = frozenset()
        """Serial numbers of the states whose runs ended with the last chunk; `_linger_until_ns` limits the wait for
        these states.
        """
        self._linger_until_ns = 0

    @property
    def num_tickets(self) -> int:
        """Number of tickets, including the tickets in the inbox."""
        return len(self.tickets) + self._inbox.qsize()

    @property
    def is_quiet(self) -> bool:
        """True if the inbox is empty."""
        return self._inbox.empty()

    def put(self, ticket: Ticket) -> None:
        """Queue a ticket, or request that it is examined again. An interrupt at any point leaves no lock held."""
        self._inbox.put(ticket)
        self._ring()

    def wake(self) -> None:
        """Request that all tickets are examined again."""
        self._inbox.put(None)
        self._ring()

    def close(self) -> None:
        """End all present and future tickets."""
        self._is_closed = True
        self.wake()

    def wait(self) -> None:
        """Wait for a message."""
        self._take_in(self._inbox.get())

    def somebody_waits(self) -> bool:
        """Wait briefly for sequences that may return from the last chunk. Return True if a ticket is waiting then."""
        self._take_in()
        if len(self._last_states) < 2 and not self.tickets:
            return False
        while self._absent() and (left_ns := self._linger_until_ns - perf_counter_ns()) > 0:
            if not self._bell.acquire(timeout=left_ns / 1e9):  # the messages may have been received already
                break
            self._take_in()
        return bool(self.tickets)

    @property
    def waiting(self) -> list[Ticket]:
        """Tickets with tokens that wait for a chunk."""
        return [ticket for ticket in self.tickets if ticket.job.num_left and ticket.error is None]

    def note_end(self, took_ns: int, done: Sequence[Job]) -> None:
        """Record that a chunk has ended after `took_ns` nanoseconds, with the last rows of some jobs."""
        self._last_states = frozenset(job.run.state.serial for job in done)
        self._linger_until_ns = perf_counter_ns() + int(LINGER * took_ns)

    def let_go(self) -> None:
        """End the tickets that have no work left."""
        for ticket in self.tickets:
            if not ticket.num_in_flight and (ticket.error is not None or not ticket.job.num_left):
                ticket.end()
        self.tickets = [ticket for ticket in self.tickets if not ticket.is_ended]

    def end_all(self, error: BaseException) -> None:
        """End all tickets. No chunk with their tokens may be in flight."""
        for ticket in self.tickets:
            ticket.end(error)
        self.tickets = []

    def _ring(self) -> None:
        with suppress(RuntimeError):  # the lock is released already
            self._bell.release()

    def _absent(self) -> frozenset[int]:
        """Return the states whose runs ended with the last chunk and that have no new ticket yet."""
        return self._last_states.difference(ticket.job.run.state.serial for ticket in self.tickets)

    def _take_in(self, *messages: Ticket | None) -> None:
        """Receive all messages from the inbox, and end the tickets that need no more rows."""
        while not self._inbox.empty():
            messages = (*messages, self._inbox.get())
        news = [ticket for ticket in dict.fromkeys(messages) if ticket and ticket not in self.tickets]
        self.tickets += [
            ticket for ticket in news if not ticket.is_ended
        ]  # a ticket may have been cancelled after its last token was computed
        for ticket in self.tickets:
            if self._is_closed:
                ticket.stop(ClosedError("the engine was closed; load the model again"))
            elif ticket.is_over:
                ticket.stop(ClosedError(f"the run was cancelled after {ticket.job.num_taken} tokens"))
        self.let_go()
