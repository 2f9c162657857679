"""Running a compiled context: buffers bound once, values converted at its edges."""

from __future__ import annotations

from collections.abc import Mapping
from queue import LifoQueue
from time import perf_counter_ns
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chunkrt.backends.base import Array, Passage
from chunkrt.backends.qnn.library import Htp
from chunkrt.backends.qnn.support import graph_rows
from chunkrt.errors import BackendError, DeviceLostError
from chunkrt.graph.plan import Plan, Subgraph, resolve

FLOAT16_SUFFIX = ".float16"
"""Added to the names of a compiled subgraph's inputs and outputs."""


NUM_PLACES = 2
"""While the NPU computes from one, the values of the next call enter the other."""


class QnnExecutable:
    """One context on the NPU. Inputs and outputs live in float16 buffers that are bound once and never move.

    Args:
        session: of ONNX Runtime, over a graph of `graph_rows(chunk_length)` rows.
        htp: whose turn calls wait for.
    """

    def __init__(self, subgraph: Subgraph, plan: Plan, chunk_length: int, session: Any, htp: Htp) -> None:
        self.fixed_length: int | None = chunk_length
        self._name = subgraph.name
        self._session, self._turn = session, htp.turn
        # The last one that was free comes first: calls one after the other find theirs in the caches.
        self._free: LifoQueue[_Place] = LifoQueue()
        for _ in range(NUM_PLACES):
            self._free.put(_Place(subgraph, plan, chunk_length, session.io_binding(), htp))

    def run(self, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> Passage:
        """See `Executable.run`. Of calls from several threads one computes at a time, while others convert.

        Raises:
            DeviceLostError: the NPU failed.
            BackendError: a value is beyond float16.
        """
        place = self._free.get()
        try:
            for name, array in inputs.items():
                place.enter(name, array)
            entered_ns = perf_counter_ns()
            with self._turn:
                began_ns = perf_counter_ns()
                try:
                    self._session.run_with_iobinding(place.binding)
                except Exception as error:  # ONNX Runtime raises many unrelated types
                    raise DeviceLostError(f"the NPU failed in subgraph {self._name}: {error}") from error
                ended_ns = perf_counter_ns()
            for name, array in outputs.items():
                place.leave(name, array)
        finally:
            self._free.put(place)
        return Passage(entered_ns, began_ns, ended_ns)


class _Place:
    """The buffers of one call, bound to the session."""

    def __init__(self, subgraph: Subgraph, plan: Plan, chunk_length: int, binding: Any, htp: Htp) -> None:
        self.binding = binding
        self._values: list[Any] = []
        rows = graph_rows(chunk_length)
        self._chunks: dict[str, NDArray[np.float16]] = {}
        self._is_finite: dict[str, NDArray[np.bool_]] = {}
        for name in (*subgraph.inputs, *subgraph.outputs):
            value, buffer = _buffer(resolve(plan.tensors[name].shape, {"T": rows, "R": rows}), htp)
            bind = binding.bind_ortvalue_input if name in subgraph.inputs else binding.bind_ortvalue_output
            bind(name + FLOAT16_SUFFIX, value)
            self._values.append(value)
            self._chunks[name] = buffer[:chunk_length]
            self._is_finite[name] = np.empty(self._chunks[name].shape, np.bool_)

    def enter(self, name: str, array: Array) -> None:
        """Convert an input. Raises BackendError if it is beyond float16."""
        with np.errstate(over="ignore", invalid="ignore"):  # told below, in words
            np.copyto(self._chunks[name], array, casting="same_kind")
        self._check_finite(name)

    def leave(self, name: str, array: Array) -> None:
        """Convert an output. Raises BackendError if it is beyond float16."""
        self._check_finite(name)
        np.copyto(array, self._chunks[name])

    def _check_finite(self, name: str) -> None:
        """Both sides: a grid makes something of an infinity, and hides it."""
        if not np.isfinite(self._chunks[name], out=self._is_finite[name]).all():
            raise BackendError(f"{name} left the range of float16 on the NPU; run this model with --npu native")


def _buffer(shape: tuple[int, ...], htp: Htp) -> tuple[Any, NDArray[np.float16]]:
    """A float16 buffer as ONNX Runtime and as NumPy see it: shared with the NPU where the machine has such memory."""
    import onnxruntime as ort

    if htp.memory is not None:
        value = ort.OrtValue.ortvalue_from_shape_and_type(shape, np.float16, memory_info=htp.memory)
        array = value.numpy()
        array[...] = 0
        return value, array
    array = np.zeros(shape, np.float16)
    return ort.OrtValue.ortvalue_from_numpy(array), array
