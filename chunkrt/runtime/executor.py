"""The executor: streams the chunks of a prompt through a decoder's subgraphs.

Decode is the same thing with one token. An executor keeps the chunk buffers and the bound subgraphs; the
schedule, the threads and the logits belong to one run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from threading import Event, Lock
from time import perf_counter_ns
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from chunkrt.backends.base import Executable
from chunkrt.errors import BackendError, ClosedError, ConfigError, DeviceLostError, ModelError, unknown_name
from chunkrt.files import Count
from chunkrt.graph.plan import Device, Plan
from chunkrt.runtime.affinity import running_on
from chunkrt.runtime.binding import BoundSubgraph
from chunkrt.runtime.buffers import BufferLayout, ChunkBuffers, aligned_zeros
from chunkrt.runtime.chunk_slots import check_chunks_in_flight, ring_slots
from chunkrt.runtime.costs import Costs
from chunkrt.runtime.policy import Policy
from chunkrt.runtime.record import Pipeline, RunRecord, stages_of
from chunkrt.runtime.schedule import Schedule
from chunkrt.runtime.state import State
from chunkrt.runtime.tasks import Processor, Task, TaskEvent, with_link
from chunkrt.runtime.workers import Workers, run_in_caller

Logits = Literal["last", "all", "none"]


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """What a run computed.

    logits: float32 [1, V] of the last token, [n, V] of all, or None if none were asked for.
    record: every task, in the order in which they ended, and what tells why workers waited.
    """

    logits: NDArray[np.float32] | None
    record: RunRecord

    @property
    def events(self) -> Sequence[TaskEvent]:
        """Every task, in the order in which they ended."""
        return self.record.events


class Executor:
    """Runs prompts through one compiled decoder, one prompt at a time; a second caller waits.

    Args:
        plan: the decoder.
        executables: one for every subgraph, by subgraph name.
        chunk_length: C, tokens a chunk, 1 to the plan's context length.
        processors: who runs which device role; together they cover the plan's devices but the link, whose tasks wait
            for other ranks in threads of their own.
        policy: chooses among ready tasks.
        chunks_in_flight: ring slots, at least 1; by default as many as `ring_slots` gives.
        cpus: those that tasks run on, in whichever thread; by default what that thread may use.

    Raises:
        ConfigError: an argument is out of range or does not go with the others.
        ModelError: the plan cannot be streamed.
    """

    def __init__(
        self,
        plan: Plan,
        executables: Mapping[str, Executable],
        *,
        chunk_length: int,
        processors: Sequence[Processor],
        policy: Policy,
        chunks_in_flight: int | None = None,
        cpus: Collection[int] | None = None,
    ) -> None:
        if not 1 <= chunk_length <= plan.context_length:
            raise ConfigError(f"chunk length {chunk_length} is outside 1..{plan.context_length}, the context")
        if chunks_in_flight is not None:
            check_chunks_in_flight(chunks_in_flight)
        _check_plan(plan)
        _check_executables(plan, executables)
        _check_processors(plan, processors)
        self.plan = plan
        self.chunk_length = chunk_length
        self.policy = policy
        self.cpus = cpus
        self.costs = Costs(plan)
        """What tasks take, learnt from every run."""
        num_slots = chunks_in_flight or ring_slots(plan, chunk_length, processors)
        self.processors = with_link(processors, plan, num_slots)
        num_workers = sum(processor.workers for processor in self.processors)
        layout = BufferLayout(plan, chunk_length)
        self.ring = [ChunkBuffers(layout) for _ in range(num_slots)]
        self.num_bytes = layout.num_bytes * num_slots
        """Bytes of the chunk buffers."""
        self.subgraphs = [
            BoundSubgraph(
                subgraph,
                executables[subgraph.name],
                ring=self.ring,
                chunk_length=chunk_length,
                output=plan.output,
            )
            for subgraph in plan.subgraphs
        ]
        self.is_concurrent = policy.is_concurrent and num_workers > 1
        """Whether tasks may run at once; if not, no run starts threads."""
        self.splits_chunks = self.is_concurrent and len(self.processors) > 1 and not plan.flow.is_chain
        """Whether tasks of one chunk may run at once, on different processors. A lone chunk on a single one would gain
        nothing: the kernels of each task use all its threads."""
        self._pipeline = Pipeline(
            stages=stages_of(plan),
            processors=self.processors,
            policy=policy.name,
            chunk_length=chunk_length,
            num_slots=num_slots,
            slot_bytes=layout.num_bytes,
        )
        alone = tuple(replace(processor, workers=1) for processor in self.processors)
        self._pipeline_in_caller = replace(self._pipeline, processors=alone)
        self._workers: Workers | None = None
        self._one_run = Lock()

    def run(
        self,
        token_ids: NDArray[np.int64],
        state: State,
        *,
        logits: Logits = "last",
        cancel: Event | None = None,
        progress: Count | None = None,
        agree: Callable[[], object] | None = None,
        for_others: bool = False,
    ) -> RunResult:
        """Run tokens through the decoder at the state's position, and advance it.

        A sequential policy, a single worker, a single token and a single chunk run in the calling thread (the chunk
        unless it has tasks for several processors at once); otherwise the processors' workers are started and this
        thread waits, so that an interrupt reaches it. Whatever goes wrong, all threads have ended, the state is what it
        was, and the executor can be used again. (A second interrupt leaves while tasks still run; then the next run, or
        whoever uses the state, waits for them.)

        Args:
            token_ids: int64 [n], n at least 1.
            state: of the same plan.
            logits: which rows of logits to compute.
            cancel: set it from any thread to stop the run as soon as the tasks that run have ended.
            progress: called in this thread with (chunks done, chunks).
            agree: called when all is computed, before the state advances; if it raises, the run has failed.
            for_others: another rank wants the logits; here only what its sums need is computed, and no logits.

        Raises:
            ConfigError: the tokens, the state or an option do not fit; nothing has run.
            BackendError: a task failed; the message names its subgraph and chunk, the cause is chained.
            ClosedError: the run was cancelled.
        """
        self._check_run(token_ids, state, logits)
        with self._one_run:
            start_ns = perf_counter_ns()
            if self._workers is not None:
                self._workers.close()  # they may run on after a second interrupt
                self._workers = None
            run = _Run(self, token_ids, state, logits, for_others=for_others)
            state.begin(token_ids.size)
            try:
                events = self._compute(run, cancel, progress)
                if agree is not None:
                    agree()
            except BaseException:
                workers = self._workers
                state.roll_back(wait=workers.close if workers is not None and workers.are_running else None)
                raise
            state.advance(token_ids.size)
            if run.is_concurrent:
                self.costs.learn(run.flops, events)
            record = RunRecord(
                pipeline=self._pipeline if run.is_concurrent else self._pipeline_in_caller,
                num_tokens=token_ids.size,
                position=state.position - token_ids.size,
                position_bytes=state.position_bytes,
                start_ns=start_ns,
                end_ns=perf_counter_ns(),
                events=events,
            )
            return RunResult(logits=run.logits, record=record)

    def _compute(self, run: _Run, cancel: Event | None, progress: Count | None) -> list[TaskEvent]:
        """Drive a run to its end. Raises BackendError if a task failed, ClosedError if it was cancelled."""
        schedule = run.schedule
        if run.is_concurrent:
            self._workers = Workers(schedule, run.execute, cancel=cancel, cpus=self.cpus)
            events = self._workers.run(progress)
            self._workers = None
        else:
            with running_on(self.cpus):
                events = run_in_caller(schedule, run.execute, cancel=cancel, progress=progress)
        if schedule.failure is not None:
            raise self._failure(*schedule.failure) from schedule.failure[1]
        if schedule.is_cancelled:
            raise ClosedError(f"the run was cancelled after {schedule.chunks_done} of {schedule.num_chunks} chunks")
        return events

    def _check_run(self, token_ids: NDArray[np.int64], state: State, logits: Logits) -> None:
        if logits not in get_args(Logits):
            raise unknown_name("choice of logits", logits, get_args(Logits))
        if token_ids.ndim != 1 or token_ids.dtype != np.int64:
            raise ConfigError(f"token ids are {token_ids.dtype} {list(token_ids.shape)}, not int64 [n]")
        if token_ids.size == 0:
            raise ConfigError("the prompt is empty; it takes at least one token")
        low, high = token_ids.min(), token_ids.max()
        if low < 0 or high >= self.plan.vocab_size:
            wrong = low if low < 0 else high
            raise ConfigError(f"token id {wrong} is outside the vocabulary, 0..{self.plan.vocab_size - 1}")
        if state.plan is not self.plan and _memory(state.plan) != _memory(self.plan):
            raise ConfigError("the state belongs to another decoder; make one from this engine's plan")
        if self.plan.window and self.chunk_length > state.chunk_length:
            raise ConfigError(f"chunks of {self.chunk_length} do not fit a state made for {state.chunk_length}")
        if self.chunk_length > state.capacity:
            raise ConfigError(f"chunk length {self.chunk_length} is outside 1..{state.capacity}, the state's capacity")
        if token_ids.size > state.capacity - state.position:
            raise ConfigError(
                f"{token_ids.size} tokens do not fit at position {state.position} of a state of "
                f"{state.capacity} positions; shorten the prompt, or make the state larger"
            )

    def _failure(self, task: Task, error: BaseException) -> BackendError:
        kind = DeviceLostError if isinstance(error, DeviceLostError) else BackendError
        name = self.plan.subgraphs[task.subgraph].name
        return kind(f"subgraph {name} failed on chunk {task.chunk}: {str(error) or type(error).__name__}")


class _Run:
    """One prompt on its way: its schedule, its logits, and how a task of it is computed."""

    def __init__(
        self, executor: Executor, token_ids: NDArray[np.int64], state: State, logits: Logits, *, for_others: bool
    ) -> None:
        self._subgraphs = executor.subgraphs
        self._waits_for = executor.plan.flow.waits_for
        self._ring = executor.ring
        self._chunk_length = executor.chunk_length
        self._token_ids = token_ids
        self._state = state
        self._mode = logits
        self._loading = Lock()
        self._loaded: set[int] = set()
        """The chunks whose graph inputs are in their ring slots."""
        num_chunks = -(-token_ids.size // executor.chunk_length)
        logit_chunks = {"last": range(num_chunks - 1, num_chunks), "all": range(num_chunks), "none": range(0)}[logits]
        self.is_concurrent = executor.is_concurrent if num_chunks > 1 else executor.splits_chunks and token_ids.size > 1
        if self.is_concurrent:
            num_tokens = [self._chunk(chunk).size for chunk in range(num_chunks)]
            num_rows = [len(self._logit_rows(num_tokens[c])) if c in logit_chunks else 0 for c in range(num_chunks)]
            self.flops = executor.costs.flops(num_tokens, num_rows, state.position)
            """Of every task, [subgraphs, chunks]."""
        self.schedule = Schedule(
            executor.plan,
            num_chunks=num_chunks,
            logit_chunks=logit_chunks,
            chunks_in_flight=len(executor.ring),
            processors=executor.processors,
            policy=executor.policy,
            durations=executor.costs.durations(self.flops) if self.is_concurrent else None,
            for_others=for_others,
        )
        self._num_rows = 0 if for_others else {"last": 1, "all": token_ids.size, "none": 0}[logits]
        group = executor.subgraphs[-1].logit_group
        shape = (-(-self._num_rows // group) * group, executor.plan.vocab_size)
        self._logits = aligned_zeros(shape, np.float32)

    @property
    def logits(self) -> NDArray[np.float32] | None:
        """float32 [rows asked for, V]."""
        return self._logits[: self._num_rows] if self._num_rows else None

    def execute(self, task: Task) -> None:
        """Compute one task; called from any worker's thread."""
        index, chunk = task
        slot = self.schedule.slot(chunk)
        start = chunk * self._chunk_length
        token_ids = self._chunk(chunk)
        if not self._waits_for[index]:
            self._load(chunk, slot)
        subgraph = self._subgraphs[index]
        if subgraph.rows == "T":
            subgraph.run(slot, token_ids.size, self._state)
        elif self._mode == "all":
            subgraph.run_logit_rows(slot, token_ids.size, token_ids.size, self._logits[start:])
        else:
            subgraph.run_logit_rows(slot, token_ids.size, 1, self._logits)

    def _load(self, chunk: int, slot: int) -> None:
        """Fill the graph inputs, once: whichever of a chunk's first tasks comes first does."""
        with self._loading:
            if chunk not in self._loaded:
                token_ids, position = self._chunk(chunk), self._state.position + chunk * self._chunk_length
                self._ring[slot].load(token_ids, position, self._logit_rows(token_ids.size), self._state.rope_offset)
                self._loaded.add(chunk)

    def _chunk(self, chunk: int) -> NDArray[np.int64]:
        start = chunk * self._chunk_length
        return self._token_ids[start : start + self._chunk_length]

    def _logit_rows(self, num_tokens: int) -> range:
        """The rows of a chunk whose logits are wanted, should the chunk come as far as that."""
        return range(num_tokens) if self._mode == "all" else range(num_tokens - 1, num_tokens)


