"""The contract between the plan and a backend, which compiles and runs subgraphs.

A backend has the role "npu", the role "cpu", or both roles. `backends/link.py` is the backend of the device "link".
`chunkrt.testing.check_backend` tests whether a backend satisfies this contract.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

from numpy.typing import NDArray

from chunkrt.engine_directory.store import WeightStore
from chunkrt.errors import PartitionError
from chunkrt.graph.plan import Plan, Subgraph
from chunkrt.quant.scheme import Scheme

Array = NDArray[Any]
AttentionMath = Literal["float32", "bfloat16", "int8"]
"""Data type in which attention multiplies queries, keys, values and the softmax's weights."""


@dataclass(frozen=True, kw_only=True)
class Support:
    """Support of a backend for a subgraph; if unsupported, the first unsupported node and the reason."""

    ok: bool
    node: str = ""
    reason: str = ""

    def __bool__(self) -> bool:
        return self.ok

    def require(self, backend: str, subgraph: Subgraph) -> None:
        """Raise PartitionError, with backend, node and reason, unless `ok` is true."""
        if not self.ok:
            raise PartitionError(f"{backend} cannot run {subgraph.name}: node {self.node!r}: {self.reason}")


class Passage(NamedTuple):
    """Times of the phases of a call to an NPU, by `time.perf_counter_ns`.

    Until `entered_ns` the inputs are converted and copied into the NPU's buffers. From `entered_ns` to `began_ns` the
    call waits for other calls. From `began_ns` to `ended_ns` the NPU computes. After that the outputs are converted.
    """

    entered_ns: int
    began_ns: int
    ended_ns: int


@runtime_checkable
class Executable(Protocol):
    """One compiled subgraph."""

    fixed_length: int | None
    """Number of rows that every call must have (an NPU's chunk), or None for any number from 1 to the chunk length."""

    def run(self, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> Passage | None:
        """Compute the outputs from the inputs.

        Args:
            inputs: the subgraph's `inputs` and `state` by name, C-contiguous, dtypes as in the plan. A value has
                shape [rows, ...]; a cache is float32 or float16 [kv_heads, P, D] and is updated in place.
                "position" is int64 [1]: the position of row 0.
            outputs: the subgraph's `outputs` by name, C-contiguous; every element is written.

        The caller owns all buffers. The call releases the GIL while it computes; several threads may call one instance.

        Returns:
            The times of the call's phases for an NPU that converts values, else None.

        Raises:
            BackendError: the computation failed.
        """
        ...


class SegmentOperands(NamedTuple):
    """Inputs of a stateful subgraph for one segment: consecutive rows of a chunk that belong to one sequence.

    Attributes:
        num_rows: number of rows of the segment.
        inputs: the arrays of the segment's sequence, by name: its state, and inputs without rows ("position",
            "rope_position").
    """

    num_rows: int
    inputs: Mapping[str, Array]


@runtime_checkable
class SegmentExecutable(Executable, Protocol):
    """A subgraph with state that takes the rows of several sequences in one call. Executables of other types get one
    call per segment.
    """

    def run_segments(
        self, inputs: Mapping[str, Array], outputs: Mapping[str, Array], segments: Sequence[SegmentOperands]
    ) -> None:
        """Run a chunk of several segments; the results are bit-identical to separate calls of `run` for each segment.

        Args:
            inputs: the subgraph's `inputs` that have rows, for all rows of the chunk.
            outputs: the subgraph's `outputs`, for all rows of the chunk.
            segments: the segments in the order of their rows; together they cover the chunk's rows. No two segments
                share state.

        Raises:
            BackendError: the computation failed.
        """
        ...


@runtime_checkable
class HistoryExecutable(Executable, Protocol):
    """A subgraph that keeps a copy of caches and rings where it computes, so that only new positions are copied in."""

    def run_after(self, inputs: Mapping[str, Array], outputs: Mapping[str, Array], history: int) -> Passage | None:
        """Run like `run`. If `history` equals the `history` of the previous call, the state before the position of this
        call has not changed since the previous call.
        """
        ...


class Backend(Protocol):
    """A way to compile and run subgraphs."""

    name: str
    concurrency: int | None
    """Number of calls that the backend takes at once (1 for an NPU) if it serves as the NPU in addition to the native
    backend. None if it runs on the executor's threads and has both roles.
    """
    cache_dtypes: tuple[str, ...]
    """Supported data types of keys and values, the default first. float16 may come first only if the backend rounds a
    chunk's own keys before it attends to them; otherwise results would depend on the chunk length. None if it keeps no
    state."""

    def supports(self, subgraph: Subgraph, plan: Plan, scheme: Scheme) -> Support:
        """Return whether `compile` would accept the subgraph under the scheme, without compiling it."""
        ...

    def compile(
        self, subgraph: Subgraph, plan: Plan, chunk_length: int, scheme: Scheme, weights: WeightStore
    ) -> Executable:
        """Make an executable for up to `chunk_length` rows.

        Raises:
            PartitionError: the backend does not run an operator or a type.
            CompileError: the backend's compiler failed.
        """
        ...


@runtime_checkable
class ConvertingBackend(Backend, Protocol):
    """An NPU backend that converts values on entry and exit: some of its calls compute while the others convert."""

    num_computing: int
    """Number of calls that compute at once, at most `concurrency`."""


@runtime_checkable
class EmulatedBackend(Backend, Protocol):
    """An NPU backend that runs on a device or on an emulator, whose times mean nothing."""

    is_emulated: bool


@runtime_checkable
class SeveralGraphsBackend(Backend, Protocol):
    """An NPU backend that compiles a subgraph for several numbers of rows, and runs the smallest graph that holds the
    rows of a call.
    """

    def graph_lengths(self, chunk_length: int, scheme: Scheme) -> tuple[int, ...]:
        """Return the numbers of rows for which subgraphs are compiled, shortest first. The last is the chunk length."""
        ...


@runtime_checkable
class RestorableBackend(Backend, Protocol):
    """An NPU backend whose executables can be used again after the NPU failed."""

    def restore(self) -> None:
        """Open everything that the executables use on the NPU again. No executable is run in the meantime.

        Raises:
            BackendError: the NPU fails again.
        """
        ...
