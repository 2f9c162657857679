"""Ranks that reach each other by messages, whatever carries these: sums, and what ends what is under way."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager

import numpy as np

from chunkrt.backends.communicator import Float32, Key
from chunkrt.errors import BackendError
from chunkrt.graph.ranks import Ranks
from chunkrt.runtime.ranks.exchange import is_sent_whole
from chunkrt.runtime.ranks.mailbox import Channel, Envelope, Mailbox


class MessageCommunicator(ABC):
    """One rank's end; see `Communicator`.

    What the leading rank has all compute has a number, under which one rank may abort it for all.
    """

    interrupts: AbstractContextManager[object]
    """In a block of it none reaches the main thread."""

    def __init__(self, ranks: Ranks, mailbox: Mailbox) -> None:
        self.rank, self.size = ranks.rank, ranks.size
        self.others = [rank for rank in range(self.size) if rank != self.rank]
        self._mailbox = mailbox

    @abstractmethod
    def share_of(self, cpus: Collection[int]) -> int:
        """How many threads this rank gets, of some CPUs that it may use; ranks of one machine share those they have."""

    @abstractmethod
    def send(self, envelope: Envelope, payload: bytes | Float32 = b"", *, to: Sequence[int] | None = None) -> None:
        """Send a copy of a message to some ranks, or to all others; returns at once."""

    @abstractmethod
    def leave(self, why: str) -> None:
        """End this rank, and tell the others why; they end too."""

    @abstractmethod
    def close(self) -> None:
        """See `Communicator.close`."""

    def take(self, envelope: Envelope, sources: Collection[int]) -> Mapping[int, memoryview]:
        """Wait for messages; see `Mailbox.take`."""
        return self._mailbox.take(envelope, sources)

    def look(self, envelope: Envelope, source: int) -> memoryview | None:
        """A message that has come from a rank, if one has; it stays."""
        return self._mailbox.look(envelope, source)

    def begin(self, number: int, *, is_urgent: bool) -> None:
        """Something begins. `is_urgent`: nothing else is computed while a sum of it is waited for."""
        self._mailbox.begin(number)

    def end(self, number: int) -> None:
        """It is over here, done or not: whoever still waits for something of it gets BackendError."""
        self._mailbox.end(number)

    def abort(self, number: int, why: str) -> None:
        """End it on every rank: whoever waits for something of it gets BackendError."""
        self._mailbox.abort(number, why)
        self.send(Envelope(Channel.ABORT, number), why.encode())

    def is_aborted(self, number: int) -> bool:
        """Whether it was aborted, here or elsewhere."""
        return self._mailbox.is_aborted(number)

    def all_reduce(self, partial: Float32, out: Float32, *, key: Key) -> None:
        """See `Communicator.all_reduce`. Raises BackendError also if what the sum is of was aborted."""
        subgraph, position, number = Key(*key)
        values = np.ascontiguousarray(partial).reshape(-1)
        envelope = Envelope(Channel.SUM, number, subgraph, position)
        if is_sent_whole(values.nbytes, self.size):
            total = self._add(envelope, [values] * self.size)
        else:
            bounds = [values.size * rank // self.size for rank in range(self.size + 1)]
            mine = self._add(envelope, [values[bounds[r] : bounds[r + 1]] for r in range(self.size)])
            envelope = envelope._replace(phase=1)
            self.send(envelope, mine)
            sums = self._take_floats(envelope)
            total = np.concatenate([sums.get(rank, mine) for rank in range(self.size)])
        out[...] = total.reshape(out.shape)

    def _add(self, envelope: Envelope, for_ranks: Sequence[Float32]) -> Float32:
        """Give each rank what is for it, and add up what all have for this one, in the order of ranks."""
        mine = for_ranks[self.rank]
        for rank in self.others:
            self.send(envelope, for_ranks[rank], to=[rank])
        received = self._take_floats(envelope)
        if sizes := {values.size for values in received.values()} - {mine.size}:
            raise BackendError(
                f"ranks give sums of different shapes: {mine.size} and {min(sizes)} numbers; they run different prompts"
            )
        total = received.get(0, mine).copy()
        for rank in range(1, self.size):
            np.add(total, received.get(rank, mine), out=total)
        return total

    def _take_floats(self, envelope: Envelope) -> dict[int, Float32]:
        payloads = self.take(envelope, self.others)
        return {rank: np.frombuffer(payload, np.float32) for rank, payload in payloads.items()}


def as_bytes(payload: bytes | Float32) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """A payload, not copied."""
    return np.frombuffer(payload, np.uint8) if isinstance(payload, bytes) else payload.reshape(-1).view(np.uint8)
