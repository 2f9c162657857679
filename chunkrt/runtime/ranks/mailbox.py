"""A mailbox: messages of other ranks, kept by what they are about until somebody here wants them.

Ranks come to a sum in different orders, so a message may be there long before, or after, it is asked for.
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
    """What a message is.

    BEAT: the rank lives. END: the leader has ended well. LOST: a rank ends, and why. ABORT: what is computed shall end,
    and why. SUM: numbers to be added. COMMAND: what the leader had done. REPLY: what came of it. DONE: a rank's part is
    computed. KEEP: how many chunks of a run stay.
    """

    BEAT = 0
    END = 1
    LOST = 2
    ABORT = 3
    SUM = 4
    COMMAND = 5
    REPLY = 6
    DONE = 7
    KEEP = 8


OF_WORK = (Channel.SUM, Channel.DONE, Channel.KEEP)
"""Of something that ranks compute, a run or a chunk."""


class Envelope(NamedTuple):
    """What a message is about. `number`: of the command. `subgraph`, `position`, `phase`: of the sum."""

    channel: Channel
    number: int = 0
    subgraph: int = 0
    position: int = 0
    phase: int = 0


@dataclass
class _Box:
    """Messages about one thing, by the rank that sent them, and how to wake who waits for more. Where work has no
    number, the next sum may be about the same thing: then a rank's messages are kept in their order."""

    arrived: Condition
    payloads: dict[int, deque[memoryview]] = field(default_factory=dict)

    def are_there(self, sources: Collection[int]) -> bool:
        """Whether each of some ranks has sent one."""
        return all(self.payloads.get(source) for source in sources)


class Mailbox:
    """Filled by one thread, emptied by any."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._boxes: dict[Envelope, _Box] = {}
        self._under_way: set[int] = set()
        self._last = 0
        """Of the work that has begun here, the last one's number."""
        self._aborted: dict[int, str] = {}
        """Why, by number; what is over is left out."""
        self._failure: ChunkrtError | None = None
        self.was_failure_told = False
        """Whether somebody has been given the failure."""

    @property
    def failure(self) -> ChunkrtError | None:
        """Why nothing arrives any more."""
        return self._failure

    def deliver(self, envelope: Envelope, source: int, payload: memoryview) -> None:
        """Put a message in; one about work that is over is thrown away."""
        if envelope.channel == Channel.ABORT:
            self.abort(envelope.number, bytes(payload).decode())
            return
        with self._lock:
            if self._is_over(envelope):
                return
            box = self._box(envelope)
            box.payloads.setdefault(source, deque()).append(payload)
            box.arrived.notify_all()

    def look(self, envelope: Envelope, source: int) -> memoryview | None:
        """The first message about one thing from a rank, if there is one; it stays."""
        box = self._boxes.get(envelope)
        return box.payloads[source][0] if box is not None and box.are_there((source,)) else None

    def take(self, envelope: Envelope, sources: Collection[int]) -> Mapping[int, memoryview]:
        """Wait for a message about one thing from each of some ranks, and take them out.

        Raises:
            DeviceLostError: a rank was lost.
            ClosedError: the leader has ended.
            BackendError: the work that it is about was aborted, or is over.
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
                        raise BackendError("what it is a part of is over")
                    box.arrived.wait()
            finally:
                if not any(box.payloads.values()):
                    self._boxes.pop(envelope, None)

    def is_settled(self, envelope: Envelope, sources: Collection[int]) -> bool:
        """Whether `take` would return at once, or raise."""
        box = self._boxes.get(envelope)
        return (
            (box is not None and box.are_there(sources))
            or self._failure is not None
            or (envelope.channel in OF_WORK and self.is_aborted(envelope.number))
        )

    def begin(self, number: int) -> None:
        """Work begins. Its number is beyond those of earlier work, which may still be under way."""
        with self._lock:
            self._under_way.add(number)
            self._last = number

    def end(self, number: int) -> None:
        """Work is over: what is left of it goes, and so does what still comes."""
        with self._lock:
            self._under_way.discard(number)
            self._aborted.pop(number, None)
            self._wake_all()
            for envelope in [e for e in self._boxes if e.channel in OF_WORK and e.number == number]:
                del self._boxes[envelope]

    def abort(self, number: int, why: str) -> None:
        """Whoever waits for something of work, now or later, is told why it never comes. The first reason stays."""
        with self._lock:
            if (number in self._under_way or number > self._last) and number not in self._aborted:
                self._aborted[number] = why
                self._wake_all()

    def is_aborted(self, number: int) -> bool:
        """Whether work was aborted, here or elsewhere."""
        return number in self._aborted

    def fail(self, error: ChunkrtError) -> bool:
        """Whoever waits, now or later, is given the error. Returns whether it is the first."""
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
