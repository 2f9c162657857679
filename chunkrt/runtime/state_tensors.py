"""The tensors of a state: their memory, and the slot of each position.

Three kinds of tensors exist. A cache [kv_heads, P, head_dim] contains the keys or values of every position. The ring of
a window [kv_heads, W, head_dim] contains the keys or values of the last W positions; position p is stored in slot p
modulo W. A recurrent tensor has a fixed shape, and contains the state of a layer after all tokens so far. The last part
of this file defines the layout of bfloat16 caches.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from math import prod
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from chunkrt.errors import ConfigError, ModelError
from chunkrt.graph.plan import INT8_GROUP, Plan, Tensor, resolve
from chunkrt.runtime.buffers import ALIGNMENT, Array, aligned_zeros, offer_pages

CacheDtype = Literal["float32", "float16", "int8", "bfloat16"]
CACHE_DTYPES: tuple[CacheDtype, ...] = get_args(CacheDtype)
Write = tuple[Array, Any, Any]
"""A pending write: an array, an index, and the value to store there. Repeating a write does not change the result."""


def state_bytes(tensor: Tensor, slots: Mapping[str, int]) -> int:
    """Return the number of bytes of one tensor of a state, with float32 recurrent tensors and float16 caches and
    rings."""
    has_positions = any(isinstance(size, str) for size in tensor.shape)
    return prod(resolve(tensor.shape, slots)) * np.dtype(np.float16 if has_positions else np.float32).itemsize


def first_seen(window: int | None, position: int) -> int:
    """Return the first position of a ring that a row at `position` or later attends to."""
    return max(0, position - window + 1) if window else 0


class Stack(NamedTuple):
    """Caches or rings of one form, in one array [tensors, heads, slots, width].

    Attributes:
        names: names of the tensors.
        are_values: True for the values of bfloat16 caches, whose layout differs from that of keys.
    """

    names: tuple[str, ...]
    array: Array
    are_values: bool

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot in all tensors."""
        number, heads, _, width = self.array.shape
        return int(number * heads * width * self.array.itemsize)

    def empty(self, num_slots: int) -> Array:
        """Return an uninitialised array of the same form for other slots."""
        number, heads, _, width = self.array.shape
        return np.empty((number, heads, num_slots, width), self.array.dtype)


