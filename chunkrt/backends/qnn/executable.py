"""Execution of a compiled context, whose buffers are bound once and whose inputs and outputs are converted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from threading import Lock
from time import perf_counter_ns
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from chunkrt.backends.base import Array, Passage
from chunkrt.backends.qnn.session_buffers import Buffer, BufferForm, ordinary_buffer
from chunkrt.engine_directory.store import WeightStore
from chunkrt.errors import BackendError, DeviceLostError, NumberRangeError
from chunkrt.graph.plan import ATTENTION_OPS, INT8_GROUP, Node, Plan, Subgraph, resolve
from chunkrt.graph.static_attention import has_int8_caches, is_convolution, kept_slots, num_groups, static_slots
from chunkrt.quant.arithmetic import quantize_rows

Result = TypeVar("Result")

FLOAT16_SUFFIX, INT8_SUFFIX = ".float16", ".int8"
"""Suffixes of a compiled subgraph's inputs and outputs."""


class NpuCall(Protocol):
    """Function that calls another one on the NPU's thread, with a time limit."""

    def __call__(self, function: Callable[[], Result], /) -> Result:
        """Return the result of a function; see `TimedCalls.call`."""
        ...


Forms = Mapping[str, BufferForm]
OpenContext = Callable[[Forms, Forms, int], "Context"]
"""Function that opens a context for forms of inputs and outputs by name, and a number of calls at once."""
Graphs = Mapping[int, OpenContext]
"""Maps the number of rows of each compiled graph of a subgraph to the function that opens its context."""


NUM_PLACES = 2
"""Number of buffer sets: while the NPU computes with one set, the inputs of the next call are converted into the other.
"""


class Held(NamedTuple):
    """Positions of a history that the buffers of caches and rings hold: those up to `end` that the graph sees."""

    history: int | None
    end: int


NOTHING = Held(None, 0)


class Context:
    """A context on the NPU, with its buffers.

    Args:
        name: the subgraph's name, for messages.
        session: a session of ONNX Runtime over a graph of a fixed number of rows.
        inputs, outputs: forms of the buffers by name.
        call: calls a function on the processor, which computes one call at a time; see `TimedCalls.call`.
        num_places: number of calls that can be in progress at once.
        allocate: makes a buffer of a form.

    Attributes:
        held: positions of a history in the buffers.
    """

    def __init__(
        self,
        name: str,
        session: Any,
        inputs: Forms,
        outputs: Forms,
        call: NpuCall,
        *,
        num_places: int,
        allocate: Callable[[BufferForm], Buffer] = ordinary_buffer,
    ) -> None:
        self.held = NOTHING
        self._name = name
        self._session, self._call = session, call
        self._places = [BoundBuffers(session.io_binding(), inputs, outputs, allocate) for _ in range(num_places)]

    @property
    def place(self) -> BoundBuffers:
        """Free buffers, or else the first set: consecutive calls find theirs in the processor's caches."""
        return next((place for place in self._places if not place.turn.locked()), self._places[0])

    def compute(self, place: BoundBuffers) -> Passage:
        """Run the graph on the values in the buffers. Raises DeviceLostError if the NPU fails or does not respond."""
        entered_ns = perf_counter_ns()

        def run() -> Passage:
            began_ns = perf_counter_ns()
            self._session.run_with_iobinding(place.binding)
            return Passage(entered_ns, began_ns, perf_counter_ns())

        try:
            return self._call(run)
        except Exception as error:  # ONNX Runtime raises many unrelated types
            raise DeviceLostError(f"the NPU failed in subgraph {self._name}: {error}") from error

    def probe(self) -> None:
        """Run the graph once on the values that its buffers contain. Raises as `compute`."""
        place = self.place
        with place.turn:
            self.compute(place)


