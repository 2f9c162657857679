"""The record of one run: its tasks' events, and what is needed to tell why its workers waited.

Executors make one of every run; a simulator makes the same from events on a virtual clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from chunkrt.graph.flow import Flow
from chunkrt.graph.plan import EXPERTS_OP, Device, Plan
from chunkrt.runtime.tasks import Processor, TaskEvent

Work = Literal["linears", "attention", "layers", "embedding", "sums"]
"""What a subgraph does: with state it is attention, or layers if it has linears as well; on the link a sum over ranks;
on the CPU, before or after the layers, embedding or head; all else is linears."""

WORKS: tuple[Work, ...] = get_args(Work)


class Stage(NamedTuple):
    """What a record tells of a subgraph. `waits_for`: the stages, by their indices, that end before it starts."""

    name: str
    device: Device
    work: Work
    waits_for: tuple[int, ...]

    @property
    def has_state(self) -> bool:
        """Whether it takes the chunks in order."""
        return self.work in ("attention", "layers")


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """What the runs of one executor share.

    `num_slots`: chunk slots, so many chunks may be in flight. `slot_bytes`: memory of each. `policy`: its name.
    """

    stages: tuple[Stage, ...]
    processors: tuple[Processor, ...]
    policy: str
    chunk_length: int
    num_slots: int
    slot_bytes: int

    @property
    def flow(self) -> Flow:
        """What waits for what among the stages."""
        picks = (stage.waits_for for stage in self.stages if stage.work == "embedding" and stage.waits_for)
        hidden = next((sources[-1] for sources in picks), None)  # the head picks rows of what that wrote
        waits_for = [stage.waits_for for stage in self.stages]
        return Flow(waits_for, [stage.has_state for stage in self.stages], hidden=hidden)


class SegmentRecord(NamedTuple):
    """Whose rows lie in a chunk: a number for the sequence, the position of its first token there, and how many."""

    sequence: int
    position: int
    num_tokens: int


class ChunkRecord(NamedTuple):
    """A chunk that several runs shared.

    number: by which their records tell that it is the same; each of an engine's chunks has its own.
    """

    number: int
    segments: tuple[SegmentRecord, ...]

    @property
    def num_tokens(self) -> int:
        """Rows that hold a token."""
        return sum(segment.num_tokens for segment in self.segments)


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """One run, on one monotonic clock in nanoseconds.

    position: of the first token. position_bytes: what the caches hold for each position.
    start_ns, end_ns: of the whole run; no event lies outside.
    events: every task, once.
    num_cached: tokens before it that were not run, since the prefix cache had them.
    sequence: whose run it is; the number that segments have for it. Of a simulated prompt it is 0.
    chunks: of a run that shared its chunks with others, one each; none of a run whose chunks were its own.
    copies: what was copied from one processor's memory to another's before a task could start: an event each, with the
        task that waits for it. Executors record none, since today's processors share memory.
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
        """Whether it took a single token."""
        return self.num_tokens == 1

    @property
    def name(self) -> str:
        """What a person calls it."""
        return f"decode at {self.position}" if self.is_decode else f"prefill {self.num_tokens} tokens"

    @property
    def num_chunks(self) -> int:
        """Chunks of the run."""
        return len(self.chunks) or -(-self.num_tokens // self.pipeline.chunk_length)


def stages_of(plan: Plan) -> tuple[Stage, ...]:
    """What a record tells of a plan's subgraphs."""
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
    """What a person calls a worker: "NPU", or "CPU worker 0"."""
    name = processor.name.upper()
    return name if processor.workers == 1 and "cpu" not in processor.devices else f"{name} worker {worker}"
