"""Causes of idle time: every gap between the tasks of a worker, by the reason for the wait.

The causes are a pure function of a record, which comes from a run or a simulation. Time is cut at every start and end
of a task, so nothing changes between two cuts. Each piece of a worker's idle time is assigned one cause: the reason why
the worker's next task waited. The pieces and the tasks of a worker fill the run exactly.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

from chunkrt.graph.plan import Device
from chunkrt.pictures import html_table
from chunkrt.runtime.record import WORKS, RunRecord, Work
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
    "linears": "waiting for linear layers",
    "layers": "waiting for complete layers",
    "embedding": "waiting for embedding or LM head",
    "sums": "waiting for other ranks",
    "order": "waiting for the order of chunks",
    "buffer": "waiting for a buffer",
    "chunk": "waiting for a chunk",
    "copy": "waiting for a copy",
    "drain": "drain of the pipeline",
    "overhead": "policy and overhead",
}
"""Descriptions of the causes.

Keys:
    start: the time before the worker's first task.
    drain: the time after the worker's last task.
    attention, linears, layers, embedding, sums: the next task waits for a task of this kind in its chunk, which is
        running, or is ready and has no worker; or it waits for attention of an earlier chunk. Of several such tasks,
        the task in progress that ends last is the cause.
    order: the next task has state, and an earlier chunk must run first.
    buffer: the chunk of the next task has no chunk slot yet.
    chunk: runs share chunks, and the chunk of the next task was not formed yet.
    copy: the input of the next task is being copied.
    overhead: the worker could have run a task and did not, because of the policy's choice, waking up or bookkeeping.
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
    """Breakdown of the time of one processor.

    Attributes:
        total_ns: wall time times workers, which is the sum of all `busy_ns` and `idle_ns`.
        span_ns: parts of the busy time of an NPU that converts values; otherwise empty.
    """

    name: str
    workers: int
    total_ns: int
    busy_ns: Mapping[Work, int]
    idle_ns: Mapping[Cause, int]
    span_ns: Mapping[Span, int]


def idle_gaps(record: RunRecord) -> list[Gap]:
    """Return every idle piece of every worker in order of time. Adjacent pieces with the same cause are joined.

    Raises:
        ConfigError: the events contradict the schedule's rules, so they do not come from a run.
    """
    return _Sweep(Replay(record)).gaps()


def where_time_went(records: Sequence[RunRecord]) -> list[ProcessorTime]:
    """Return the breakdown of every processor's time over some runs. For shared chunks, only the time with at least one
    chunk in flight counts.

    Args:
        records: records of one pipeline, or of pipelines with the same processors.

    Raises:
        ConfigError: the events contradict the schedule's rules.
    """
    return times_of(joined(records))


def times_of(records: Sequence[RunRecord]) -> list[ProcessorTime]:
    """Return the breakdown of `where_time_went` for records without duplicate tasks, from the start of each to its
    end."""
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
        """Ready tasks that have not started, with their start times."""

    def gaps(self) -> list[Gap]:
        record = self._record
        events = (*record.events, *record.copies)
        cuts = {record.start_ns, record.end_ns, *(e.start_ns for e in events), *(e.end_ns for e in events)}
        gaps: list[Gap] = []
        last: dict[Worker, int] = {}
        """Index of the latest gap of every worker."""
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
        """Advance to a time."""
        while self._unready and self._replay.ready[self._unready[-1].task] <= now:
            event = self._unready.pop()
            self._waiting[event.task] = event.start_ns
        self._waiting = {task: start for task, start in self._waiting.items() if start > now}
        for upcoming in self._upcoming.values():
            while upcoming and upcoming[-1].end_ns <= now:
                upcoming.pop()

    def _causes(self, now: int) -> Iterable[tuple[Worker, Cause]]:
        """Yield the cause for every worker that is idle from now on."""
        idle = {
            worker: upcoming[-1] if upcoming else None
            for worker, upcoming in self._upcoming.items()
            if not upcoming or upcoming[-1].start_ns > now
        }
        if not idle:
            return
        claimed = {event.task for event in idle.values() if event is not None}
        free = {name: 0 for name, _ in idle}
        """Number of ready tasks for each processor that no idle worker takes next."""
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
        """Return the task that a task ultimately waits for. Of several sources, follow the one that ends last, and
        repeat this for its sources.
        """
        while sources := [event for event in self._replay.sources(task) if event.end_ns > now]:
            task = max(sources, key=lambda event: event.end_ns).task
        return task


def record_html(record: RunRecord) -> str:
    """Return a table with a column for each processor, and a row for each kind of work and each cause of idleness, in
    percent."""
    times = times_of([record])
    parts = [{**time.busy_ns, **{f"idle: {CAUSES[cause]}": ns for cause, ns in time.idle_ns.items()}} for time in times]
    names = [
        name
        for name in (*WORKS, *(f"idle: {meaning}" for meaning in CAUSES.values()))
        if any(name in part for part in parts)
    ]
    rows = [
        (
            name,
            *(
                f"{100 * part.get(name, 0) / max(time.total_ns, 1):.1f} %"
                for time, part in zip(times, parts, strict=True)
            ),
        )
        for name in names
    ]
    seconds = (record.end_ns - record.start_ns) / 1e9
    speed = f", {record.num_tokens / seconds:.1f} tokens/s" if seconds else ""
    caption = f"{record.name}: {1e3 * seconds:.1f} ms{speed}, policy {record.pipeline.policy}"
    return html_table(caption, ("", *(f"{t.name} x {t.workers}" if t.workers > 1 else t.name for t in times)), rows)
