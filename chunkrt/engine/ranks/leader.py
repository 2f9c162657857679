"""The leader's side of ranks: every engine, state and run here has its like on each follower."""

from __future__ import annotations

import os
import pickle
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from threading import Lock

from chunkrt.engine.options import EngineOptions
from chunkrt.engine.ranks.commands import Call, Message, Open, RankPath, Reference, TakePart, read_reply
from chunkrt.errors import ConfigError
from chunkrt.graph.plan import Plan
from chunkrt.runtime.ranks.mailbox import Channel, Envelope
from chunkrt.runtime.ranks.mpi import MpiCommunicator
from chunkrt.runtime.run import Run, RunResult
from chunkrt.runtime.snapshot import Snapshot
from chunkrt.runtime.state import State
from chunkrt.runtime.state_file import StateFile, state_file
from chunkrt.runtime.state_tensors import CacheDtype


class Leader:
    """Sends commands. There is one a process; it numbers the commands and the objects of the followers."""

    def __init__(self, communicator: MpiCommunicator) -> None:
        self.communicator = communicator
        self.one_run = Lock()
        """Held while a run is under way: sums are of one run at a time, whichever engine's."""
        self._lock = Lock()
        self._num_commands = 0
        self._num_objects = 0
        self._forgotten: deque[int] = deque()

    def open(self, model: str, options: EngineOptions) -> EngineMirror:
        """Have the followers load a model, while this process does."""
        number = self.new_number()
        return EngineMirror(self, number, self.tell(Open(model=model, options=options, result=number)))

    def new_number(self) -> int:
        """A number for an object; see `tell`."""
        with self._lock:
            self._num_objects += 1
            return self._num_objects

    def tell(self, command: Open | Call | TakePart) -> int:
        """Send a command to all followers, without waiting for anything. Returns its number."""
        with self.communicator.interrupts, self._lock:
            forgotten = tuple(self._forgotten.popleft() for _ in range(len(self._forgotten)))
            self._num_commands += 1
            self.communicator.send(
                Envelope(Channel.COMMAND, self._num_commands), pickle.dumps(Message(command, forgotten))
            )
            return self._num_commands

    def call(self, target: int, method: str, *arguments: object, result: int | None = None) -> None:
        """Have every follower call a method that cannot fail where it has not failed here."""
        self.tell(Call(target=target, method=method, arguments=arguments, result=result))

    def ask(self, target: int, method: str, *arguments: object) -> None:
        """Have every follower call a method, and wait for it. Raises what the first of them raised."""
        self.replies(self.tell(Call(target=target, method=method, arguments=arguments, has_reply=True)))

    def replies(self, number: int) -> Mapping[int, object]:
        """What the followers replied to a command, by rank. Raises the error of the first that replied with one."""
        payloads = self.communicator.take(Envelope(Channel.REPLY, number), self.communicator.others)
        return {rank: read_reply(rank, payloads[rank]) for rank in self.communicator.others}

    def forget_with(self, owner: object, number: int) -> None:
        """Let the followers' object go when the one here does."""
        weakref.finalize(owner, self._forgotten.append, number)


@cache
def leader(communicator: MpiCommunicator) -> Leader:
    """The process's one leader."""
    return Leader(communicator)


class EngineMirror:
    """An engine here, and its like on every follower."""

    def __init__(self, leader: Leader, number: int, opening: int) -> None:
        self._leader, self._number, self._opening = leader, number, opening
        leader.forget_with(self, number)

    def check(self, identity: Mapping[str, object]) -> None:
        """Wait until all followers have loaded the model.

        Raises:
            ConfigError: one has another than this process, or other plug-ins.
            ChunkrtError: one could not load it.
        """
        for rank, theirs in self._leader.replies(self._opening).items():
            assert isinstance(theirs, Mapping)
            _check_plugins(rank, identity["plug-ins"], theirs["plug-ins"])
            if odd := [name for name, value in identity.items() if theirs.get(name) != value]:
                raise ConfigError(
                    f"rank {rank} has loaded another model than rank 0: its {' and '.join(odd)} differ; put the same "
                    "checkpoint on every machine"
                )

    def make_state(self, plan: Plan, capacity: int, dtype: CacheDtype, *, chunk_length: int) -> State:
        """An empty state that has its like on every follower."""
        number = self._leader.new_number()
        self._leader.call(self._number, "make_state", result=number)
        return MirroredState(self._leader, number, plan, capacity, dtype, chunk_length=chunk_length)

    def run(self, execute: Callable[[Run], RunResult], run: Run) -> RunResult:
        """Have the followers do a run while `execute` does it here; on all ranks the state advances, or on none."""
        state, token_ids = run.state, run.token_ids
        if not isinstance(state, MirroredState):
            raise ConfigError("the state is this rank's alone; take that of a session")
        communicator, number = self._leader.communicator, 0
        with self._leader.one_run:
            position = state.position
            command = TakePart(
                engine=self._number, state=state.number, position=position, token_ids=token_ids, logits=run.logits
            )
            try:
                with communicator.interrupts:
                    number = self._leader.tell(command)
                    communicator.begin(number, num_tokens=token_ids.size)
                all_done = partial(communicator.take, Envelope(Channel.DONE, number), communicator.others)
                return execute(replace(run, agree=all_done))
            finally:
                with communicator.interrupts:
                    if state.position != position:
                        communicator.send(Envelope(Channel.COMMIT, number))
                    elif number:
                        communicator.abort(number, "rank 0 ended the run")

    def close(self) -> None:
        """Close the followers' engines."""
        self._leader.call(self._number, "close")


