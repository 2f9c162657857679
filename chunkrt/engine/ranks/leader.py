"""The leader's side of several ranks. Every engine, state and run of the leader corresponds to one on each follower."""

from __future__ import annotations

import os
import pickle
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from threading import Lock
from typing import TypeVar
from weakref import WeakKeyDictionary

from chunkrt.backends.low_rank import LoadedAdapter
from chunkrt.engine.options import EngineOptions
from chunkrt.engine.ranks.commands import FOLLOWER, Call, Compute, Message, Part, Reference, read_reply
from chunkrt.errors import ConfigError
from chunkrt.graph.plan import Plan
from chunkrt.runtime.ranks.mailbox import Channel, Envelope
from chunkrt.runtime.ranks.messages import MessageCommunicator
from chunkrt.runtime.request import Segment
from chunkrt.runtime.state import Snapshot, State
from chunkrt.runtime.state_file import StateFile, state_file
from chunkrt.runtime.state_tensors import CacheDtype, SpareTensors

Item = TypeVar("Item")
Result = TypeVar("Result")


class Leader:
    """Sender of commands. A process has only one, which numbers the commands and the objects of the followers."""

    def __init__(self, communicator: MessageCommunicator) -> None:
        self.communicator = communicator
        self._lock = Lock()
        self._num_commands = 0
        self._num_objects = 0
        self._waiting: deque[Call] = deque()
        self._forgotten: deque[int] = deque()
        self.adapters: WeakKeyDictionary[LoadedAdapter, int] = WeakKeyDictionary()
        """Numbers of the followers' adapters."""

    def open(self, model: str, options: EngineOptions) -> EngineMirror:
        """Load a model on the followers, concurrently with this process."""
        number = self.new_number()
        call = Call(target=FOLLOWER, method="open", arguments=(number, model, options), has_reply=True)
        return EngineMirror(self, number, self.tell(call))

    def new_number(self) -> int:
        """Return a new number for an object; see `tell`."""
        with self._lock:
            self._num_objects += 1
            return self._num_objects

    def tell(self, command: Call | Compute) -> int:
        """Send a command to all followers without waiting, and return its number."""
        with self.communicator.interrupts, self._lock:
            forgotten = _emptied(
                self._forgotten
            )  # postponed calls come first, because they may use an object that is then forgotten
            message: Message = command, _emptied(self._waiting), forgotten
            self._num_commands += 1
            number = self._num_commands
            if isinstance(command, Compute):
                self.communicator.begin(number, is_urgent=command.is_urgent)
            self.communicator.send(Envelope(Channel.COMMAND, number), pickle.dumps(message))
            return number

    def tell_later(self, call: Call) -> None:
        """Postpone a call, which is sent with the next command and executed before it."""
        self._waiting.append(call)

    def call(self, target: int, method: str, *arguments: object, result: int | None = None) -> None:
        """Call a method on every follower without a reply. A method that succeeded on the leader must not fail on a
        follower.
        """
        self.tell(Call(target=target, method=method, arguments=arguments, result=result))

    def ask(self, target: int, method: str, *arguments: object) -> None:
        """Call a method on every follower, and wait for the replies. Raise the error of the first follower that
        failed."""
        self.replies(self.tell(Call(target=target, method=method, arguments=arguments, has_reply=True)))

    def replies(self, number: int) -> Mapping[int, object]:
        """Return the followers' replies to a command in the order of ranks. Raise the error of the first follower that
        failed.
        """
        payloads = self.communicator.take(Envelope(Channel.REPLY, number), self.communicator.others)
        return {rank: read_reply(rank, payloads[rank]) for rank in self.communicator.others}

    def forget_with(self, owner: object, number: int) -> None:
        """Release the followers' objects when this object is released."""
        weakref.finalize(owner, self._forgotten.append, number)


def _emptied(queue: deque[Item]) -> tuple[Item, ...]:
    return tuple(queue.popleft() for _ in range(len(queue)))