class ContextSlot:
    """Place of a context that can be closed and opened again.

    Args:
        name: the subgraph's name, for messages.
        open_context: opens the context.

    Raises:
        DeviceLostError: the NPU refuses the context, lacks memory for its inputs and outputs, or does not respond.
    """

    def __init__(self, name: str, open_context: Callable[[], Context]) -> None:
        self._name, self._open = name, open_context
        self._context: Context | None = self._opened()

    @property
    def context(self) -> Context:
        """The context. Access to a closed one raises DeviceLostError."""
        if (context := self._context) is None:
            raise DeviceLostError(f"the context of {self._name} is closed, because the NPU failed")
        return context

    def close(self) -> None:
        """Release the context, so that its memory is free when all its calls have returned."""
        self._context = None

    def reopen(self) -> None:
        """Open the context again, and run it once. Raises DeviceLostError as the constructor, or if the run fails."""
        context = self._opened()
        context.probe()
        self._context = context

    def _opened(self) -> Context:
        try:
            return self._open()
        except Exception as error:  # ONNX Runtime raises many unrelated types
            raise DeviceLostError(f"the NPU refuses the context of {self._name}: {error}") from error


class BoundBuffers:
    """The buffers of one call, by name, bound to the session at fixed addresses.

    Attributes:
        turn: lock that a call holds while it uses the buffers.
    """

    def __init__(
        self,
        binding: Any,
        inputs: Forms,
        outputs: Forms,
        allocate: Callable[[BufferForm], Buffer],
    ) -> None:
        self.binding, self.turn = binding, Lock()
        self.buffers: dict[str, NDArray[Any]] = {}
        self._values: list[Any] = []
        self._is_finite: dict[str, NDArray[np.bool_]] = {}
        for bind, forms in ((binding.bind_ortvalue_input, inputs), (binding.bind_ortvalue_output, outputs)):
            for name, form in forms.items():
                buffer, value = allocate(form)
                bind(name + (INT8_SUFFIX if form.dtype is np.int8 else FLOAT16_SUFFIX), value)
                self._values.append(value)
                self.buffers[name] = buffer
                self._is_finite[name] = np.empty(buffer.shape, np.bool_)

    def enter(self, name: str, array: Array) -> None:
        """Convert an input into the first rows of its buffer. Raises NumberRangeError if a value exceeds float16."""
        with np.errstate(over="ignore", invalid="ignore"):  # reported as an error
            np.copyto(self.buffers[name][: len(array)], array, casting="same_kind")
        self.check_finite(name, len(array))

    def enter_at(self, name: str, slots: NDArray[np.int64], array: Array) -> None:
        """Convert a range of a cache's second axis into its buffer; rows of an int8 cache into those of integers and of
        scales. Raises NumberRangeError if a value or a scale exceeds float16.
        """
        if self.buffers[name].dtype == np.int8:
            integers, scales = _unpack_rows(array, self.buffers[name].shape[-1])
            self.buffers[name][:, slots] = integers
            name, array = name + SCALES_SUFFIX, scales
        with np.errstate(over="ignore"):  # reported as an error
            values = array.astype(np.float16)
        if not np.isfinite(values).all():
            raise self._beyond(name)
        self.buffers[name][:, slots] = values

    def leave(self, name: str, array: Array) -> None:
        """Convert the first rows of an output's buffer. Raises NumberRangeError if a value exceeds float16."""
        self.check_finite(name, len(array))
        np.copyto(array, self.buffers[name][: len(array)])

    def check_finite(self, name: str, num_rows: int) -> None:
        """Raise NumberRangeError for an infinity. Inputs are checked too, because quantising an infinity yields a
        finite value.
        """
        if not np.isfinite(self.buffers[name][:num_rows], out=self._is_finite[name][:num_rows]).all():
            raise self._beyond(name)

    @staticmethod
    def _beyond(name: str) -> NumberRangeError:
        return NumberRangeError(
            f"{name} left the range of float16 on the NPU; run this model with `on_npu_failure='fallback'`, or "
            "`npu='native'`"
        )


