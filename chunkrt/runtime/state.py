"""State: what a session remembers between chunks.

Three kinds of tensors. A cache [kv_heads, P, head_dim] holds the keys or values of every position. A ring
[kv_heads, W, head_dim] holds those of the last positions, position p at slot p modulo W. A recurrent tensor of fixed
shape holds what a layer made of everything so far. A cache can go back to any position, a ring as far as it still holds
what a window sees, a recurrent tensor only to where a copy of it was kept.

An interrupt may fall anywhere, so every change is one assignment: it says what the state is from now on, and what has
to be written for that. Writing it may be broken off; whoever uses the state next writes it again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal, get_args

import numpy as np

from chunkrt.errors import ConfigError, ModelError
from chunkrt.graph.plan import Plan, resolve
from chunkrt.runtime.buffers import Array, aligned_zeros
from chunkrt.runtime.state_file import StateFile

CacheDtype = Literal["float32", "float16", "int8"]
CACHE_DTYPES: tuple[CacheDtype, ...] = get_args(CacheDtype)
SCALE_BYTES = 4
"""In an int8 cache the float32 scale of each position of a head follows its head_dim values, as bytes."""

MOST_KEPT = 2
"""Snapshots that a state keeps to rewind to: the last of them are those that a conversation comes back to."""


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """What a state held at a position. `tensors`: copies by name, of caches the filled part.

    `first`: the first position that rings hold. `kept`: what the state could be rewound to.
    """

    position: int
    first: int
    rope_offset: int
    tensors: Mapping[str, Array]
    kept: tuple[Snapshot, ...] = ()


Write = tuple[Array, Any, Any]
"""An array, a key, and what belongs there; made twice it is the same."""


@dataclass(frozen=True, kw_only=True)
class _Present:
    """What a state is, once `writes` have been made. Those of a run in progress undo it."""

    position: int = 0
    first: int = 0
    rope_offset: int = 0
    kept: tuple[Snapshot, ...] = ()
    writes: tuple[Write, ...] = ()


class State:
    """Everything that one decoder remembers, of the tokens from position 0 up to `position`.

    The memory of caches is reserved at once and committed by the operating system as positions are written; what lies
    at `position` and beyond is never read. Rings have a fixed size, whatever the capacity (`Plan.slots`). Recurrent
    tensors are float32, and zero at position 0.

    Args:
        plan: the decoder.
        capacity: positions to hold, 1 to the plan's context length.
        dtype: of caches and rings, whatever the plan names.
        chunk_length: tokens of a chunk at most; by default as many as the capacity. Rings are sized by it.

    Raises:
        ConfigError: the capacity, the dtype or the chunk length is out of range.
        ModelError: a tensor of the plan is of none of the three kinds.
    """

    def __init__(
        self, plan: Plan, capacity: int, dtype: CacheDtype = "float32", *, chunk_length: int | None = None
    ) -> None:
        if not 1 <= capacity <= plan.context_length:
            raise ConfigError(
                f"a state of {capacity} positions was asked for; the model takes 1 to {plan.context_length}"
            )
        if dtype not in CACHE_DTYPES:
            raise ConfigError(f"caches cannot be {dtype!r}; there are: {', '.join(CACHE_DTYPES)}")
        if chunk_length is not None and not 1 <= chunk_length <= capacity:
            raise ConfigError(f"a state for chunks of {chunk_length} was asked for; its capacity is {capacity}")
        self.plan = plan
        self.capacity = capacity
        self.dtype: CacheDtype = dtype
        self.chunk_length = chunk_length or capacity
        self._present = _Present()
        slots = plan.slots(capacity, self.chunk_length)
        kinds: dict[str, list[str]] = {"P": [], "W": [], "": []}
        arrays = {}
        for tensor in plan.state_tensors:
            kind = "".join(size for size in tensor.shape if isinstance(size, str))
            if kind not in kinds or (kind and (len(tensor.shape) != 3 or tensor.shape[1] != kind)):
                raise ModelError(
                    f"state {tensor.name!r} has shape {tensor.shape}, not [kv_heads, P or W, head_dim] or a fixed one"
                )
            if kind == "W" and plan.window is None:
                raise ModelError(f"state {tensor.name!r} is a ring, but no layer of the plan has a window")
            kinds[kind].append(tensor.name)
            shape = resolve(tensor.shape, slots)
            if kind and dtype == "int8":
                shape = (*shape[:-1], shape[-1] + SCALE_BYTES)
            arrays[tensor.name] = aligned_zeros(shape, dtype if kind else np.float32)
        self.tensors: Mapping[str, Array] = MappingProxyType(arrays)
        """By tensor name."""
        self._caches = {name: arrays[name] for name in kinds["P"]}
        self._rings = {name: arrays[name] for name in kinds["W"]}
        self._recurrent = {name: arrays[name] for name in kinds[""]}
        self._ring_slots = slots["W"]
        self._wait: Callable[[], None] | None = None

    @property
    def position(self) -> int:
        """Tokens that the state has seen; the position of the next token."""
        return self._present.position

    @property
    def rope_offset(self) -> int:
        """What is added to a position for its row in the rotary tables; see `Plan.rope_offset`."""
        return self._present.rope_offset

    @property
    def _first(self) -> int:
        """The first position that rings hold; they hold all from there to the present one."""
        return self._present.first

    @property
    def _kept(self) -> tuple[Snapshot, ...]:
        return self._present.kept

    @property
    def num_bytes(self) -> int:
        """Bytes reserved, committed or not."""
        return sum(array.nbytes for array in self.tensors.values())

    @property
    def position_bytes(self) -> int:
        """Bytes that grow with every position: those of the caches."""
        return sum(array.nbytes for array in self._caches.values()) // self.capacity

    def begin(self, num_tokens: int) -> None:
        """Keep what a run of so many tokens will overwrite, until `advance` or `roll_back`; the executor calls it."""
        self._settle()
        undo = tuple((array, ..., array.copy()) for array in self._overwritten(num_tokens))
        self._present = replace(self._present, writes=undo)

    def advance(self, num_tokens: int) -> None:
        """Count tokens that have been written; the executor calls it when a run completes.

        Raises:
            ConfigError: they do not fit.
        """
        if not 0 <= num_tokens <= self.capacity - self.position:
            raise ConfigError(
                f"{num_tokens} tokens do not fit at position {self.position} of a state of "
                f"{self.capacity} positions; rewind it, or make it larger"
            )
        position = self.position + num_tokens
        first = max(self._first, position - self._ring_slots)
        self._present = replace(self._present, position=position, first=first, writes=())

    def roll_back(self, wait: Callable[[], None] | None = None) -> None:
        """Undo a run that did not complete: everything is as it was when it began.

        Args:
            wait: waits for tasks of the run that still write, if there may be some; then all this happens when the
                state is used next.
        """
        self._wait = wait
        if wait is None:
            self._settle()

    def rewind(self, position: int) -> int:
        """Forget everything from `position` on, and more if what is needed there is gone.

        Returns:
            The nearest position at or below the one asked for that the state could go back to. Tokens from there on
            are to be run again.

        Raises:
            ConfigError: the position is outside 0..the present one.
        """
        if not 0 <= position <= self.position:
            raise ConfigError(f"cannot rewind to position {position}; the state holds positions 0 to {self.position}")
        self._settle()
        kept = tuple(snapshot for snapshot in self._kept if snapshot.position <= position)
        if self._can_rewind(position):
            self._present = replace(self._present, position=position, kept=kept)
        elif kept:
            self._become(kept[-1], kept)
        else:
            self.reset(self.rope_offset)
        return self.position

    def reset(self, rope_offset: int = 0) -> None:
        """Forget everything, and take the rotary tables' rows from `rope_offset` on."""
        self._settle()
        self._present = _Present(rope_offset=rope_offset, writes=self._zeros())
        self._settle()

    def keep_snapshot(self) -> None:
        """Make the present position one that `rewind` can go back to, until something before it is forgotten.

        Costs a copy of the rings and recurrent tensors; without such there is nothing to keep. The last few are kept.
        """
        if self._rings or self._recurrent:
            before = [kept for kept in self._kept if kept.position < self.position]
            copies = {name: array.copy() for name, array in (self._rings | self._recurrent).items()}
            self._present = replace(self._present, kept=(*before, self._snapshot(copies))[-MOST_KEPT:])

    def snapshot(self) -> Snapshot:
        """A copy of everything that the state holds."""
        self._settle()
        copies = {name: array.copy() for name, array in self._held(self.position).items()}
        return self._snapshot(copies, self._kept)

    def restore(self, snapshot: Snapshot) -> None:
        """Be as at the time of a snapshot, bit for bit.

        Raises:
            ConfigError: it was taken of a state of another decoder, capacity, dtype or chunk length.
        """
        self._settle()
        forms = {name: (array.dtype, array.shape) for name, array in self._held(snapshot.position).items()}
        if forms != {name: (array.dtype, array.shape) for name, array in snapshot.tensors.items()}:
            raise ConfigError(
                "the snapshot is of another kind of state; restore it into one made with the same options"
            )
        self._become(snapshot, snapshot.kept)

    def fork(self) -> State:
        """An independent copy that continues from the same prefix; of caches only the filled part is copied."""
        copy = State(self.plan, self.capacity, self.dtype, chunk_length=self.chunk_length)
        self._copy_to(copy)
        return copy

    def shift(self, keep: int, drop: int) -> int:
        """Forget the positions from `keep` to `keep + drop` and move later ones down, without computing anything again.

        Needs a plan with raw keys. Caches move their keys and values, which stay what they were computed to be with the
        dropped tokens in sight. Rings move too. Recurrent tensors stay as they are: they have absorbed the dropped
        tokens. The snapshots kept are forgotten.

        Returns:
            The position that the state has now, less than the tokens left if it could not go all the way: it had not
            seen the dropped ones yet, or its rings have lost a kept one that a window would see. The rest is to be
            run again.

        Raises:
            ConfigError: a count is negative, or keys were cached after RoPE.
        """
        if (self._caches or self._rings) and not self.plan.has_raw_keys:
            raise ConfigError("keys are cached after RoPE and cannot move; load the model with context_shift")
        if keep < 0 or drop < 0:
            raise ConfigError(f"cannot keep {keep} positions and drop {drop}; both are counts")
        self._settle()
        position = self.position - drop
        first = max(self._first - drop, keep) if self._first else 0
        if position < keep or (first and first > self._first_seen(position)):
            return self.rewind(min(keep, self.position))
        writes: list[Write] = [
            (array, np.s_[:, keep:position], array[:, keep + drop : self.position].copy())
            for array in self._caches.values()
        ]
        old = np.arange(self._first, self.position)
        old = old[(old >= keep + drop) | ((old < keep) & (first == 0))]
        new = np.where(old < keep, old, old - drop)
        size = self._ring_slots
        writes += [(array, np.s_[:, new % size], array[:, old % size]) for array in self._rings.values()]
        self._present = _Present(position=position, first=first, rope_offset=self.rope_offset, writes=tuple(writes))
        self._settle()
        return position

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write what later tokens see as a NumPy .npz file, beside `path` first and then renamed.

        Raises:
            ConfigError: the file cannot be written.
        """
        self._settle()
        seen = np.arange(self._first_seen(self.position), self.position) % self._ring_slots
        arrays = {name: array[:, : self.position] for name, array in self._caches.items()}
        arrays |= {name: array[:, seen] for name, array in self._rings.items()}
        numbers = {"position": self.position, "rope_offset": self.rope_offset, "raw_keys": int(self.plan.has_raw_keys)}
        StateFile(path).write(numbers, arrays | self._recurrent)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Replace the contents by what `save` wrote for the same decoder and dtype.

        The capacity and the chunk length may differ.

        Raises:
            ModelError: the file is missing, damaged, of another decoder or dtype, or longer than the
                capacity. The state is then unchanged.
        """
        self._settle()
        arrays, numbers = StateFile(path).read(self._expected, ("position", "rope_offset", "raw_keys"), self.tensors)
        position = numbers["position"]
        first = self._first_seen(position)
        slots = np.arange(first, position) % self._ring_slots
        writes = list(self._zeros())
        for name, array in arrays.items():
            part = slice(position) if name in self._caches else slots if name in self._rings else slice(None)
            writes.append((self.tensors[name], np.s_[:, part], array))
        self._present = _Present(
            position=position, first=first, rope_offset=numbers["rope_offset"], writes=tuple(writes)
        )
        self._settle()

    def _expected(self, numbers: Mapping[str, int]) -> Mapping[str, Array]:
        """Arrays of the form that those in a file with these numbers have. Raises ValueError if there are none."""
        position, raw_keys = numbers["position"], bool(numbers["raw_keys"])
        if not 0 <= position <= self.capacity:
            raise ValueError(f"it holds {position} positions; the state has room for {self.capacity}")
        if raw_keys != self.plan.has_raw_keys:
            raise ValueError(
                f"its keys were cached {'before' if raw_keys else 'after'} RoPE, those of the state are not"
            )
        if numbers["rope_offset"] not in (0, self.plan.rope_offset(self.plan.context_length)):
            raise ValueError(f"its rotary tables begin at row {numbers['rope_offset']}")
        num_seen = position - self._first_seen(position)
        return {
            **{name: array[:, :position] for name, array in self._caches.items()},
            **{name: array[:, :num_seen] for name, array in self._rings.items()},
            **self._recurrent,
        }

    def _first_seen(self, position: int) -> int:
        """The first position that a row at `position`, or after it, sees in a ring."""
        return max(0, position - self.plan.window + 1) if self.plan.window else 0

    def _can_rewind(self, position: int) -> bool:
        """Whether what rows from `position` on need is in the tensors as they are."""
        if position == self.position:
            return True
        return not self._recurrent and (not self._rings or self._first <= self._first_seen(position))

    def _overwritten(self, num_tokens: int) -> Iterator[Array]:
        """The parts of the tensors that a run changes, of those that hold anything."""
        yield from self._recurrent.values()
        size = self._ring_slots
        first = max(self._first, self.position - size)
        count = min(self.position, self.position + num_tokens - size) - first
        if count > 0:
            start = first % size
            for array in self._rings.values():
                yield array[:, start : start + count]
                if start + count > size:
                    yield array[:, : start + count - size]

    def _held(self, position: int) -> dict[str, Array]:
        """The tensors, of caches the part up to a position."""
        return {name: array[:, :position] if name in self._caches else array for name, array in self.tensors.items()}

    def _copy_to(self, other: State) -> None:
        self._settle()
        State.restore(other, self._snapshot(self._held(self.position), self._kept))

    def _snapshot(self, tensors: Mapping[str, Array], kept: tuple[Snapshot, ...] = ()) -> Snapshot:
        return Snapshot(
            position=self.position, first=self._first, rope_offset=self.rope_offset, tensors=tensors, kept=kept
        )

    def _become(self, snapshot: Snapshot, kept: tuple[Snapshot, ...]) -> None:
        writes = tuple(
            (self.tensors[name], np.s_[:, : snapshot.position] if name in self._caches else ..., array)
            for name, array in snapshot.tensors.items()
        )
        self._present = _Present(
            position=snapshot.position,
            first=snapshot.first,
            rope_offset=snapshot.rope_offset,
            kept=kept,
            writes=writes,
        )
        self._settle()

    def _zeros(self) -> tuple[Write, ...]:
        return tuple((array, ..., 0) for array in (*self._rings.values(), *self._recurrent.values()))

    def _settle(self) -> None:
        """Make the writes that are due, after what a run that was left still writes."""
        if self._wait is not None:
            self._wait()
            self._wait = None
        if self._present.writes:
            for array, key, value in self._present.writes:
                array[key] = value
            self._present = replace(self._present, writes=())
