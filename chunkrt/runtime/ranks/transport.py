"""The thread that looks after MPI: messages out and in, beats, and what happens when a rank is lost.

MPI's own waiting would keep a core busy, so this thread only asks whether something has come, and sleeps between: for a
twentieth of the time that nothing has come, so that a message waits little longer than it had to. Whoever waits and has
nothing else to do may ask by itself for a moment (`MpiTransport.hurry`); this thread then sleeps.

A rank is lost when its process is gone, where that can be seen, or when nothing has come from it for `LOST_S`; each
sends a beat every second. MPI cannot go on without one, so the launch ends: whoever waits for a message gets
DeviceLostError. A process in which nobody notices, or that goes on after the leader has ended, is ended here.

mpiexec kills all ranks when one ends, so the order matters. The leader has its last words ready before it tells anybody
or ends a silent rank. A follower that cannot go on tells the leader why, and leaves when the leader has answered, or is
lost itself. What ranks were started with is compared before any of them may leave.
"""

from __future__ import annotations

import contextlib
import ctypes
import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Condition, Event, Lock, Thread
from typing import NoReturn

import numpy as np
import psutil

from chunkrt.errors import ChunkrtError, ClosedError, ConfigError, DeviceLostError
from chunkrt.graph.ranks import Ranks
from chunkrt.runtime.ranks.carrier import Bytes, Carrier
from chunkrt.runtime.ranks.interrupts import Interrupts
from chunkrt.runtime.ranks.mailbox import Channel, Envelope, Mailbox

CONNECT_S = 60.0
"""All ranks have to come within it."""
LOOK_S = 0.1
"""How often it is looked whether they have."""
BEAT_S = 1.0
LOST_S = 5.0
GRACE_S = 2.0
"""How long somebody has to notice that the launch is over, before the process is ended."""
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 50e-6, 5e-3
HURRY_S = 200e-6
"""How long a thread that waits asks for messages by itself, before it sleeps."""
HEADER_BYTES = 64


@dataclass(frozen=True, kw_only=True)
class Peer:
    """What a rank tells the others of itself when they meet.

    `machine`: equal for those that see each other's process ids. `arguments`: what it was started with.
    """

    pid: int
    machine: Sequence[str]
    cpus: frozenset[int]
    version: str
    arguments: Sequence[str]


