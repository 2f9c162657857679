"""Ranks as threads of one process, for tests and for use without MPI."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import nullcontext

from chunkrt.backends.link import Float32
from chunkrt.errors import DeviceLostError
from chunkrt.graph.plan import Ranks
from chunkrt.runtime.ranks.mailbox import Envelope, Mailbox
from chunkrt.runtime.ranks.messages import MessageCommunicator, as_bytes


def local_communicators(size: int) -> list[LocalCommunicator]:
    """Return the communicators of `size` connected ranks. Raise ConfigError if `Ranks` rejects the size."""
    mailboxes = [Mailbox() for _ in range(size)]
    return [LocalCommunicator(Ranks(rank, size), mailboxes) for rank in range(size)]


class LocalCommunicator(MessageCommunicator):
    """One rank's end of the link; see `Communicator`. Its messages are put into the other ranks' mailboxes."""

    interrupts = nullcontext()

    def __init__(self, ranks: Ranks, mailboxes: Sequence[Mailbox]) -> None:
        super().__init__(ranks, mailboxes[ranks.rank])
        self._mailboxes = mailboxes

    def share_of(self, cpus: Collection[int]) -> int:
        """See `MessageCommunicator.share_of`."""
        return max(1, len(cpus) // self.size)

    def send(self, envelope: Envelope, payload: bytes | Float32 = b"", *, to: Sequence[int] | None = None) -> None:
        """See `MessageCommunicator.send`."""
        data = as_bytes(payload).copy().data
        for rank in self.others if to is None else to:
            self._mailboxes[rank].deliver(envelope, self.rank, data)

    def leave(self, why: str) -> None:
        """See `MessageCommunicator.leave`."""
        for mailbox in self._mailboxes:
            mailbox.fail(DeviceLostError(why))

    def close(self) -> None:
        """See `Communicator.close`."""
        for rank, mailbox in enumerate(self._mailboxes):
            mailbox.fail(DeviceLostError(f"rank {self.rank} has left, so {Ranks(rank, self.size)} cannot continue"))
