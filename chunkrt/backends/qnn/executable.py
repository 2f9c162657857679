"""Running a compiled context: buffers bound once, values converted at its edges."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chunkrt.backends.base import Array
from chunkrt.backends.qnn.library import Htp
from chunkrt.backends.qnn.support import graph_rows
from chunkrt.errors import BackendError, DeviceLostError
from chunkrt.graph.plan import Plan, Subgraph, resolve

FLOAT16_SUFFIX = ".float16"
"""Added to the names of a compiled subgraph's inputs and outputs."""


class Context:
    """One context on the NPU. Inputs and outputs live in float16 buffers that are bound once and never move.

    Args:
        name: the subgraph's, for messages.
        inputs, outputs: shapes by name.
    """

    def __init__(
        self,
        name: str,
        inputs: Mapping[str, Sequence[int]],
        outputs: Mapping[str, Sequence[int]],
        session: Any,
        htp: Htp,
    ) -> None:
        self._name = name
        self._session = session
        self._binding = session.io_binding()
        self._values: list[Any] = []
        self.buffers: dict[str, NDArray[np.float16]] = {}
        self._is_finite: dict[str, NDArray[np.bool_]] = {}
        for bind, shapes in (
            (self._binding.bind_ortvalue_input, inputs),
            (self._binding.bind_ortvalue_output, outputs),
        ):
            for value_name, shape in shapes.items():
                value, buffer = _buffer(tuple(shape), htp)
                bind(value_name + FLOAT16_SUFFIX, value)
                self._values.append(value)
                self.buffers[value_name] = buffer
                self._is_finite[value_name] = np.empty(buffer.shape, np.bool_)

    def enter(self, name: str, array: Array) -> None:
        """Put the first rows of an input. Raises BackendError if a value is beyond float16."""
        buffer = self.buffers[name][: len(array)]
        with np.errstate(over="ignore", invalid="ignore"):  # told in words
            np.copyto(buffer, array, casting="same_kind")
        self.check_finite(name, len(array))

    def run(self) -> None:
        """Raises DeviceLostError if the NPU fails."""
        try:
            self._session.run_with_iobinding(self._binding)
        except Exception as error:  # ONNX Runtime raises many unrelated types
            raise DeviceLostError(f"the NPU failed in subgraph {self._name}: {error}") from error

    def check_finite(self, name: str, num_rows: int) -> None:
        """Both sides: a grid makes something of an infinity, and hides it."""
        if not np.isfinite(self.buffers[name][:num_rows], out=self._is_finite[name][:num_rows]).all():
            raise BackendError(f"{name} left the range of float16 on the NPU; run this model with --npu native")


class QnnExecutable:
    """A static subgraph: it takes whole chunks."""

    def __init__(self, subgraph: Subgraph, plan: Plan, chunk_length: int, session: Any, htp: Htp) -> None:
        self.fixed_length: int | None = chunk_length
        rows = graph_rows(chunk_length)
        inputs, outputs = (
            {name: resolve(plan.tensors[name].shape, {"T": rows, "R": rows}) for name in names}
            for names in (subgraph.inputs, subgraph.outputs)
        )
        self._context = Context(subgraph.name, inputs, outputs, session, htp)
        self._one_call = threading.Lock()

    def run(self, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> None:
        """See `Executable.run`. Calls from several threads take turns, as they would on the NPU.

        Raises:
            DeviceLostError: the NPU failed.
            BackendError: a value is beyond float16.
        """
        context = self._context
        with self._one_call:
            for name, array in inputs.items():
                context.enter(name, array)
            context.run()
            for name, array in outputs.items():
                context.check_finite(name, len(array))
                np.copyto(array, context.buffers[name][: len(array)])


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
