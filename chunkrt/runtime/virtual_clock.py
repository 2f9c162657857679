"""A schedule on a virtual clock: what a run would look like if its tasks took given times. No threads, no waiting."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from chunkrt.runtime.tasks import Task, TaskEvent

if TYPE_CHECKING:  # a schedule looks ahead with this module
    from chunkrt.runtime.schedule import Schedule


def run_on_virtual_clock(schedule: Schedule, duration: Callable[[Task], int]) -> list[TaskEvent]:
    """Drive a schedule to its end.

    At every moment all tasks that end then are completed, in the order in which they started; after that, processors in
    their order take what the schedule hands out, each until its workers are busy or it gets nothing.

    Args:
        schedule: a new one.
        duration: of a task in nanoseconds, at least 0.

    Returns:
        Every task in the order in which they ended; the clock starts at 0.
    """
    now, num_started = 0, 0
    idle = {processor.name: list(reversed(range(processor.workers))) for processor in schedule.processors}
    ends: list[tuple[int, int, TaskEvent]] = []
    events = []
    while not schedule.is_finished:
        for processor in schedule.processors:
            workers = idle[processor.name]
            while workers and (task := schedule.claim(processor)) is not None:
                end = now + duration(task)
                heappush(ends, (end, num_started, TaskEvent(task, processor.name, workers.pop(), now, end)))
                num_started += 1
        now = ends[0][0]
        while ends and ends[0][0] == now:
            event = heappop(ends)[2]
            idle[event.processor].append(event.worker)
            schedule.complete(event.task)
            events.append(event)
    return events
