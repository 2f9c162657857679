"""An engine's executors: its subgraphs compiled for whoever runs them, and what streams prompts and tokens through."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from chunkrt.backends import Backend, Executable
from chunkrt.backends.fallback import FallbackExecutable, NpuHealth
from chunkrt.engine.options import EngineOptions
from chunkrt.errors import CompileError, DeviceLostError, PartitionError
from chunkrt.files import Progress
from chunkrt.graph.plan import Plan, Subgraph
from chunkrt.runtime.executor import Executor
from chunkrt.runtime.policy import find_policy
from chunkrt.runtime.tasks import Processor, processors_for


@dataclass(frozen=True, kw_only=True)
class Executors:
    """The executors of prompts and of single tokens; without an NPU one is both.

    npu_backend: what plays the NPU's role; the CPU's, if the NPU failed already when it was compiled for.
    """

    prompts: Executor
    tokens: Executor
    npu_backend: Backend


@dataclass(frozen=True, kw_only=True)
class ExecutorBuilder:
    """Compiles a plan and makes its executors.

    compile: a subgraph for a backend. link: sums over ranks, if there are several. cpus: those that tasks run on.
    """

    plan: Plan
    options: EngineOptions
    chunk_length: int
    compile: Callable[[Subgraph, Backend], Executable]
    npu_backend: Backend
    cpu_backend: Backend
    link: Backend | None
    cpus: Collection[int] | None
    progress: Progress

    def build(self) -> Executors:
        """Raises as `Engine`."""
        on_cpu = {s.name: self.compile(s, self._link_or_cpu(s)) for s in self.plan.subgraphs}
        cpu_only = processors_for(None, self.options.num_threads)
        on_npu = self._compile_for_npu(on_cpu) if self.npu_backend is not self.cpu_backend else {}
        in_flight = self.options.chunks_in_flight
        if not on_npu:
            executor = self._make(on_cpu, cpu_only, self.chunk_length, in_flight)
            return Executors(prompts=executor, tokens=executor, npu_backend=self.cpu_backend)
        processors = processors_for(self.npu_backend.concurrency, self.options.num_threads)
        prompts = self._make({**on_cpu, **on_npu}, processors, self.chunk_length, in_flight)
        return Executors(prompts=prompts, tokens=self._make(on_cpu, cpu_only, 1, 1), npu_backend=self.npu_backend)

    def _link_or_cpu(self, subgraph: Subgraph) -> Backend:
        return self.link if self.link is not None and subgraph.device == "link" else self.cpu_backend

    def _make(
        self,
        executables: Mapping[str, Executable],
        processors: tuple[Processor, ...],
        chunk_length: int,
        chunks_in_flight: int | None,
    ) -> Executor:
        return Executor(
            self.plan,
            executables,
            chunk_length=chunk_length,
            processors=processors,
            policy=find_policy(self.options.policy),
            chunks_in_flight=chunks_in_flight,
            cpus=self.cpus,
        )

    def _compile_for_npu(self, on_cpu: Mapping[str, Executable]) -> dict[str, Executable]:
        """The NPU's subgraphs; none, if the NPU fails already here and the CPU shall take over."""
        subgraphs = [s for s in self.plan.subgraphs if s.device == "npu"]
        health = NpuHealth()
        on_npu: dict[str, Executable] = {}
        for done, subgraph in enumerate(subgraphs):
            self.progress("compiling for the NPU", done, len(subgraphs))
            try:
                executable = self.compile(subgraph, self.npu_backend)
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
