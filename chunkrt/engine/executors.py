"""An engine's executors: its subgraphs compiled for whoever runs them, and what streams prompts and tokens through."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from chunkrt.backends import Backend, Executable
from chunkrt.backends.dispatch import Dispatcher
from chunkrt.backends.fallback import FallbackExecutable, NpuHealth
from chunkrt.backends.registry import NATIVE
from chunkrt.engine.options import EngineOptions
from chunkrt.engine_directory.store import WeightStore
from chunkrt.errors import CompileError, DeviceLostError, PartitionError
from chunkrt.files import Progress
from chunkrt.graph.merging import merged_on_cpu
from chunkrt.graph.plan import Plan, Subgraph
from chunkrt.runtime.executor import Executor
from chunkrt.runtime.lanes import Lanes
from chunkrt.runtime.policy import find_policy
from chunkrt.runtime.tasks import processors_for


@dataclass(frozen=True, kw_only=True)
class Executors:
    """An engine's executors.

    Prompts stream through the NPU, if there is one, and the CPU. Single tokens, which an NPU compiled for whole chunks
    would pad, run on the CPU alone; native runs as few subgraphs for them as there can be, since each costs time. So it
    does for chunks that several sequences share, where there is no NPU.
    npu_backend: what plays the NPU's role; the CPU's, if the NPU failed already when it was compiled for.
    """

    lanes: Lanes
    npu_backend: Backend


@dataclass(frozen=True, kw_only=True)
class ExecutorBuilder:
    """Compiles a plan and makes its executors.

    link: sums over ranks, if there are several. cpus: those that tasks run on.
    """

    plan: Plan
    options: EngineOptions
    chunk_length: int
    weights: WeightStore
    dispatcher: Dispatcher
    npu_backend: Backend
    cpu_backend: Backend
    link: Backend | None
    cpus: Collection[int] | None
    progress: Progress

    def build(self) -> Executors:
        """Raises as `Engine`."""
        on_cpu = {s.name: self._compile(s, self._link_or_cpu(s)) for s in self.plan.subgraphs}
        on_npu = self._compile_for_npu(on_cpu) if self.npu_backend is not self.cpu_backend else {}
        npu_backend = self.npu_backend if on_npu else self.cpu_backend
        prompts = self._make(
            self.plan,
            {**on_cpu, **on_npu},
            chunk_length=self.chunk_length,
            npu_workers=npu_backend.concurrency if on_npu else None,
            chunks_in_flight=self.options.chunks_in_flight,
        )
        merged = merged_on_cpu(self.plan)
        dispatcher = self.dispatcher.for_plan(merged)
        if self.cpu_backend.name == NATIVE and dispatcher.compiles_whole(NATIVE):
            compiled = {
                s.name: on_cpu.get(s.name) or dispatcher.compile(s, self.cpu_backend, self.chunk_length, self.weights)
                for s in merged.subgraphs
            }
            tokens = self._make(merged, compiled)
            few = self._make(merged, compiled, chunk_length=self.chunk_length)
            many = prompts if on_npu else few
        elif on_npu:
            tokens = self._make(self.plan, on_cpu)
            few, many = self._make(self.plan, on_cpu, chunk_length=self.chunk_length), prompts
        else:
            tokens = few = many = prompts
        decode_on = self.options.decode_on
        if decode_on == "npu":
            tokens = prompts
        lanes = Lanes(prompts=prompts, tokens=tokens, many=many, few=few, decode_on=decode_on)
        return Executors(lanes=lanes, npu_backend=npu_backend)

    def _link_or_cpu(self, subgraph: Subgraph) -> Backend:
        return self.link if self.link is not None and subgraph.device == "link" else self.cpu_backend

    def _make(
        self,
        plan: Plan,
        executables: Mapping[str, Executable],
        *,
        chunk_length: int = 1,
        npu_workers: int | None = None,
        chunks_in_flight: int | None = 1,
    ) -> Executor:
        return Executor(
            plan,
            executables,
            chunk_length=chunk_length,
            processors=processors_for(npu_workers, self.options.num_threads),
            policy=find_policy(self.options.policy),
            chunks_in_flight=chunks_in_flight,
            cpus=self.cpus,
        )

    def _compile(self, subgraph: Subgraph, backend: Backend) -> Executable:
        return self.dispatcher.compile(subgraph, backend, self.chunk_length, self.weights)

    def _compile_for_npu(self, on_cpu: Mapping[str, Executable]) -> dict[str, Executable]:
        """The NPU's subgraphs; none, if the NPU fails already here and the CPU shall take over."""
        subgraphs = [s for s in self.plan.subgraphs if s.device == "npu"]
        health = NpuHealth()
        on_npu: dict[str, Executable] = {}
        for done, subgraph in enumerate(subgraphs):
            self.progress("compiling for the NPU", done, len(subgraphs))
            try:
                executable = self._compile(subgraph, self.npu_backend)
            except (CompileError, DeviceLostError, PartitionError) as error:
                was_chosen = isinstance(error, PartitionError) and self.options.npu != "auto"
                if was_chosen or not self.options.falls_back:
                    raise
                health.report(error)
                return {}
            if self.options.falls_back:
                executable = FallbackExecutable(executable, on_cpu[subgraph.name], health)
            on_npu[subgraph.name] = executable
        self.progress("compiling for the NPU", len(subgraphs), len(subgraphs))
        return on_npu
