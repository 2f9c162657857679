"""Communicator of ranks that are processes started by mpiexec."""

from __future__ import annotations

import atexit
import os
import platform
import signal
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from threading import current_thread, main_thread
from typing import NoReturn

from chunkrt.backends.link import Float32
from chunkrt.errors import ClosedError
from chunkrt.graph.plan import Ranks
from chunkrt.runtime.affinity import available_cpus, cpu_quota
from chunkrt.runtime.ranks.interrupts import Interrupts
from chunkrt.runtime.ranks.mailbox import Channel, Envelope, Mailbox
from chunkrt.runtime.ranks.messages import MessageCommunicator, as_bytes
from chunkrt.runtime.ranks.transport import MpiTransport, Peer


class MpiCommunicator(MessageCommunicator):
    """One rank's end of the link; see `Communicator`. It lives as long as the process.

    If one rank aborts some work, all ranks abort it, and continue with the next work. If a rank is lost, all ranks end.

    Args:
        ranks: rank and number of ranks from mpiexec; the number is at least 2.
        version, arguments: chunkrt's version and the arguments of the process, which must be the same on all ranks.
        foretell: called with the reason for the end of the launch, before the reason is sent to another rank, because
            mpiexec may kill this process afterwards.
        end: called with the reason if a rank is lost while no thread waits for a message; it ends the process.

    Raises:
        ConfigError: MPI is not installed or does not belong to mpiexec, or a rank was started with other arguments.
        DeviceLostError: a rank did not connect.
    """

    def __init__(
        self,
        ranks: Ranks,
        *,
        version: str,
        arguments: Sequence[str],
        foretell: Callable[[str], None],
        end: Callable[[str], NoReturn],
    ) -> None:
        super().__init__(ranks, Mailbox())
        self._me = Peer(
            pid=os.getpid(), machine=_machine(), cpus=available_cpus(), version=version, arguments=tuple(arguments)
        )
        self._transport = MpiTransport(ranks, self._me, self._mailbox, foretell=foretell, end=end)
        self._is_urgent = False
        """True if this rank has no other work while it waits for a sum of the current work."""
        self._handle_signals()
        self._transport.connect()
        self._handle_signals()  # MPI installs its own handlers
        self.interrupts = Interrupts()
        self._transport.let_others_carry(self.interrupts)
        self._has_cpu_each = self._share_of(self._me.cpus) >= 1
        atexit.register(self.close)

    def share_of(self, cpus: Collection[int]) -> int:
        """See `MessageCommunicator.share_of`."""
        return max(1, int(self._share_of(cpus)))

    def _share_of(self, cpus: Collection[int]) -> float:
        near = [peer for peer in self._transport.peers if peer.machine == self._me.machine]
        share = sum(1 / max(1, sum(cpu in peer.cpus for peer in near)) for cpu in cpus) + 1e-6
        quota = cpu_quota()
        return share if quota is None else min(share, quota / max(1, len(near)) + 1e-6)

    def send(self, envelope: Envelope, payload: bytes | Float32 = b"", *, to: Sequence[int] | None = None) -> None:
        """See `MessageCommunicator.send`."""
        will_hurry = self._is_urgent and envelope.channel == Channel.SUM  # a call of `take` follows
        self._transport.send(envelope, as_bytes(payload), self.others if to is None else to, will_hurry=will_hurry)

    def take(self, envelope: Envelope, sources: Collection[int]) -> Mapping[int, memoryview]:
        """Wait for messages; see `Mailbox.take`."""
        if self._is_urgent:
            self._transport.hurry(lambda: self._mailbox.is_settled(envelope, sources))
        return super().take(envelope, sources)

    def begin(self, number: int, *, is_urgent: bool) -> None:
        """See `MessageCommunicator.begin`."""
        self._is_urgent = is_urgent and self._has_cpu_each
        super().begin(number, is_urgent=is_urgent)

    def leave(self, why: str) -> None:
        """See `MessageCommunicator.leave`."""
        self._transport.give_up(why)
        self.close()

    def close(self) -> None:
        """Leave MPI. When the leader leaves, all other ranks end. Repeated calls are allowed."""
        if self.rank:
            self._transport.give_up(f"rank {self.rank} ended before the leader did")
        elif self._mailbox.fail(ClosedError("the leader has ended")):
            self.send(Envelope(Channel.END))
        self._transport.close()

    def _handle_signals(self) -> None:
        if current_thread() is main_thread():
            if hasattr(signal, "SIGUSR1"):  # mpiexec sends this signal when a process of the launch has ended
                signal.signal(signal.SIGUSR1, lambda number, frame: self._transport.check())
            if self.rank:
                signal.signal(signal.SIGINT, signal.SIG_IGN)  # the leader forwards interrupts


def _machine() -> tuple[str, ...]:
    """Return a value that is equal for processes that can access each other by process id: the host, the boot id, and
    on Linux the namespace.
    """
    boot, namespace = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    return (
        platform.node(),
        boot.read_text("ascii").strip() if boot.is_file() else "",
        str(namespace.readlink()) if namespace.exists() else "",
    )
