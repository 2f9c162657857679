"""Communicator of ranks that are processes started by mpiexec, and the thread that drives MPI.

Waiting inside MPI would keep a core busy. So this thread polls for messages, and sleeps between the polls for a
twentieth of the time since the last message. A message is therefore delayed only little. A waiting thread without other
work may poll by itself for a short time; the thread of MPI then sleeps.

Each rank sends a heartbeat every second. A rank is lost if no message has arrived from it for `LOST_S`, or if its
process is known to have ended. MPI cannot continue without the rank, so the launch ends: threads that wait for a
message receive DeviceLostError. If no thread of a process waits, or if a process continues after the leader has ended,
the thread of MPI ends the process.

mpiexec kills all ranks when one rank ends, so the order of steps matters. The leader prepares its last words before it
notifies other ranks or ends a silent rank. A follower that cannot continue sends the reason to the leader, and exits
when the leader has answered or is itself lost. The arguments of the ranks are compared before any rank may exit.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import pickle
import platform
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Condition, Event, Lock, Thread, current_thread, main_thread
from typing import NoReturn

import numpy as np
import psutil

from chunkrt.backends.link import Float32
from chunkrt.errors import ChunkrtError, ClosedError, ConfigError, DeviceLostError
from chunkrt.graph.plan import Ranks
from chunkrt.runtime.affinity import available_cpus, cpu_quota
from chunkrt.runtime.ranks.carrier import Bytes, Carrier
from chunkrt.runtime.ranks.interrupts import Interrupts
from chunkrt.runtime.ranks.mailbox import Channel, Envelope, Mailbox
from chunkrt.runtime.ranks.messages import MessageCommunicator, as_bytes

CONNECT_S = 60.0
"""Seconds within which all ranks must connect."""
LOOK_S = 0.1
"""Seconds between checks of the connections."""
BEAT_S = 1.0
LOST_S = 5.0
GRACE_S = 2.0
"""Seconds in which threads may react to the end of the launch, before the process is ended."""
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 50e-6, 5e-3
HURRY_S = 200e-6
"""Seconds for which a waiting thread polls for messages by itself, before it sleeps."""
HEADER_BYTES = 64


@dataclass(frozen=True, kw_only=True)
class _Peer:
    """Data that a rank sends to the other ranks when they connect.

    Attributes:
        machine: a value that is equal for ranks that can access each other by process id.
        arguments: the arguments of the process.
    """

    pid: int
    machine: Sequence[str]
    cpus: frozenset[int]
    version: str
    arguments: Sequence[str]


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
        super().__init__(ranks, {ranks.rank: Mailbox()})
        self._me = _Peer(
            pid=os.getpid(), machine=_machine(), cpus=available_cpus(), version=version, arguments=tuple(arguments)
        )
        self._peers: Sequence[_Peer] = ()
        """Data of the connected ranks, by rank."""
        self._foretell, self._end = foretell, end
        self._carrier = Carrier(self._deliver)
        self._is_urgent = False
        """True if this rank has no other work while it waits for a sum of the current work."""
        self._wake = Condition(Lock())
        self._is_hurried = False
        """True if a waiting thread sends and receives messages."""
        self._last_news = 0.0
        """Time of the last message that was sent or received."""
        self._is_closing = False
        self._is_check_due = False
        self._is_over = False
        self._losing = Lock()
        self._why_lost = ""
        self._latest_answer = 0.0
        """Time limit of the wait for other ranks after `_why_lost` is set: a follower waits for the leader's answer."""
        self._heard: dict[int, float] = {}
        """Time of the last message from each rank."""
        self._met = Event()
        self._thread = Thread(target=self._work, name="chunkrt-mpi", daemon=True)
        self._handle_signals()
        self._connect()
        self._handle_signals()  # MPI installs its own handlers
        self.interrupts: Interrupts = Interrupts()
        self._has_cpu_each = self._share_of(self._me.cpus) >= 1
        atexit.register(self.close)

    def share_of(self, cpus: Collection[int]) -> int:
        """See `MessageCommunicator.share_of`."""
        return max(1, int(self._share_of(cpus)))

    def _share_of(self, cpus: Collection[int]) -> float:
        near = [peer for peer in self._peers if peer.machine == self._me.machine]
        share = sum(1 / max(1, sum(cpu in peer.cpus for peer in near)) for cpu in cpus) + 1e-6
        quota = cpu_quota()
        return share if quota is None else min(share, quota / max(1, len(near)) + 1e-6)

    def send(self, envelope: Envelope, payload: bytes | Float32 = b"", *, to: Sequence[int] | None = None) -> None:
        """See `MessageCommunicator.send`."""
        data = as_bytes(payload)
        message = np.zeros(HEADER_BYTES + data.size, np.uint8)
        message[: 8 * len(envelope)] = np.array(envelope, np.int64).view(np.uint8)
        message[HEADER_BYTES:] = data
        self._carrier.post(message, self.others if to is None else to)
        if not (self._is_urgent and envelope.channel == Channel.SUM):  # otherwise a call of `take` follows
            self._wake_up()

    def take(self, envelope: Envelope, sources: Collection[int]) -> Mapping[int, memoryview]:
        """Wait for messages; see `Mailbox.take`."""
        if self._is_urgent:
            self._hurry(lambda: self._mailbox.is_settled(envelope, sources))
        return super().take(envelope, sources)

    def begin(self, number: int, *, is_urgent: bool) -> None:
        """See `MessageCommunicator.begin`."""
        self._is_urgent = is_urgent and self._has_cpu_each
        super().begin(number, is_urgent=is_urgent)

    def leave(self, why: str) -> None:
        """See `MessageCommunicator.leave`."""
        self._give_up(why)
        self.close()

    def close(self) -> None:
        """Send the remaining messages, and leave MPI, within a few seconds. When the leader leaves, all other ranks
        end. Repeated calls are allowed.
        """
        if self.rank:
            self._give_up(f"rank {self.rank} ended before the leader did")
        elif self._mailbox.fail(ClosedError("the leader has ended")):
            self.send(Envelope(Channel.END))
        self._is_closing = True
        self._wake_up()
        self._thread.join(LOST_S)

    def _give_up(self, why: str) -> None:
        """End the launch because of a failure of this rank, unless it has ended already."""
        if self._mailbox.failure is None:
            self._lose(why)

    def _handle_signals(self) -> None:
        if current_thread() is main_thread():
            if hasattr(signal, "SIGUSR1"):  # mpiexec sends this signal when a process of the launch has ended
                signal.signal(signal.SIGUSR1, self._request_check)
            if self.rank:
                signal.signal(signal.SIGINT, signal.SIG_IGN)  # the leader forwards interrupts

    def _request_check(self, *_: object) -> None:
        """Request an immediate check for lost ranks, without taking a lock."""
        self._is_check_due = True

    def _connect(self) -> None:
        """Start the thread, and wait until the other ranks have connected.

        Raises:
            ConfigError: MPI cannot be loaded or does not belong to mpiexec, or a rank was started with other arguments.
            DeviceLostError: a rank did not connect.
        """
        self._thread.start()
        latest = time.monotonic() + CONNECT_S
        while not self._met.wait(LOOK_S):
            if self._is_check_due:
                self._mailbox.fail(DeviceLostError("a rank ended before all had connected; start all ranks again"))
                break
            if time.monotonic() > latest:
                why = f"not all {self.size} ranks connected within {CONNECT_S:.0f} s; start all ranks again"
                self._mailbox.fail(DeviceLostError(why))
                break
        if self._mailbox.failure is not None:
            raise self._mailbox.failure

    def _hurry(self, has_come: Callable[[], bool]) -> None:
        """Send and receive messages in the calling thread for a short time, at most until a message has arrived."""
        if self.interrupts.can_be_held:
            self._is_hurried, latest = True, time.monotonic() + HURRY_S
            try:
                while not (has_come() or self._is_over or time.monotonic() > latest):
                    with self.interrupts:
                        if self._carrier.carry(blocking=False):
                            self._last_news = time.monotonic()
                    if not has_come():
                        time.sleep(0)  # allow other threads to use this processor
            finally:
                self._is_hurried = False
        if not has_come() or self._carrier.has_mail:
            self._wake_up()

    def _wake_up(self) -> None:
        with self._wake:
            self._wake.notify()

    def _work(self) -> None:
        try:
            library = self._initialize()
        except Exception as error:
            self._mailbox.fail(error if isinstance(error, ChunkrtError) else ConfigError(f"MPI failed: {error}"))
            return
        finally:
            self._met.set()
        try:
            self._carry()
        except Exception as error:
            self._look_for_lost()  # a failure of MPI is usually caused by a lost rank
            self._lose(f"MPI failed: {error}")
            self._fail()
        with self._wake:
            self._wake.wait_for(lambda: self._is_closing, GRACE_S)
        if not isinstance(self._mailbox.failure, DeviceLostError):
            library.MPI_Finalize()
        if not (self._is_closing or self._mailbox.was_failure_told):
            self._end(str(self._mailbox.failure))

    def _initialize(self) -> ctypes.CDLL:
        """Load MPI and connect to the other ranks. Use ctypes, because mpi4py would hold the GIL while it waits for
        them.
        """
        try:
            import mpi4py

            mpi4py.rc.initialize = mpi4py.rc.finalize = False
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:
            raise ConfigError(
                f"mpiexec started {self.size} ranks, but MPI cannot be loaded ({error}); "
                'run pip install "chunkrt[mpi]", or start without mpiexec'
            ) from error
        library = ctypes.CDLL(MPI.__file__)
        if not MPI.Is_initialized():
            library.MPI_Init_thread(None, None, MPI.THREAD_SERIALIZED, ctypes.byref(ctypes.c_int()))
        if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
            raise ConfigError(
                "MPI was initialized for one thread, and chunkrt calls it from another; request MPI.THREAD_SERIALIZED, "
                "or let chunkrt initialize it"
            )
        world = MPI.COMM_WORLD
        if (world.rank, world.size) != (self.rank, self.size):
            raise ConfigError(
                f"mpiexec started {Ranks(self.rank, self.size)}, but MPI reports {Ranks(world.rank, world.size)}; "
                f"use the mpiexec of {MPI.Get_library_version().splitlines()[0]}"
            )
        self._peers = [pickle.loads(peer) for peer in world.allgather(pickle.dumps(self._me))]
        if odd := _difference(self._peers):
            self._foretell(odd)
            world.Barrier()  # no rank leaves before the leader has prepared its last words
            library.MPI_Finalize()
            raise ConfigError(odd)
        self._carrier.open(MPI, world.Dup())
        return library

    def _carry(self) -> None:
        """Carry messages until this rank or the leader leaves, or a rank is lost."""
        now = time.monotonic()
        self._last_news = last_beat = last_round = now
        self._heard = dict.fromkeys(self.others, now)
        while not self._may_leave():
            if self._carrier.carry():
                self._last_news = time.monotonic()
            now = time.monotonic()
            if (
                now - last_round > BEAT_S
            ):  # this process was stopped, or the machine was suspended; the same may be true for other ranks
                self._heard = dict.fromkeys(self.others, now)
            last_round = now
            if now - last_beat >= BEAT_S or self._is_check_due:
                last_beat, self._is_check_due = now, False
                self.send(Envelope(Channel.BEAT))
                self._look_for_lost()
            pause = min(max((now - self._last_news) / 20, SHORTEST_PAUSE_S), LONGEST_PAUSE_S)
            with self._wake:
                if self._is_hurried:
                    self._wake.wait(LONGEST_PAUSE_S)
                elif not self._carrier.has_mail and (self._why_lost or not self._is_closing):
                    self._wake.wait(pause)

    def _deliver(self, source: int, data: Bytes) -> None:
        """Deliver a message to the mailbox, or handle it."""
        self._heard[source] = time.monotonic()
        channel, *about = data[: 8 * len(Envelope._fields)].view(np.int64).tolist()
        envelope, payload = Envelope(Channel(channel), *about), data[HEADER_BYTES:].data
        if envelope.channel == Channel.END:
            self._mailbox.fail(ClosedError("the leader has ended"))
            self._is_over = True
        elif envelope.channel == Channel.LOST:
            self._lose(bytes(payload).decode())
            if source == 0:  # the leader has been notified
                self._fail()
        elif envelope.channel != Channel.BEAT:
            self._mailbox.deliver(envelope, source, payload)

    def _look_for_lost(self) -> None:
        now = time.monotonic()
        for rank in self.others:
            peer = self._peers[rank]
            is_near = peer.machine == self._me.machine
            if is_near and not _lives(peer.pid):
                self._lose(f"rank {rank} was lost: its process {peer.pid} has ended", lost=rank)
            elif now - self._heard.get(rank, now) > LOST_S:
                self._lose(f"rank {rank} was lost: no message arrived from it for {LOST_S:.0f} s", lost=rank)
                if is_near and 0 in (rank, self.rank):  # mpiexec would wait for it
                    with contextlib.suppress(psutil.Error):
                        psutil.Process(peer.pid).kill()

    def _lose(self, why: str, *, lost: int | None = None) -> None:
        """End the launch: report the reason to the leader, or to all ranks if this is the leader."""
        with self._losing:
            if not self._why_lost:
                self._why_lost, self._latest_answer = why, time.monotonic() + LOST_S
                self._foretell(f"{why}; start all ranks again")
                self._carrier.drop()
                to = [rank for rank in (self.others if self.rank == 0 else [0]) if rank != lost]
                self.send(Envelope(Channel.LOST), why.encode(), to=to)
        if self.rank == 0 or lost == 0:
            self._fail()

    def _fail(self) -> None:
        """Raise DeviceLostError in all threads that wait for a message."""
        self._mailbox.fail(DeviceLostError(f"{self._why_lost}; start all ranks again"))
        self._is_over = True

    def _may_leave(self) -> bool:
        if not self._why_lost:
            return self._is_over or (self._is_closing and self._carrier.is_done)
        if time.monotonic() > self._latest_answer:
            self._fail()
            return True
        return self._is_over and self._carrier.is_done


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


def _difference(peers: Sequence[_Peer]) -> str:
    """Return a description of the first rank whose version or arguments differ from those of rank 0. Return an empty
    string if no rank differs.
    """
    first = peers[0]
    for rank, peer in enumerate(peers):
        if peer.version != first.version:
            return f"rank {rank} has chunkrt {peer.version}, rank 0 has {first.version}; install one version everywhere"
        if peer.arguments != first.arguments:
            return (
                f"rank {rank} was started with {' '.join(peer.arguments)!r}, rank 0 with "
                f"{' '.join(first.arguments)!r}; start all ranks with the same arguments"
            )
    return ""


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True
