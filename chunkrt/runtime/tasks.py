"""Tasks, the processors that run them, and the events of completed tasks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple, get_args

from chunkrt.backends.base import Passage
from chunkrt.graph.plan import Device, Plan


class Task(NamedTuple):
    """Execution of one subgraph on one chunk, identified by their indices."""

    subgraph: int
    chunk: int


Span = Literal["entering", "waiting", "computing", "leaving"]
"""Parts of a task on an NPU that converts values, in this order: conversion of the inputs, wait for the NPU,
computation on the NPU, conversion of the outputs.
"""

SPANS: tuple[Span, ...] = get_args(Span)


class TaskEvent(NamedTuple):
    """Record of a completed task: its worker, and its times in nanoseconds on one monotonic clock."""

    task: Task
    processor: str
    worker: int
    start_ns: int
    end_ns: int
    passage: Passage | None = None
    """Boundaries between the parts of a task on an NPU that converts its values."""

    @property
    def own_ns(self) -> int:
        """Duration in nanoseconds, without the wait for the NPU."""
        waited_ns = 0 if self.passage is None else self.passage.began_ns - self.passage.entered_ns
        return self.end_ns - self.start_ns - waited_ns

    @property
    def spans(self) -> Sequence[tuple[Span, int, int]]:
        """The parts of the task with their start and end times; empty if the task has no passage."""
        if self.passage is None:
            return ()
        times = (self.start_ns, *self.passage, self.end_ns)
        return [(span, *between) for span, between in zip(SPANS, pairwise(times), strict=True)]


@dataclass(frozen=True, kw_only=True)
class Processor:
    """Workers that run the tasks of one device role, or of both roles if both run on the same CPU threads.

    Attributes:
        workers: maximum number of tasks in progress.
        num_computing: maximum number of tasks that an NPU computes at once, while other tasks convert their values or
            wait; None for no limit.
    """

    name: str
    devices: frozenset[Device]
    workers: int
    num_computing: int | None = None


def processors_for(
    npu_workers: int | None, cpu_workers: int, *, num_computing: int | None = None
) -> tuple[Processor, ...]:
    """Return the processors: one for the NPU and one for the CPU's threads.

    If `npu_workers` is None, return one processor of CPU threads for both roles. `num_computing` limits the NPU's
    tasks; see `Processor`.
    """
    if npu_workers is None:
        return (Processor(name="cpu", devices=frozenset(("npu", "cpu")), workers=cpu_workers),)
    return (
        Processor(name="npu", devices=frozenset(("npu",)), workers=npu_workers, num_computing=num_computing),
        Processor(name="cpu", devices=frozenset(("cpu",)), workers=cpu_workers),
    )


def with_link(processors: Sequence[Processor], plan: Plan, chunks_in_flight: int) -> tuple[Processor, ...]:
    """Return the processors, preceded by the link's workers if the plan has sums over ranks.

    The link has one worker for every chunk in flight. So no sum waits for a worker while other ranks wait for the sum,
    and the earliest chunk can always continue, in any order of tasks on the ranks. The link's workers come first, so an
    executor that runs one task at a time finishes a chunk before it begins the next.
    """
    if not any(subgraph.device == "link" for subgraph in plan.subgraphs):
        return tuple(processors)
    link = Processor(name="link", devices=frozenset(("link",)), workers=chunks_in_flight)
    return (link, *processors)
