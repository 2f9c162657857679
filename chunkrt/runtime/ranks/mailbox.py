"""A mailbox stores the messages of other ranks by subject, until a thread takes them.

Ranks reach the sums in different orders, so a message may arrive long before or after it is requested.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from threading import Condition, Lock
from typing import NamedTuple

from chunkrt.errors import BackendError, ChunkrtError


class Channel(IntEnum):
    """Kind of a message.

    Attributes:
        BEAT: a heartbeat.
        END: the leader has ended normally.
        LOST: a rank ends; the message contains the reason.
        ABORT: a computation ends early; the message contains the reason.
        SUM: numbers to be added.
        COMMAND: work from the leader.
        REPLY: the result of a command.
        DONE: a rank has computed its part of some work.
    """

    BEAT = 0
    END = 1
    LOST = 2
    ABORT = 3
    SUM = 4
    COMMAND = 5
    REPLY = 6
    DONE = 7


OF_WORK = (Channel.SUM, Channel.DONE)
"""Channels of messages that belong to a unit of work, which is a run or a chunk."""


class Envelope(NamedTuple):
    """Subject of a message.

    `number` identifies the command or the unit of work. `subgraph`, `position` and `phase` identify a sum.
    """

    channel: Channel
    number: int = 0
    subgraph: int = 0
    position: int = 0
    phase: int = 0


@dataclass
class _Box:
    """Messages on one subject by sending rank, with a condition for threads that wait for more messages. If work is not
    numbered, the next sum may have the same subject, so the messages of a rank are kept in order.
    """

    arrived: Condition
    payloads: dict[int, deque[memoryview]] = field(default_factory=dict)

    def are_there(self, sources: Collection[int]) -> bool:
        """Return True if a message from every given rank has arrived."""
        return all(self.payloads.get(source) for source in sources)


class Mailbox:
    """Mailbox that one thread fills and any thread empties."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._boxes: dict[Envelope, _Box] = {}
        self._under_way: set[int] = set()
        self._last = 0
        """Number of the last work that has begun on this rank."""
        self._aborted: dict[int, str] = {}
        """Reasons for aborted work, by number. Work that has ended has no entry."""
        self._failure: ChunkrtError | None = None
        self.was_failure_told = False
        """True if a thread has received the failure."""

    @property
    def failure(self) -> ChunkrtError | None:
        """Error after which no further message arrives."""
        return self._failure

    def deliver(self, envelope: Envelope, source: int, payload: memoryview) -> None:
        """Add a message. A message on work that has ended is discarded."""
        if envelope.channel == Channel.ABORT:
            self.abort(envelope.number, bytes(payload).decode())
            return
        with self._lock:
            if self._is_over(envelope):
                return
            box = self._box(envelope)
            box.payloads.setdefault(source, deque()).append(payload)
            box.arrived.notify_all()

    def take(self, envelope: Envelope, sources: Collection[int]) -> Mapping[int, memoryview]:
        """Wait for a message on one subject from every given rank. Remove and return the messages.

        Raises:
            DeviceLostError: a rank was lost.
            ClosedError: the leader has ended.
            BackendError: the work of the subject was aborted, or has ended.
        """
        with self._lock:
            box = self._box(envelope)
            try:
                while True:
                    if box.are_there(sources):
                        return {source: box.payloads[source].popleft() for source in sources}
                    if self._failure is not None:
                        self.was_failure_told = True
                        raise type(self._failure)(str(self._failure))
                    if envelope.channel in OF_WORK and self.is_aborted(envelope.number):
                        raise BackendError(self._aborted[envelope.number])
                    if self._is_over(envelope):
                        raise BackendError("the requested message belongs to work that has ended")
                    box.arrived.wait()
            finally:
                if not any(box.payloads.values()):
                    self._boxes.pop(envelope, None)

    def is_settled(self, envelope: Envelope, sources: Collection[int]) -> bool:
        """Return True if `take` would return or raise immediately."""
        box = self._boxes.get(envelope)
        return (
            (box is not None and box.are_there(sources))
            or self._failure is not None
            or (envelope.channel in OF_WORK and self.is_aborted(envelope.number))
        )

    def begin(self, number: int) -> None:
        """Begin work. Its number must be greater than the numbers of earlier work, which may still be in progress."""
        with self._lock:
            self._under_way.add(number)
            self._last = number

    def end(self, number: int) -> None:
        """End work: remove its messages, and discard messages that arrive later."""
        with self._lock:
            self._under_way.discard(number)
            self._aborted.pop(number, None)
            self._wake_all()
            for envelope in [e for e in self._boxes if e.channel in OF_WORK and e.number == number]:
                del self._boxes[envelope]

    def abort(self, number: int, why: str) -> None:
        """Abort work. Threads that wait for its messages, now or later, receive the reason. Only the first reason is
        kept.
        """
        with self._lock:
            if (number in self._under_way or number > self._last) and number not in self._aborted:
                self._aborted[number] = why
                self._wake_all()

    def is_aborted(self, number: int) -> bool:
        """Return True if work was aborted, on this rank or another one."""
        return number in self._aborted

    def fail(self, error: ChunkrtError) -> bool:
        """Raise the error in all threads that wait, now or later. Return True if it is the first error."""
        with self._lock:
            if self._failure is not None:
                return False
            self._failure = error
            self._wake_all()
            return True

    def _is_over(self, envelope: Envelope) -> bool:
        number = envelope.number
        return envelope.channel in OF_WORK and 0 < number <= self._last and number not in self._under_way

    def _box(self, envelope: Envelope) -> _Box:
        if (box := self._boxes.get(envelope)) is None:
            box = self._boxes[envelope] = _Box(Condition(self._lock))
        return box

    def _wake_all(self) -> None:
        for box in self._boxes.values():
            box.arrived.notify_all()
