"""Ranks that are processes, launched by mpiexec: their communicator, and how they meet."""

from __future__ import annotations

import atexit
import os
import platform
import signal
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from threading import current_thread, main_thread
from typing import NoReturn

import numpy as np

from chunkrt.backends.communicator import Float32, Key
from chunkrt.errors import BackendError, ClosedError
from chunkrt.graph.ranks import Ranks
from chunkrt.runtime.affinity import available_cpus
from chunkrt.runtime.ranks.exchange import is_sent_whole
from chunkrt.runtime.ranks.interrupts import Interrupts
from chunkrt.runtime.ranks.mailbox import Channel, Envelope, Mailbox
from chunkrt.runtime.ranks.transport import MpiTransport, Peer


class MpiCommunicator:
    """One rank's end; see `Communicator`. It lives as long as the process.

    A run that one rank aborts ends on all; the ranks can go on with the next. A lost rank ends all of them.

    Args:
        ranks: what mpiexec said; at least 2.
        version, arguments: have to be the same on all ranks.
        foretell: told why the launch ends, before any other rank is; what mpiexec then kills cannot tell any more.
        end: ends the process, if a rank is lost and nobody notices; told why.

    Raises:
        ConfigError: MPI is not installed, is another than mpiexec's, or a rank was started with something else.
        DeviceLostError: a rank did not come.
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
        self.rank, self.size = ranks.rank, ranks.size
        self.others = [rank for rank in range(self.size) if rank != self.rank]
        self._me = Peer(
            pid=os.getpid(), machine=_machine(), cpus=available_cpus(), version=version, arguments=tuple(arguments)
        )
        self._mailbox = Mailbox()
        self._transport = MpiTransport(ranks, self._me, self._mailbox, foretell=foretell, end=end)
        self._run = 0
        self._is_urgent = False
        """Whether nothing else is computed while a sum is waited for."""
        self._handle_signals()
        self._transport.connect()
        self._handle_signals()  # MPI has handlers of its own
        self.interrupts = Interrupts()
        self._transport.let_others_carry(self.interrupts)
        self._has_cpu_each = self._share_of(self._me.cpus) >= 1
        atexit.register(self.close)

    def share_of(self, cpus: Collection[int]) -> int:
        """How many threads this rank gets, of some CPUs that it may use; ranks of one machine share those they have."""
        return max(1, int(self._share_of(cpus)))

    def _share_of(self, cpus: Collection[int]) -> float:
        near = [peer for peer in self._transport.peers if peer.machine == self._me.machine]
        return sum(1 / max(1, sum(cpu in peer.cpus for peer in near)) for cpu in cpus) + 1e-6

    def send(self, envelope: Envelope, payload: bytes | Float32 = b"", *, to: Sequence[int] | None = None) -> None:
        """Send a copy of a message to some ranks, or to all others; returns at once."""
        data = np.frombuffer(payload, np.uint8) if isinstance(payload, bytes) else payload.reshape(-1).view(np.uint8)
        will_hurry = self._is_urgent and envelope.channel == Channel.SUM  # what follows is `take`
        self._transport.send(envelope, data, self.others if to is None else to, will_hurry=will_hurry)

    def take(self, envelope: Envelope, sources: Collection[int]) -> Mapping[int, memoryview]:
        """Wait for messages; see `Mailbox.take`."""
        if self._is_urgent:
            self._transport.hurry(lambda: self._mailbox.is_settled(envelope, sources))
        return self._mailbox.take(envelope, sources)

    def begin(self, run: int, *, num_tokens: int) -> None:
        """Sums are of this run from now on; runs are numbered upwards from 1."""
        self._run, self._is_urgent = run, num_tokens == 1 and self._has_cpu_each
        self._mailbox.begin(run)

    def abort(self, run: int, why: str) -> None:
        """End a run on every rank: whoever waits for something of it gets BackendError."""
        self._mailbox.abort(run, why)
        self.send(Envelope(Channel.ABORT, run), why.encode())

    def is_aborted(self, run: int) -> bool:
        """Whether a run was aborted, here or elsewhere."""
        return self._mailbox.is_aborted(run)

    def all_reduce(self, partial: Float32, out: Float32, *, key: Key) -> None:
        """See `Communicator.all_reduce`. Raises BackendError also if the run was aborted."""
        values = np.ascontiguousarray(partial).reshape(-1)
        envelope = Envelope(Channel.SUM, self._run, *key)
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

    def leave(self, why: str) -> None:
        """End this rank, and tell the others why; they end too."""
        self._transport.give_up(why)
        self.close()

    def close(self) -> None:
        """Leave MPI. When the leader leaves, all others end. Closing twice is allowed."""
        if self.rank:
            self._transport.give_up(f"rank {self.rank} ended before the leader did")
        elif self._mailbox.fail(ClosedError("the leader has ended")):
            self.send(Envelope(Channel.END))
        self._transport.close()

    def _handle_signals(self) -> None:
        if current_thread() is main_thread():
            if hasattr(signal, "SIGUSR1"):  # mpiexec sends it when a process of the launch has died
                signal.signal(signal.SIGUSR1, lambda number, frame: self._transport.check())
            if self.rank:
                signal.signal(signal.SIGINT, signal.SIG_IGN)  # the leader tells of interrupts

    def _add(self, envelope: Envelope, for_ranks: Sequence[Float32]) -> Float32:
        """Give each rank what is for it, and add up what all have for this one, in the order of ranks."""
        mine = for_ranks[self.rank]
        for rank in self.others:
            self.send(envelope, for_ranks[rank], to=[rank])
        received = self._take_floats(envelope)
        if sizes := {values.size for values in received.values()} - {mine.size}:
            raise BackendError(f"ranks give sums of {mine.size} and {min(sizes)} numbers; they run different prompts")
        total = received.get(0, mine).copy()
        for rank in range(1, self.size):
            np.add(total, received.get(rank, mine), out=total)
        return total

    def _take_floats(self, envelope: Envelope) -> dict[int, Float32]:
        payloads = self.take(envelope, self.others)
        return {rank: np.frombuffer(payload, np.float32) for rank, payload in payloads.items()}


def _machine() -> tuple[str, ...]:
    """What is equal for processes that see each other's process ids: host, boot, and on Linux the namespace."""
    boot, namespace = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    return (
        platform.node(),
        boot.read_text("ascii").strip() if boot.is_file() else "",
        str(namespace.readlink()) if namespace.exists() else "",
    )