@cache
def leader(communicator: MessageCommunicator) -> Leader:
    """Return the only leader of this process."""
    return Leader(communicator)


class EngineMirror:
    """The engines of all followers that correspond to an engine of the leader."""

    def __init__(self, leader: Leader, number: int, opening: int) -> None:
        self._leader, self._number, self._opening = leader, number, opening
        leader.forget_with(self, number)

    def check_loaded(self, identity: Mapping[str, object]) -> None:
        """Wait until all followers have loaded the model.

        Raises:
            ConfigError: the model, plug-ins or executors of a follower differ from those of this process.
            ChunkrtError: a follower could not load the model.
        """
        for rank, theirs in self._leader.replies(self._opening).items():
            assert isinstance(theirs, Mapping)
            _check_plugins(rank, identity["plug-ins"], theirs["plug-ins"])
            odd = [name for name, value in identity.items() if theirs.get(name) != value]
            if odd == ["executors"]:
                raise ConfigError(
                    f"rank {rank} computes differently from rank 0: it has another NPU, or other chunks in flight; "
                    "choose values that suit all machines (`npu`, `chunks_in_flight`)"
                )
            if odd == ["grids"]:
                raise ConfigError(
                    f"rank {rank} has other grids than rank 0, because their calibrations differ; run `chunkrt "
                    "calibrate` on one machine, and give the file to all ranks (`calibration`)"
                )
            if odd:
                raise ConfigError(
                    f"rank {rank} has loaded a different model from rank 0's: its {' and '.join(odd)} differ; put the "
                    "same checkpoint on every machine"
                )

    def make_state(
        self, plan: Plan, capacity: int, dtype: CacheDtype, *, chunk_length: int, spare: SpareTensors
    ) -> State:
        """Return an empty state, and create the corresponding state on every follower."""
        number = self._leader.new_number()
        state = _MirroredState(self._leader, number, plan, capacity, dtype, chunk_length=chunk_length, spare=spare)
        # after this, the followers' states are always released together with this state
        self._leader.call(self._number, "make_state", result=number)
        return state

    def compute(self, executor: str, segments: Sequence[Segment], work: Callable[[int], Result]) -> Result:
        """Compute some tokens on all ranks; see `OnAllRanks`."""
        command = Compute(engine=self._number, executor=executor, parts=tuple(map(_part, segments)))
        communicator, number, is_done = self._leader.communicator, 0, False
        try:
            with communicator.interrupts:
                number = self._leader.tell(command)
            result = work(number)
            communicator.take(Envelope(Channel.DONE, number), communicator.others)
            is_done = True
            return result
        finally:
            with communicator.interrupts:
                if number and not is_done:
                    communicator.abort(number, "rank 0 ended the run")
                communicator.end(number)

    def load_adapter(self, adapter: LoadedAdapter, path: Path, scale: float) -> None:
        """Load an adapter of this process on the followers.

        Raises:
            ChunkrtError: a follower could not load the adapter, or its files differ.
        """
        number = self._leader.new_number()
        self._leader.adapters[adapter] = number
        self._leader.forget_with(adapter, number)
        arguments = (path, adapter.name, scale, adapter.digest)
        call = Call(target=self._number, method="read_adapter", arguments=arguments, result=number, has_reply=True)
        self._leader.replies(self._leader.tell(call))

    def close(self) -> None:
        """Close the followers' engines."""
        self._leader.call(self._number, "close")


def _part(segment: Segment) -> Part:
    """Return the description of a segment for the followers."""
    request = segment.request
    if not isinstance(request.state, _MirroredState):
        raise ConfigError("the state belongs to this rank alone; use the state of a session")
    return Part(
        state=request.state.number,
        position=segment.position,
        start=segment.start,
        num_tokens=request.token_ids.size,
        token_ids=segment.token_ids,
        logits=request.wanted if segment.num_rows or request.wanted == "hidden" else "none",
    )


