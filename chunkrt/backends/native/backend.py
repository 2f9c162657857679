"""Compilation of subgraphs to native programs, and their execution."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from chunkrt._native import Program, ProgramBuilder, StepTimes, ThreadPool
from chunkrt.backends.base import Array, AttentionMath, Executable, SegmentOperands, Support
from chunkrt.backends.native.cpu import selected_kernels
from chunkrt.backends.native.fusion import fuse
from chunkrt.backends.native.operators import Lowering, check_node
from chunkrt.backends.registry import NATIVE, operators
from chunkrt.engine_directory.store import WeightStore
from chunkrt.errors import BackendError, ConfigError, PartitionError
from chunkrt.graph.plan import Plan, Subgraph
from chunkrt.graph.uses import use_of
from chunkrt.quant.scheme import Scheme

_FAILURES = (KeyError, ValueError, IndexError, TypeError, MemoryError)


class NativeBackend:
    """Backend of the C++ core, which runs on this machine's CPU.

    Args:
        threads: number of threads that may compute at once, over all executables of this backend. Results do not depend
            on it.
        attention_math: data type of attention's products; softmax and sums are float32.
        times: accumulates the times of the programs' steps; None turns timing off.

    Raises:
        ConfigError: `threads` is less than 1, or CHUNKRT_FORCE_ISA names kernels that cannot run here.
    """

    name = "native"
    concurrency: int | None = None
    cache_dtypes: tuple[str, ...] = ("float16", "float32", "int8")

    def __init__(self, threads: int, attention_math: AttentionMath = "float32", times: StepTimes | None = None) -> None:
        if threads < 1:
            raise ConfigError(f"the native backend needs at least 1 thread, got {threads}")
        selected_kernels()  # report a forced instruction set that cannot run here, not at some node later
        self._pool = ThreadPool(threads)
        self._attention_math: AttentionMath = attention_math
        if attention_math == "bfloat16":
            self.cache_dtypes = (*self.cache_dtypes, "bfloat16")
        elif attention_math == "int8":
            self.cache_dtypes = ("bfloat16",)
        self._times = times

    def supports(self, subgraph: Subgraph, plan: Plan, scheme: Scheme) -> Support:
        """Accept a subgraph if every operator is known and every linear has int8 weights."""
        for node in subgraph.nodes:
            if reason := operators.missing(use_of(node), NATIVE):
                return Support(ok=False, node=node.name, reason=reason)
            if reason := check_node(node, plan, scheme):
                return Support(ok=False, node=node.name, reason=reason)
        return Support(ok=True)

    def compile(
        self, subgraph: Subgraph, plan: Plan, chunk_length: int, scheme: Scheme, weights: WeightStore
    ) -> Executable:
        """Lower the subgraph to one program over the memory-mapped weights.

        Raises:
            PartitionError: see `supports`; or an operator does not support the shape or type of an operand.
        """
        self.supports(subgraph, plan, scheme).require(self.name, subgraph)
        builder = ProgramBuilder(self._pool, chunk_length, self._times)
        lowering = Lowering(builder, subgraph, plan, scheme, weights, self._attention_math)
        for node in fuse(subgraph, plan, scheme):
            try:
                lowering.lower(node)
            except ValueError as error:
                raise PartitionError(f"native cannot run {subgraph.name}: node {node.name!r}: {error}") from error
        return NativeExecutable(subgraph, plan, lowering.build())


class NativeExecutable:
    """Executable of one native program; `run` passes the arrays in the order of the program's values."""

    fixed_length: int | None = None

    def __init__(self, subgraph: Subgraph, plan: Plan, program: Program) -> None:
        self._name = subgraph.name
        self._inputs = (*subgraph.inputs, *subgraph.all_state)
        self._of_chunk = tuple(n for n in subgraph.inputs if {"T", "R"} & set(plan.tensors[n].shape))
        self._of_segment = tuple(n for n in self._inputs if n not in self._of_chunk)
        self._outputs = subgraph.outputs
        self._program = program

    def run(self, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> None:
        """See `Executable.run`."""
        try:
            self._program.run([*map(inputs.__getitem__, self._inputs)], [*map(outputs.__getitem__, self._outputs)])
        except _FAILURES as error:
            raise self._failure(error) from error

    def run_segments(
        self, inputs: Mapping[str, Array], outputs: Mapping[str, Array], segments: Sequence[SegmentOperands]
    ) -> None:
        """See `SegmentExecutable.run_segments`."""
        try:
            self._program.run_segments(
                [inputs[n] for n in self._of_chunk],
                [outputs[n] for n in self._outputs],
                [(num_rows, [own[n] for n in self._of_segment]) for num_rows, own in segments],
            )
        except _FAILURES as error:
            raise self._failure(error) from error

    def _failure(self, error: Exception) -> BackendError:
        what = f"no array was passed for {error}" if isinstance(error, KeyError) else str(error)
        return BackendError(f"native, {self._name}: {what}")
