"""State: the memory of a session between chunks.

A cache can be rewound to any position. A ring can be rewound to positions whose complete window it still contains. A
recurrent tensor can be rewound only to a position with a stored copy (see `state_tensors.py`).

An interrupt may occur at any point, so every change is a single assignment: the new description of the state, with the
writes that it requires. If an interrupt aborts the writes, they are repeated at the next use of the state.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

import numpy as np

from chunkrt.backends.low_rank import LoadedAdapter
from chunkrt.errors import ConfigError
from chunkrt.graph.plan import KEY_FORMS, Plan
from chunkrt.runtime.buffers import Array
from chunkrt.runtime.prefix import Prefix, PrefixPiece, StateForms, copied, hold, is_held, writes_of
from chunkrt.runtime.state_file import StateFile, state_file
from chunkrt.runtime.state_tensors import CACHE_DTYPES, CacheDtype, SpareTensors, Write

_serials, _histories = count(), count()

MOST_KEPT = 2
"""Number of snapshots that a state keeps for `rewind`. Conversations return to the most recent ones."""


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """Contents of a state at a position.

    Attributes:
        tensors: copies of the tensors by name; of caches only the filled part.
        first: the first position that rings contain.
        kept: the snapshots to which the state could be rewound.
    """

    position: int
    first: int
    rope_offset: int
    tensors: Mapping[str, Array]
    kept: tuple[Snapshot, ...] = ()


class _Present(NamedTuple):
    """Description of a state after `writes` have been executed. During a run, the writes undo the run.

    Attributes:
        history: number that stays the same as long as tokens are only added. If it is unchanged, a copy of caches and
            rings up to a position needs only the later positions.
        is_running: True if a run has begun and has not completed.
    """

    position: int
    first: int
    rope_offset: int
    kept: tuple[Snapshot, ...]
    writes: tuple[Write, ...]
    history: int
    is_running: bool = False


class State:
    """All data that a decoder stores for the tokens before `position`.

    The address space of caches is reserved at creation, and the operating system commits memory as positions are
    written. Data at `position` and later positions are never read. The size of rings does not depend on the capacity
    (`Plan.slots`). Recurrent tensors are float32, and zero at position 0.

    Args:
        plan: the decoder.
        capacity: maximum number of positions, 1 to the plan's context length.
        dtype: data type of caches and rings; it overrides the plan's.
        chunk_length: maximum number of tokens of a chunk, which determines the size of rings; by default the capacity.
        spare: memory of earlier states with the same arguments; by default new memory.

    Raises:
        ConfigError: the capacity, the dtype or the chunk length is out of range, or the dtype is bfloat16 although the
            plan caches keys before RoPE.
        ModelError: a tensor of the plan is neither a cache, nor a ring, nor a recurrent tensor.
    """

    def __init__(
        self,
        plan: Plan,
        capacity: int,
        dtype: CacheDtype = "float32",
        *,
        chunk_length: int | None = None,
        spare: SpareTensors | None = None,
    ) -> None:
        if not 1 <= capacity <= plan.context_length:
            raise ConfigError(f"a state cannot hold {capacity} positions; the model takes 1 to {plan.context_length}")
        if dtype not in CACHE_DTYPES:
            raise ConfigError(f"caches cannot be {dtype!r}; choose one of: {', '.join(CACHE_DTYPES)}")
        if chunk_length is not None and not 1 <= chunk_length <= capacity:
            raise ConfigError(f"chunk length {chunk_length} is outside 1..{capacity}, the capacity of the state")
        self.plan = plan
        self.serial = next(_serials)
        """Number that identifies the sequence in traces."""
        self.capacity = capacity
        self.dtype: CacheDtype = dtype
        self.chunk_length = chunk_length or capacity
        self._present = _described(0)
        self._spare = spare or SpareTensors()
        self._lease = np.empty(0, np.uint8)
        self._tensors = self._spare.take(self._lease, plan, capacity, dtype, self.chunk_length)
        self.tensors = self._tensors.by_name
        """Tensors by name."""
        self.position_bytes = self._tensors.position_bytes
        """Bytes of the caches for each position."""
        self.adapter: LoadedAdapter | None = None
        """Adapter with which the tokens of the state are computed."""
        self._wait: Callable[[], None] | None = None

    @property
    def position(self) -> int:
        """Number of tokens that the state contains, which is the position of the next token."""
        return self._present.position

    @property
    def rope_offset(self) -> int:
        """Difference between a position's row in the rotary tables and the position; see `Plan.rope_offset`."""
        return self._present.rope_offset

    @property
    def first_in_rings(self) -> int:
        """The first position that rings contain; they contain all positions from there to the present one."""
        return self._present.first

    @property
    def history(self) -> int:
        """Number that stays the same as long as tokens are only added; see `_Present.history`."""
        return self._present.history

    @property
    def num_bytes(self) -> int:
        """Number of reserved bytes, whether or not they are committed."""
        return sum(array.nbytes for array in self.tensors.values())

    def begin(self, num_tokens: int) -> None:
        """Copy the data that a run of `num_tokens` will overwrite. The copies are kept until `advance` or `roll_back`.
        The scheduler calls this method.
        """
        if self._wait is not None or self._present.writes:
            self._settle()
        position, first, rope_offset, kept, _, history, is_running = self._present
        self._tensors.note_use(position + num_tokens)
        self._tensors.forget_pieces(position)
        undo: tuple[Write, ...] = ()
        if self._tensors.has_overwritten:
            changed = self._tensors.overwritten(first, position, num_tokens)
            undo = tuple((array, ..., array.copy()) for array in changed)
        if is_running:  # the previous run was aborted, so copies of caches may contain its data
            history = next(_histories)
        self._present = _Present(position, first, rope_offset, kept, undo, history, True)

    def advance(self, num_tokens: int) -> None:
        """Advance the position after tokens have been written. The scheduler calls this method when a run completes.

        Raises:
            ConfigError: the tokens do not fit the capacity.
        """
        before, first, rope_offset, kept, _, history, _ = self._present
        if not 0 <= num_tokens <= self.capacity - before:
            raise ConfigError(
                f"{num_tokens} tokens do not fit at position {before} of a state of "
                f"{self.capacity} positions; rewind it, or increase the capacity"
            )
        position = before + num_tokens
        first = max(first, position - self._tensors.ring_slots)
        self._present = _Present(position, first, rope_offset, kept, (), history)

    def roll_back(self, wait: Callable[[], None] | None = None) -> None:
        """Undo a run that did not complete, so the state is the same as before the run.

        Args:
            wait: function that waits for tasks of the run that may still write. If it is given, the run is undone at
                the next use of the state.
        """
        if wait is not None:
            self._wait = wait
        else:
            self._write()

    def rewind(self, position: int) -> int:
        """Rewind the state to `position`, or to an earlier position if the data needed at `position` are no longer
        stored.

        Returns:
            The nearest possible position at or below the requested one. The tokens after it must be run again.

        Raises:
            ConfigError: the position is negative, or after the present one.
        """
        if not 0 <= position <= self.position:
            raise ConfigError(f"cannot rewind to position {position}; the state holds positions 0 to {self.position}")
        self._settle()
        kept = tuple(snapshot for snapshot in self._present.kept if snapshot.position <= position)
        if position == self.position or self._tensors.can_rewind(self.first_in_rings, position):
            history = self.history if position == self.position else next(_histories)
            self._present = self._present._replace(position=position, kept=kept, history=history)
        elif kept:
            self._become(kept[-1], kept)
        else:
            self.reset(self.rope_offset)
        return self.position

    def reset(self, rope_offset: int = 0) -> None:
        """Return to position 0, and use the rows of the rotary tables from `rope_offset` on."""
        self._settle()
        self._present = _described(0, rope_offset=rope_offset, writes=self._tensors.to_be_empty())
        self._settle()

    def keep_snapshot(self) -> None:
        """Store a snapshot, so `rewind` can return to the present position.

        The snapshot contains copies of the rings and recurrent tensors; without such tensors no snapshot is needed.
        Only the last few snapshots are kept. A snapshot is dropped when the state is rewound to an earlier position.
        """
        if fixed := self._tensors.rings | self._tensors.recurrent:
            before = [kept for kept in self._present.kept if kept.position < self.position]
            copies = {name: array.copy() for name, array in fixed.items()}
            self._present = self._present._replace(kept=(*before, self._snapshot(copies))[-MOST_KEPT:])

    def mark(self) -> Snapshot:
        """Return a mark of the present contents for `return_to`. Caches are not copied, because runs do not overwrite
        their filled part.
        """
        self._settle()
        fixed = self._tensors.rings | self._tensors.recurrent if self.position else {}
        return self._snapshot({name: array.copy() for name, array in fixed.items()}, self._present.kept)

    def return_to(self, mark: Snapshot) -> None:
        """Restore the contents at the call of `mark`. Since that call, the state must not have been rewound to an
        earlier position.
        """
        self._settle()
        if mark.position:
            self._become(mark, mark.kept)
        else:
            self.reset(mark.rope_offset)

    @property
    def forms(self) -> StateForms:
        """Layout of the state's tensors in the pieces of a prefix."""
        return StateForms(self._tensors)

    def piece(self, start: int, end: int, *, caches: bool = True) -> PrefixPiece:
        """Return a copy of the caches at some positions, and of the rings if they still contain these positions."""
        self._settle()
        tensors, size = self._tensors, self._tensors.ring_slots
        in_rings = np.arange(start, end) % size
        has_rings = self.first_in_rings <= start
        piece = PrefixPiece(
            start,
            end,
            copied(tensors, tensors.cache_stacks, slice(start, end)) if caches else (),
            copied(tensors, tensors.ring_stacks, in_rings) if has_rings else None,
        )
        hold(piece, tensors)
        return piece

    def recurrent(self) -> tuple[Array, ...]:
        """Return copies of the recurrent tensors."""
        self._settle()
        return tuple(array.copy() for array in self._tensors.recurrent.values())

    def take(self, prefix: Prefix) -> None:
        """Replace the contents by a prefix, whose first tokens must be the tokens that the state contains, if any. The
        pieces are copied, except those that the caches still contain.
        """
        self._settle()
        tensors = self._tensors
        writes = writes_of(prefix, tensors)  # before pieces are forgotten
        tensors.forget_pieces(
            next((piece.start for piece in prefix.pieces if not is_held(piece, tensors)), prefix.position)
        )
        self._present = _described(
            prefix.position,
            first=prefix.rings_from,
            rope_offset=self.rope_offset,
            kept=self._present.kept,
            writes=writes,
        )
        self._settle()
        for piece in prefix.pieces:
            if piece.end <= prefix.position:
                hold(piece, tensors)

    def snapshot(self) -> Snapshot:
        """Return a copy of all contents of the state."""
        self._settle()
        copies = {name: array.copy() for name, array in self._tensors.held(self.position).items()}
        return self._snapshot(copies, self._present.kept)

    def restore(self, snapshot: Snapshot) -> None:
        """Restore the contents of a snapshot exactly.

        Raises:
            ConfigError: the snapshot is of another decoder, capacity, dtype or chunk length.
        """
        self._settle()
        forms = {name: (array.dtype, array.shape) for name, array in self._tensors.held(snapshot.position).items()}
        if forms != {name: (array.dtype, array.shape) for name, array in snapshot.tensors.items()}:
            raise ConfigError("the snapshot does not fit this state; create both with the same options")
        self._tensors.forget_pieces()
        self._become(snapshot, snapshot.kept)

    def choose_adapter(self, adapter: LoadedAdapter) -> None:
        """Compute the tokens of this state, which is empty, with an adapter."""
        self.adapter = adapter

    def fork(self) -> State:
        """Return an independent copy of the state. Only the filled part of caches is copied."""
        copy = State(self.plan, self.capacity, self.dtype, chunk_length=self.chunk_length, spare=self._spare)
        copy.adapter = self.adapter
        self._copy_to(copy)
        return copy

    def shift(self, keep: int, drop: int) -> int:
        """Remove the positions from `keep` to `keep + drop` and move later ones down, without computing tokens again.

        The plan must cache keys before RoPE. The keys and values of caches and rings are moved without change, so in
        deeper layers they still depend on the dropped tokens. Recurrent tensors do not change, so they depend on the
        dropped tokens, too. All snapshots for `rewind` are dropped.

        Returns:
            The new position. It is less than the number of remaining tokens if the state did not contain all dropped
            tokens, or if the rings no longer contain a kept token within a window. The tokens after the new position
            must be run again.

        Raises:
            ConfigError: `keep` or `drop` is negative, or the plan caches keys after RoPE.
        """
        if (self._tensors.caches or self._tensors.rings) and not self.plan.has_raw_keys:
            raise ConfigError("keys are cached after RoPE and cannot move; load the model with `context_shift=True`")
        if keep < 0 or drop < 0:
            raise ConfigError(f"cannot keep {keep} positions and drop {drop}; both are counts")
        self._settle()
        position = self.position - drop
        first = max(self.first_in_rings - drop, keep) if self.first_in_rings else 0
        if position < keep or (first and first > self._tensors.first_seen(position)):
            return self.rewind(min(keep, self.position))
        writes = self._tensors.to_be_shifted(self.first_in_rings, self.position, keep, drop)
        self._tensors.forget_pieces(keep)
        self._present = _described(position, first=first, rope_offset=self.rope_offset, writes=writes)
        self._settle()
        return position

    def save(self, path: str | os.PathLike[str] | StateFile) -> None:
        """Write the data that later tokens depend on to a NumPy .npz file, through a temporary file that is renamed.

        Raises:
            ConfigError: the file cannot be written.
        """
        self._settle()
        numbers = {"position": self.position, "rope_offset": self.rope_offset, "raw_keys": self.plan.key_form}
        state_file(path).write(numbers, self._tensors.seen(self.position))

    def load(self, path: str | os.PathLike[str] | StateFile) -> None:
        """Replace the contents by the contents of a file that `save` wrote for the same decoder and dtype.

        The capacity and the chunk length may differ from those of the saved state.

        Raises:
            ModelError: the file is missing or damaged, belongs to another decoder or dtype, or contains more positions
                than the capacity. The state is then unchanged.
        """
        self._settle()
        arrays, numbers = state_file(path).read(self._expected, ("position", "rope_offset", "raw_keys"), self.tensors)
        position = numbers["position"]
        self._tensors.forget_pieces()
        self._present = _described(
            position,
            first=self._tensors.first_seen(position),
            rope_offset=numbers["rope_offset"],
            writes=self._tensors.to_be_seen(arrays, position),
        )
        self._settle()

    def _expected(self, numbers: Mapping[str, int]) -> Mapping[str, Array]:
        """Return arrays with the shapes and dtypes that a file with these numbers must contain. Raise ValueError if the
        state cannot load such a file.
        """
        position = numbers["position"]
        if not 0 <= position <= self.capacity:
            raise ValueError(f"it contains {position} positions, but the capacity of the state is {self.capacity}")
        if numbers["raw_keys"] != self.plan.key_form:
            raise ValueError(f"its keys were not cached {KEY_FORMS[self.plan.key_form]}, unlike those of the state")
        if not self.plan.is_rope_offset(numbers["rope_offset"]):
            raise ValueError(
                f"its rotary tables begin at row {numbers['rope_offset']}, but those of this decoder do not"
            )
        return self._tensors.seen(position)

    def _copy_to(self, other: State) -> None:
        self._settle()
        State.restore(other, self._snapshot(self._tensors.held(self.position), self._present.kept))

    def _snapshot(self, tensors: Mapping[str, Array], kept: tuple[Snapshot, ...] = ()) -> Snapshot:
        return Snapshot(
            position=self.position, first=self.first_in_rings, rope_offset=self.rope_offset, tensors=tensors, kept=kept
        )

    def _become(self, snapshot: Snapshot, kept: tuple[Snapshot, ...]) -> None:
        self._present = _described(
            snapshot.position,
            first=snapshot.first,
            rope_offset=snapshot.rope_offset,
            kept=kept,
            writes=self._tensors.to_be(snapshot.tensors, snapshot.position),
        )
        self._settle()

    def _settle(self) -> None:
        """Wait for the tasks of an abandoned run, and then execute the pending writes."""
        if self._wait is not None:
            self._wait()
            self._wait = None
        self._write()

    def _write(self) -> None:
        if self._present.writes:
            for array, key, value in self._present.writes:
                array[key] = value
            self._tensors.note_use(self.position)
            self._present = self._present._replace(writes=())


def _described(
    position: int,
    *,
    first: int = 0,
    rope_offset: int = 0,
    kept: tuple[Snapshot, ...] = (),
    writes: tuple[Write, ...] = (),
) -> _Present:
    """Return the description of a state with new contents."""
    return _Present(position, first, rope_offset, kept, writes, next(_histories))
