"""Compile an engine's subgraphs for their backends, and create the executors of prompts and tokens."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from chunkrt.backends import Backend, Executable
from chunkrt.backends.base import ConvertingBackend, EmulatedBackend, RestorableBackend, SeveralGraphsBackend
from chunkrt.backends.coverage import QNN
from chunkrt.backends.dispatch import IN_NUMPY, Dispatcher
from chunkrt.backends.fallback import NpuHealth, guarded
from chunkrt.backends.registry import NATIVE
from chunkrt.engine.model_options import choose_context_length
from chunkrt.engine.npu_attention import check_decode, near_plans
from chunkrt.engine.options import EngineOptions
from chunkrt.engine_directory.store import WeightStore
from chunkrt.errors import CompileError, ConfigError, DeviceLostError, PartitionError
from chunkrt.files import Progress
from chunkrt.graph.placement import Placement
from chunkrt.graph.plan import Plan, Subgraph
from chunkrt.graph.rewrites import merged_on_cpu
from chunkrt.runtime.executor import Executor, ExecutorSet
from chunkrt.runtime.policy import find_policy
from chunkrt.runtime.record import Origin
from chunkrt.runtime.tasks import processors_for

_NPU_ERRORS = (CompileError, DeviceLostError, PartitionError)

log = logging.getLogger(__name__)

BY_ROWS = {NATIVE, QNN}
"""Backends that compute every row independently of other rows; see `parting_step` for the exceptions."""


def origin_with(npu: Backend | None) -> Origin:
    """Return the origin of times that are measured while a backend, if any, serves as the NPU."""
    return "emulated" if isinstance(npu, EmulatedBackend) and npu.is_emulated else "measured"


@dataclass(frozen=True, kw_only=True)
class ExecutorBuilder:
    """Builder that compiles a plan and creates its executors.

    Prompts stream through the NPU, if one is used, and the CPU. Single tokens, which an NPU compiled for complete
    chunks would pad, run only on the CPU. For single tokens the native backend fuses subgraphs, because every subgraph
    adds overhead. Without an NPU it also does this for chunks that several sequences share, and for prompts of one
    chunk.

    Attributes:
        placement: the placement of the plan.
        link: the backend of sums over ranks; None for a single rank.
        cpus: the CPUs on which tasks run.
    """

    plan: Plan
    placement: Placement
    options: EngineOptions
    chunk_length: int
    weights: WeightStore
    dispatcher: Dispatcher
    npu_backend: Backend
    cpu_backend: Backend
    link: Backend | None
    cpus: Collection[int] | None
    progress: Progress

    def build(self) -> tuple[ExecutorSet, Backend, NpuHealth | None]:
        """Compile the plan. The errors are those of `Engine`.

        Returns:
            The executors; the backend that serves as the NPU, which is the CPU's if the NPU already failed at
            compilation; and the state of the NPU, or None without an NPU.
        """
        has_npu = self.npu_backend is not self.cpu_backend
        keeps_all = not has_npu or self.options.weights == "both"
        on_cpu = {
            s.name: self._compile(s, self._link_or_cpu(s))
            for s in self.plan.subgraphs
            if keeps_all or s.device != "npu"
        }
        npu = self.npu_backend
        health, near = NpuHealth(npu.restore if isinstance(npu, RestorableBackend) else None), list[Executor]()
        if self.npu_backend.name == QNN:
            try:
                near = self._near(on_cpu, health)
            except _NPU_ERRORS as error:
                if not self.options.falls_back:
                    raise
                log.warning("%s; attention stays on the CPU", error)
        is_near_enough = any(executor.reaches(choose_context_length(self.plan, self.options)) for executor in near)
        on_npu = self._compile_or_fall_back(on_cpu, health) if has_npu and not is_near_enough else {}
        if health.is_lost:
            near = []
        has_npu = bool(near or on_npu)
        if near and is_near_enough:
            prompts = near[-1]
        else:
            prompts = self._make(
                self.plan,
                {**on_cpu, **on_npu},
                chunk_length=self.chunk_length,
                npu=self.npu_backend if on_npu else None,
                chunks_in_flight=self.options.chunks_in_flight,
            )
        tokens, few, many = self._for_tokens(on_cpu, prompts, has_npu=has_npu)
        if not keeps_all:
            self.weights.forget_pages()  # most pages were only read for the hash
        executors = ExecutorSet(
            prompts=prompts, tokens=tokens, many=many, few=few, decode_on=self.options.decodes_on, near=tuple(near)
        )
        exact_step = executors.parting_step if self._is_by_rows(has_npu=has_npu) else self.chunk_length
        tokens_differ = has_npu and (self.options.decodes_on != "npu" or bool(near))
        return (
            replace(executors, exact_step=exact_step, tokens_differ=tokens_differ),
            self.npu_backend if has_npu else self.cpu_backend,
            health if self.npu_backend is not self.cpu_backend else None,
        )

    def _for_tokens(
        self, on_cpu: Mapping[str, Executable], prompts: Executor, *, has_npu: bool
    ) -> tuple[Executor, Executor, Executor]:
        """Return the executors `tokens`, `few` and `many` of the executor set."""
        if has_npu and self.options.weights == "npu-only":
            return prompts, prompts, prompts
        merged = merged_on_cpu(self.plan)
        dispatcher = self.dispatcher.for_plan(merged)
        if self.cpu_backend.name == NATIVE and dispatcher.compiles_whole(NATIVE):
            compiled = {
                s.name: on_cpu.get(s.name) or dispatcher.compile(s, self.cpu_backend, self.chunk_length, self.weights)
                for s in merged.subgraphs
            }
            tokens = self._make(merged, compiled)
            few = self._make(merged, compiled, chunk_length=self.chunk_length)
            many = prompts if has_npu else few
        elif has_npu:
            tokens = self._make(self.plan, on_cpu)
            few, many = self._make(self.plan, on_cpu, chunk_length=self.chunk_length), prompts
        else:
            tokens = few = many = prompts
        return prompts if self.options.decode_on == "npu" else tokens, few, many

    def _near(self, on_cpu: Mapping[str, Executable], health: NpuHealth) -> list[Executor]:
        """Return the executors for short histories, with attention on the NPU. The errors are those of
        `_compile_for_npu`.
        """
        context_length = choose_context_length(self.plan, self.options)
        made = []
        for near in near_plans(self.plan, self.placement, self.options, context_length):
            if self.link is not None:
                raise ConfigError("`attention='npu'` is not supported with several ranks; omit it")
            dispatcher = self.dispatcher.for_plan(near.plan)
            self._check_whole(near.plan)
            check_decode(near.plan, self.options)
            own = {
                s.name: on_cpu.get(s.name) or dispatcher.compile(s, self.cpu_backend, self.chunk_length, self.weights)
                for s in near.plan.subgraphs
                if s.device != "npu" or self.options.falls_back
            }
            on_npu = self._compile_for_npu(near.plan, own, health)
            made.append(
                self._make(
                    near.plan,
                    {**own, **on_npu},
                    chunk_length=self.chunk_length,
                    npu=self.npu_backend,
                    chunks_in_flight=self.options.chunks_in_flight,
                    reach=near.reach,
                )
            )
        return made

    def _is_by_rows(self, *, has_npu: bool) -> bool:
        """Return True if rows are computed independently of their chunk, as native and the HTP do."""
        backends = {self.cpu_backend.name, self.npu_backend.name if has_npu else self.cpu_backend.name}
        return backends <= BY_ROWS and all(
            runner.form is None or use.operator in IN_NUMPY
            for s in self.plan.subgraphs
            if s.device != "link"
            for use, runner in self.dispatcher.runners(s, self._backend_of(s, has_npu=has_npu).name)
        )

    def _backend_of(self, subgraph: Subgraph, *, has_npu: bool) -> Backend:
        return self.npu_backend if has_npu and subgraph.device == "npu" else self.cpu_backend

    def _link_or_cpu(self, subgraph: Subgraph) -> Backend:
        return self.link if self.link is not None and subgraph.device == "link" else self.cpu_backend

    def _make(
        self,
        plan: Plan,
        executables: Mapping[str, Executable],
        *,
        chunk_length: int = 1,
        npu: Backend | None = None,
        chunks_in_flight: int | None = 1,
        reach: int | None = None,
    ) -> Executor:
        return Executor(
            plan,
            executables,
            chunk_length=chunk_length,
            processors=processors_for(
                None if npu is None else npu.concurrency,
                self.options.num_threads,
                num_computing=npu.num_computing if isinstance(npu, ConvertingBackend) else None,
            ),
            policy=find_policy(self.options.policy),
            chunks_in_flight=chunks_in_flight,
            cpus=self.cpus,
            reach=reach,
            graph_lengths=self._graph_lengths(npu),
            origin=origin_with(npu),
        )

    def _graph_lengths(self, npu: Backend | None) -> tuple[int, ...]:
        """Return the lengths of the NPU's graphs; empty if there is only one."""
        if not isinstance(npu, SeveralGraphsBackend):
            return ()
        lengths = npu.graph_lengths(self.chunk_length, self.dispatcher.scheme)
        return lengths if len(lengths) > 1 else ()

    def _compile(self, subgraph: Subgraph, backend: Backend) -> Executable:
        return self.dispatcher.compile(subgraph, backend, self.chunk_length, self.weights)

    def _check_whole(self, plan: Plan) -> None:
        """Raise ConfigError if a function would run an operator of an NPU graph that contains attention."""
        dispatcher = self.dispatcher.for_plan(plan)
        for subgraph in (s for s in plan.subgraphs if s.device == "npu" and s.state):
            for use, runner in dispatcher.runners(subgraph, QNN):
                if runner.form is not None:
                    raise ConfigError(
                        f"with attention on the NPU all operators of its graphs run there, but {runner.name} runs "
                        f"{use.operator} ({runner.reason}); omit `attention='npu'`, or let the NPU run it"
                    )

    def _compile_or_fall_back(self, on_cpu: Mapping[str, Executable], health: NpuHealth) -> dict[str, Executable]:
        """Map names to the compiled subgraphs of the NPU. The mapping is empty if the NPU fails and the CPU takes
        over."""
        try:
            return self._compile_for_npu(self.plan, on_cpu, health)
        except _NPU_ERRORS as error:
            has_to = self.options.npu != "auto" or self.options.npu_strict
            was_chosen = isinstance(error, PartitionError) and has_to
            if was_chosen or not self.options.falls_back:
                raise
            health.give_up(error)
            return {}

    def _compile_for_npu(
        self, plan: Plan, on_cpu: Mapping[str, Executable], health: NpuHealth
    ) -> dict[str, Executable]:
        """Compile the NPU's subgraphs of a plan. Raise CompileError, DeviceLostError or PartitionError if the NPU
        fails.
        """
        subgraphs = [s for s in plan.subgraphs if s.device == "npu"]
        dispatcher = self.dispatcher.for_plan(plan)
        on_npu: dict[str, Executable] = {}
        for done, subgraph in enumerate(subgraphs):
            self.progress("compiling for the NPU", done, len(subgraphs))
            executable = dispatcher.compile(subgraph, self.npu_backend, self.chunk_length, self.weights)
            if self.options.falls_back:
                executable = guarded(executable, on_cpu[subgraph.name], health)
            elif health.can_restore:
                executable = guarded(executable, None, health)
            on_npu[subgraph.name] = executable
        self.progress("compiling for the NPU", len(subgraphs), len(subgraphs))
        return on_npu
