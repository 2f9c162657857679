"""Memory of the chunks in flight: the values that pass from one subgraph to the next.

Every chunk slot contains the values of one chunk. Within a slot, a value B reuses the memory of a value A only if, in
any order of tasks, the subgraph that writes B starts after all subgraphs that write or read A have ended.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from chunkrt.errors import ModelError
from chunkrt.graph.plan import Dimension, Plan, resolve

if TYPE_CHECKING:  # job.py, which allocates its logits here, imports this module
    from chunkrt.runtime.job import Segment

Array = NDArray[Any]

ALIGNMENT = 64
"""Alignment of arrays in bytes: the size of a cache line, and of the widest vector load."""

MAPPED_BYTES = 2**20
"""Minimum size in bytes of arrays that are memory-mapped. `np.zeros` may reuse memory that this process has freed, and
must then write the zeros.
"""

HUGE_PAGES_BYTES = 32 * 2**20
"""Minimum size in bytes of arrays that use huge pages. In smaller arrays, including caches, a few rows would commit a
complete huge page.
"""

KEPT_LOGIT_BYTES = 8 * 2**20
"""Maximum size in bytes of the array of shared logits that a chunk slot keeps for reuse."""

EMPTY = slice(0)

GRAPH_INPUTS = ("input_ids", "position", "rope_position", "logit_rows")
"""Inputs that a chunk provides: the tokens, int64 [T]; for each segment the position of its first row, and the index of
this row in the rotary tables, int64 [1]; the rows with requested logits, int64 [R].
"""


def aligned_zeros(shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    """Return a zeroed C-contiguous array that starts at a multiple of ALIGNMENT.

    The operating system commits the pages of large arrays on their first use, so unused parts take no memory.
    """
    num_bytes = prod(shape) * np.dtype(dtype).itemsize
    if num_bytes >= MAPPED_BYTES:
        return np.frombuffer(_mapped(num_bytes), dtype).reshape(shape)
    raw = np.zeros(num_bytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + num_bytes].view(dtype).reshape(shape)


def _mapped(num_bytes: int) -> mmap.mmap:
    """Map zeroed pages. Large arrays use huge pages if the system supports them. The pages are freed with the last
    array that uses them.
    """
    try:
        if sys.platform == "win32":
            return mmap.mmap(-1, num_bytes)
        pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"cannot allocate {num_bytes} bytes: {error.strerror or error}") from error
    if sys.platform == "linux" and num_bytes >= HUGE_PAGES_BYTES:
        with suppress(OSError):  # a kernel may not support huge pages
            pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


class BufferLayout:
    """Assignment of values to physical buffers, the same in every slot.

    Args:
        plan: the decoder. Its output has no buffer, because logits are written directly to a run's result.
        chunk_length: C, the rows reserved for every value.

    Raises:
        ModelError: a value is read before it is written, its first axis is not its rows, or it is a graph input that no
            run provides.
    """

    def __init__(self, plan: Plan, chunk_length: int) -> None:
        self.values = {name: plan.tensors[name] for name in _boundary_values(plan)}
        self.chunk_length = chunk_length
        self.vocab_size = plan.vocab_size
        self.hidden = plan.hidden
        self.buffer_of: dict[str, int] = {}
        self.buffer_bytes: list[int] = []
        self._users = _users(plan)
        self._last_users: list[int] = []
        """Subgraphs that use the last value assigned to each buffer."""
        for name in plan.inputs:
            self._add(name)
        for subgraph, ended in zip(plan.subgraphs, plan.flow.ancestors, strict=True):
            for name in subgraph.outputs:
                if name != plan.output:
                    self._place(name, ended)

    @property
    def num_bytes(self) -> int:
        """Bytes of one slot."""
        return sum(self.buffer_bytes)

    def _place(self, name: str, ended: int) -> None:
        """Assign a value to a buffer whose users have all ended. Prefer the most recently used buffer, which may still
        be in the CPU caches.
        """
        size, users = self._num_bytes(name), self._last_users
        free = [i for i, num_bytes in enumerate(self.buffer_bytes) if num_bytes == size and not users[i] & ~ended]
        if free:
            self.buffer_of[name] = max(free, key=users.__getitem__)
            users[self.buffer_of[name]] = self._users[name]
        else:
            self._add(name)

    def _add(self, name: str) -> None:
        self.buffer_of[name] = len(self.buffer_bytes)
        self.buffer_bytes.append(self._num_bytes(name))
        self._last_users.append(self._users[name])

    def _num_bytes(self, name: str) -> int:
        tensor, rows = self.values[name], self.chunk_length
        num_bytes = tensor.num_bytes(T=rows, R=rows)
        return num_bytes if tensor.shape[0] in ("T", "R") else num_bytes * rows  # one row per segment


class ChunkBuffers:
    """A chunk slot: the values of one chunk in flight, by name. Every value has room for C rows."""

    def __init__(self, layout: BufferLayout) -> None:
        buffers = [aligned_zeros((num_bytes,), np.uint8) for num_bytes in layout.buffer_bytes]
        rows = layout.chunk_length
        self._vocab_size, self._hidden = layout.vocab_size, layout.hidden
        self._logits: Array | None = None
        self._arrays: dict[str, Array] = {}
        self._symbols: dict[str, Dimension] = {}
        for name, index in layout.buffer_of.items():
            tensor = layout.values[name]
            _, *others = resolve(tensor.shape, {"T": rows, "R": rows})
            self._arrays[name] = buffers[index].view(tensor.dtype).reshape(rows, *others)
            self._symbols[name] = tensor.shape[0]

    def load(self, segments: Sequence[Segment]) -> None:
        """Fill the graph inputs from consecutive segments, with T tokens in total, T in 1..C."""
        row = num_rows = 0
        for index, (segment, position) in enumerate((s, s.position) for s in segments):
            rows = slice(row, row + segment.num_tokens)
            self._put("input_ids", rows, segment.token_ids)
            self._put("position", index, position)
            self._put("rope_position", index, position + segment.job.rope_offset)
            wanted = slice(num_rows, num_rows + segment.num_rows)
            self._put("logit_rows", wanted, range(rows.stop - segment.num_rows, rows.stop))
            row, num_rows = rows.stop, wanted.stop

    def _put(self, name: str, where: int | slice, value: Any) -> None:
        if name in self._arrays:
            self._arrays[name][where] = value

    def logits(self, num_rows: int) -> Array:
        """Return a buffer for the logits of rows that several jobs request, float32 [num_rows, V]. Small arrays are
        kept for reuse.
        """
        if self._logits is not None and len(self._logits) >= num_rows:
            return self._logits[:num_rows]
        made = aligned_zeros((num_rows, self._vocab_size), np.float32)
        if made.nbytes <= KEPT_LOGIT_BYTES:
            self._logits = made
        return made

    def give_hidden(self, segments: Sequence[Segment]) -> None:
        """Copy the hidden states of the chunk's rows to the jobs that request hidden states."""
        assert self._hidden is not None
        rows, row = self._arrays[self._hidden], 0
        for segment in segments:
            if (wanted := segment.job.hidden) is not None:
                wanted[segment.start :][: segment.num_tokens] = rows[row : row + segment.num_tokens]
            row += segment.num_tokens

    def views(
        self, names: Iterable[str], tokens: slice, logit_rows: slice = EMPTY, segment: int = 0
    ) -> dict[str, Array]:
        """Return views of values by name: values with "T" rows are cut to `tokens`, values with "R" rows to
        `logit_rows`, and other values to one segment.
        """
        cuts: dict[Dimension, slice] = {"T": tokens, "R": logit_rows}
        own = slice(segment, segment + 1)
        return {name: self._arrays[name][cuts.get(self._symbols[name], own)] for name in names}

    def has_rows(self, name: str) -> bool:
        """Return True if a value contains one row per row of the chunk, False if it contains one per segment."""
        return self._symbols[name] in ("T", "R")

    def clear_padding(self, names: Iterable[str], num_tokens: int, num_logit_rows: int = 0) -> None:
        """Zero the padding rows of the named values: rows without a token, or without requested logits."""
        cuts: dict[Dimension, slice] = {"T": slice(num_tokens, None), "R": slice(num_logit_rows, None)}
        for name in names:
            self._arrays[name][cuts.get(self._symbols[name], EMPTY)] = 0


