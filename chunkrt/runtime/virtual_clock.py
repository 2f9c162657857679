"""Simulate a schedule on a virtual clock: the timeline of a run whose tasks take given times.

The simulation uses no threads, and does not wait. Every running task proceeds at a speed, which may depend on the other
running tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from operator import truediv
from typing import TYPE_CHECKING

from chunkrt.backends.base import Passage
from chunkrt.runtime.tasks import Processor, Task, TaskEvent

if TYPE_CHECKING:  # a schedule simulates policies with this module
    from chunkrt.runtime.schedule import Schedule

NOTHING_LEFT_NS = 1e-3
"""Remaining work that is only a rounding error."""

Speeds = Callable[[Collection[Task]], Sequence[float]]
"""Function that returns the speeds of tasks that run at the same time, above 0 and at most 1."""


def at_full_speed(running: Collection[Task]) -> Sequence[float]:
    """Return full speed for all tasks, so no task slows down another."""
    return [1.0] * len(running)


Outside = Callable[[float], float | None]
"""Source of chunks for an open schedule. It is called with the current time whenever a task ends, and at the times that
it returns. It admits chunks, and closes the schedule after the last one. It returns the time of its next call, or None
to be called at the end of the next task.
"""


def nothing_comes(now: float) -> float | None:
    """Admit no chunks, because all chunks are known from the beginning."""
    return None


Edges = Callable[[Task], tuple[float, float]]
"""Function that returns the shares of a task's duration on an NPU for the conversion of its inputs and of its
outputs."""


def without_edges(task: Task) -> tuple[float, float]:
    """Return shares of 0: the task converts no values."""
    return 0.0, 0.0


@dataclass
class _Way:
    """A task in progress.

    Attributes:
        parts: work of the parts after the present one.
        times: start and end times of the parts.
    """

    processor: Processor
    worker: int
    parts: list[float]
    times: list[float]


def run_on_virtual_clock(
    schedule: Schedule,
    duration: Callable[[Task], int],
    speeds: Speeds = at_full_speed,
    outside: Outside = nothing_comes,
    edges: Edges = without_edges,
) -> list[TaskEvent]:
    """Drive a schedule to its end.

    At every point in time, tasks that end are completed first, in the order in which they started. Then `outside` is
    called. Then each processor, in order, claims tasks until its workers are busy or the schedule offers no task for
    it. If `Processor.num_computing` limits a processor, its tasks convert their inputs, wait for their turn (first
    come, first served), compute, and convert their outputs.

    Args:
        schedule: a new schedule.
        duration: returns a task's duration at full speed in nanoseconds, at least 0, without the wait for its turn.
        speeds: returns the speeds of the running tasks.
        outside: source of chunks for an open schedule.
        edges: returns the shares of a duration for conversions, if a processor limits the number of computing tasks.

    Returns:
        The events of all tasks, in the order in which they ended. The clock starts at 0.
    """
    now = 0.0
    idle = {processor.name: list(reversed(range(processor.workers))) for processor in schedule.processors}
    turns = {p.name: p.num_computing for p in schedule.processors if p.num_computing is not None}
    waiting: dict[str, list[Task]] = {name: [] for name in turns}
    running: dict[Task, _Way] = {}
    """Running tasks in the order in which they started."""
    left: dict[Task, float] = {}
    """Remaining work of each task in its present part. Tasks that wait for their turn have no entry."""
    events: list[TaskEvent] = []
    while True:
        next_call = outside(now)
        if schedule.is_finished:
            return events
        for processor in schedule.processors:
            workers = idle[processor.name]
            while workers and (task := schedule.claim(processor)) is not None:
                parts: list[float] = [duration(task)]
                if processor.name in turns:
                    entering, leaving = edges(task)
                    parts = [entering, max(0.0, parts[0] - entering - leaving), leaving]
                left[task] = parts.pop(0)
                running[task] = _Way(processor, workers.pop(), parts, [now])
        rates = speeds(left)
        steps = list(map(truediv, left.values(), rates))
        if next_call is not None:
            steps.append(next_call - now)
        step = min(steps)
        now = next_call if step == steps[-1] and next_call is not None else now + step
        for task, rate in zip(left, rates, strict=True):
            left[task] -= step * rate
        for task, way in list(running.items()):
            if left.get(task, 1.0) >= NOTHING_LEFT_NS:
                continue
            del left[task]
            way.times.append(now)
            name = way.processor.name
            if len(way.parts) == 2:
                waiting[name].append(task)
                continue
            if way.parts:
                turns[name] += 1
                if leaving := way.parts.pop():
                    left[task] = leaving
                    continue
                way.times.append(now)
            del running[task]
            idle[name].append(way.worker)
            schedule.complete(task)
            events.append(_event(task, way))
        for name, tasks in waiting.items():
            while tasks and turns[name]:
                turns[name] -= 1
                task = tasks.pop(0)
                running[task].times.append(now)
                left[task] = running[task].parts.pop(0)


def _event(task: Task, way: _Way) -> TaskEvent:
    start, *between, end = map(round, way.times)
    return TaskEvent(task, way.processor.name, way.worker, start, end, Passage(*between) if between else None)
