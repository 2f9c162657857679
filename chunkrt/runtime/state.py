"""State: the memory of a session between chunks.

A cache can go back to any position, a ring as far as it still holds the positions that a window sees, a recurrent
tensor only to a position with a kept copy (see `state_tensors.py`).

An interrupt may come at any point, so every change is one assignment: the new description of the state, and the writes
that it requires. The writes may be aborted; the next user of the state makes them again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import count

import numpy as np

from chunkrt.errors import ConfigError
from chunkrt.graph.plan import KEY_FORMS, Plan
from chunkrt.runtime.buffers import Array
from chunkrt.runtime.prefix import Prefix, PrefixPiece, StateForms, copied, writes_of
from chunkrt.runtime.snapshot import Present, Snapshot
from chunkrt.runtime.state_file import StateFile, state_file
from chunkrt.runtime.state_tensors import CACHE_DTYPES, CacheDtype, StateTensors

_serials = count()

MOST_KEPT = 2
"""Number of snapshots that a state keeps to rewind to; a conversation returns to the most recent ones."""


class State:
    """All data that one decoder keeps of the tokens from position 0 up to `position`.

    The memory of caches is reserved at once and committed by the operating system as positions are written; data at
    `position` and beyond are never read. Rings have a fixed size, regardless of the capacity (`Plan.slots`). Recurrent
    tensors are float32, and zero at position 0.

    Args:
        plan: the decoder.
        capacity: positions to hold, 1 to the plan's context length.
        dtype: data type of caches and rings, regardless of the plan's.
        chunk_length: largest number of tokens of a chunk, which determines the size of rings; by default the capacity.

    Raises:
        ConfigError: the capacity, the dtype or the chunk length is out of range, or bfloat16 caches get raw keys.
        ModelError: a tensor of the plan is of none of the three kinds.
    """

    def __init__(
        self, plan: Plan, capacity: int, dtype: CacheDtype = "float32", *, chunk_length: int | None = None
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
        self._present = Present()
        self._tensors = StateTensors(plan, capacity, dtype, self.chunk_length)
        self._wait: Callable[[], None] | None = None

    @property
    def tensors(self) -> Mapping[str, Array]:
        """Tensors by name."""
        return self._tensors.by_name

    @property
    def position(self) -> int:
        """Number of tokens that the state has seen; the position of the next token."""
        return self._present.position

    @property
    def rope_offset(self) -> int:
        """Offset from a position to its row in the rotary tables; see `Plan.rope_offset`."""
        return self._present.rope_offset

    @property
    def first_in_rings(self) -> int:
        """The first position that rings hold; they hold all from there to the present one."""
        return self._present.first

    @property
    def history(self) -> int:
        """Number that stays the same as long as tokens are only added; see `Present`."""
        return self._present.history

    @property
    def num_bytes(self) -> int:
        """Bytes reserved, committed or not."""
        return sum(array.nbytes for array in self.tensors.values())

    @property
    def position_bytes(self) -> int:
        """Bytes of the caches for each position."""
        return self._tensors.position_bytes

    def begin(self, num_tokens: int) -> None:
        """Keep the data that a run of `num_tokens` will overwrite, until `advance` or `roll_back`; called by the
        executor."""
        self._settle()
        changed = self._tensors.overwritten(self.first_in_rings, self.position, num_tokens)
        undo = tuple((array, ..., array.copy()) for array in changed)
        self._present = self._present.begun(undo)

    def advance(self, num_tokens: int) -> None:
        """Count tokens that have been written; called by the executor when a run completes.

        Raises:
            ConfigError: they do not fit.
        """
        if not 0 <= num_tokens <= self.capacity - self.position:
            raise ConfigError(
                f"{num_tokens} tokens do not fit at position {self.position} of a state of "
                f"{self.capacity} positions; rewind it, or make it larger"
            )
        position = self.position + num_tokens
        first = max(self.first_in_rings, position - self._tensors.ring_slots)
        self._present = self._present.advanced(position, first)

    def roll_back(self, wait: Callable[[], None] | None = None) -> None:
        """Undo a run that did not complete: the state is the same as when the run began.

        Args:
            wait: waits for tasks of the run that may still write; all this then happens at the next use of the state.
        """
        self._wait = wait
        if wait is None:
            self._settle()

    def rewind(self, position: int) -> int:
        """Forget everything from `position` on, and more if the data needed there are gone.

        Returns:
            The nearest possible position at or below the requested one. Tokens from there on must be run again.

        Raises:
            ConfigError: the position is outside 0..the present one.
        """
        if not 0 <= position <= self.position:
            raise ConfigError(f"cannot rewind to position {position}; the state holds positions 0 to {self.position}")
        self._settle()
        kept = tuple(snapshot for snapshot in self._present.kept if snapshot.position <= position)
        if position == self.position or self._tensors.can_rewind(self.first_in_rings, position):
            self._present = self._present.rewound(position, kept)
        elif kept:
            self._become(kept[-1], kept)
        else:
            self.reset(self.rope_offset)
        return self.position

    def reset(self, rope_offset: int = 0) -> None:
        """Forget everything, and use the rows of the rotary tables from `rope_offset` on."""
        self._settle()
        self._present = Present(rope_offset=rope_offset, writes=self._tensors.to_be_empty())
        self._settle()

    def keep_snapshot(self) -> None:
        """Make the present position one that `rewind` can go back to, until an earlier position is forgotten.

        This copies the rings and recurrent tensors; without such tensors nothing is kept. The last few snapshots are
        kept.
        """
        if fixed := self._tensors.rings | self._tensors.recurrent:
            before = [kept for kept in self._present.kept if kept.position < self.position]
            copies = {name: array.copy() for name, array in fixed.items()}
            self._present = replace(self._present, kept=(*before, self._snapshot(copies))[-MOST_KEPT:])

    def mark(self) -> Snapshot:
        """Return a mark for `return_to`. Caches keep their contents and are not copied."""
        self._settle()
        fixed = self._tensors.rings | self._tensors.recurrent if self.position else {}
        return self._snapshot({name: array.copy() for name, array in fixed.items()}, self._present.kept)

    def return_to(self, mark: Snapshot) -> None:
        """Go back to where `mark` was called; no earlier position has been forgotten since."""
        self._settle()
        if mark.position:
            self._become(mark, mark.kept)
        else:
            self.reset(mark.rope_offset)

    @property
    def forms(self) -> StateForms:
        """Layout of its tensors in the pieces of a prefix."""
        return StateForms(self._tensors)

    def piece(self, forms: StateForms, start: int, end: int, *, caches: bool = True) -> PrefixPiece:
        """Copy the contents of caches and rings at some positions; rings may have lost them."""
        self._settle()
        tensors, size = self._tensors, self._tensors.ring_slots
        in_rings = np.arange(start, end) % size
        has_rings = self.first_in_rings <= start
        return PrefixPiece(
            start,
            end,
            copied(tensors, forms.caches, slice(start, end)) if caches else (),
            copied(tensors, forms.rings, in_rings) if has_rings else None,
        )

    def recurrent(self) -> tuple[Array, ...]:
        """Copy the recurrent tensors."""
        self._settle()
        return tuple(array.copy() for array in self._tensors.recurrent.values())

    def take(self, prefix: Prefix) -> None:
        """Take over a prefix that begins with the tokens seen by the state, if any. Its pieces are copied."""
        self._settle()
        self._present = Present(
            position=prefix.position,
            first=prefix.rings_from,
            rope_offset=self.rope_offset,
            kept=self._present.kept,
            writes=writes_of(prefix, self._tensors),
        )
        self._settle()

    def snapshot(self) -> Snapshot:
        """Copy everything that the state holds."""
        self._settle()
        copies = {name: array.copy() for name, array in self._tensors.held(self.position).items()}
        return self._snapshot(copies, self._present.kept)

    def restore(self, snapshot: Snapshot) -> None:
        """Restore the contents of a snapshot, bit for bit.

        Raises:
            ConfigError: the snapshot is of another decoder, capacity, dtype or chunk length.
        """
        self._settle()
        forms = {name: (array.dtype, array.shape) for name, array in self._tensors.held(snapshot.position).items()}
        if forms != {name: (array.dtype, array.shape) for name, array in snapshot.tensors.items()}:
            raise ConfigError("the snapshot does not fit this state; create both with the same options")
        self._become(snapshot, snapshot.kept)

    def fork(self) -> State:
        """Return an independent copy that continues from the same prefix; for caches only the filled part is copied."""
        copy = State(self.plan, self.capacity, self.dtype, chunk_length=self.chunk_length)
        self._copy_to(copy)
        return copy

    def shift(self, keep: int, drop: int) -> int:
        """Forget the positions from `keep` to `keep + drop` and move later ones down, without computing anything again.

        Needs a plan with raw keys. Caches move their keys and values, which were computed while the dropped tokens were
        visible and do not change. Rings move too. Recurrent tensors do not change: they have absorbed the dropped
        tokens. The kept snapshots are forgotten.

        Returns:
            The new position. It is less than the number of remaining tokens if the state had not seen the dropped
            tokens yet, or its rings have lost a kept token that a window would see. The other tokens must be run again.

        Raises:
            ConfigError: a count is negative, or keys were cached after RoPE.
        """
        if (self._tensors.caches or self._tensors.rings) and not self.plan.has_raw_keys:
            raise ConfigError("keys are cached after RoPE and cannot move; load the model with context_shift")
        if keep < 0 or drop < 0:
            raise ConfigError(f"cannot keep {keep} positions and drop {drop}; both are counts")
        self._settle()
        position = self.position - drop
        first = max(self.first_in_rings - drop, keep) if self.first_in_rings else 0
        if position < keep or (first and first > self._tensors.first_seen(position)):
            return self.rewind(min(keep, self.position))
        writes = self._tensors.to_be_shifted(self.first_in_rings, self.position, keep, drop)
        self._present = Present(position=position, first=first, rope_offset=self.rope_offset, writes=writes)
        self._settle()
        return position

    def save(self, path: str | os.PathLike[str] | StateFile) -> None:
        """Write the data that later tokens see to a NumPy .npz file, through a temporary file that is renamed.

        Raises:
            ConfigError: the file cannot be written.
        """
        self._settle()
        numbers = {"position": self.position, "rope_offset": self.rope_offset, "raw_keys": self.plan.key_form}
        state_file(path).write(numbers, self._tensors.seen(self.position))

    def load(self, path: str | os.PathLike[str] | StateFile) -> None:
        """Replace the contents by those that `save` wrote for the same decoder and dtype.

        The capacity and the chunk length may differ.

        Raises:
            ModelError: the file is missing, damaged, of another decoder or dtype, or longer than the capacity. The
                state is then unchanged.
        """
        self._settle()
        arrays, numbers = state_file(path).read(self._expected, ("position", "rope_offset", "raw_keys"), self.tensors)
        position = numbers["position"]
        self._present = Present(
            position=position,
            first=self._tensors.first_seen(position),
            rope_offset=numbers["rope_offset"],
            writes=self._tensors.to_be_seen(arrays, position),
        )
        self._settle()

    def _expected(self, numbers: Mapping[str, int]) -> Mapping[str, Array]:
        """Return arrays of the form expected in a file with these numbers. Raises ValueError if the state cannot load
        it."""
        position = numbers["position"]
        if not 0 <= position <= self.capacity:
            raise ValueError(f"it holds {position} positions; the state has room for {self.capacity}")
        if numbers["raw_keys"] != self.plan.key_form:
            raise ValueError(f"its keys were not cached {KEY_FORMS[self.plan.key_form]}, unlike those of the state")
        if numbers["rope_offset"] not in (0, self.plan.rope_offset(self.plan.context_length)):
            raise ValueError(f"its rotary tables begin at row {numbers['rope_offset']}")
        return self._tensors.seen(position)

    def _copy_to(self, other: State) -> None:
        self._settle()
        State.restore(other, self._snapshot(self._tensors.held(self.position), self._present.kept))

    def _snapshot(self, tensors: Mapping[str, Array], kept: tuple[Snapshot, ...] = ()) -> Snapshot:
        return Snapshot(
            position=self.position, first=self.first_in_rings, rope_offset=self.rope_offset, tensors=tensors, kept=kept
        )

    def _become(self, snapshot: Snapshot, kept: tuple[Snapshot, ...]) -> None:
        self._present = Present(
            position=snapshot.position,
            first=snapshot.first,
            rope_offset=snapshot.rope_offset,
            kept=kept,
            writes=self._tensors.to_be(snapshot.tensors, snapshot.position),
        )
        self._settle()

    def _settle(self) -> None:
        """Make the pending writes, after waiting for the tasks of an abandoned run."""
        if self._wait is not None:
            self._wait()
            self._wait = None
        if self._present.writes:
            for array, key, value in self._present.writes:
                array[key] = value
            self._present = replace(self._present, writes=())
