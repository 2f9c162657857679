"""A schedule on a virtual clock: what a run would look like if its tasks took given times. No threads, no waiting.

At any moment each running task proceeds at a speed, which may depend on what else runs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from operator import truediv
from typing import TYPE_CHECKING

from chunkrt.runtime.tasks import Task, TaskEvent

if TYPE_CHECKING:  # a schedule looks ahead with this module
    from chunkrt.runtime.schedule import Schedule

NOTHING_LEFT_NS = 1e-3
"""Work left by rounding alone."""

Speeds = Callable[[Collection[Task]], Sequence[float]]
"""Of tasks that run beside each other: above 0 and at most 1."""


def at_full_speed(running: Collection[Task]) -> Sequence[float]:
    """No task slows another down."""
    return [1.0] * len(running)


Outside = Callable[[float], float | None]
"""What feeds a schedule that is open: called with the time at every moment at which something ends, and whenever it
wants. It admits chunks, and closes the schedule when no more come. It returns when it wants to be called next; None if
only something that ends can tell."""


def nothing_comes(now: float) -> float | None:
    """All chunks are there from the beginning."""
    return None


def run_on_virtual_clock(
    schedule: Schedule,
    duration: Callable[[Task], int],
    speeds: Speeds = at_full_speed,
    outside: Outside = nothing_comes,
) -> list[TaskEvent]:
    """Drive a schedule to its end.

    At every moment all tasks that end then are completed, in the order in which they started; after that comes what
    comes from outside; then processors in their order take what the schedule hands out, each until its workers are busy
    or it gets nothing.

    Args:
        schedule: a new one.
        duration: of a task at full speed, in nanoseconds, at least 0.
        speeds: of the tasks that run.
        outside: feeds a schedule that is open.

    Returns:
        Every task in the order in which they ended; the clock starts at 0.
    """
    now = 0.0
    idle = {processor.name: list(reversed(range(processor.workers))) for processor in schedule.processors}
    running: dict[Task, tuple[str, int, float]] = {}
    """Processor, worker and start of each, in the order in which they started."""
    left: dict[Task, float] = {}
    """Work of each."""
    events: list[TaskEvent] = []
    while True:
        next_call = outside(now)
        if schedule.is_finished:
            return events
        for processor in schedule.processors:
            workers = idle[processor.name]
            while workers and (task := schedule.claim(processor)) is not None:
                running[task] = processor.name, workers.pop(), now
                left[task] = duration(task)
        rates = speeds(left)
        steps = list(map(truediv, left.values(), rates))
        if next_call is not None:
            steps.append(next_call - now)
        step = min(steps)
        now = next_call if step == steps[-1] and next_call is not None else now + step
        for task, rate in zip(list(left), rates, strict=True):
            left[task] -= step * rate
            if left[task] < NOTHING_LEFT_NS:
                del left[task]
                name, worker, start = running.pop(task)
                idle[name].append(worker)
                schedule.complete(task)
                events.append(TaskEvent(task, name, worker, round(start), round(now)))
