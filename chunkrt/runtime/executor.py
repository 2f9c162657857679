"""The executor: streams the chunks of a prompt through a decoder's subgraphs.

Decoding uses the same path, with a prompt of one token. An executor owns the chunk buffers and the bound subgraphs; the
schedule, the threads and the stream belong to one run.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from threading import Lock
from time import perf_counter_ns

import numpy as np
from numpy.typing import NDArray

from chunkrt.backends.base import Executable, Passage
from chunkrt.errors import BackendError, ClosedError, ConfigError, DeviceLostError, ModelError, NumberRangeError
from chunkrt.graph.plan import Device, Plan
from chunkrt.runtime.affinity import running_on
from chunkrt.runtime.binding import BoundSubgraph
from chunkrt.runtime.buffers import BufferLayout, ChunkBuffers
from chunkrt.runtime.chunk_slots import check_chunks_in_flight, chunk_slots
from chunkrt.runtime.costs import Costs
from chunkrt.runtime.job import Job
from chunkrt.runtime.policy import Policy
from chunkrt.runtime.record import Pipeline, stages_of
from chunkrt.runtime.run import Run, RunResult
from chunkrt.runtime.schedule import Schedule
from chunkrt.runtime.stream import Chunk, Stream
from chunkrt.runtime.task_clock import TaskClock
from chunkrt.runtime.tasks import Processor, Task, TaskEvent, with_link
from chunkrt.runtime.workers import GivesWay, Workers, never, run_in_caller


class Executor:
    """Executor that runs prompts through one compiled decoder, one prompt at a time; a second caller waits.

    Args:
        plan: the decoder.
        executables: the executable of every subgraph, by subgraph name.
        chunk_length: C, maximum number of tokens of a chunk, 1 to the plan's context length.
        processors: the workers of each device role. They must cover all devices of the plan except the link, whose
        tasks
            wait for other ranks in separate threads.
        policy: chooses among ready tasks.
        chunks_in_flight: number of chunk slots, at least 1; by default the number that `chunk_slots` returns.
        cpus: CPUs that tasks run on, in any thread; by default those that the thread may use.
        reach: the last position at which a chunk may begin, if the subgraphs support only a limited history.

    Raises:
        ConfigError: an argument is out of range or does not fit the others.
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
        reach: int | None = None,
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
        self.reach = reach
        self.costs = Costs(plan)
        """Durations of tasks, learnt from every run."""
        num_slots = chunks_in_flight or chunk_slots(plan, chunk_length, processors)
        self.processors = with_link(processors, plan, num_slots)
        num_workers = sum(processor.workers for processor in self.processors)
        layout = BufferLayout(plan, chunk_length)
        self.slots = [ChunkBuffers(layout) for _ in range(num_slots)]
        self.num_bytes = layout.num_bytes * num_slots
        """Bytes of the chunk buffers."""
        self.subgraphs = [
            BoundSubgraph(
                subgraph,
                executables[subgraph.name],
                slots=self.slots,
                chunk_length=chunk_length,
                output=plan.output,
            )
            for subgraph in plan.subgraphs
        ]
        self.is_concurrent = policy.is_concurrent and num_workers > 1
        """True if tasks may run concurrently. Otherwise no run starts threads."""
        self.splits_chunks = self.is_concurrent and len(self.processors) > 1 and not plan.flow.is_chain
        """True if tasks of one chunk may run concurrently, on different processors. On one processor a single chunk
        gains nothing from this, because the kernels of each task use all threads of the processor.
        """
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
        self.clock = TaskClock()
        """Clock of the tasks in progress."""
        self._workers: Workers | None = None
        self._one_run = Lock()

    def job(self, run: Run) -> Job:
        """Return a run as a job for this executor. Raise ConfigError if tokens, state or an option do not fit the
        decoder.
        """
        run.check(self.plan, self.chunk_length)
        last = run.state.position + (run.token_ids.size - 1) // self.chunk_length * self.chunk_length
        if not self.reaches(last):
            raise ConfigError(
                f"a chunk would begin at position {last}, but the last position for this executor is {self.reach}"
            )
        return Job(run, self.plan, self.logit_group)

    def reaches(self, position: int) -> bool:
        """Return True if a chunk of this executor may begin at the position."""
        return self.reach is None or position <= self.reach

    @property
    def logit_group(self) -> int:
        """Number of rows of logits that one call writes; see `BoundSubgraph.logit_group`."""
        return self.subgraphs[-1].logit_group

    def run(self, run: Run) -> RunResult:
        """Run tokens through the decoder at the state's position, and advance it.

        The run is computed in the calling thread if the policy is sequential, if only one worker exists, or if the run
        consists of a single token. A run of a single chunk also uses the calling thread, unless the chunk contains
        tasks for several processors at once. Otherwise the workers of the processors are started, and the calling
        thread waits, so that an interrupt reaches it. After an error all threads have ended, the state is restored, and
        the executor can be used again. (After a second interrupt `run` returns while tasks still run. The next run, or
        the next use of the state, then waits for these tasks.)

        Raises:
            ConfigError: the tokens, the state or an option do not fit; nothing has run.
            BackendError: a task failed; the message names its subgraph and chunk, the cause is chained.
            ClosedError: the run was cancelled.
        """
        job = self.job(run)
        with self._one_run:
            self._end_workers()
        return job.carry_out(self.compute)

    def compute(self, job: Job, gives_way: GivesWay = never, *, number: int = 0) -> None:
        """Compute the remaining tokens of a job up to this executor's reach, without sharing chunks. The caller manages
        the state.

        Args:
            job: a job that fits this executor.
            gives_way: called before every task; it may withdraw chunks, whose tokens the job keeps.
            number: number of this unit of work if other ranks compute it too; see `Key.number`.

        Raises:
            ConfigError, BackendError, ClosedError: see `run`.
        """
        with self._one_run:
            start_ns = perf_counter_ns()
            self._end_workers()
            first, chunks = job.num_taken, list[Chunk]()
            while job.num_left and self.reaches(job.position + job.num_taken):
                chunks.append(Chunk([job.take(self.chunk_length)], self.plan.flow, number))
            flops = self._flops(chunks)
            schedule = self._schedule(chunks, flops)
            stream = self.stream(dict(enumerate(chunks)))
            try:
                events = self._drive(job, stream, schedule, gives_way, starts_threads=flops is not None)
            except BaseException:
                job.num_taken = first
                workers = self._workers
                job.wait_for_writers = workers.close if workers is not None and workers.are_running else None
                raise
            segments = [chunk.segments[0] for chunk in chunks[: schedule.num_chunks]]
            job.num_taken = segments[-1].start + segments[-1].num_tokens
            if flops is not None:
                self.costs.learn(flops, events)
            pipeline = self._pipeline_in_caller if flops is None else self._pipeline
            job.record(pipeline, segments, events, start_ns=start_ns, end_ns=perf_counter_ns())

    def compute_chunk(self, chunk: Chunk, number: int = 0) -> list[TaskEvent]:
        """Compute one chunk, with rows of one or more jobs, in the calling thread. Raise BackendError if a task failed.

        `number` identifies the chunk if other ranks compute it too; see `Key.number`.
        """
        with self._one_run:
            chunk.number = number
            self._end_workers()
            schedule = self._schedule([chunk], None)
            stream = self.stream({0: chunk})
            with running_on(self.cpus):
                events = run_in_caller(schedule, lambda task: stream.compute(task, schedule.slot(task.chunk)))
            if schedule.failure is not None:
                raise self.failure(*schedule.failure) from schedule.failure[1]
            self.learn(chunk, events)
            return events

    def learn(self, chunk: Chunk, events: Sequence[TaskEvent]) -> None:
        """Update the cost estimates from a chunk's tasks, which may have shared the processors with other chunks."""
        first = [event._replace(task=event.task._replace(chunk=0)) for event in events]
        self.costs.learn(self._flops_of([chunk]), first)

    def durations_of(self, chunk: Chunk) -> list[int]:
        """Return the expected duration of each subgraph on a chunk, in nanoseconds."""
        return [durations[0] for durations in self.costs.durations(self._flops_of([chunk]))]

    def open_schedule(self) -> Schedule:
        """Return a schedule that accepts chunks while others run."""
        self._end_workers()
        return self._schedule([], None)

    @property
    def pipeline(self) -> Pipeline:
        """Description shared by the records of chunks that several workers computed."""
        return self._pipeline

    @property
    def pipeline_in_caller(self) -> Pipeline:
        """Description shared by the records of chunks that the calling thread computed."""
        return self._pipeline_in_caller

    def estimate(self, segments: Sequence[tuple[int, int]], num_rows: int) -> int:
        """Return the expected duration of a chunk without overlap, in nanoseconds.

        Args:
            segments: for each segment the position of the first token, and the number of tokens.
            num_rows: number of rows whose logits are requested.
        """
        durations = self.costs.durations(self.costs.flops_of_segments([segments], [num_rows]))
        return sum(of_subgraph[0] for of_subgraph in durations)

    def _end_workers(self) -> None:
        """Wait for the workers of a run that a second interrupt left running."""
        if self._workers is not None:
            self._workers.close()
            self._workers = None

    def _schedule(self, chunks: Sequence[Chunk], flops: NDArray[np.float64] | None) -> Schedule:
        return Schedule(
            self.plan,
            routes=[chunk.route for chunk in chunks],
            chunks_in_flight=len(self.slots),
            processors=self.processors,
            policy=self.policy,
            durations=None if flops is None else self.costs.durations(flops),
        )

    def stream(self, chunks: dict[int, Chunk]) -> Stream:
        """Return a stream that computes the tasks of these chunks (numbers to chunks) in this executor's slots."""
        return Stream(chunks, self.plan.flow, self.subgraphs, self.slots, self.clock)

    def _flops(self, chunks: Sequence[Chunk]) -> NDArray[np.float64] | None:
        """Return the operations of every task, [subgraphs, chunks]. Return None if tasks cannot overlap, because their
        order then does not matter.
        """
        if not (self.is_concurrent if len(chunks) > 1 else self.splits_chunks and chunks[0].num_tokens > 1):
            return None
        return self._flops_of(chunks)

    def _flops_of(self, chunks: Sequence[Chunk]) -> NDArray[np.float64]:
        segments = [[(segment.position, segment.num_tokens) for segment in chunk.segments] for chunk in chunks]
        return self.costs.flops_of_segments(segments, [chunk.num_rows for chunk in chunks])

    def _drive(
        self, job: Job, stream: Stream, schedule: Schedule, gives_way: GivesWay, *, starts_threads: bool
    ) -> list[TaskEvent]:
        """Drive a run to its end. Raises BackendError if a task failed, ClosedError if it was cancelled."""
        cancel = job.run.cancel

        def execute(task: Task) -> Passage | None:
            return stream.compute(task, schedule.slot(task.chunk))

        if starts_threads:
            self._workers = Workers(schedule, execute, cancel=cancel, gives_way=gives_way, cpus=self.cpus)
            events = self._workers.run()
            self._workers = None
        else:
            with running_on(self.cpus):
                events = run_in_caller(schedule, execute, cancel=cancel, gives_way=gives_way)
        if schedule.failure is not None:
            raise self.failure(*schedule.failure) from schedule.failure[1]
        if schedule.is_cancelled:
            raise ClosedError(f"the run was cancelled after {schedule.chunks_done} of {schedule.num_chunks} chunks")
        return events

    def failure(self, task: Task, error: BaseException) -> BackendError:
        """Return the error to raise for a failed task."""
        kind = next((k for k in (DeviceLostError, NumberRangeError) if isinstance(error, k)), BackendError)
        name = self.plan.subgraphs[task.subgraph].name
        return kind(f"subgraph {name} failed on chunk {task.chunk}: {str(error) or type(error).__name__}")


def _check_plan(plan: Plan) -> None:
    """Check that the last subgraphs compute the logits of the requested rows, and that all subgraphs with state precede
    them.
    """
    rows = [subgraph.rows for subgraph in plan.subgraphs]
    if rows != sorted(rows, reverse=True) or rows[-1:] != ["R"] or plan.output not in plan.subgraphs[-1].outputs:
        raise ModelError(f"the plan's last subgraph does not compute {plan.output!r} row by row; recompile the model")
    for subgraph in plan.subgraphs:
        if subgraph.rows == "R" and subgraph.state:
            raise ModelError(
                f"{subgraph.name} keeps state, but runs only on rows with requested logits; recompile the model"
            )


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
            raise ConfigError(f"processor {processor.name!r} is for the link, which has workers of its own; omit it")
    devices = frozenset[Device](("link",)).union(*(processor.devices for processor in processors))
    for subgraph in plan.subgraphs:
        if subgraph.device not in devices:
            raise ConfigError(
                f"no processor runs {subgraph.device!r}, which {subgraph.name} needs; available devices: "
                f"{', '.join(sorted(devices - {'link'})) or 'none'}"
            )
