"""Memory of the chunks in flight, and the subgraphs that are bound to it.

Every chunk slot contains the values of one chunk. Within a slot, a value B reuses the memory of a value A only if, in
any order of tasks, the subgraph that writes B starts after all subgraphs that write or read A have ended.

An executable without a fixed length receives views of the rows that contain tokens. An executable with a fixed length
receives complete buffers. The padding rows of its inputs are zeroed before every call, because an earlier subgraph may
have written to them. Several subgraphs may read one value concurrently: executables without a fixed length do not read
the padding, and all others write the same zeros to it.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from chunkrt.backends.base import (
    Executable,
    HistoryExecutable,
    Passage,
    SegmentExecutable,
    SegmentOperands,
)
from chunkrt.backends.link import LinkExecutable
from chunkrt.errors import ConfigError, ModelError, cause_of
from chunkrt.graph.plan import Dimension, Plan, Subgraph, resolve

if TYPE_CHECKING:  # request.py, which allocates its logits here, imports this module
    from chunkrt.runtime.request import Segment

Array = NDArray[Any]

ALIGNMENT = 64
"""Alignment of arrays in bytes: the size of a cache line, and of the widest vector load."""

MAPPED_BYTES = 2**20
"""Minimum size in bytes of arrays that are memory-mapped. `np.zeros` may reuse memory that this process has freed, and
must then write the zeros.
"""

HUGE_PAGES_BYTES = 32 * 2**20
"""Minimum size in bytes of arrays that use huge pages. In smaller arrays a few rows would commit a complete huge
page."""

KEPT_LOGIT_BYTES = 8 * 2**20
"""Maximum size in bytes of the array of shared logits that a chunk slot keeps for reuse."""

EMPTY = slice(0)

GRAPH_INPUTS = ("input_ids", "position", "rope_position", "logit_rows", "adapters")
"""Inputs that a chunk provides: the tokens, int64 [T]; for each segment the position of its first row, and the index of
this row in the rotary tables, int64 [1]; the rows with requested logits, int64 [R]; the number of each row's adapter,
int64 [T].
"""


def aligned_zeros(shape: tuple[int, ...], dtype: DTypeLike, *, huge_pages: bool = True) -> Array:
    """Return a zeroed C-contiguous array that starts at a multiple of ALIGNMENT.

    The operating system commits the pages of large arrays on their first use, so unused parts take no memory, unless
    huge pages are used.
    """
    num_bytes = prod(shape) * np.dtype(dtype).itemsize
    if num_bytes >= MAPPED_BYTES:
        return np.frombuffer(_mapped(num_bytes, huge_pages=huge_pages), dtype).reshape(shape)
    raw = np.zeros(num_bytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + num_bytes].view(dtype).reshape(shape)


def _mapped(num_bytes: int, *, huge_pages: bool) -> mmap.mmap:
    """Map zeroed pages. Large arrays use huge pages if the system supports them. The pages are freed with the last
    array that uses them.
    """
    try:
        if sys.platform == "win32":
            return mmap.mmap(-1, num_bytes)
        pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"cannot allocate {num_bytes} bytes: {cause_of(error)}") from error
    if sys.platform == "linux" and huge_pages and num_bytes >= HUGE_PAGES_BYTES:
        with suppress(OSError):  # a kernel may not support huge pages
            pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


def offer_pages(array: Array) -> None:
    """Let the operating system take the pages of a large array back when it needs memory. The contents are lost then,
    and zeros take their place.
    """
    owner: Any = array
    while isinstance(owner, np.ndarray):
        owner = owner.base
    if isinstance(owner, mmap.mmap) and hasattr(mmap, "MADV_FREE"):
        with suppress(OSError):  # a kernel may not support it
            owner.madvise(mmap.MADV_FREE)


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
        self._graph_inputs = [self._arrays.get(n) for n in GRAPH_INPUTS]

    def load(self, segments: Sequence[Segment]) -> None:
        """Fill the graph inputs from consecutive segments, with T tokens in total, T in 1..C."""
        row = num_rows = 0
        ids, positions, rope_positions, logit_rows, adapters = self._graph_inputs
        for index, (request, start, num_tokens, num_logits) in enumerate(segments):
            end, position = row + num_tokens, request.position + start
            if ids is not None:
                ids[row:end] = request.token_ids[start : start + num_tokens]
            if positions is not None:
                positions[index] = position
            if rope_positions is not None:
                rope_positions[index] = position + request.rope_offset
            if adapters is not None:
                chosen = request.state.adapter
                adapters[row:end] = 0 if chosen is None else chosen.number
            if logit_rows is not None and num_logits:
                logit_rows[num_rows : num_rows + num_logits] = range(end - num_logits, end)
            row, num_rows = end, num_rows + num_logits

    def logits(self, num_rows: int) -> Array:
        """Return a buffer for the logits of rows that several requests request, float32 [num_rows, V]. Small arrays are
        kept for reuse.
        """
        if self._logits is not None and len(self._logits) >= num_rows:
            return self._logits[:num_rows]
        made = aligned_zeros((num_rows, self._vocab_size), np.float32)
        if made.nbytes <= KEPT_LOGIT_BYTES:
            self._logits = made
        return made

    def give_hidden(self, segments: Sequence[Segment]) -> None:
        """Copy the hidden states of the chunk's rows to the requests that request hidden states."""
        assert self._hidden is not None
        rows, row = self._arrays[self._hidden], 0
        for segment in segments:
            if (wanted := segment.request.hidden) is not None:
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