def _check_plugins(rank: int, ours: object, theirs: object) -> None:
    """Raise ConfigError for the first plug-in that is used by rank 0 or by another rank, but not by both."""
    assert isinstance(ours, Sequence)
    assert isinstance(theirs, Sequence)
    for number, one, other in ((0, ours, theirs), (rank, theirs, ours)):
        if odd := [plugin for plugin in one if plugin not in other]:
            raise ConfigError(
                f"rank {number} uses the {odd[0]} and rank {rank - number} does not; install the same plug-ins on "
                "every machine"
            )


@dataclass(frozen=True, kw_only=True)
class _MirroredSnapshot(Snapshot):
    """A snapshot of the leader, and the number of the followers' snapshots."""

    number: int


class _MirroredState(State):
    """A state whose changes are repeated on all ranks; see `State`."""

    def __init__(
        self,
        leader: Leader,
        number: int,
        plan: Plan,
        capacity: int,
        dtype: CacheDtype,
        *,
        chunk_length: int,
        spare: SpareTensors,
    ) -> None:
        super().__init__(plan, capacity, dtype, chunk_length=chunk_length, spare=spare)
        self.number = number
        self._leader = leader
        self._is_changing = False
        leader.forget_with(self, number)

    def advance(self, num_tokens: int) -> None:
        """See `State.advance`. No message is sent, because the other ranks advance with the next command. If that
        command does not advance the state, the run has failed, and the other ranks undo it at the next use of the
        state.
        """
        with self._leader.communicator.interrupts:
            super().advance(num_tokens)
            self._leader.tell_later(Call(target=self.number, method="advance", arguments=(num_tokens,)))

    def choose_adapter(self, adapter: LoadedAdapter) -> None:
        """See `State.choose_adapter`."""
        with self._mirrored("choose_adapter", Reference(self._leader.adapters[adapter])):
            super().choose_adapter(adapter)

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

    def snapshot(self) -> _MirroredSnapshot:
        """See `State.snapshot`."""
        snapshot = _MirroredSnapshot(**vars(super().snapshot()), number=self._leader.new_number())
        self._leader.forget_with(snapshot, snapshot.number)
        self._leader.call(self.number, "snapshot", result=snapshot.number)
        return snapshot

    def restore(self, snapshot: Snapshot) -> None:
        """See `State.restore`."""
        if not isinstance(snapshot, _MirroredSnapshot):
            raise ConfigError("the snapshot belongs to this rank alone; use a snapshot of a session's state")
        with self._mirrored("restore", Reference(snapshot.number)):
            super().restore(snapshot)

    def fork(self) -> _MirroredState:
        """See `State.fork`."""
        number = self._leader.new_number()
        copy = _MirroredState(
            self._leader,
            number,
            self.plan,
            self.capacity,
            self.dtype,
            chunk_length=self.chunk_length,
            spare=self._spare,
        )
        copy.adapter = self.adapter
        self._copy_to(copy)  # waits for the tasks of an abandoned run, on all ranks
        self._leader.call(self.number, "fork", result=number)
        return copy

    def save(self, path: str | os.PathLike[str] | StateFile) -> None:
        """See `State.save`. Every other rank writes a separate file, with ".rank1" and so on at the end of its name."""
        super().save(path)
        self._leader.ask(FOLLOWER, "save", self.number, state_file(path).path)

    def load(self, path: str | os.PathLike[str] | StateFile) -> None:
        """See `State.load`. `save` must have written the files with the same number of ranks."""
        before = self.snapshot()
        try:
            with self._mirrored(None):
                super().load(path)
            self._leader.ask(FOLLOWER, "load", self.number, state_file(path).path)
        except BaseException:
            self.restore(before)
            raise

    @contextmanager
    def _mirrored(self, method: str | None, *arguments: object) -> Iterator[None]:
        """Repeat the change of the block on the followers if the block succeeds. Nested changes are not sent."""
        with self._leader.communicator.interrupts:
            is_outermost, self._is_changing = not self._is_changing, True
            try:
                yield
            finally:
                self._is_changing = not is_outermost
            if is_outermost and method is not None:
                self._leader.call(self.number, method, *arguments)