class StateTensors:
    """The tensors of one state, initially zero.

    Args:
        plan: the decoder.
        capacity: maximum number of positions.
        dtype: data type of caches and rings.
        chunk_length: maximum number of tokens of a chunk, which determines the size of rings.

    Raises:
        ConfigError: the plan caches keys before RoPE, which bfloat16 caches do not support.
        ModelError: a tensor of the plan is neither a cache, nor a ring, nor a recurrent tensor.
    """

    def __init__(self, plan: Plan, capacity: int, dtype: CacheDtype, chunk_length: int) -> None:
        if dtype == "bfloat16" and plan.has_raw_keys:
            raise ConfigError(
                "bfloat16 caches support only keys after RoPE, but `context_shift` needs keys before RoPE; "
                "choose another cache dtype, or omit `context_shift`"
            )
        slots = plan.slots(capacity, chunk_length)
        shapes: dict[str, dict[str, tuple[int, ...]]] = {"P": {}, "W": {}, "": {}}
        for tensor in plan.state_tensors:
            kind = "".join(size for size in tensor.shape if isinstance(size, str))
            if kind not in shapes or (kind and (len(tensor.shape) != 3 or tensor.shape[1] != kind)):
                raise ModelError(
                    f"state {tensor.name!r} has shape {tensor.shape}, not [kv_heads, P or W, head_dim] or a fixed one"
                )
            if kind == "W" and plan.window is None:
                raise ModelError(
                    f"state {tensor.name!r} is a ring, but no layer of the plan has a window; recompile the model"
                )
            shapes[kind][tensor.name] = resolve(tensor.shape, slots)
        self._are_tiled = dtype == "bfloat16"
        values = plan.value_caches if self._are_tiled else frozenset[str]()
        self.cache_stacks = _stacks(shapes["P"], dtype, values)
        self.ring_stacks = _stacks(shapes["W"], dtype, values)
        self.caches, self.rings = _by_name(self.cache_stacks), _by_name(self.ring_stacks)
        self.recurrent = {name: aligned_zeros(shape, np.float32) for name, shape in shapes[""].items()}
        by_name = self.caches | self.rings | self.recurrent
        self.by_name = MappingProxyType({t.name: by_name[t.name] for t in plan.state_tensors})
        self.position_bytes: int = sum(array.nbytes // array.shape[1] for array in self.caches.values())
        """Bytes of the caches for each position."""
        self._values = values
        self.num_used = 0
        """Number of positions that were ever written; the operating system has committed their memory."""
        self.has_overwritten = bool(self.rings or self.recurrent)
        """True if runs overwrite data of the tensors."""
        self.ring_slots = slots["W"]
        self.window = plan.window
        self._pieces: dict[int, tuple[int, weakref.ref[Array]]] = {}
        """Pieces of prefixes whose contents the caches contain: by first position the end and the first array, which
        identifies a piece because it never changes.
        """
        self._pieces_end = 0
        self.is_offered = False
        """True if the operating system may take the pages of the caches back, so their contents may be lost."""

    @property
    def has_pieces(self) -> bool:
        """True if the caches contain pieces of prefixes, which need not be copied again."""
        return any(array() is not None for _, array in self._pieces.values())

    def contains(self, start: int, array: Array) -> bool:
        """Return True if the caches contain the piece that begins at a position and has this first array."""
        found = self._pieces.get(start)
        return found is not None and found[1]() is array

    def note_piece(self, start: int, end: int, array: Array) -> None:
        """Record that the caches contain a piece."""
        self._pieces_end = max(self._pieces_end, end)  # first, because an interrupt may occur in between
        self._pieces[start] = end, weakref.ref(array)

    def forget_pieces(self, position: int = 0) -> None:
        """Record that the caches are about to change from a position on."""
        if self._pieces_end > position:
            self._pieces = {start: found for start, found in self._pieces.items() if found[0] <= position}
            self._pieces_end = position

    def note_use(self, num_positions: int) -> None:
        """Record that the first positions are about to be written, or were written."""
        if num_positions > self.num_used:
            self.num_used = num_positions

    @property
    def num_committed_bytes(self) -> int:
        """Approximate number of bytes that the operating system has committed."""
        fixed = (*self.rings.values(), *self.recurrent.values())
        return self.position_bytes * self.num_used + sum(array.nbytes for array in fixed)

    def first_seen(self, position: int) -> int:
        """Return the first position of a ring that a row at `position` or later attends to."""
        return first_seen(self.window, position)

    def can_rewind(self, first: int, position: int) -> bool:
        """Return True if the state can continue at `position`, given that rings contain the positions from `first`
        on."""
        return not self.recurrent and (not self.rings or first <= self.first_seen(position))

    def rows(self, name: str, slots: slice | Array) -> Array:
        """Return the contents of a cache or ring at some slots, [heads, slots, width]. The result is a copy for
        bfloat16, and otherwise may be a view.
        """
        array = self.by_name[name]
        if not self._are_tiled:
            return array[:, slots]
        count = slots.stop - (slots.start or 0) if isinstance(slots, slice) else len(slots)
        found = np.empty((len(array), count, array.shape[2]), array.dtype)
        for view, key, rows in tiled_writes(array, slots, found, are_values=name in self._values):
            rows[...] = view[key]
        return found

    def rows_of_all(self, stack: Stack, slots: slice | Array, into: Array) -> None:
        """Copy the contents of all tensors of a stack at some slots, [tensors, heads, slots, width]."""
        if not self._are_tiled:
            into[...] = stack.array[:, :, slots]
            return
        for view, key, rows in tiled_writes(stack.array, slots, into, are_values=stack.are_values):
            rows[...] = view[key]

    def to_be_rows_of_all(self, stack: Stack, slots: slice | Array, rows: Array) -> list[Write]:
        """Return the writes that store the given rows of all tensors of a stack."""
        if not self._are_tiled:
            return [(stack.array, np.s_[:, :, slots], rows)]
        return tiled_writes(stack.array, slots, rows, are_values=stack.are_values)

    def to_be_rows(self, name: str, slots: slice | Array, rows: Array) -> list[Write]:
        """Return the writes that store the given rows, in the format of `rows`."""
        if not self._are_tiled:
            return [(self.by_name[name], np.s_[:, slots], rows)]
        return tiled_writes(self.by_name[name], slots, rows, are_values=name in self._values)

    def overwritten(self, first: int, position: int, num_tokens: int) -> Iterator[Array]:
        """Yield the parts of tensors that a run overwrites and that contain data, given that rings contain positions
        `first` to `position`.
        """
        yield from self.recurrent.values()
        size = self.ring_slots
        first = max(first, position - size)
        count = min(position, position + num_tokens - size) - first
        if count > 0:
            start = first % size
            begin, end, beyond = self._whole(start, start + count, start + count - size)
            for array in self.rings.values():
                yield array[:, begin:end]
                if beyond > 0:
                    yield array[:, :beyond]

    def _whole(self, start: int, *ends: int) -> tuple[int, ...]:
        """Extend the slots from `start` to each end to complete blocks, if the layout stores slots in blocks."""
        return (start // BLOCK * BLOCK, *map(whole_blocks, ends)) if self._are_tiled else (start, *ends)

    def held(self, position: int) -> dict[str, Array]:
        """Return all tensors by name; of caches only the part before a position."""
        _, end = self._whole(0, position)
        return {name: array[:, :end] if name in self.caches else array for name, array in self.by_name.items()}

    def seen(self, position: int) -> dict[str, Array]:
        """Return the contents that rows from `position` on depend on. The contents of rings are copied in the order of
        positions.
        """
        slots = np.arange(self.first_seen(position), position) % self.ring_slots
        caches = {name: self.rows(name, slice(position)) for name in self.caches}
        return caches | {name: self.rows(name, slots) for name in self.rings} | self.recurrent

    def to_be(self, held: Mapping[str, Array], position: int) -> tuple[Write, ...]:
        """Return the writes that restore a result of `held`."""
        _, end = self._whole(0, position)
        keys = dict.fromkeys(self.caches, np.s_[:, :end])
        return tuple((self.by_name[name], keys.get(name, ...), array) for name, array in held.items())

    def to_be_seen(self, seen: Mapping[str, Array], position: int) -> tuple[Write, ...]:
        """Return the writes that restore a result of `seen`, and zero all other slots of the rings."""
        slots = np.arange(self.first_seen(position), position) % self.ring_slots
        keys: dict[str, Any] = dict.fromkeys(self.caches, slice(position)) | dict.fromkeys(self.rings, slots)
        rows = (write for name, key in keys.items() for write in self.to_be_rows(name, key, seen[name]))
        return (*self.to_be_empty(), *rows, *((array, ..., seen[name]) for name, array in self.recurrent.items()))

    def to_be_empty(self) -> tuple[Write, ...]:
        """Return the writes that reset the tensors to position 0."""
        return tuple((array, ..., 0) for array in (*self.rings.values(), *self.recurrent.values()))

    def to_be_shifted(self, first: int, position: int, keep: int, drop: int) -> tuple[Write, ...]:
        """Return the writes that move the positions from `keep + drop` on down by `drop`.

        Rings must contain the positions from `first` on. They keep the first `keep` positions only if `first` is 0.
        Requires keys before RoPE, and no bfloat16 caches.
        """
        writes: list[Write] = [
            (array, np.s_[:, keep : position - drop], array[:, keep + drop : position].copy())
            for array in self.caches.values()
        ]
        old = np.arange(first, position)
        old = old[(old >= keep + drop) | ((old < keep) & (first == 0))]
        new, size = np.where(old < keep, old, old - drop), self.ring_slots
        return (*writes, *((array, np.s_[:, new % size], array[:, old % size]) for array in self.rings.values()))


MOST_SPARE = 4
"""Maximum number of states whose memory is kept for new states."""

MOST_SPARE_BYTES = 256 * 2**20
"""Maximum number of committed bytes of a state whose memory is kept."""


class SpareTensors:
    """Memory of states that are no longer used, for new states of the same plan, capacity, dtype and chunk length.

    The pages of this memory are committed already, and the operating system may take them back. The pages of the last
    state that was released are kept if its caches contain pieces of prefixes: a session that continues the same
    conversation then need not copy these pieces. Any thread may use the object without a lock, because the garbage
    collector releases states at any point.
    """

    def __init__(self) -> None:
        self._spare: deque[StateTensors] = deque()
        self._is_closed = False

    def close(self) -> None:
        """Free the memory, and keep none from now on."""
        self._is_closed = True
        self._spare.clear()

    def take(self, lease: Array, plan: Plan, capacity: int, dtype: CacheDtype, chunk_length: int) -> StateTensors:
        """Return tensors for a state. The rings and recurrent tensors are zero; the contents of caches are undefined.

        The tensors come back when `lease`, an array that the state keeps, is released. The state itself may be released
        too early: the garbage collector reports its end before it runs finalizers, which may use the state again.
        """
        try:
            tensors = self._spare.pop()
        except IndexError:
            tensors = StateTensors(plan, capacity, dtype, chunk_length)
        else:
            tensors.is_offered = False
            for array, key, value in tensors.to_be_empty():
                array[key] = value
        weakref.finalize(lease, self._give_back, tensors).atexit = False
        return tensors

    def _give_back(self, tensors: StateTensors) -> None:
        if self._is_closed:
            return
        if len(self._spare) < MOST_SPARE and tensors.num_committed_bytes <= MOST_SPARE_BYTES:
            earlier = list[StateTensors]()
            with suppress(IndexError):
                while True:
                    earlier.append(self._spare.pop())  # no other thread uses these until they are back
            for each in reversed(earlier):
                _offer(each)
                self._spare.append(each)
            if not tensors.has_pieces:
                _offer(tensors)
            self._spare.append(tensors)
            if self._is_closed:
                self._spare.clear()


def _offer(tensors: StateTensors) -> None:
    """Let the operating system take back the pages of caches, whose contents are no longer used."""
    if not tensors.is_offered:
        tensors.forget_pieces()
        tensors.is_offered = True
        for stack in tensors.cache_stacks:
            offer_pages(stack.array)


def _stacks(shapes: Mapping[str, tuple[int, ...]], dtype: CacheDtype, values: frozenset[str]) -> tuple[Stack, ...]:
    """Allocate caches or rings for values [heads, slots, head_dim]; those of one form share an array."""
    alike: dict[tuple[tuple[int, ...], bool], list[str]] = {}
    for name, shape in shapes.items():
        alike.setdefault((shape, name in values), []).append(name)
    return tuple(Stack(tuple(names), _stacked(len(names), key[0], dtype), key[1]) for key, names in alike.items())


def _stacked(number: int, shape: tuple[int, ...], dtype: CacheDtype) -> Array:
    """Return a zeroed array [number, heads, slots, width], each part of which is contiguous and aligned."""
    heads, slots, head_dim = shape
    if dtype == "bfloat16":
        shape = tiled_shape(heads, slots, head_dim)
    elif dtype == "int8":
        shape = heads, slots, head_dim + -(-head_dim // INT8_GROUP) * np.dtype(np.float32).itemsize
    stored = np.dtype("uint16" if dtype == "bfloat16" else dtype)
    num_bytes = prod(shape) * stored.itemsize
    aligned_bytes = -(-num_bytes // ALIGNMENT) * ALIGNMENT
    memory = aligned_zeros((number, aligned_bytes), np.uint8, huge_pages=False)
    return memory[:, :num_bytes].view(stored).reshape(number, *shape)


def _by_name(stacks: tuple[Stack, ...]) -> dict[str, Array]:
    return {name: array for stack in stacks for name, array in zip(stack.names, stack.array, strict=True)}


BLOCK = 64
"""Number of slots in a block, which is stored contiguously."""

_TILE, _DEPTH = 16, 32


def tiled_shape(heads: int, slots: int, head_dim: int) -> tuple[int, int, int]:
    """Return the shape of an array for at least `slots` slots."""
    return heads, whole_blocks(slots), -(-head_dim // _DEPTH) * _DEPTH


def whole_blocks(slots: int) -> int:
    """Return the number of slots rounded up to complete blocks."""
    return -(-slots // BLOCK) * BLOCK


def tiled_writes(array: Array, slots: slice | Array, rows: Array, *, are_values: bool) -> list[Write]:
    """Return the writes that store rows [..., slots, width] at some slots of a tiled array [..., slots, width].

    Each write is a view of the array, an index, and a view of the rows with the same shape. Adjacent slots in complete
    tiles are copied without an index for each slot, which is about eight times faster. Rows are contiguous along their
    last axis.
    """
    if not isinstance(slots, slice):
        return [_scattered(array, slots, rows, are_values=are_values)]
    start, stop = slots.start or 0, slots.stop
    first = min(-(-start // _TILE) * _TILE, stop)
    last = max(stop // _TILE * _TILE, first)
    writes = []
    for begin, end in ((start, first), (last, stop)):
        if begin < end:
            part = rows[..., begin - start : end - start, :]
            writes.append(_scattered(array, np.arange(begin, end), part, are_values=are_values))
    if not are_values:
        if first < last:
            writes.append(_keys(array, first, last, rows[..., first - start : last - start, :]))
        return writes
    # The tiles of values belong to a block: the part of the first block, complete blocks, and the part of the last.
    whole = min(whole_blocks(first), last), max(last // BLOCK * BLOCK, min(whole_blocks(first), last))
    for begin, end in ((first, whole[0]), whole, (whole[1], last)):
        if begin < end:
            writes += _values(array, begin, end, rows[..., begin - start : end - start, :])
    return writes


def _keys(array: Array, begin: int, end: int, rows: Array) -> Write:
    """Return the write of complete tiles of keys, in which pairs of dimensions of 16 positions are adjacent."""
    *first, num_slots, width = array.shape
    tiles = array.view(np.uint32).reshape(*first, num_slots // _TILE, width // 2, _TILE)
    pairs = rows.view(np.uint32).reshape(*first, (end - begin) // _TILE, _TILE, width // 2)
    return tiles, np.s_[..., begin // _TILE : end // _TILE, :, :], pairs.swapaxes(-1, -2)


def _values(array: Array, begin: int, end: int, rows: Array) -> list[Write]:
    """Return the writes of complete tiles of values, in which pairs of positions of 16 dimensions are adjacent: one for
    the even and one for the odd positions. The tiles are in one block, or form complete blocks.
    """
    *first, num_slots, width = array.shape
    blocks = array.reshape(*first, num_slots // BLOCK, width // _TILE, BLOCK // 2, _TILE, 2)
    length = min(end - begin, BLOCK)
    pair = begin % BLOCK // 2
    key = np.s_[..., begin // BLOCK : -(-end // BLOCK), :, pair : pair + length // 2, :]
    given = rows.reshape(*first, (end - begin) // length, length // 2, 2, width // _TILE, _TILE)
    return [(blocks[..., odd], key, np.moveaxis(given[..., odd, :, :], -2, -3)) for odd in (0, 1)]


def _scattered(array: Array, slots: Array, rows: Array, *, are_values: bool) -> Write:
    """Return the write of rows at any slots."""
    *first, num_slots, width = array.shape
    n, whole = len(first), (slice(None),) * len(first)
    key: tuple[Any, ...]
    if are_values:
        tiles = array.reshape(*first, num_slots // BLOCK, width // _TILE, BLOCK // 2, _TILE, 2)
        tiles = tiles.transpose(*range(n), n, n + 2, n + 4, n + 1, n + 3)
        key = (*whole, slots // BLOCK, slots % BLOCK // 2, slots % 2)
    else:
        tiles = array.reshape(*first, num_slots // _TILE, width // 2, _TILE, 2)
        tiles = tiles.transpose(*range(n), n, n + 2, n + 1, n + 3)
        key = (*whole, slots // _TILE, slots % _TILE)
    return tiles, key, rows.reshape(*first, len(slots), *tiles.shape[-2:])
