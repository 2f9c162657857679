"""Memory of the chunks in flight: the values that cross from one subgraph to the next.

Every chunk slot holds one chunk's values. Within a slot a value takes over another's memory if the subgraph that writes
it starts only after all that write or read the other have ended, in whatever order tasks run.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Iterable
from contextlib import suppress
from math import prod
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from chunkrt.errors import ModelError
from chunkrt.graph.plan import Dimension, Plan, resolve

Array = NDArray[Any]

ALIGNMENT = 64
"""Bytes: a cache line, and the widest vector load."""

MAPPED_BYTES = 32 * 2**20
"""Arrays from so many bytes on are mapped. `np.zeros` may take them from what this process has freed before, and would
then write the zeros."""

WHOLE = slice(None)
EMPTY = slice(0)

GRAPH_INPUTS = ("input_ids", "position", "rope_position", "logit_rows")
"""What a run provides: int64 [T] tokens, int64 [1] position of row 0, int64 [1] its row in the rotary tables, int64 [R]
rows with wanted logits."""


def aligned_zeros(shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    """A zeroed C-contiguous array that starts at a multiple of ALIGNMENT.

    Large ones cost memory only where they are written: the operating system commits their pages on first use.
    """
    num_bytes = prod(shape) * np.dtype(dtype).itemsize
    if num_bytes >= MAPPED_BYTES:
        return np.frombuffer(_mapped(num_bytes), dtype).reshape(shape)
    raw = np.zeros(num_bytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + num_bytes].view(dtype).reshape(shape)


def _mapped(num_bytes: int) -> mmap.mmap:
    """Fresh pages of zeros, huge ones where the system has them. They go with the last array that uses them."""
    try:
        if sys.platform == "win32":
            return mmap.mmap(-1, num_bytes)
        pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no {num_bytes} bytes are to be had: {error.strerror or error}") from error
    if sys.platform == "linux":
        with suppress(OSError):  # a kernel may have none
            pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


class BufferLayout:
    """Which physical buffer holds which value; the same in every slot.

    Args:
        plan: the decoder. Its output has no buffer: logits are written straight into a run's result.
        chunk_length: C, the rows reserved for every value.

    Raises:
        ModelError: a value is read before it is written, does not have its rows first, or is a graph input
            that no run provides.
    """

    def __init__(self, plan: Plan, chunk_length: int) -> None:
        self.values = {name: plan.tensors[name] for name in _boundary_values(plan)}
        self.chunk_length = chunk_length
        self.buffer_of: dict[str, int] = {}
        self.buffer_bytes: list[int] = []
        self._users = _users(plan)
        self._last_users: list[int] = []
        """Of the value that every buffer holds last."""
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
        """Give a value a buffer whose users have all ended, of several the one used last: it may be in the caches."""
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
        return self.values[name].num_bytes(T=self.chunk_length, R=self.chunk_length)


class ChunkBuffers:
    """One chunk slot: the values of one chunk in flight, by name, each with room for C rows."""

    def __init__(self, layout: BufferLayout) -> None:
        buffers = [aligned_zeros((num_bytes,), np.uint8) for num_bytes in layout.buffer_bytes]
        rows = layout.chunk_length
        self._arrays: dict[str, Array] = {}
        self._symbols: dict[str, Dimension] = {}
        for name, index in layout.buffer_of.items():
            tensor = layout.values[name]
            shape = resolve(tensor.shape, {"T": rows, "R": rows})
            self._arrays[name] = buffers[index].view(tensor.dtype).reshape(shape)
            self._symbols[name] = tensor.shape[0]

    def load(self, token_ids: Array, position: int, logit_rows: range, rope_offset: int = 0) -> None:
        """Fill the graph inputs.

        Args:
            token_ids: int64 [T], T in 1..C.
            position: of row 0.
            logit_rows: the rows whose logits are wanted, R in 0..C of them.
            rope_offset: what is added to a position for its row in the rotary tables.
        """
        places = {"position": position, "rope_position": position + rope_offset}
        graph_inputs: dict[str, Any] = {"input_ids": token_ids, **places, "logit_rows": logit_rows}
        for name, rows in graph_inputs.items():
            if name in self._arrays:
                self._arrays[name][: np.size(rows)] = rows

    def views(self, names: Iterable[str], tokens: slice, logit_rows: slice = EMPTY) -> dict[str, Array]:
        """Values by name: those with "T" rows cut to `tokens`, those with "R" rows to `logit_rows`."""
        cuts: dict[Dimension, slice] = {"T": tokens, "R": logit_rows}
        return {name: self._arrays[name][cuts.get(self._symbols[name], WHOLE)] for name in names}

    def clear_padding(self, names: Iterable[str], num_tokens: int, num_logit_rows: int = 0) -> None:
        """Zero the rows of the named values that hold no token, or no row whose logits are wanted."""
        cuts: dict[Dimension, slice] = {"T": slice(num_tokens, None), "R": slice(num_logit_rows, None)}
        for name in names:
            self._arrays[name][cuts.get(self._symbols[name], EMPTY)] = 0


def _users(plan: Plan) -> dict[str, int]:
    """The subgraphs that write or read each value, as sets."""
    users = dict.fromkeys(plan.inputs, 0)
    for index, subgraph in enumerate(plan.subgraphs):
        for name in (*subgraph.inputs, *subgraph.outputs):
            users[name] = users.get(name, 0) | 1 << index
    return users


def _boundary_values(plan: Plan) -> list[str]:
    """Graph inputs and subgraph outputs in the order in which they appear, checked."""
    for name in plan.inputs:
        if name not in GRAPH_INPUTS:
            raise ModelError(f"the plan's input {name!r} is none of {', '.join(GRAPH_INPUTS)}; compile the model again")
    known = list(plan.inputs)
    for subgraph in plan.subgraphs:
        for name in subgraph.inputs:
            if name not in known:
                raise ModelError(f"{subgraph.name} reads {name!r} before any subgraph writes it; compile again")
        known += subgraph.outputs
    for name in known:
        shape = plan.tensors[name].shape
        if name not in ("position", "rope_position") and (
            shape[0] not in ("T", "R") or any(isinstance(d, str) for d in shape[1:])
        ):
            raise ModelError(f"{name!r} has shape {shape}; values between subgraphs have their rows (T or R) first")
    return known
