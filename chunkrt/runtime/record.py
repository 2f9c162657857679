"""The record of one run: the events of its tasks, and the data that explain why its workers waited.

Executors make a record of every run; a simulator makes the same from events on a virtual clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from chunkrt.graph.flow import Flow
from chunkrt.graph.plan import EXPERTS_OP, Device, Plan
from chunkrt.runtime.tasks import Processor, TaskEvent

Work = Literal["linears", "attention", "layers", "embedding", "sums"]
"""Kind of work of a subgraph: with state it is attention, or layers if it also has linear layers; on the link it is a
sum over ranks; on the CPU, before or after the layers, it is embedding or LM head; all other subgraphs are linears."""

WORKS: tuple[Work, ...] = get_args(Work)


class Stage(NamedTuple):
    """Description of a subgraph in a record. `waits_for`: indices of the stages that end before it starts."""

    name: str
    device: Device
    work: Work
    waits_for: tuple[int, ...]

    @property
    def has_state(self) -> bool:
        """True if it takes the chunks in order."""
        return self.work in ("attention", "layers")


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """Description shared by the runs of one executor.

    `num_slots`: chunk slots, the largest number of chunks in flight. `slot_bytes`: memory of each. `policy`: its name.
    """

    stages: tuple[Stage, ...]
    processors: tuple[Processor, ...]
    policy: str
    chunk_length: int
    num_slots: int
    slot_bytes: int

    @property
    def flow(self) -> Flow:
        """Dependencies among the stages."""
        picks = (stage.waits_for for stage in self.stages if stage.work == "embedding" and stage.waits_for)
        hidden = next((sources[-1] for sources in picks), None)  # the LM head picks rows of that stage's output
        waits_for = [stage.waits_for for stage in self.stages]
        return Flow(waits_for, [stage.has_state for stage in self.stages], hidden=hidden)


class SegmentRecord(NamedTuple):
    """Segment of a chunk: a number for the sequence, the position of its first token, and the number of tokens."""

    sequence: int
    position: int
    num_tokens: int


class ChunkRecord(NamedTuple):
    """A chunk that several runs shared.

    number: unique among an engine's chunks, and the same in the records of all its runs.
    """

    number: int
    segments: tuple[SegmentRecord, ...]

    @property
    def num_tokens(self) -> int:
        """Number of rows that hold a token."""
        return sum(segment.num_tokens for segment in self.segments)


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """One run, on one monotonic clock in nanoseconds.

    position: position of the first token. position_bytes: bytes of the caches for each position.
    start_ns, end_ns: bounds of the complete run; no event is outside.
    events: every task, once.
    num_cached: tokens before the run that were taken from the prefix cache.
    sequence: the number of the run's sequence, as in segments; 0 for a simulated prompt.
    chunks: one entry for each chunk of a run that shared its chunks; empty for a run with chunks of its own.
    copies: copies from one processor's memory to another's before a task could start: an event each, with the task that
        waits for it. Executors record none, because today's processors share memory.
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

    def _repr_html_(self) -> str:
        from chunkrt.runtime.trace.table import record_html

        return record_html(self)

    @property
    def is_decode(self) -> bool:
        """True if the run took a single token."""
        return self.num_tokens == 1

    @property
    def name(self) -> str:
        """Name of the run for display."""
        return f"decode at {self.position}" if self.is_decode else f"prefill {self.num_tokens} tokens"

    @property
    def num_chunks(self) -> int:
        """Number of chunks of the run."""
        return len(self.chunks) or -(-self.num_tokens // self.pipeline.chunk_length)


def stages_of(plan: Plan) -> tuple[Stage, ...]:
    """Return the descriptions of a plan's subgraphs."""
    stages = []
    for subgraph, waits_for in zip(plan.subgraphs, plan.flow.waits_for, strict=True):
        is_outside_layers = subgraph.device == "cpu" and (not waits_for or subgraph.rows == "R")
        work: Work = "embedding" if is_outside_layers else "linears"
        if subgraph.device == "link":
            work = "sums"
        elif subgraph.state:
            work = "layers" if any(node.op in ("MatMul", EXPERTS_OP) for node in subgraph.nodes) else "attention"
        stages.append(Stage(subgraph.name, subgraph.device, work, waits_for))
    return tuple(stages)


def track_name(processor: Processor, worker: int) -> str:
    """Return the display name of a worker: "NPU", or "CPU worker 0"."""
    name = processor.name.upper()
    return name if processor.workers == 1 and "cpu" not in processor.devices else f"{name} worker {worker}"