class MpiTransport:
    """Carries messages between mailboxes. It lives as long as the process.

    Args:
        ranks: what mpiexec said; at least 2.
        me: told to all others.
        mailbox: where messages and failures go.
        foretell: told why the launch ends, before anybody else is.
        end: ends the process; told why.
    """

    def __init__(
        self,
        ranks: Ranks,
        me: Peer,
        mailbox: Mailbox,
        *,
        foretell: Callable[[str], None],
        end: Callable[[str], NoReturn],
    ) -> None:
        self._ranks = ranks
        self._others = [rank for rank in range(ranks.size) if rank != ranks.rank]
        self._me = me
        self._mailbox = mailbox
        self._foretell = foretell
        self._end = end
        self._carrier = Carrier(self._deliver)
        self._interrupts: Interrupts | None = None
        """Held back while another thread than the transport's carries; until they can be, none does."""
        self._wake = Condition(Lock())
        self._is_hurried = False
        """Whether a thread that waits carries."""
        self._last_news = 0.0
        """When something last came or went."""
        self._is_closing = False
        self._is_check_due = False
        self._is_over = False
        self._losing = Lock()
        self._why_lost = ""
        self._latest_answer = 0.0
        """How long others are waited for once `_why_lost` is known: a follower waits for the leader's answer."""
        self._heard: dict[int, float] = {}
        """When something last came from each."""
        self._met = Event()
        self._thread = Thread(target=self._work, name="chunkrt-mpi", daemon=True)
        self.peers: Sequence[Peer] = ()
        """By rank, once connected."""

    def connect(self) -> None:
        """Start, and wait for the other ranks.

        Raises:
            ConfigError: MPI cannot be loaded, is another than mpiexec's, or a rank was started with something else.
            DeviceLostError: a rank did not come.
        """
        self._thread.start()
        latest = time.monotonic() + CONNECT_S
        while not self._met.wait(LOOK_S):
            if self._is_check_due:
                self._mailbox.fail(DeviceLostError("a rank ended before all were there; start all ranks again"))
                break
            if time.monotonic() > latest:
                self._mailbox.fail(
                    DeviceLostError(f"not all {self._ranks.size} ranks were there after {CONNECT_S:.0f} s; start again")
                )
                break
        if self._mailbox.failure is not None:
            raise self._mailbox.failure

    def send(self, envelope: Envelope, payload: Bytes, to: Sequence[int], *, will_hurry: bool = False) -> None:
        """Send a copy of a payload; returns at once. `will_hurry`: the calling thread goes on with `hurry`."""
        message = np.zeros(HEADER_BYTES + payload.size, np.uint8)
        message[: 8 * len(envelope)] = np.array(envelope, np.int64).view(np.uint8)
        message[HEADER_BYTES:] = payload
        self._carrier.post(message, to)
        if not will_hurry:
            self._wake_up()

    def let_others_carry(self, interrupts: Interrupts) -> None:
        """From now on threads may hurry, with interrupts held back meanwhile."""
        self._interrupts = interrupts

    def hurry(self, has_come: Callable[[], bool]) -> None:
        """Carry messages in the calling thread until one has come, but not for long."""
        interrupts = self._interrupts
        if interrupts is not None and interrupts.can_be_held:
            self._is_hurried, latest = True, time.monotonic() + HURRY_S
            try:
                while not (has_come() or self._is_over or time.monotonic() > latest):
                    with interrupts:
                        if self._carrier.carry(blocking=False):
                            self._last_news = time.monotonic()
                    if not has_come():
                        time.sleep(0)  # for whoever else wants this processor
            finally:
                self._is_hurried = False
        if not has_come() or self._carrier.has_mail:
            self._wake_up()

    def check(self) -> None:
        """Look soon whether all ranks live. For a signal's handler: it takes no lock."""
        self._is_check_due = True

    def give_up(self, why: str) -> None:
        """End the launch, because of this rank, unless it has ended already."""
        if self._mailbox.failure is None:
            self._lose(why)

    def close(self) -> None:
        """Send what is to be sent, and leave MPI; wait for it a few seconds at most."""
        self._is_closing = True
        self._wake_up()
        self._thread.join(LOST_S)

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
            self._look_for_lost()  # which is why MPI fails, mostly
            self._lose(f"MPI failed: {error}")
            self._fail()
        with self._wake:
            self._wake.wait_for(lambda: self._is_closing, GRACE_S)
        if not isinstance(self._mailbox.failure, DeviceLostError):
            library.MPI_Finalize()
        if not (self._is_closing or self._mailbox.was_failure_told):
            self._end(str(self._mailbox.failure))

    def _initialize(self) -> ctypes.CDLL:
        """Load MPI and meet the others. Through ctypes, for mpi4py would keep the GIL while it waits for them."""
        try:
            import mpi4py

            mpi4py.rc.initialize = mpi4py.rc.finalize = False
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:
            raise ConfigError(
                f"mpiexec started {self._ranks.size} ranks, but MPI cannot be loaded ({error}); "
                "pip install 'chunkrt[mpi]', or start without mpiexec"
            ) from error
        library = ctypes.CDLL(MPI.__file__)
        if not MPI.Is_initialized():
            library.MPI_Init_thread(None, None, MPI.THREAD_SERIALIZED, ctypes.byref(ctypes.c_int()))
        if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
            raise ConfigError(
                "MPI was initialized for one thread, and chunkrt calls it from another; ask for MPI.THREAD_SERIALIZED, "
                "or let chunkrt initialize it"
            )
        world = MPI.COMM_WORLD
        if (world.rank, world.size) != (self._ranks.rank, self._ranks.size):
            raise ConfigError(
                f"mpiexec started {self._ranks}, but for MPI it is {Ranks(world.rank, world.size)}; "
                f"use the mpiexec of {MPI.Get_library_version().splitlines()[0]}"
            )
        self.peers = [pickle.loads(peer) for peer in world.allgather(pickle.dumps(self._me))]
        if odd := _difference(self.peers):
            self._foretell(odd)
            world.Barrier()  # so that nobody leaves before the leader has its last words ready
            library.MPI_Finalize()
            raise ConfigError(odd)
        self._carrier.open(MPI, world.Dup())
        return library

    def _carry(self) -> None:
        """Carry messages until this rank or the leader leaves, or a rank is lost."""
        now = time.monotonic()
        self._last_news = last_beat = last_round = now
        self._heard = dict.fromkeys(self._others, now)
        while not self._may_leave():
            if self._carrier.carry():
                self._last_news = time.monotonic()
            now = time.monotonic()
            if now - last_round > BEAT_S:  # this process was stopped, or the machine slept; so perhaps did the others
                self._heard = dict.fromkeys(self._others, now)
            last_round = now
            if now - last_beat >= BEAT_S or self._is_check_due:
                last_beat, self._is_check_due = now, False
                self.send(Envelope(Channel.BEAT), np.empty(0, np.uint8), self._others)
                self._look_for_lost()
            pause = min(max((now - self._last_news) / 20, SHORTEST_PAUSE_S), LONGEST_PAUSE_S)
            with self._wake:
                if self._is_hurried:
                    self._wake.wait(LONGEST_PAUSE_S)
                elif not self._carrier.has_mail and (self._why_lost or not self._is_closing):
                    self._wake.wait(pause)

    def _deliver(self, source: int, data: Bytes) -> None:
        """Put a message where it belongs."""
        self._heard[source] = time.monotonic()
        channel, *about = data[: 8 * len(Envelope._fields)].view(np.int64).tolist()
        envelope, payload = Envelope(Channel(channel), *about), data[HEADER_BYTES:].data
        if envelope.channel == Channel.END:
            self._mailbox.fail(ClosedError("the leader has ended"))
            self._is_over = True
        elif envelope.channel == Channel.LOST:
            self._lose(bytes(payload).decode())
            if source == 0:  # the leader knows
                self._fail()
        elif envelope.channel != Channel.BEAT:
            self._mailbox.deliver(envelope, source, payload)

    def _look_for_lost(self) -> None:
        now = time.monotonic()
        for rank in self._others:
            peer = self.peers[rank]
            is_near = peer.machine == self._me.machine
            if is_near and not _lives(peer.pid):
                self._lose(f"rank {rank} was lost: its process {peer.pid} has ended", lost=rank)
            elif now - self._heard.get(rank, now) > LOST_S:
                self._lose(f"rank {rank} was lost: nothing came from it for {LOST_S:.0f} s", lost=rank)
                if is_near and 0 in (rank, self._ranks.rank):  # mpiexec would wait for it
                    with contextlib.suppress(psutil.Error):
                        psutil.Process(peer.pid).kill()

    def _lose(self, why: str, *, lost: int | None = None) -> None:
        """The launch ends: tell the leader why, or if this is the leader, everybody."""
        with self._losing:
            if not self._why_lost:
                self._why_lost, self._latest_answer = why, time.monotonic() + LOST_S
                self._foretell(f"{why}; start all ranks again")
                self._carrier.drop()
                to = [rank for rank in (self._others if self._ranks.rank == 0 else [0]) if rank != lost]
                self.send(Envelope(Channel.LOST), np.frombuffer(why.encode(), np.uint8), to)
        if self._ranks.rank == 0 or lost == 0:
            self._fail()

    def _fail(self) -> None:
        """Whoever waits for a message gets DeviceLostError."""
        self._mailbox.fail(DeviceLostError(f"{self._why_lost}; start all ranks again"))
        self._is_over = True

    def _may_leave(self) -> bool:
        if not self._why_lost:
            return self._is_over or (self._is_closing and self._carrier.is_done)
        if time.monotonic() > self._latest_answer:
            self._fail()
            return True
        return self._is_over and self._carrier.is_done


def _difference(peers: Sequence[Peer]) -> str:
    """Which rank was started with something else than rank 0; empty if none was."""
    first = peers[0]
    for rank, peer in enumerate(peers):
        if peer.version != first.version:
            return f"rank {rank} has chunkrt {peer.version}, rank 0 has {first.version}; install one version everywhere"
        if peer.arguments != first.arguments:
            return (
                f"rank {rank} was started with {' '.join(peer.arguments)!r}, rank 0 with "
                f"{' '.join(first.arguments)!r}; start all ranks alike"
            )
    return ""


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True
