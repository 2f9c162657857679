"""Messages between ranks over any transport: the computation of sums, and the end of work in progress. Ranks as threads
of one process, for tests and for use without MPI.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np

from chunkrt.backends.link import Float32, Key
from chunkrt.errors import BackendError, DeviceLostError
from chunkrt.graph.plan import Ranks
from chunkrt.runtime.ranks.mailbox import Channel, Envelope, Mailbox


class MessageCommunicator:
    """One rank's end of the link; see `Communicator`. The ranks are threads of one process, which put their messages
    into each other's mailboxes; a subclass sends messages in another way.

    Work that the leading rank starts on all ranks is numbered. Any rank may use the number to abort the work on all
    ranks.

    Args:
        ranks: rank and number of ranks.
        mailboxes: the mailbox of this rank, and those of the ranks in the same process, by rank.
    """

    interrupts: AbstractContextManager[object] = nullcontext()
    """Context manager in whose block no interrupt reaches the main thread."""

    def __init__(self, ranks: Ranks, mailboxes: Mapping[int, Mailbox]) -> None:
        self.rank, self.size = ranks.rank, ranks.size
        self.others = [rank for rank in range(self.size) if rank != self.rank]
        self._mailboxes, self._mailbox = mailboxes, mailboxes[self.rank]

    def share_of(self, cpus: Collection[int]) -> int:
        """Return the number of threads for this rank, given the CPUs that it may use. Ranks on one machine share their
        CPUs.
        """
        return max(1, len(cpus) // self.size)

    def send(self, envelope: Envelope, payload: bytes | Float32 = b"", *, to: Sequence[int] | None = None) -> None:
        """Send a copy of a message to the given ranks, by default to all others. Return immediately."""
        data = as_bytes(payload).copy().data
        for rank in self.others if to is None else to:
            self._mailboxes[rank].deliver(envelope, self.rank, data)

    def leave(self, why: str) -> None:
        """End this rank, and report the reason to the other ranks, which then end too."""
        for mailbox in self._mailboxes.values():
            mailbox.fail(DeviceLostError(why))

    def close(self) -> None:
        """See `Communicator.close`."""
        for rank, mailbox in self._mailboxes.items():
            mailbox.fail(DeviceLostError(f"rank {self.rank} has left, so {Ranks(rank, self.size)} cannot continue"))

    def take(self, envelope: Envelope, sources: Collection[int]) -> Mapping[int, memoryview]:
        """Wait for messages; see `Mailbox.take`."""
        return self._mailbox.take(envelope, sources)

    def begin(self, number: int, *, is_urgent: bool) -> None:
        """Begin work. `is_urgent` is True if this rank has no other work while it waits for a sum of this work."""
        self._mailbox.begin(number)

    def end(self, number: int) -> None:
        """End work on this rank, completed or not. Threads that still wait for its messages receive BackendError."""
        self._mailbox.end(number)

    def abort(self, number: int, why: str) -> None:
        """Abort work on every rank. Threads that wait for its messages receive BackendError."""
        self._mailbox.abort(number, why)
        self.send(Envelope(Channel.ABORT, number), why.encode())

    def is_aborted(self, number: int) -> bool:
        """Return True if work was aborted, on this rank or another one."""
        return self._mailbox.is_aborted(number)

    def all_reduce(self, partial: Float32, out: Float32, *, key: Key) -> None:
        """Add up an array over all ranks; see `Communicator.all_reduce`. Raise BackendError also if the work was
        aborted.
        """
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

    def all_gather(self, part: Float32, *, key: Key, to: int | None = None) -> Sequence[Float32] | None:
        """Collect the parts of all ranks; see `Communicator.all_gather`. Raise BackendError also if the work was
        aborted.
        """
        subgraph, position, number = Key(*key)
        envelope, values = Envelope(Channel.SUM, number, subgraph, position), np.ascontiguousarray(part)
        if to is None or to != self.rank:
            self.send(envelope, values, to=None if to is None else [to])
        if to is not None and to != self.rank:
            return None
        received = self._take_floats(envelope)
        if sizes := {values.size for values in received.values()} - {part.size}:
            raise BackendError(
                f"ranks send parts of different shapes: {part.size} and {min(sizes)} numbers; they run other prompts"
            )
        return [received[rank].reshape(part.shape) if rank in received else part for rank in range(self.size)]

    def _add(self, envelope: Envelope, for_ranks: Sequence[Float32]) -> Float32:
        """Send every rank its slice, and add up this rank's slice of all ranks, in the order of ranks."""
        mine = for_ranks[self.rank]
        for rank in self.others:
            self.send(envelope, for_ranks[rank], to=[rank])
        received = self._take_floats(envelope)
        if sizes := {values.size for values in received.values()} - {mine.size}:
            raise BackendError(
                f"ranks send sums of different shapes: {mine.size} and {min(sizes)} numbers; they run different prompts"
            )
        total = received.get(0, mine).copy()
        for rank in range(1, self.size):
            np.add(total, received.get(rank, mine), out=total)
        return total

    def _take_floats(self, envelope: Envelope) -> dict[int, Float32]:
        payloads = self.take(envelope, self.others)
        return {rank: np.frombuffer(payload, np.float32) for rank, payload in payloads.items()}


def as_bytes(payload: bytes | Float32) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Return a payload as bytes, without a copy."""
    return np.frombuffer(payload, np.uint8) if isinstance(payload, bytes) else payload.reshape(-1).view(np.uint8)


AT_ONCE_BYTES = 16 * 1024
"""Maximum number of additional bytes for an exchange in one step instead of two."""


def is_sent_whole(num_bytes: int, size: int) -> bool:
    """Return True if a sum of `num_bytes` over `size` ranks is exchanged in one step."""
    return num_bytes * (size - 2) <= AT_ONCE_BYTES


def exchange_of(num_bytes: int, size: int) -> tuple[int, float]:
    """Return the cost of a sum of `num_bytes` over `size` ranks, at least 2: the number of messages that depend on each
    other, and the number of bytes that a rank sends, which equals the number that it receives.
    """
    if is_sent_whole(num_bytes, size):
        return 1, float(num_bytes * (size - 1))
    return 2, 2 * (size - 1) / size * num_bytes


def local_communicators(size: int) -> list[MessageCommunicator]:
    """Return the communicators of `size` connected ranks. Raise ConfigError if `Ranks` rejects the size."""
    mailboxes = {rank: Mailbox() for rank in range(size)}
    return [MessageCommunicator(Ranks(rank, size), mailboxes) for rank in range(size)]
