"""A mailbox: messages of other ranks, kept by what they are about until somebody here wants them.

Ranks come to a sum in different orders, so a message may be there long before, or after, it is asked for.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from threading import Condition, Lock
from typing import NamedTuple

from chunkrt.errors import BackendError, ChunkrtError


class Channel(IntEnum):
    """What a message is.

    BEAT: the rank lives. END: the leader has ended well. LOST: a rank ends, and why. ABORT: a run shall end, and why.
    SUM: numbers to be added. COMMAND: what the leader had done. REPLY: what came of it. DONE: a rank's part of a run
    is computed. COMMIT: everybody's is.
    """

    BEAT = 0
    END = 1
    LOST = 2
    ABORT = 3
    SUM = 4
    COMMAND = 5
    REPLY = 6
    DONE = 7
    COMMIT = 8


OF_RUNS = (Channel.SUM, Channel.DONE, Channel.COMMIT)


class Envelope(NamedTuple):
    """What a message is about. `number`: of the run or the command. `subgraph`, `position`, `phase`: of the sum."""

    channel: Channel
    number: int = 0
    subgraph: int = 0
    position: int = 0
    phase: int = 0


@dataclass
class _Box:
    """Messages about one thing, by the rank that sent them, and how to wake who waits for more."""

    arrived: Condition
    payloads: dict[int, memoryview] = field(default_factory=dict)


class Mailbox:
    """Filled by one thread, emptied by any."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._boxes: dict[Envelope, _Box] = {}
        self._run = 0
        self._aborted: dict[int, str] = {}
        """Why, by run; runs that are over are left out."""
        self._failure: ChunkrtError | None = None
        self.was_failure_told = False
        """Whether somebody has been given the failure."""

    @property
    def failure(self) -> ChunkrtError | None:
        """Why nothing arrives any more."""
        return self._failure

    def deliver(self, envelope: Envelope, source: int, payload: memoryview) -> None:
        """Put a message in; one about a run that is over is thrown away."""
        with self._lock:
            if envelope.channel in OF_RUNS and envelope.number < self._run:
                return
            box = self._box(envelope)
            box.payloads[source] = payload
            box.arrived.notify_all()

    def take(self, envelope: Envelope, sources: Collection[int]) -> Mapping[int, memoryview]:
        """Wait for a message about one thing from each of some ranks, and take them out.

        Raises:
            DeviceLostError: a rank was lost.
            ClosedError: the leader has ended.
            BackendError: the run that it is about was aborted.
        """
        with self._lock:
            box = self._box(envelope)
            try:
                while True:
                    if all(source in box.payloads for source in sources):
                        return box.payloads
                    if self._failure is not None:
                        self.was_failure_told = True
                        raise type(self._failure)(str(self._failure))
                    if envelope.channel in OF_RUNS and self.is_aborted(envelope.number):
                        raise BackendError(self._aborted[envelope.number])
                    box.arrived.wait()
            finally:
                self._boxes.pop(envelope, None)

    def is_settled(self, envelope: Envelope, sources: Collection[int]) -> bool:
        """Whether `take` would return at once, or raise."""
        box = self._boxes.get(envelope)
        return (
            (box is not None and all(source in box.payloads for source in sources))
            or self._failure is not None
            or (envelope.channel in OF_RUNS and self.is_aborted(envelope.number))
        )

    def begin(self, run: int) -> None:
        """A run begins: what is left of earlier ones goes."""
        with self._lock:
            self._run = run
            self._aborted = {number: why for number, why in self._aborted.items() if number >= run}
            for envelope in [e for e in self._boxes if e.channel in OF_RUNS and e.number < run]:
                del self._boxes[envelope]

    def abort(self, run: int, why: str) -> None:
        """Whoever waits for something of a run, now or later, is told why it never comes. The first reason stays."""
        with self._lock:
            if run >= self._run and run not in self._aborted:
                self._aborted[run] = why
                self._wake_all()

    def is_aborted(self, run: int) -> bool:
        """Whether a run was aborted, here or elsewhere."""
        return run in self._aborted

    def fail(self, error: ChunkrtError) -> bool:
        """Whoever waits, now or later, is given the error. Returns whether it is the first."""
        with self._lock:
            if self._failure is not None:
                return False
            self._failure = error
            self._wake_all()
            return True

    def _box(self, envelope: Envelope) -> _Box:
        if (box := self._boxes.get(envelope)) is None:
            box = self._boxes[envelope] = _Box(Condition(self._lock))
        return box

    def _wake_all(self) -> None:
        for box in self._boxes.values():
            box.arrived.notify_all()
