"""Execution of a compiled context, whose buffers are bound once and whose inputs and outputs are converted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from time import perf_counter_ns
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from chunkrt.backends.base import Array, Passage
from chunkrt.backends.qnn.buffers import Buffer, ordinary_buffer
from chunkrt.backends.qnn.htp_support import graph_rows
from chunkrt.engine_directory.store import WeightStore
from chunkrt.errors import BackendError, DeviceLostError, NumberRangeError
from chunkrt.graph.plan import ATTENTION_OPS, Node, Plan, Subgraph, resolve
from chunkrt.graph.static_attention import is_convolution, static_slots

Result = TypeVar("Result")

FLOAT16_SUFFIX = ".float16"
"""Suffixes of a compiled subgraph's inputs and outputs."""


class Call(Protocol):
    """Function that calls another one on the NPU's thread, with a time limit."""

    def __call__(self, function: Callable[[], Result], /) -> Result:
        """Return the result of a function; see `TimedCalls.call`."""
        ...


Shapes = Mapping[str, Sequence[int]]
OpenContext = Callable[[Shapes, Shapes, int], "Context"]
"""Function that opens a context for shapes of inputs and outputs by name, and a number of calls at once."""


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
        session: a session of ONNX Runtime over a graph of `graph_rows` rows.
        inputs, outputs: shapes by name.
        call: calls a function on the processor, which computes one call at a time; see `TimedCalls.call`.
        num_places: number of calls that can be in progress at once.
        allocate: makes a buffer of a shape.

    Attributes:
        held: positions of a history in the buffers.
    """

    def __init__(
        self,
        name: str,
        session: Any,
        inputs: Mapping[str, Sequence[int]],
        outputs: Mapping[str, Sequence[int]],
        call: Call,
        *,
        num_places: int,
        allocate: Callable[[Sequence[int]], Buffer] = ordinary_buffer,
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
    """The float16 buffers of one call, by name, bound to the session at fixed addresses.

    Attributes:
        turn: lock that a call holds while it uses the buffers.
    """

    def __init__(
        self,
        binding: Any,
        inputs: Mapping[str, Sequence[int]],
        outputs: Mapping[str, Sequence[int]],
        allocate: Callable[[Sequence[int]], Buffer],
    ) -> None:
        self.binding, self.turn = binding, Lock()
        self.buffers: dict[str, NDArray[np.float16]] = {}
        self._values: list[Any] = []
        self._is_finite: dict[str, NDArray[np.bool_]] = {}
        for bind, shapes in ((binding.bind_ortvalue_input, inputs), (binding.bind_ortvalue_output, outputs)):
            for name, shape in shapes.items():
                buffer, value = allocate(shape)
                bind(name + FLOAT16_SUFFIX, value)
                self._values.append(value)
                self.buffers[name] = buffer
                self._is_finite[name] = np.empty(buffer.shape, np.bool_)

    def enter(self, name: str, array: Array) -> None:
        """Convert an input into the first rows of its buffer. Raises NumberRangeError if a value exceeds float16."""
        with np.errstate(over="ignore", invalid="ignore"):  # reported as an error
            np.copyto(self.buffers[name][: len(array)], array, casting="same_kind")
        self.check_finite(name, len(array))

    def enter_at(self, name: str, slots: NDArray[np.int64], array: Array) -> None:
        """Convert a range of an input's second axis into its buffer. Raises NumberRangeError if a value exceeds
        float16.
        """
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


class QnnExecutable:
    """Executable of a static subgraph, which takes complete chunks."""

    def __init__(self, subgraph: Subgraph, plan: Plan, chunk_length: int, open_context: OpenContext) -> None:
        self.fixed_length: int | None = chunk_length
        rows = graph_rows(chunk_length)
        inputs, outputs = (
            {name: resolve(plan.tensors[name].shape, {"T": rows, "R": rows}) for name in names}
            for names in (subgraph.inputs, subgraph.outputs)
        )
        self.slot = ContextSlot(subgraph.name, lambda: open_context(inputs, outputs, NUM_PLACES))

    def run(self, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> Passage:
        """See `Executable.run`. If several threads call this, one call computes while the others convert values.

        Raises:
            DeviceLostError: the NPU failed.
            NumberRangeError: a value exceeds float16.
        """
        context = self.slot.context
        place = context.place
        with place.turn:
            for name, array in inputs.items():
                place.enter(name, array)
            passage = context.compute(place)
            for name, array in outputs.items():
                place.leave(name, array)
        return passage


NEW_SUFFIX, ROWS_SUFFIX = ".new", ".rows"
"""Suffixes of names: of the output with a state's new rows, and of the input with the chunk's rows of a rotary table.
"""

HIDDEN = np.float16(-30000)
"""Term added to the score of a slot that a row does not see. The sum with a score is finite in float16, and its
exponential is 0.
"""


def mask_name(node: Node) -> str:
    """Name of the mask that layers with the same window and slots share: float16 [rows, past_slots + rows]."""
    return f"mask.{node.attributes['window']}.{static_slots(node)}"


class WindowEdges:
    """Inputs and outputs of a graph with attention.

    values: values between subgraphs.
    tables: rotary tables; the chunk's rows of each are an input.
    masks: by name of the mask, a node that uses it.
    caches: caches and rings, with the number of slots that the graph sees.
    convolutions: states of convolutions, which are passed as rows.
    inputs, outputs: shapes of all float16 inputs and outputs by name.
    """

    def __init__(self, subgraph: Subgraph, plan: Plan, rows: int) -> None:
        attention = [node for node in subgraph.nodes if node.op in ATTENTION_OPS]
        self.values = [name for name in subgraph.inputs if plan.tensors[name].shape[0] == "T"]
        self.tables = list(dict.fromkeys(name for node in attention for name in node.inputs[3:5]))
        self.masks = {mask_name(node): node for node in attention}
        self.caches = {cache: static_slots(node) for node in attention for cache in node.inputs[5:7]}
        shapes = {name: plan.tensors[name].shape for name in (*self.values, *subgraph.outputs, *self.tables)}
        self.convolutions = [node.inputs[5] for node in subgraph.nodes if is_convolution(node)]
        self.inputs = {name: resolve(shapes[name], {"T": rows, "R": rows}) for name in self.values}
        self.inputs |= {name + ROWS_SUFFIX: (rows, int(shapes[name][1])) for name in self.tables}
        self.inputs |= {name: (rows, static_slots(node) + rows) for name, node in self.masks.items()}
        self.outputs = {name: resolve(shapes[name], {"T": rows, "R": rows}) for name in subgraph.outputs}
        for cache, past in self.caches.items():
            kv_heads, _, dim = plan.tensors[cache].shape
            self.inputs[cache] = (int(kv_heads), past, int(dim))
            self.outputs[cache + NEW_SUFFIX] = (int(kv_heads), rows, int(dim))
        for state in self.convolutions:
            channels, past = resolve(plan.tensors[state].shape, {})
            self.inputs[state] = (past, channels)
            self.outputs[state + NEW_SUFFIX] = (rows, channels)


class WindowedExecutable:
    """Executable of a subgraph with attention or convolutions. It takes any number of rows up to the chunk length, and
    pads the chunk itself.
    """

    fixed_length: int | None = None

    def __init__(
        self,
        subgraph: Subgraph,
        plan: Plan,
        chunk_length: int,
        open_context: OpenContext,
        weights: WeightStore,
    ) -> None:
        self._name = subgraph.name
        self._rows = rows = graph_rows(chunk_length)
        edges = WindowEdges(subgraph, plan, rows)
        self._values, self._masks, self._caches = edges.values, edges.masks, edges.caches
        self._convolutions = edges.convolutions
        self._tables = {name: weights.array(name) for name in edges.tables}
        # The state orders the chunks of a sequence, so the next chunk's inputs cannot be converted while a chunk is
        # computed.
        self.slot = ContextSlot(subgraph.name, lambda: open_context(edges.inputs, edges.outputs, 1))

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
        context = self.slot.context
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
                inputs[cache][:, slots] = place.buffers[cache + NEW_SUFFIX][:, :num_rows]
            self._copy(place, inputs, position, position + num_rows)
            context.held = Held(history, position + num_rows)
        return passage

    def _copy(self, place: BoundBuffers, inputs: Mapping[str, Array], start: int, end: int) -> None:
        """Copy the positions of the state that the graph sees. Raises NumberRangeError if a value exceeds float16."""
        for cache, past in self._caches.items():
            size = inputs[cache].shape[1]
            slots = np.arange(max(start, end - size), end) % size
            slots = slots[slots < past]
            place.enter_at(cache, slots, inputs[cache][:, slots])

    def _mask(self, mask: NDArray[np.float16], node: Node, position: int, num_rows: int) -> None:
        """Return the mask: 0 if a row sees a slot or a row of the chunk, else HIDDEN. Rows of padding have the mask of
        the last row.
        """
        past, window = static_slots(node), int(str(node.attributes["window"]))
        slots = np.arange(past)
        # the last earlier position in each slot; negative if there is none
        held = slots + (position - 1 - slots) // past * past if window else slots
        if not window and position > past:
            raise BackendError(f"{self._name} was compiled for {past} positions of history, but has {position}")
        rows = np.minimum(np.arange(self._rows), num_rows - 1)[:, None] + position
        keys = np.concatenate(
            [np.where((held >= 0) & (held < position), held, np.iinfo(np.int64).max), position + np.arange(self._rows)]
        )
        sees = keys <= rows
        if window:
            sees &= keys > rows - window
        np.copyto(mask, np.where(sees, np.float16(0), HIDDEN))
