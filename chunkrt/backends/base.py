"""What a backend is: the contract between the plan and whatever computes a subgraph.

A backend plays one or both roles, "npu" and "cpu"; the device "link" has one of its own (`backends/link.py`).
`chunkrt.testing.check_backend` is this contract as a test suite.
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
AttentionMath = Literal["float32", "bfloat16"]
"""What queries, keys, values and the softmax's weights are multiplied in."""


@dataclass(frozen=True, kw_only=True)
class Support:
    """Whether a backend can run a subgraph; if not, which node stands in the way and why."""

    ok: bool
    node: str = ""
    reason: str = ""

    def __bool__(self) -> bool:
        return self.ok

    def require(self, backend: str, subgraph: Subgraph) -> None:
        """Raises PartitionError, with backend, node and reason, unless it is `ok`."""
        if not self.ok:
            raise PartitionError(f"{backend} cannot run {subgraph.name}: node {self.node!r}: {self.reason}")


class Passage(NamedTuple):
    """When a call passed through an NPU, by `time.perf_counter_ns`.

    Until `entered_ns` its inputs were converted and laid where the NPU reads them. Then it waited for its turn. From
    `began_ns` to `ended_ns` the NPU computed. What came after was the conversion of the outputs.
    """

    entered_ns: int
    began_ns: int
    ended_ns: int


class Executable(Protocol):
    """One compiled subgraph."""

    fixed_length: int | None
    """Rows that every call must have (an NPU's chunk), or None if any number from 1 to the chunk length will do."""

    def run(self, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> Passage | None:
        """Compute the outputs from the inputs.

        Args:
            inputs: the subgraph's `inputs` and `state` by name, C-contiguous, dtypes as in the plan. A value has
                shape [rows, ...]; a cache is float32 or float16 [kv_heads, P, D] and is updated in place.
                "position" is int64 [1]: the position of row 0.
            outputs: the subgraph's `outputs` by name, C-contiguous, written in full.

        The caller owns all buffers. Releases the GIL while it computes; several threads may call one instance.

        Returns:
            Of an NPU whose values are converted: what of the time was what. Else None.

        Raises:
            BackendError: the computation failed.
        """
        ...


class SegmentOperands(NamedTuple):
    """What a stateful subgraph takes of one segment: consecutive rows of a chunk that are one sequence's.

    `num_rows`: of the segment. `inputs`: by name what each sequence has of its own: the state, and inputs whose shape
    has no rows ("position", "rope_position").
    """

    num_rows: int
    inputs: Mapping[str, Array]


@runtime_checkable
class SegmentExecutable(Executable, Protocol):
    """A subgraph with state that takes the rows of several sequences in one call. Of others each segment is a call."""

    def run_segments(
        self, inputs: Mapping[str, Array], outputs: Mapping[str, Array], segments: Sequence[SegmentOperands]
    ) -> None:
        """As `run`, for a chunk of several segments, with the bits that each alone would give.

        Args:
            inputs: those of the subgraph's `inputs` that have rows, of the whole chunk.
            outputs: the subgraph's `outputs`, of the whole chunk.
            segments: what lies in the chunk's rows, in their order; their rows together are the chunk's. No two share
                state.

        Raises:
            BackendError: the computation failed.
        """
        ...


@runtime_checkable
class SumExecutable(Executable, Protocol):
    """A subgraph that is a sum over ranks."""

    def run_sum(self, inputs: Mapping[str, Array], outputs: Mapping[str, Array], number: int) -> None:
        """As `run`, of whatever has that number on all ranks; `run` is of what has none. See `Key.number`."""
        ...


@runtime_checkable
class HistoryExecutable(Executable, Protocol):
    """A subgraph that keeps a copy of caches and rings where it computes, so that only what is new enters."""

    def run_after(self, inputs: Mapping[str, Array], outputs: Mapping[str, Array], history: int) -> Passage | None:
        """As `run`. The same `history` as in the call before says that what it saw or wrote up to the position of this
        one is still what the state holds."""
        ...


class Backend(Protocol):
    """A way to compile and run subgraphs."""

    name: str
    concurrency: int | None
    """Calls it takes at once. A number, 1 for an NPU, is for one that plays the NPU's role beside the native
    backend. None is for one that runs on the executor's threads, and plays both roles."""
    cache_dtypes: tuple[str, ...]
    """Of keys and values, what it takes, and first what it gets unless told otherwise: float16 only if it rounds a
    chunk's own keys before it attends to them, or results would depend on the chunk length. None if it keeps no state.
    """

    def supports(self, subgraph: Subgraph, plan: Plan, scheme: Scheme) -> Support:
        """Tell, without compiling, whether `compile` would accept the subgraph under the scheme."""
        ...

    def compile(
        self, subgraph: Subgraph, plan: Plan, chunk_length: int, scheme: Scheme, weights: WeightStore
    ) -> Executable:
        """Make an executable for up to `chunk_length` rows.

        Raises:
            PartitionError: an operator or type that the backend does not run.
            CompileError: the backend's compiler failed.
        """
        ...


@runtime_checkable
class ConvertingBackend(Backend, Protocol):
    """An NPU whose values are converted on the way in and out: of its calls some compute, the others convert."""

    num_computing: int
    """Calls that compute at once, at most `concurrency`."""
