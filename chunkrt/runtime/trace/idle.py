"""Why workers were idle: every gap between the tasks of a run, by what it was a wait for.

Pure: from a record alone, of a run or a simulation. Time is cut at every start and end of a task, so that between two
cuts nothing changes, and each idle worker's piece has one cause: what its next task was waiting for. The pieces and the
tasks of a worker fill its run exactly.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

from chunkrt.graph.plan import Device
from chunkrt.runtime.record import RunRecord, Work
from chunkrt.runtime.tasks import Span, Task, TaskEvent
from chunkrt.runtime.trace.replay import Replay, Worker
from chunkrt.runtime.trace.shared import joined

Cause = Literal[
    "start",
    "attention",
    "linears",
    "layers",
    "embedding",
    "sums",
    "order",
    "buffer",
    "chunk",
    "copy",
    "drain",
    "overhead",
]

CAUSES: Mapping[Cause, str] = {
    "start": "start of the pipeline",
    "attention": "waiting for attention",
    "linears": "waiting for linears",
    "layers": "waiting for whole layers",
    "embedding": "waiting for embedding or head",
    "sums": "waiting for other ranks",
    "order": "waiting for the order of chunks",
    "buffer": "waiting for a buffer",
    "chunk": "waiting for a chunk",
    "copy": "waiting for a copy",
    "drain": "drain of the pipeline",
    "overhead": "policy and overhead",
}
"""What each cause means.

start, drain: before a worker's first task and after its last. attention, linears, layers, embedding, sums: the next
task waits for such a task of its chunk, which runs, or is ready and has no worker; or attention of an earlier chunk
comes first.
Of several it is the one on the way that ends last. order: the next task has state and is not its chunk's turn. buffer:
its chunk has no chunk slot yet. chunk: runs share chunks, and the next task's had not been formed. copy: what it reads
is being copied. overhead: the worker could have run a task and did not: the policy's choice, waking up, bookkeeping.
"""


class Gap(NamedTuple):
    """A piece of a worker's idle time with one cause, in nanoseconds."""

    processor: str
    worker: int
    start_ns: int
    end_ns: int
    cause: Cause


@dataclass(frozen=True, kw_only=True)
class ProcessorTime:
    """Where the time of one processor went: `total_ns` is wall time times workers, and the sum of `busy_ns` and
    `idle_ns`.

    span_ns: of what it was busy with, on an NPU that converts: what of it was what; else empty.
    """

    name: str
    workers: int
    total_ns: int
    busy_ns: Mapping[Work, int]
    idle_ns: Mapping[Cause, int]
    span_ns: Mapping[Span, int]


def idle_gaps(record: RunRecord) -> list[Gap]:
    """Every idle piece of every worker, by time; pieces of one cause that touch are one.

    Raises:
        ConfigError: the events contradict the schedule's rules, so that they are no run's.
    """
    return _Sweep(Replay(record)).gaps()


def where_time_went(records: Sequence[RunRecord]) -> list[ProcessorTime]:
    """The time of every processor over some runs; of shared chunks, that in which at least one was in flight.

    Args:
        records: of one pipeline, or of pipelines with the same processors.

    Raises:
        ConfigError: the events contradict the schedule's rules.
    """
    return times_of(joined(records))


def times_of(records: Sequence[RunRecord]) -> list[ProcessorTime]:
    """As `where_time_went`, of records in which no task is told twice, from the beginning of each to its end."""
    processors = {processor.name: processor for record in records for processor in record.pipeline.processors}
    times = []
    gaps = [gap for record in records for gap in idle_gaps(record)]
    for name, processor in processors.items():
        busy: dict[Work, int] = {}
        idle: dict[Cause, int] = {}
        spans: dict[Span, int] = {}
        for record in records:
            for event in record.events:
                if event.processor == name:
                    work = record.pipeline.stages[event.task.subgraph].work
                    busy[work] = busy.get(work, 0) + event.end_ns - event.start_ns
                    for span, start_ns, end_ns in event.spans:
                        spans[span] = spans.get(span, 0) + end_ns - start_ns
        for gap in gaps:
            if gap.processor == name:
                idle[gap.cause] = idle.get(gap.cause, 0) + gap.end_ns - gap.start_ns
        total = sum(busy.values()) + sum(idle.values())
        times.append(
            ProcessorTime(
                name=name,
                workers=processor.workers,
                total_ns=total,
                busy_ns=busy,
                idle_ns=idle,
                span_ns=spans,
            )
        )
    return times


