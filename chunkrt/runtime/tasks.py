"""Tasks, the processors that run them, and what is told of one that has run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple, get_args

from chunkrt.backends.base import Passage
from chunkrt.graph.plan import Device, Plan


class Task(NamedTuple):
    """One subgraph on one chunk, by their indices."""

    subgraph: int
    chunk: int


Span = Literal["entering", "waiting", "computing", "leaving"]
"""Parts of a task on an NPU that converts: its inputs are converted; it waits for the NPU's turn; the NPU computes; its
outputs are converted."""

SPANS: tuple[Span, ...] = get_args(Span)


class TaskEvent(NamedTuple):
    """One task that ended well: who ran it and when, on one monotonic clock in nanoseconds."""

    task: Task
    processor: str
    worker: int
    start_ns: int
    end_ns: int
    passage: Passage | None = None
    """Of a task on an NPU that converts its values: what of the time was what."""

    @property
    def own_ns(self) -> int:
        """What it took without the wait for the NPU's turn."""
        waited_ns = 0 if self.passage is None else self.passage.began_ns - self.passage.entered_ns
        return self.end_ns - self.start_ns - waited_ns

    @property
    def spans(self) -> Sequence[tuple[Span, int, int]]:
        """What of the time was what, each from when to when; empty without a passage."""
        if self.passage is None:
            return ()
        times = (self.start_ns, *self.passage, self.end_ns)
        return [(span, *between) for span, between in zip(SPANS, pairwise(times), strict=True)]


@dataclass(frozen=True, kw_only=True)
class Processor:
    """Workers that run tasks of one device role, or of both when both run on the same CPU threads.

    `workers` is how many tasks it takes at once. `num_computing`: of those that an NPU takes, how many compute at once,
    while the others convert their values or wait; None: all.
    """

    name: str
    devices: frozenset[Device]
    workers: int
    num_computing: int | None = None


def processors_for(
    npu_workers: int | None, cpu_workers: int, *, num_computing: int | None = None
) -> tuple[Processor, ...]:
    """Who runs tasks: an NPU beside the CPU's threads, or, without one (None), the CPU's threads for both roles.

    `num_computing`: of the NPU's tasks; see `Processor`.
    """
    if npu_workers is None:
        return (Processor(name="cpu", devices=frozenset(("npu", "cpu")), workers=cpu_workers),)
    return (
        Processor(name="npu", devices=frozenset(("npu",)), workers=npu_workers, num_computing=num_computing),
        Processor(name="cpu", devices=frozenset(("cpu",)), workers=cpu_workers),
    )


def with_link(processors: Sequence[Processor], plan: Plan, chunks_in_flight: int) -> tuple[Processor, ...]:
    """The processors, and before them the link's workers if the plan has sums over ranks.

    There is a worker for every chunk in flight, so that no sum waits for a worker while the other ranks wait for it:
    whatever the order in which each rank takes its tasks, the earliest chunk can always go on. They come first, so that
    what runs one task at a time finishes a chunk before it begins the next.
    """
    if not any(subgraph.device == "link" for subgraph in plan.subgraphs):
        return tuple(processors)
    link = Processor(name="link", devices=frozenset(("link",)), workers=chunks_in_flight)
    return (link, *processors)


def task_lists(processors: Sequence[Processor]) -> dict[Device, list[Task]]:
    """An empty list of tasks for every device; devices of the same processors share one."""
    lists: dict[frozenset[str], list[Task]] = {}
    takers = {d: frozenset(p.name for p in processors if d in p.devices) for d in get_args(Device)}
    return {device: lists.setdefault(names, []) for device, names in takers.items()}