def _users(plan: Plan) -> dict[str, int]:
    """Map each value to the set of subgraphs that write or read it."""
    users = dict.fromkeys(plan.inputs, 0)
    for index, subgraph in enumerate(plan.subgraphs):
        for name in (*subgraph.inputs, *subgraph.outputs):
            users[name] = users.get(name, 0) | 1 << index
    return users


def _boundary_values(plan: Plan) -> list[str]:
    """Check the graph inputs and subgraph outputs, and yield their names in order of appearance."""
    for name in plan.inputs:
        if name not in GRAPH_INPUTS:
            raise ModelError(f"the plan's input {name!r} is not one of {', '.join(GRAPH_INPUTS)}; recompile the model")
    known = list(plan.inputs)
    for subgraph in plan.subgraphs:
        for name in subgraph.inputs:
            if name not in known:
                raise ModelError(f"{subgraph.name} reads {name!r} before any subgraph writes it; recompile the model")
        known += subgraph.outputs
    for name in known:
        shape = plan.tensors[name].shape
        if name not in ("position", "rope_position") and (
            shape[0] not in ("T", "R") or any(isinstance(d, str) for d in shape[1:])
        ):
            raise ModelError(
                f"{name!r} has shape {shape}; the first axis of values between subgraphs must be their rows (T or R)"
            )
    return known
