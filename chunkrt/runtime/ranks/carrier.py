"""The carrier of messages, which passes outgoing messages to MPI and receives incoming messages from it.

Only one thread at a time calls MPI: the communicator's thread, or a thread that waits for a message and has no other
work. If the waiting thread calls MPI itself, a message needs two thread switches less.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]


class Carrier:
    """One rank's messages in transit.

    Args:
        deliver: called with the sending rank and the message, in the thread that carried it.
    """

    def __init__(self, deliver: Callable[[int, Bytes], None]) -> None:
        self._deliver = deliver
        self._calling = Lock()
        self._outbox: deque[tuple[int, Bytes]] = deque()
        self._sending: list[tuple[Any, Bytes]] = []
        self._receiving: list[tuple[Any, int, Bytes]] = []
        self._dropped: list[tuple[Any, Bytes]] = []
        """Sent messages whose memory MPI may still read."""

    def open(self, mpi: Any, world: Any) -> None:
        """Open the carrier. `mpi` is mpi4py's module, and `world` is a communicator of all ranks that no other code
        uses.
        """
        self._mpi, self._world, self._status = mpi, world, mpi.Status()

    @property
    def has_mail(self) -> bool:
        """True if some messages have not been passed to MPI yet."""
        return bool(self._outbox)

    @property
    def is_done(self) -> bool:
        """True if all messages have been sent."""
        return not (self._outbox or self._sending)

    def post(self, message: Bytes, to: Iterable[int]) -> None:
        """Queue a message for sending. It must not be changed afterwards."""
        self._outbox.extend((rank, message) for rank in to)

    def drop(self) -> None:
        """Stop waiting for the messages queued so far, because their receivers may no longer exist."""
        self._outbox.clear()
        self._dropped, self._sending = self._sending, []

    def carry(self, *, blocking: bool = True) -> bool:
        """Send and receive all messages. Without `blocking`, do this only if no other thread does. Return True if a
        message was sent or received.
        """
        if not self._calling.acquire(blocking):
            return False
        try:
            return self._send() | self._receive()
        finally:
            self._calling.release()

    def _send(self) -> bool:
        has_mail = self.has_mail
        while self._outbox:
            rank, message = self._outbox.popleft()
            self._sending.append((self._world.Isend([message, self._mpi.BYTE], dest=rank), message))
        if self._sending:
            self._sending = [(request, message) for request, message in self._sending if not request.Test()]
        return has_mail

    def _receive(self) -> bool:
        while (found := self._world.Improbe(status=self._status)) is not None:
            data = np.empty(self._status.Get_count(self._mpi.BYTE), np.uint8)
            self._receiving.append((found.Irecv([data, self._mpi.BYTE]), self._status.Get_source(), data))
        under_way, self._receiving = self._receiving, []
        late: set[int] = set()  # the messages of a rank are delivered in the order in which it sent them
        for request, source, data in under_way:
            if source not in late and request.Test():
                self._deliver(source, data)
            else:
                late.add(source)
                self._receiving.append((request, source, data))
        return len(self._receiving) < len(under_way)