class BoundSubgraph:
    """A subgraph that is ready to run on any chunk slot.

    Args:
        subgraph: the subgraph.
        executable: the executable of the subgraph, compiled for chunks of `chunk_length` rows.
        slots: the buffers of each chunk slot.
        chunk_length: C, the maximum number of rows of a chunk.
        output: name of the plan's output, which is written directly to a run's logits and has no buffer.

    Raises:
        ConfigError: the executable's fixed length does not fit the chunk length, or padding would reach state.
    """

    def __init__(
        self,
        subgraph: Subgraph,
        executable: Executable,
        *,
        slots: Sequence[ChunkBuffers],
        chunk_length: int,
        output: str,
    ) -> None:
        self.subgraph = subgraph
        self.rows = subgraph.rows
        self._compute = executable.run  # for example, NativeExecutable.run
        self._compute_segments = executable.run_segments if isinstance(executable, SegmentExecutable) else None
        self._link = executable.run_link if isinstance(executable, LinkExecutable) else None
        self._after = executable.run_after if isinstance(executable, HistoryExecutable) else None
        self._fixed_length = executable.fixed_length
        self._slots = slots
        self._chunk_length = chunk_length
        self._logits = output if output in subgraph.outputs else None
        self._outputs = tuple(name for name in subgraph.outputs if name != output)
        self._state = subgraph.all_state
        has_rows = slots[0].has_rows
        self._shared = tuple(name for name in subgraph.inputs if has_rows(name))
        self._own = tuple(name for name in subgraph.inputs if not has_rows(name))
        self._check_length()
        whole = slice(chunk_length)
        self._whole = [
            (buffers.views(subgraph.inputs, whole, whole), buffers.views(self._outputs, whole, whole))
            for buffers in slots
        ]

    def _check_length(self) -> None:
        fixed, chunk = self._fixed_length, self._chunk_length
        if fixed is None:
            return
        if self.subgraph.rows == "R" and (fixed < 1 or chunk % fixed):
            raise ConfigError(
                f"{self.subgraph.name} was compiled for {fixed} rows of logits at a time, "
                f"which does not divide the chunk length {chunk}"
            )
        if self.subgraph.rows == "T" and fixed != chunk:
            raise ConfigError(
                f"{self.subgraph.name} was compiled for {fixed} rows and cannot take chunks of {chunk}; "
                f"compile it for {chunk}, or use chunk length {fixed}"
            )
        if self.subgraph.all_state and chunk > 1:
            raise ConfigError(
                f"{self.subgraph.name} keeps state and always takes {fixed} rows, "
                "so padding would reach the state; run it on a backend that takes any number of rows"
            )

    @property
    def logit_group(self) -> int:
        """Number of rows of logits that one call writes if this number is fixed; otherwise 1."""
        return self._fixed_length or 1

    @property
    def has_logits(self) -> bool:
        """True if the subgraph computes the plan's output."""
        return self._logits is not None

    def run(self, slot: int, segments: Sequence[Segment], num_tokens: int, number: int = 0) -> Passage | None:
        """Compute one chunk.

        Args:
            slot: chunk slot that holds the chunk.
            segments: the segments of the chunk; the states of their requests are updated in place.
            num_tokens: number of rows that contain tokens, 1 to C.
            number: number of the chunk if other ranks compute it too; see `Key.number`.

        Returns:
            The result of `Executable.run`.
        """
        if len(segments) > 1 and self._state:
            self._run_segments(slot, segments, num_tokens)
            return None
        inputs, outputs = self._whole[slot]
        if num_tokens < self._chunk_length:
            buffers = self._slots[slot]
            if self._fixed_length is None:
                valid = slice(num_tokens)
                inputs, outputs = (
                    buffers.views(self.subgraph.inputs, valid),
                    buffers.views(self._outputs, valid),
                )
            else:
                buffers.clear_padding(self.subgraph.inputs, num_tokens)
        if self._state:
            inputs = inputs | self._state_of(segments[0])
            if self._after is not None:
                return self._after(inputs, outputs, segments[0].request.state.history)
        if self._link is not None:
            self._link(inputs, outputs, number)
            return None
        return self._compute(inputs, outputs)

    def _run_segments(self, slot: int, segments: Sequence[Segment], num_tokens: int) -> None:
        """Compute the segments, in one call if the executable supports it, otherwise in one call per segment."""
        buffers, row = self._slots[slot], 0
        if self._compute_segments is not None:
            tokens = slice(num_tokens)
            operands = [
                SegmentOperands(s.num_tokens, buffers.views(self._own, EMPTY, segment=i) | self._state_of(s))
                for i, s in enumerate(segments)
            ]
            self._compute_segments(buffers.views(self._shared, tokens), buffers.views(self._outputs, tokens), operands)
            return
        for index, segment in enumerate(segments):
            rows = slice(row, row + segment.num_tokens)
            inputs = buffers.views(self.subgraph.inputs, rows, segment=index)
            self._compute(inputs | self._state_of(segment), buffers.views(self._outputs, rows))
            row = rows.stop

    def _state_of(self, segment: Segment) -> dict[str, Array] | MappingProxyType[str, Array]:
        tensors, names = segment.request.state.tensors, self._state
        return tensors if len(names) == len(tensors) else {name: tensors[name] for name in names}

    def run_logit_rows(self, slot: int, num_tokens: int, num_rows: int, logits: Array | None, number: int = 0) -> None:
        """Compute the logits of the requested rows of one chunk, in groups if the executable has a fixed length.

        Args:
            slot: chunk slot that holds the chunk.
            num_tokens: number of rows that contain tokens, 1 to C.
            num_rows: number of requested rows, 1 to C.
            logits: float32 [N, V], written completely; N is `num_rows` rounded up to a multiple of `logit_group`. None
                if another rank receives the logits.
            number: number of the chunk if other ranks compute it too; see `Key.number`.
        """
        buffers = self._slots[slot]
        step, tokens = num_rows, slice(num_tokens)
        if self._fixed_length is not None:
            step, tokens = self._fixed_length, slice(None)
            buffers.clear_padding(self.subgraph.inputs, num_tokens, num_rows)
        for start in range(0, num_rows, step):
            group = slice(start, start + step)
            inputs, outputs = self._whole[slot]
            if step < self._chunk_length:
                inputs = buffers.views(self.subgraph.inputs, tokens, group)
                outputs = buffers.views(self._outputs, tokens, group)
            if self._logits is not None and logits is not None:
                outputs = {**outputs, self._logits: logits[group]}
            if self._link is not None:
                self._link(inputs, outputs, number)
            else:
                self._compute(inputs, outputs)


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