class _Sweep:
    """A walk through a run from cut to cut."""

    def __init__(self, replay: Replay) -> None:
        self._replay = replay
        self._record = replay.record
        self._stages = self._record.pipeline.stages
        self._devices: dict[str, frozenset[Device]] = {p.name: p.devices for p in self._record.pipeline.processors}
        self._last_end = max(event.end_ns for event in self._record.events)
        self._upcoming = {worker: list(reversed(events)) for worker, events in replay.workers.items()}
        self._unready = sorted(self._record.events, key=lambda event: -replay.ready[event.task])
        self._waiting: dict[Task, int] = {}
        """The tasks that are ready and have not started, with their starts."""

    def gaps(self) -> list[Gap]:
        record = self._record
        events = (*record.events, *record.copies)
        cuts = {record.start_ns, record.end_ns, *(e.start_ns for e in events), *(e.end_ns for e in events)}
        gaps: list[Gap] = []
        last: dict[Worker, int] = {}
        """The index of every worker's latest gap."""
        for start, end in pairwise(sorted(cuts)):
            self._advance(start)
            for worker, cause in self._causes(start):
                index = last.get(worker)
                if index is not None and gaps[index].end_ns == start and gaps[index].cause == cause:
                    gaps[index] = gaps[index]._replace(end_ns=end)
                else:
                    last[worker] = len(gaps)
                    gaps.append(Gap(*worker, start, end, cause))
        return gaps

    def _advance(self, now: int) -> None:
        """Take in everything up to a moment."""
        while self._unready and self._replay.ready[self._unready[-1].task] <= now:
            event = self._unready.pop()
            self._waiting[event.task] = event.start_ns
        self._waiting = {task: start for task, start in self._waiting.items() if start > now}
        for upcoming in self._upcoming.values():
            while upcoming and upcoming[-1].end_ns <= now:
                upcoming.pop()

    def _causes(self, now: int) -> Iterable[tuple[Worker, Cause]]:
        """The cause of every worker that is idle from now on."""
        idle = {
            worker: upcoming[-1] if upcoming else None
            for worker, upcoming in self._upcoming.items()
            if not upcoming or upcoming[-1].start_ns > now
        }
        if not idle:
            return
        claimed = {event.task for event in idle.values() if event is not None}
        free = {name: 0 for name, _ in idle}
        """Ready tasks that none of the idle workers takes next, and any of a processor's could."""
        for task in self._waiting:
            if task not in claimed:
                for name in free:
                    free[name] += self._stages[task.subgraph].device in self._devices[name]
        for worker, event in idle.items():
            cause = self._cause(worker, event, now)
            if cause != "overhead" and free[worker[0]]:
                free[worker[0]] -= 1
                cause = "overhead"
            yield worker, cause

    def _cause(self, worker: Worker, event: TaskEvent | None, now: int) -> Cause:
        if event is None:
            return "drain" if now < self._last_end else "overhead"
        replay, task = self._replay, event.task
        if replay.ready[task] <= now:
            return "overhead"
        if event is replay.workers[worker][0]:
            return "start"
        if replay.entry(task) > now:
            return "buffer"
        if replay.formed(task) > now:
            return "chunk"
        holdup = self._holdup(task, now)
        if holdup != task and (replay.ready[holdup] <= now or replay.turn(holdup) > now):
            return self._stages[holdup.subgraph].work
        if holdup == task and replay.turn(task) > now:
            return "order"
        return "copy"

    def _holdup(self, task: Task, now: int) -> Task:
        """What a task waits for in the end: of what it waits for the one that ends last, and so on from that."""
        while sources := [event for event in self._replay.sources(task) if event.end_ns > now]:
            task = max(sources, key=lambda event: event.end_ns).task
        return task
