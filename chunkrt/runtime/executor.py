"""The executor: a decoder's subgraphs, bound to the buffers of the chunks in flight.

An executor computes one chunk in the calling thread, or provides the tasks of a stream (`runtime/stream.py`), whose
threads compute several chunks at once. Only one of the two uses it at a time.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from math import lcm
from time import monotonic, perf_counter_ns
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from chunkrt.backends.base import Executable, Passage
from chunkrt.errors import (
    BackendError,
    ChunkrtError,
    ClosedError,
    ConfigError,
    DeviceLostError,
    ModelError,
    NumberRangeError,
)
from chunkrt.graph.linear_attention import LINEAR_ATTENTION_OP, find_variant
from chunkrt.graph.plan import Device, Plan
from chunkrt.runtime.affinity import running_on
from chunkrt.runtime.buffers import BoundSubgraph, BufferLayout, ChunkBuffers
from chunkrt.runtime.chunk_slots import check_chunks_in_flight, chunk_slots
from chunkrt.runtime.costs import Costs
from chunkrt.runtime.policy import Policy
from chunkrt.runtime.record import Origin, Pipeline, stages_of
from chunkrt.runtime.request import Chunk, Request
from chunkrt.runtime.schedule import Schedule
from chunkrt.runtime.tasks import Processor, Task, TaskEvent, with_link

if TYPE_CHECKING:
    from chunkrt.runtime.stream import Stream


DecodeOn = Literal["auto", "cpu", "npu"]

DELTA_RULE_ROWS = 32
"""Number of rows that the native gated delta rule processes at once."""


class Executor:
    """Executor that runs chunks through one compiled decoder.

    Args:
        plan: the decoder.
        executables: the executable of every subgraph, by subgraph name.
        chunk_length: C, maximum number of tokens of a chunk, 1 to the plan's context length.
        processors: the workers of each device role. They must cover all devices of the plan except the link, whose
            tasks wait for other ranks in separate threads.
        policy: chooses among ready tasks.
        chunks_in_flight: number of chunk slots, at least 1; by default the number that `chunk_slots` returns.
        cpus: CPUs that tasks run on, in any thread; by default those that the thread may use.
        reach: the last position at which a chunk may begin, if the subgraphs support only a limited history.
        graph_lengths: see `Pipeline.graph_lengths`.
        origin: "emulated" if one of the processors is emulated.

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
        graph_lengths: tuple[int, ...] = (),
        origin: Origin = "measured",
    ) -> None:
        if not 1 <= chunk_length <= plan.context_length:
            raise ConfigError(f"chunk length {chunk_length} is outside 1..{plan.context_length}, the context length")
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
        self.pipeline = Pipeline(
            stages=stages_of(plan),
            processors=self.processors,
            policy=policy.name,
            chunk_length=chunk_length,
            num_slots=num_slots,
            slot_bytes=layout.num_bytes,
            graph_lengths=graph_lengths,
            origin=origin,
        )
        """Description shared by the records of chunks that a stream computed."""
        alone = tuple(replace(processor, workers=1) for processor in self.processors)
        self.pipeline_in_caller = replace(self.pipeline, processors=alone)
        """Description shared by the records of chunks that the calling thread computed."""
        self.last_stream: Stream | None = None
        """The stream whose threads may still run, because an interrupt ended the wait for them."""
        self._starts: dict[object, float] = {}
        """Start times of the tasks in progress."""
        self._takers = [
            next(processor.name for processor in self.processors if subgraph.device in processor.devices)
            for subgraph in plan.subgraphs
        ]
        """Names of the processors that take the tasks of each subgraph."""
        self._tasks_alone = [Task(index, 0) for index in range(len(plan.subgraphs))]

    def reaches(self, position: int) -> bool:
        """Return True if a chunk of this executor may begin at the position."""
        return self.reach is None or position <= self.reach

    @property
    def logit_group(self) -> int:
        """Number of rows of logits that one call writes; see `BoundSubgraph.logit_group`."""
        return self.subgraphs[-1].logit_group

    def overlaps(self, num_tokens: int) -> bool:
        """Return True if tasks can overlap when a sequence runs this number of tokens alone."""
        if num_tokens > self.chunk_length:
            return self.is_concurrent
        return self.splits_chunks and num_tokens > 1

    def compute(self, chunk: Chunk) -> list[TaskEvent]:
        """Compute one chunk in the calling thread, one task at a time, in the plan's order.

        Raises:
            BackendError: a task failed; the message names its subgraph, the cause is chained.
        """
        if self.cpus is not None:
            with running_on(self.cpus):
                return self._compute(chunk)
        return self._compute(chunk)

    def _compute(self, chunk: Chunk) -> list[TaskEvent]:
        events = []
        for index in chunk.route.subgraphs:
            start_ns = perf_counter_ns()
            try:
                passage = self.run_task(index, chunk, 0)
            except Exception as error:
                raise self.failure(index, chunk, error)  # noqa: B904 - it has its cause
            task, processor = self._tasks_alone[index], self._takers[index]
            events.append(TaskEvent(task, processor, 0, start_ns, perf_counter_ns(), passage))
        return events

    def run_task(self, index: int, chunk: Chunk, slot: int) -> Passage | None:
        """Run one subgraph on a chunk, whose data are in a chunk slot. Any thread may call this method."""
        if chunk.num_tokens > 1 and chunk.is_over:
            first = chunk.segments[0]
            raise first.request.cancelled(first.start)
        subgraph, buffers = self.subgraphs[index], self.slots[slot]
        if not chunk.is_loaded:
            with chunk.loading:  # several tasks of a chunk may be first
                if not chunk.is_loaded:
                    buffers.load(chunk.segments)
                    chunk.is_loaded = True
        key = object()
        self._starts[key] = monotonic()
        passage = None
        try:
            if subgraph.rows == "T":
                passage = subgraph.run(slot, chunk.segments, chunk.num_tokens, chunk.number)
            elif len(chunk.segments) == 1:
                logits = chunk.segments[0].logits
                subgraph.run_logit_rows(slot, chunk.num_tokens, chunk.num_rows, logits, chunk.number)
            else:
                self._run_logit_rows(subgraph, slot, chunk)
        finally:
            del self._starts[key]
        if chunk.wants_hidden and index == self.plan.flow.hidden:  # before a later task reuses the memory
            buffers.give_hidden(chunk.segments)
        if index == chunk.route.subgraphs[-1]:
            for segment in chunk.segments:
                if (on_tokens := segment.request.on_tokens) is not None:
                    on_tokens(segment.num_tokens)
        return passage

    def _run_logit_rows(self, subgraph: BoundSubgraph, slot: int, chunk: Chunk) -> None:
        """Compute the logits of the requested rows, which are consecutive in the chunk, and copy them to the
        requests."""
        group, together = subgraph.logit_group, None
        if subgraph.has_logits and not chunk.segments[0].request.is_for_others:
            together = self.slots[slot].logits(-(-chunk.num_rows // group) * group)
        subgraph.run_logit_rows(slot, chunk.num_tokens, chunk.num_rows, together, chunk.number)
        if together is not None:
            row = 0
            for segment in chunk.segments:
                if segment.num_rows:
                    assert segment.logits is not None
                    np.copyto(segment.logits[: segment.num_rows], together[row : row + segment.num_rows])
                    row += segment.num_rows

    def schedule(self, chunks: Sequence[Chunk] = ()) -> Schedule:
        """Return a schedule of a sequence's consecutive chunks, or an open one if there are none."""
        return Schedule(
            self.plan,
            routes=[chunk.route for chunk in chunks],
            chunks_in_flight=len(self.slots),
            processors=self.processors,
            policy=self.policy,
            durations=self.costs.durations(self._flops(chunks)) if chunks else None,
        )

    def learn(self, chunks: Sequence[Chunk], events: Sequence[Sequence[TaskEvent]]) -> None:
        """Update the cost estimates from the tasks of some chunks, which may have shared the processors with others."""
        numbered = [
            event._replace(task=Task(event.task.subgraph, number))
            for number, of_chunk in enumerate(events)
            for event in of_chunk
        ]
        self.costs.learn(self._flops(chunks), numbered)

    def durations_of(self, chunk: Chunk) -> list[int]:
        """Return the expected duration of each subgraph on a chunk, in nanoseconds."""
        return [durations[0] for durations in self.costs.durations(self._flops([chunk]))]

    def estimate(self, segments: Sequence[tuple[int, int]], num_rows: int) -> int:
        """Return the expected duration of a chunk without overlap, in nanoseconds.

        Args:
            segments: for each segment the position of the first token, and the number of tokens.
            num_rows: number of rows whose logits are requested.
        """
        durations = self.costs.durations(self.costs.flops_of_segments([segments], [num_rows]))
        return sum(of_subgraph[0] for of_subgraph in durations)

    def _flops(self, chunks: Sequence[Chunk]) -> NDArray[np.float64]:
        """Return the operations of every task, [subgraphs, chunks]."""
        segments = [[(segment.position, segment.num_tokens) for segment in chunk.segments] for chunk in chunks]
        return self.costs.flops_of_segments(segments, [chunk.num_rows for chunk in chunks])

    def longest_s(self) -> float:
        """Return the seconds since the oldest task in progress began, or 0 if no task is in progress."""
        starts = list(self._starts.copy().values())
        return monotonic() - min(starts) if starts else 0.0

    def wait_for_threads(self) -> None:
        """Wait for the threads of a stream that a second interrupt left running."""
        if self.last_stream is not None:
            self.last_stream.close()
            self.last_stream = None

    def failure(self, index: int, chunk: Chunk, error: BaseException) -> ChunkrtError:
        """Return the error to raise for a failed task."""
        if isinstance(error, ClosedError) and chunk.is_over:
            return error
        kind = next((k for k in (DeviceLostError, NumberRangeError) if isinstance(error, k)), BackendError)
        number = chunk.segments[0].start // self.chunk_length
        failure = kind(
            f"subgraph {self.plan.subgraphs[index].name} failed on chunk {number}: {str(error) or type(error).__name__}"
        )
        failure.__cause__ = error
        return failure


@dataclass(frozen=True, kw_only=True)
class ExecutorSet:
    """The executors that a scheduler uses.

    Attributes:
        prompts: executor of several tokens of one request.
        tokens: executor of a single token of one request.
        many: executor of chunks that contain rows of prompts, of any number of requests.
        few: executor of chunks that contain only decoding sequences.
        decode_on: if `many` and `few` differ, the choice between them for single tokens: "cpu", "npu", or "auto" for
            the executor with the shorter expected time.
        near: executors with a limited reach (`Executor.reach`), in order of their reach. While the history is short,
            they take precedence over `prompts` and `many`, and with decode_on "npu" over the executors of single
            tokens.
        exact_step: step of the positions at which chunks must begin; otherwise results may differ in the last bit.
        tokens_differ: True if single tokens are computed by another backend than prompts, with other rounding.
    """

    prompts: Executor
    tokens: Executor
    many: Executor
    few: Executor
    decode_on: DecodeOn = "cpu"
    near: Sequence[Executor] = ()
    exact_step: int = 1
    tokens_differ: bool = False

    @classmethod
    def of_one(cls, executor: Executor) -> ExecutorSet:
        """Return a set with one executor for all purposes."""
        return cls(prompts=executor, tokens=executor, many=executor, few=executor)

    def for_one(self, request: Request) -> Executor:
        """Return the executor for the next tokens of a request that shares no chunks.

        A prompt of one chunk has no tasks that overlap. If `many` fuses subgraphs, it computes such a prompt in less
        time than `prompts`.
        """
        if request.is_decode:
            far = self.tokens
        elif self.fuses_one_chunk and request.num_left <= self.many.chunk_length:
            far = self.many
        else:
            far = self.prompts
        return self.near_to(request) or far if self.near else far

    @cached_property
    def fuses_one_chunk(self) -> bool:
        """True if prompts of one chunk are computed by `many`, without an NPU, on one rank and under a policy with
        concurrent tasks. Under other policies, traces show the subgraphs of all prompts.
        """
        is_fused = self.many is self.few and len(self.many.plan.subgraphs) < len(self.prompts.plan.subgraphs)
        return is_fused and self.prompts.policy.is_concurrent and not self.many.plan.flow.sums

    def near_to(self, request: Request) -> Executor | None:
        """Return the executor of limited reach for the next tokens of a request, or None."""
        if request.is_decode and self.decode_on != "npu":
            return None
        position = request.position + request.num_taken
        return next((executor for executor in self.near if executor.reaches(position)), None)

    def for_stream(self, waiting: Sequence[Request]) -> list[Request]:
        """Return the requests whose next tokens are added to the stream of `many`, in which chunks overlap."""
        return self._beside_decoding(self._far(waiting)) if self.overlaps else []

    def for_thread(self, waiting: Sequence[Request], last: Executor | None) -> tuple[list[Request], Executor] | None:
        """Return the requests for the next chunk outside the stream, and the executor of this chunk.

        A single thread computes such chunks. If several executors have requests, the executors take turns: the executor
        after `last` comes next. Return None if no request waits.
        """
        far = self._far(waiting)
        others = self._beside_decoding(far)
        decoding = [request for request in far if request not in others]
        by_thread = [] if self.overlaps else others
        groups = [(decoding, self.few)]
        for executor in self.near:
            own = [
                request
                for request in waiting
                if self.near_to(request) is executor or (executor is self.many and request in by_thread)
            ]
            groups.append((own, executor))
        if self.many not in self.near:
            groups.append((by_thread, self.many))
        start = next((index + 1 for index, (_, executor) in enumerate(groups) if executor is last), 0)
        return next((group for group in (*groups[start:], *groups[:start]) if group[0]), None)

    def _far(self, waiting: Sequence[Request]) -> list[Request]:
        """Return the requests whose history exceeds the reach of the near executors."""
        return [request for request in waiting if self.near_to(request) is None]

    def _beside_decoding(self, waiting: Sequence[Request]) -> list[Request]:
        """Return all requests, without decoding ones if single tokens are computed by a separate executor."""
        if self.many is self.few:
            return list(waiting)
        is_apart = self.decode_apart([request.position for request in waiting if request.is_decode])
        return [request for request in waiting if not (is_apart and request.is_decode)]

    @property
    def all(self) -> Sequence[Executor]:
        """All executors; one that serves several purposes occurs several times."""
        return (self.prompts, self.tokens, self.many, self.few, *self.near)

    @property
    def logit_group(self) -> int:
        """Common multiple of the executors' numbers of rows of logits per call; see `BoundSubgraph.logit_group`."""
        return lcm(*(executor.logit_group for executor in self.all))

    @property
    def parting_step(self) -> int:
        """Step at which prompts may be split; see `Waiting.step`. Executors of limited reach require a step, because
        they sum a chunk's own rows separately from the preceding rows.
        """
        return self.many.chunk_length if self.near else parting_step(self.many.plan, self.many.chunk_length)

    @property
    def overlaps(self) -> bool:
        """True if several chunks in flight keep more processors busy than one chunk. With several ranks, shared chunks
        are computed one at a time, in the order in which the first rank forms them.
        """
        if (
            self.many.plan.flow.sums or self.many in self.near
        ):  # near executors compute one chunk at a time, in one thread
            return False
        return self.many is not self.few and self.many.is_concurrent and len(self.many.processors) > 1

    def decode_apart(self, positions: Sequence[int]) -> bool:
        """Return True if single tokens at these positions run only on the CPU, not in chunks with prompts."""
        if self.decode_on != "auto" or not positions:
            return self.decode_on == "cpu"
        segments = [(position, 1) for position in positions]
        return self.few.estimate(segments, len(segments)) <= self.many.estimate(segments, len(segments))

    def name_of(self, executor: Executor) -> str:
        """Return the name of an executor, by which other ranks find the corresponding executor."""
        return next(field.name for field in fields(self) if getattr(self, field.name) is executor)

    @property
    def identity(self) -> Sequence[object]:
        """Description of the executors, which must be equal on all ranks."""
        executors = (self.prompts, self.tokens, self.many, self.few)
        return [(e.chunk_length, len(e.slots), [s.name for s in e.plan.subgraphs]) for e in executors]

    def longest_task_s(self) -> float:
        """Return the seconds since the oldest task in progress began, or 0 if no task is in progress."""
        return max(executor.longest_s() for executor in self.all)


def parting_step(plan: Plan, chunk_length: int) -> int:
    """Return the step (see `Waiting.step`) at which splitting a prompt does not change results.

    Most layers compute every row independently. The native gated delta rule processes up to 32 rows at once, counted
    from the beginning of a chunk. Mamba-2 is computed row by row. For other recurrent kinds the step is unknown.
    """
    nodes = (node for subgraph in plan.subgraphs for node in subgraph.nodes if node.op == LINEAR_ATTENTION_OP)
    kinds = {str(node.attributes["attn_type"]) for node in nodes}
    recurrent = {kind for kind in kinds if (v := find_variant(kind)).is_recurrent and not v.is_row_by_row}
    if not recurrent:
        return 1
    is_known = recurrent == {"gated_delta_rule"} and not chunk_length % DELTA_RULE_ROWS
    return DELTA_RULE_ROWS if is_known else chunk_length


def _check_plan(plan: Plan) -> None:
    """Check that the last subgraphs compute the logits of the requested rows, and that all subgraphs with state precede
    them.
    """
    rows = [subgraph.rows for subgraph in plan.subgraphs]
    if rows != sorted(rows, reverse=True) or rows[-1:] != ["R"] or plan.output not in plan.subgraphs[-1].outputs:
        raise ModelError(f"the plan's last subgraph does not compute {plan.output!r} row by row; recompile the model")
    for subgraph in plan.subgraphs:
        if subgraph.rows == "R" and subgraph.all_state:
            raise ModelError(
                f"{subgraph.name} uses state, but runs only on rows with requested logits; recompile the model"
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
            raise ConfigError(f"processor {processor.name!r} is for the link, which has its own workers; omit it")
    devices = frozenset[Device](("link",)).union(*(processor.devices for processor in processors))
    for subgraph in plan.subgraphs:
        if subgraph.device not in devices:
            raise ConfigError(
                f"no processor runs {subgraph.device!r}, which {subgraph.name} needs; available devices: "
                f"{', '.join(sorted(devices - {'link'})) or 'none'}"
            )