class ContextSlots:
    """The contexts of a subgraph's graphs, which have different numbers of rows.

    Args:
        name: the subgraph's name, for messages.
        openers: functions that open a context, by the number of rows of its graph.

    Raises:
        DeviceLostError: see `ContextSlot`.
    """

    def __init__(self, name: str, openers: Mapping[int, Callable[[], Context]]) -> None:
        self._slots = {rows: ContextSlot(name, openers[rows]) for rows in sorted(openers)}

    def __iter__(self) -> Iterator[ContextSlot]:
        return iter(self._slots.values())

    def smallest(self, num_rows: int) -> Context:
        """Return the context of the smallest graph that holds a number of rows. Raises as `ContextSlot.context`."""
        return next(slot for rows, slot in self._slots.items() if num_rows <= rows).context


class QnnExecutable:
    """Executable of a static subgraph. With a single graph it takes complete chunks; with several graphs it takes any
    number of rows, and runs the smallest graph that holds them.
    """

    def __init__(self, subgraph: Subgraph, plan: Plan, chunk_length: int, graphs: Graphs) -> None:
        self.fixed_length: int | None = chunk_length if len(graphs) == 1 else None

        def opener(rows: int) -> Callable[[], Context]:
            inputs, outputs = (
                {name: BufferForm(resolve(plan.tensors[name].shape, {"T": rows, "R": rows})) for name in names}
                for names in (subgraph.inputs, subgraph.outputs)
            )
            return lambda: graphs[rows](inputs, outputs, NUM_PLACES)

        self.slots = ContextSlots(subgraph.name, {rows: opener(rows) for rows in graphs})

    def run(self, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> Passage:
        """See `Executable.run`. If several threads call this, one call computes while the others convert values.

        Raises:
            DeviceLostError: the NPU failed.
            NumberRangeError: a value exceeds float16.
        """
        context = self.slots.smallest(max(map(len, inputs.values())))
        place = context.place
        with place.turn:
            for name, array in inputs.items():
                place.enter(name, array)
                place.buffers[name][len(array) :] = 0
            passage = context.compute(place)
            for name, array in outputs.items():
                place.leave(name, array)
        return passage


NEW_SUFFIX, ROWS_SUFFIX, SCALES_SUFFIX = ".new", ".rows", ".scales"
"""Suffixes of names: of the output with a state's new rows, of the input with the chunk's rows of a rotary table, and
of the input with the scales of an int8 cache.
"""

HIDDEN = np.float16(-30000)
"""Term added to the score of a slot that a row does not see. The sum with a score is finite in float16, and its
exponential is 0.
"""


def mask_name(node: Node) -> str:
    """Name of the mask that layers with the same window and slots share: float16 [rows, past_slots + rows]."""
    return f"mask.{node.attributes['window']}.{static_slots(node)}"


class BufferSlots(NamedTuple):
    """Slots of a graph's buffer for a cache: the first `kept` positions, and a ring of later positions.

    Attributes:
        size: number of slots.
    """

    size: int
    kept: int

    @staticmethod
    def of(node: Node) -> BufferSlots:
        """Return the slots of a node with static attention."""
        return BufferSlots(static_slots(node), kept_slots(node) or 0)

    @property
    def ring(self) -> int:
        """Number of slots of the ring."""
        return self.size - self.kept

    def positions(self, start: int, end: int) -> NDArray[np.int64]:
        """Return the positions from `start` to `end` - 1 that the buffer holds once it holds those before `end`."""
        kept = np.arange(start, min(end, self.kept))
        return np.concatenate([kept, np.arange(max(start, end - self.ring, self.kept), end)])

    def slots(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the slot of each position."""
        slots: NDArray[np.int64] = np.where(
            positions < self.kept, positions, self.kept + (positions - self.kept) % self.ring
        )
        return slots

    def held(self, end: int) -> NDArray[np.int64]:
        """Return the position in each slot if the buffer holds the positions before `end`; slots that hold none have a
        number of `end` or more.
        """
        slots = np.arange(self.size)
        turns = np.where(slots < self.kept, 0, np.maximum(end - 1 - slots, 0) // self.ring)
        held: NDArray[np.int64] = slots + turns * self.ring
        return held


class WindowEdges:
    """Inputs and outputs of a graph with attention.

    values: values between subgraphs.
    tables: rotary tables; the chunk's rows of each are an input.
    masks: by name of the mask, a node that uses it.
    caches: caches and rings, with the slots of the graph's buffer for each.
    int8_caches: those of the caches that are int8; their scales are inputs of their own.
    convolutions: states of convolutions, which are passed as rows.
    inputs, outputs: forms of all inputs and outputs by name.
    """

    def __init__(self, subgraph: Subgraph, plan: Plan, rows: int) -> None:
        attention = [node for node in subgraph.nodes if node.op in ATTENTION_OPS]
        self.values = [name for name in subgraph.inputs if plan.tensors[name].shape[0] == "T"]
        self.tables = list(dict.fromkeys(name for node in attention for name in node.inputs[3:5]))
        self.masks = {mask_name(node): node for node in attention}
        self.caches = {cache: BufferSlots.of(node) for node in attention for cache in node.inputs[5:7]}
        self.int8_caches = {cache for node in attention if has_int8_caches(node) for cache in node.inputs[5:7]}
        shapes = {name: plan.tensors[name].shape for name in (*self.values, *subgraph.outputs, *self.tables)}
        self.convolutions = [node.inputs[5] for node in subgraph.nodes if is_convolution(node)]
        self.inputs = {name: BufferForm(resolve(shapes[name], {"T": rows, "R": rows})) for name in self.values}
        self.inputs |= {name + ROWS_SUFFIX: BufferForm((rows, int(shapes[name][1]))) for name in self.tables}
        self.inputs |= {name: BufferForm((rows, static_slots(node) + rows)) for name, node in self.masks.items()}
        self.outputs = {name: BufferForm(resolve(shapes[name], {"T": rows, "R": rows})) for name in subgraph.outputs}
        for cache, buffer in self.caches.items():
            kv_heads, _, dim = (int(size) if size not in ("P", "W") else 0 for size in plan.tensors[cache].shape)
            is_int8 = cache in self.int8_caches
            self.inputs[cache] = BufferForm((kv_heads, buffer.size, dim), np.int8 if is_int8 else np.float16)
            if is_int8:
                self.inputs[cache + SCALES_SUFFIX] = BufferForm((kv_heads, buffer.size, num_groups(dim)))
            self.outputs[cache + NEW_SUFFIX] = BufferForm((kv_heads, rows, dim))
        for state in self.convolutions:
            channels, past = resolve(plan.tensors[state].shape, {})
            self.inputs[state] = BufferForm((past, channels))
            self.outputs[state + NEW_SUFFIX] = BufferForm((rows, channels))


class WindowedExecutable:
    """Executable of a subgraph with attention or convolutions. It takes any number of rows up to the chunk length, and
    pads them itself to the smallest graph that holds them. Each graph's buffers hold a copy of the state's slots.
    """

    fixed_length: int | None = None

    def __init__(
        self,
        subgraph: Subgraph,
        plan: Plan,
        graphs: Graphs,
        weights: WeightStore,
    ) -> None:
        self._name = subgraph.name
        edges = WindowEdges(subgraph, plan, max(graphs))
        self._values, self._masks, self._caches = edges.values, edges.masks, edges.caches
        self._int8_caches = edges.int8_caches
        self._convolutions = edges.convolutions
        self._tables = {name: weights.array(name) for name in edges.tables}

        def opener(rows: int) -> Callable[[], Context]:
            edges = WindowEdges(subgraph, plan, rows)
            # The state orders the chunks of a sequence, so the next chunk's inputs cannot be converted while a chunk is
            # computed.
            return lambda: graphs[rows](edges.inputs, edges.outputs, 1)

        self.slots = ContextSlots(subgraph.name, {rows: opener(rows) for rows in graphs})

    def run(self, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> Passage:
        """See `Executable.run`. Raises as `run_after`."""
        return self.run_after(inputs, outputs, None)

    def run_after(self, inputs: Mapping[str, Array], outputs: Mapping[str, Array], history: int | None) -> Passage:
        """See `HistoryExecutable.run_after`. Calls from several threads take turns.

        Raises:
            DeviceLostError: the NPU failed.
            NumberRangeError: a value exceeds float16.
            BackendError: the history is longer than the graph's window.
        """
        num_rows = len(inputs[self._values[0]])
        position = int(inputs["position"][0]) if self._caches else 0  # convolutions do not need it
        first = int(inputs["rope_position"][0]) if "rope_position" in inputs else position
        context = self.slots.smallest(num_rows)
        place = context.place
        with place.turn:
            for name in self._values:
                place.enter(name, inputs[name])
                place.buffers[name][num_rows:] = 0
            for name, table in self._tables.items():
                place.buffers[name + ROWS_SUFFIX][:num_rows] = table[first : first + num_rows]
            for name, node in self._masks.items():
                self._mask(place.buffers[name], node, position, num_rows)
            held, context.held = context.held, NOTHING
            is_same = history is not None and held.history == history and held.end <= position
            self._copy(place, inputs, held.end if is_same else 0, position)
            for state in self._convolutions:
                place.enter(state, inputs[state].T)
            passage = context.compute(place)
            for cache in self._caches:
                place.check_finite(cache + NEW_SUFFIX, len(place.buffers[cache]))
            for state in self._convolutions:
                place.check_finite(state + NEW_SUFFIX, num_rows)
            for name, array in outputs.items():
                place.leave(name, array)
            for state in self._convolutions:
                new = place.buffers[state + NEW_SUFFIX][:num_rows]
                inputs[state][...] = np.concatenate([inputs[state].T, new])[num_rows:].T
            for cache in self._caches:
                slots = np.arange(position, position + num_rows) % inputs[cache].shape[1]
                new = place.buffers[cache + NEW_SUFFIX][:, :num_rows]
                inputs[cache][:, slots] = _pack_rows(new) if cache in self._int8_caches else new
            self._copy(place, inputs, position, position + num_rows)
            context.held = Held(history, position + num_rows)
        return passage

    def _copy(self, place: BoundBuffers, inputs: Mapping[str, Array], start: int, end: int) -> None:
        """Copy the positions of the state that the graph sees. Raises NumberRangeError if a value exceeds float16."""
        for cache, buffer in self._caches.items():
            positions = buffer.positions(start, end)
            of_state = positions % inputs[cache].shape[1]
            place.enter_at(cache, buffer.slots(positions), inputs[cache][:, of_state])

    def _mask(self, mask: NDArray[np.float16], node: Node, position: int, num_rows: int) -> None:
        """Return the mask: 0 if a row sees a slot or a row of the chunk, else HIDDEN. Rows of padding have the mask of
        the last row.
        """
        buffer, window, kept = BufferSlots.of(node), int(str(node.attributes["window"])), kept_slots(node)
        if not window and kept is None and position > buffer.size:
            raise BackendError(f"{self._name} was compiled for {buffer.size} positions of history, but has {position}")
        own, held = np.arange(len(mask)), buffer.held(position)
        rows = np.minimum(own, num_rows - 1)[:, None] + position
        keys = np.concatenate([np.where(held < position, held, np.iinfo(np.int64).max), position + own])
        sees = keys <= rows
        if window:
            sees &= keys > rows - window
        if kept is not None:
            sees &= (keys < kept) | (keys > rows - buffer.ring)
        np.copyto(mask, np.where(sees, np.float16(0), HIDDEN))


def _pack_rows(values: NDArray[Any]) -> NDArray[np.int8]:
    """Return rows of an int8 cache, int8 [..., head_dim + 4 * groups], for finite values [..., head_dim].

    A row consists of the native backend's integers, followed by the bytes of one float32 scale for each group of
    INT8_GROUP values.
    """
    groups = [
        quantize_rows(values[..., begin : begin + INT8_GROUP].astype(np.float32))
        for begin in range(0, values.shape[-1], INT8_GROUP)
    ]
    scales = np.concatenate([scale for _, scale in groups], axis=-1)
    return np.concatenate([*(integers for integers, _ in groups), scales.view(np.int8)], axis=-1)


def _unpack_rows(rows: NDArray[np.int8], head_dim: int) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Return the integers [..., head_dim] and the scales [..., groups] of rows of an int8 cache, as views."""
    return rows[..., :head_dim], rows[..., head_dim:].view(np.float32)
