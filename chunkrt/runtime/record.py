"""The record of one run: its tasks' events, and what is needed to tell why its workers waited.

Executors make one of every run; a simulator makes the same from events on a virtual clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from chunkrt.graph.plan import Device, Subgraph
from chunkrt.runtime.events import TaskEvent
from chunkrt.runtime.schedule import Processor

Work = Literal["linears", "attention", "embedding"]
"""What a subgraph does, by its device and state: for the NPU; with state; neither (embedding and head)."""

WORKS: tuple[Work, ...] = get_args(Work)


class Stage(NamedTuple):
    """What a record tells of a subgraph."""

    name: str
    device: Device
    has_state: bool

    @property
    def work(self) -> Work:
        """What the subgraph does."""
        if self.has_state:
            return "attention"
        return "linears" if self.device == "npu" else "embedding"


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """What the runs of one executor share.

    `num_slots`: ring slots, so many chunks may be in flight. `slot_bytes`: memory of each. `policy`: its name.
    """

    stages: tuple[Stage, ...]
    processors: tuple[Processor, ...]
    policy: str
    chunk_length: int
    num_slots: int
    slot_bytes: int


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """One run, on one monotonic clock in nanoseconds.

    position: of the first token. position_bytes: what the caches hold for each position.
    start_ns, end_ns: of the whole run; no event lies outside.
    events: every task, once.
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
        return -(-self.num_tokens // self.pipeline.chunk_length)


def stages_of(subgraphs: Sequence[Subgraph]) -> tuple[Stage, ...]:
    """What a record tells of a plan's subgraphs."""
    return tuple(Stage(subgraph.name, subgraph.device, bool(subgraph.state)) for subgraph in subgraphs)


def track_name(processor: Processor, worker: int) -> str:
    """What a person calls a worker: "NPU", or "CPU worker 0"."""
    name = processor.name.upper()
    return name if processor.workers == 1 and "cpu" not in processor.devices else f"{name} worker {worker}"
