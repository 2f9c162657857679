"""The record of one run: the events of its tasks, and the data that explain why its workers waited.

Executors create a record of every run. A simulator creates the same kind of record from events on a virtual clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from chunkrt.graph.flow import Flow
from chunkrt.graph.plan import EXPERTS_OP, Device, Plan
from chunkrt.runtime.tasks import Processor, TaskEvent

Work = Literal["linears", "attention", "layers", "embedding", "sums"]
"""Kind of work of a subgraph. A subgraph with state is attention, or layers if it also contains linear layers. A
subgraph on the link is a sum over ranks. A subgraph on the CPU before or after the layers is embedding or LM head. All
other subgraphs are linears.
"""

WORKS: tuple[Work, ...] = get_args(Work)

Origin = Literal["measured", "emulated", "predicted", "unknown"]
"""Source of the times of a record: a run on this machine's processors, a run in which an emulated NPU took part, or a
simulation. The origin is unknown if an older version of chunkrt wrote the record.
"""

ORIGINS: tuple[Origin, ...] = get_args(Origin)


class Stage(NamedTuple):
    """Description of a subgraph in a record. `waits_for` lists the indices of the stages that end before it starts."""

    name: str
    device: Device
    work: Work
    waits_for: tuple[int, ...]

    @property
    def has_state(self) -> bool:
        """True if the subgraph processes the chunks in order."""
        return self.work in ("attention", "layers")


def smallest_graph(num_rows: int, graph_lengths: Sequence[int], chunk_length: int) -> int:
    """Return the number of rows of the smallest graph that holds a number of rows. `graph_lengths` are in order, and
    empty if there is one graph, for the chunk length.
    """
    return next((length for length in graph_lengths if num_rows <= length), chunk_length)


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """Description of a pipeline, shared by the records of one executor's runs.

    Attributes:
        num_slots: number of chunk slots, which is the maximum number of chunks in flight.
        slot_bytes: bytes of one slot.
        policy: name of the policy.
        graph_lengths: numbers of rows for which the NPU has graphs, shortest first; empty if it has one graph, for the
            chunk length.
        origin: source of the times.
    """

    stages: tuple[Stage, ...]
    processors: tuple[Processor, ...]
    policy: str
    chunk_length: int
    num_slots: int
    slot_bytes: int
    graph_lengths: tuple[int, ...] = ()
    origin: Origin = "unknown"

    def rows_on_npu(self, num_tokens: int) -> int:
        """Return the number of rows that the NPU computes for a chunk with a number of tokens, including padding."""
        return smallest_graph(num_tokens, self.graph_lengths, self.chunk_length)

    def __repr__(self) -> str:
        """Return the number of stages, with the processors, the policy and the slots."""
        names = ", ".join(processor.name for processor in self.processors)
        return (
            f"Pipeline({len(self.stages)} stages on {names}, policy {self.policy}, chunks of {self.chunk_length}, "
            f"{self.num_slots} slots of {self.slot_bytes} bytes)"
        )

    @property
    def flow(self) -> Flow:
        """Dependencies among the stages."""
        picks = (stage.waits_for for stage in self.stages if stage.work == "embedding" and stage.waits_for)
        hidden = next((sources[-1] for sources in picks), None)  # the LM head selects rows of that stage's output
        waits_for = [stage.waits_for for stage in self.stages]
        return Flow(waits_for, [stage.has_state for stage in self.stages], hidden=hidden)


class SegmentRecord(NamedTuple):
    """Segment of a chunk: the number of the sequence, the position of the first token, and the number of tokens."""

    sequence: int
    position: int
    num_tokens: int


class ChunkRecord(NamedTuple):
    """A chunk that several runs may have shared.

    `number` is unique among the chunks of an engine, and the same in the records of all runs of the chunk.
    """

    number: int
    segments: tuple[SegmentRecord, ...]

    @property
    def num_tokens(self) -> int:
        """Number of rows that contain a token."""
        return sum(segment.num_tokens for segment in self.segments)


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """Record of one run. All times are nanoseconds on one monotonic clock.

    Attributes:
        position: position of the first token.
        position_bytes: bytes of the caches for each position.
        start_ns, end_ns: bounds of the complete run, which include all events.
        events: one event for every task.
        num_cached: number of tokens before the run that came from the prefix cache.
        sequence: number of the run's sequence, as in segments; 0 for a simulated prompt.
        chunks: the chunks, if the run shared chunks with other runs; otherwise empty.
        copies: copies between the memories of two processors: one event for each copy, with the task that waits for it.
            Executors record none, because today's processors share memory.
    """

    pipeline: Pipeline
    num_tokens: int
    position: int
    position_bytes: int
    start_ns: int
    end_ns: int
    events: Sequence[TaskEvent]
    copies: Sequence[TaskEvent] = ()
    chunks: Sequence[ChunkRecord] = ()
    sequence: int = 0
    num_cached: int = 0

    def __repr__(self) -> str:
        """Return the run's name and duration, with the numbers of chunks and events."""
        cached = f", {self.num_cached} cached" if self.num_cached else ""
        milliseconds = (self.end_ns - self.start_ns) / 1e6
        return (
            f"RunRecord({self.name}{cached}, from position {self.position}, {self.num_chunks} chunks, "
            f"{milliseconds:.3f} ms, {len(self.events)} events, policy {self.pipeline.policy})"
        )

    def _repr_html_(self) -> str:
        from chunkrt.runtime.trace.idle import record_html

        return record_html(self)

    @property
    def is_decode(self) -> bool:
        """True if the run consisted of a single token."""
        return self.num_tokens == 1

    @property
    def name(self) -> str:
        """Name of the run for display."""
        return f"decode at {self.position}" if self.is_decode else f"prefill {self.num_tokens} tokens"

    @property
    def num_chunks(self) -> int:
        """Number of chunks of the run."""
        return len(self.chunks) or -(-self.num_tokens // self.pipeline.chunk_length)


def origin_of(records: Sequence[RunRecord]) -> Origin:
    """Return the common origin of some records. A measured run next to an emulated one counts as emulated.

    Raises:
        ValueError: there are no records.
    """
    found = {record.pipeline.origin for record in records}
    if found == {"measured", "emulated"}:
        return "emulated"
    if not found:
        raise ValueError("no records, so no origin")
    return found.pop() if len(found) == 1 else "unknown"


def stages_of(plan: Plan) -> tuple[Stage, ...]:
    """Return the descriptions of a plan's subgraphs."""
    stages = []
    for subgraph, waits_for in zip(plan.subgraphs, plan.flow.waits_for, strict=True):
        is_outside_layers = subgraph.device == "cpu" and (not waits_for or subgraph.rows == "R")
        work: Work = "embedding" if is_outside_layers else "linears"
        if subgraph.device == "link":
            work = "sums"
        elif subgraph.all_state:
            work = "layers" if any(node.op in ("MatMul", EXPERTS_OP) for node in subgraph.nodes) else "attention"
        stages.append(Stage(subgraph.name, subgraph.device, work, waits_for))
    return tuple(stages)


def track_name(processor: Processor, worker: int) -> str:
    """Return the display name of a worker: "NPU", or "CPU worker 0"."""
    name = processor.name.upper()
    return name if processor.workers == 1 and "cpu" not in processor.devices else f"{name} worker {worker}"