def _memory(plan: Plan) -> tuple[object, ...]:
    """What a state is made by, and what lies in it."""
    return plan.state_tensors, plan.window, plan.has_raw_keys


def _check_plan(plan: Plan) -> None:
    """Logits come last and come from subgraphs that run on the rows asked for; state comes before."""
    rows = [subgraph.rows for subgraph in plan.subgraphs]
    if rows != sorted(rows, reverse=True) or rows[-1:] != ["R"] or plan.output not in plan.subgraphs[-1].outputs:
        raise ModelError(f"the plan's last subgraph does not compute {plan.output!r} row by row; compile again")
    for subgraph in plan.subgraphs:
        if subgraph.rows == "R" and subgraph.state:
            raise ModelError(f"{subgraph.name} keeps state, but does not run on every token; compile again")


def _check_executables(plan: Plan, executables: Mapping[str, Executable]) -> None:
    names = {subgraph.name for subgraph in plan.subgraphs}
    if names != executables.keys():
        odd = min(names ^ executables.keys())
        problem = "has no executable" if odd in names else "is not a subgraph of the plan"
        raise ConfigError(f"{odd!r} {problem}; exactly one executable is needed for each of {len(names)} subgraphs")


def _check_processors(plan: Plan, processors: Sequence[Processor]) -> None:
    if len({processor.name for processor in processors}) < len(processors):
        raise ConfigError(f"two processors share a name: {', '.join(p.name for p in processors)}")
    for processor in processors:
        if processor.workers < 1:
            raise ConfigError(f"processor {processor.name!r} has {processor.workers} workers; it needs at least 1")
        if "link" in processor.devices:
            raise ConfigError(
                f"processor {processor.name!r} is for the link, which has workers of its own; leave it away"
            )
    devices = frozenset[Device](("link",)).union(*(processor.devices for processor in processors))
    for subgraph in plan.subgraphs:
        if subgraph.device not in devices:
            raise ConfigError(
                f"no processor runs {subgraph.device!r}, which {subgraph.name} needs; there are: "
                f"{', '.join(sorted(devices - {'link'})) or 'none'}"
            )