def _check_plugins(rank: int, ours: object, theirs: object) -> None:
    """Raises ConfigError for the first plug-in that rank 0 or another has, or that works there, alone."""
    assert isinstance(ours, Sequence)
    assert isinstance(theirs, Sequence)
    for number, one, other in ((0, ours, theirs), (rank, theirs, ours)):
        if odd := [plugin for plugin in one if plugin not in other]:
            raise ConfigError(
                f"rank {number} uses the {odd[0]} and rank {rank - number} does not; install the same plug-ins on "
                "every machine"
            )


@dataclass(frozen=True, kw_only=True)
class MirroredSnapshot(Snapshot):
    """A snapshot here, and the number of those of the followers."""

    number: int


class MirroredState(State):
    """A state whose every change is made on all ranks; see `State`."""

    def __init__(
        self, leader: Leader, number: int, plan: Plan, capacity: int, dtype: CacheDtype, *, chunk_length: int
    ) -> None:
        super().__init__(plan, capacity, dtype, chunk_length=chunk_length)
        self.number = number
        self._leader = leader
        self._is_changing = False
        leader.forget_with(self, number)

    def rewind(self, position: int) -> int:
        """See `State.rewind`."""
        with self._mirrored("rewind", position):
            return super().rewind(position)

    def reset(self, rope_offset: int = 0) -> None:
        """See `State.reset`."""
        with self._mirrored("reset", rope_offset):
            super().reset(rope_offset)

    def shift(self, keep: int, drop: int) -> int:
        """See `State.shift`."""
        with self._mirrored("shift", keep, drop):
            return super().shift(keep, drop)

    def keep_snapshot(self) -> None:
        """See `State.keep_snapshot`."""
        with self._mirrored("keep_snapshot"):
            super().keep_snapshot()

    def snapshot(self) -> MirroredSnapshot:
        """See `State.snapshot`."""
        snapshot = MirroredSnapshot(**vars(super().snapshot()), number=self._leader.new_number())
        self._leader.call(self.number, "snapshot", result=snapshot.number)
        self._leader.forget_with(snapshot, snapshot.number)
        return snapshot

    def restore(self, snapshot: Snapshot) -> None:
        """See `State.restore`."""
        if not isinstance(snapshot, MirroredSnapshot):
            raise ConfigError("the snapshot is this rank's alone; take one of a session's state")
        with self._mirrored("restore", Reference(snapshot.number)):
            super().restore(snapshot)

    def fork(self) -> MirroredState:
        """See `State.fork`."""
        number = self._leader.new_number()
        self._leader.call(self.number, "fork", result=number)
        copy = MirroredState(self._leader, number, self.plan, self.capacity, self.dtype, chunk_length=self.chunk_length)
        self._copy_to(copy)
        return copy

    def save(self, path: str | os.PathLike[str] | StateFile) -> None:
        """See `State.save`. Each other rank writes its own file, with ".rank1" and so on at its name's end."""
        super().save(path)
        self._leader.ask(self.number, "save", RankPath(state_file(path).path))

    def load(self, path: str | os.PathLike[str] | StateFile) -> None:
        """See `State.load`; the files are those that `save` wrote, with as many ranks."""
        before = self.snapshot()
        try:
            with self._mirrored(None):
                super().load(path)
            self._leader.ask(self.number, "load", RankPath(state_file(path).path))
        except BaseException:
            self.restore(before)
            raise

    @contextmanager
    def _mirrored(self, method: str | None, *arguments: object) -> Iterator[None]:
        """Have the followers do what the block does, if that goes well. What it calls in turn is not told of."""
        is_outermost, self._is_changing = not self._is_changing, True
        with self._leader.communicator.interrupts:
            try:
                yield
            finally:
                self._is_changing = not is_outermost
            if is_outermost and method is not None:
                self._leader.call(self.number, method, *arguments)
