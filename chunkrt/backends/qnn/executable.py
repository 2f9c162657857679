"""Execution of a compiled context, whose buffers are bound once and whose inputs and outputs are converted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from threading import Lock
from time import perf_counter_ns
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chunkrt.backends.base import Array, Passage
from chunkrt.backends.qnn.library import Htp
from chunkrt.backends.qnn.support import graph_rows
from chunkrt.errors import DeviceLostError, NumberRangeError
from chunkrt.graph.plan import Plan, Subgraph, resolve

FLOAT16_SUFFIX = ".float16"
"""Suffixes of a compiled subgraph's inputs and outputs."""


NUM_PLACES = 2
"""Number of buffer sets: while the NPU computes with one set, the inputs of the next call are converted into the other.
"""


class Context:
    """A context on the NPU, with its buffers.

    Args:
        name: the subgraph's name, for messages.
        session: a session of ONNX Runtime over a graph of `graph_rows` rows.
        inputs, outputs: shapes by name.
        htp: the processor, which computes one call at a time.
        num_places: number of calls that can be in progress at once.
    """

    def __init__(
        self,
        name: str,
        session: Any,
        inputs: Mapping[str, Sequence[int]],
        outputs: Mapping[str, Sequence[int]],
        htp: Htp,
        *,
        num_places: int,
    ) -> None:
        self._name = name
        self._session, self._turn = session, htp.turn
        self._places = [BoundBuffers(session.io_binding(), inputs, outputs) for _ in range(num_places)]

    @property
    def place(self) -> BoundBuffers:
        """Free buffers, or else the first set: consecutive calls find theirs in the processor's caches."""
        return next((place for place in self._places if not place.turn.locked()), self._places[0])

    def compute(self, place: BoundBuffers) -> Passage:
        """Run the graph on the values in the buffers. Raises DeviceLostError if the NPU fails."""
        entered_ns = perf_counter_ns()
        with self._turn:
            began_ns = perf_counter_ns()
            try:
                self._session.run_with_iobinding(place.binding)
            except Exception as error:  # ONNX Runtime raises many unrelated types
                raise DeviceLostError(f"the NPU failed in subgraph {self._name}: {error}") from error
            return Passage(entered_ns, began_ns, perf_counter_ns())


class BoundBuffers:
    """The float16 buffers of one call, by name, bound to the session at fixed addresses.

    Attributes:
        turn: lock that a call holds while it uses the buffers.
    """

    def __init__(self, binding: Any, inputs: Mapping[str, Sequence[int]], outputs: Mapping[str, Sequence[int]]) -> None:
        import onnxruntime as ort

        self.binding, self.turn = binding, Lock()
        self.buffers: dict[str, NDArray[np.float16]] = {}
        self._values: list[Any] = []
        self._is_finite: dict[str, NDArray[np.bool_]] = {}
        for bind, shapes in ((binding.bind_ortvalue_input, inputs), (binding.bind_ortvalue_output, outputs)):
            for name, shape in shapes.items():
                buffer = np.zeros(tuple(shape), np.float16)
                value = ort.OrtValue.ortvalue_from_numpy(buffer)
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

    def __init__(self, subgraph: Subgraph, plan: Plan, chunk_length: int, session: Any, htp: Htp) -> None:
        self.fixed_length: int | None = chunk_length
        rows = graph_rows(chunk_length)
        inputs, outputs = (
            {name: resolve(plan.tensors[name].shape, {"T": rows, "R": rows}) for name in names}
            for names in (subgraph.inputs, subgraph.outputs)
        )
        self._context = Context(subgraph.name, session, inputs, outputs, htp, num_places=NUM_PLACES)

    def run(self, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> Passage:
        """See `Executable.run`. If several threads call this, one call computes while the others convert values.

        Raises:
            DeviceLostError: the NPU failed.
            NumberRangeError: a value exceeds float16.
        """
        place = self._context.place
        with place.turn:
            for name, array in inputs.items():
                place.enter(name, array)
            passage = self._context.compute(place)
            for name, array in outputs.items():
                place.leave(name, array)
        return passage
