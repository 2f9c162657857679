"""A schedule on a virtual clock whose tasks slow each other down.

Every task has so much work left. At any moment each running one proceeds at a speed that depends on what else runs;
when a task starts or ends, speeds change. With all speeds 1 this is `runtime/virtual_clock.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from chunkrt.runtime.schedule import Schedule
from chunkrt.runtime.tasks import Task, TaskEvent
from chunkrt.simulate.work import Work, WorkOf

NOTHING_LEFT_NS = 1e-3
"""Work left by rounding alone."""


@dataclass(kw_only=True)
class Running:
    """A task on its way; `left_ns` at full speed."""

    task: Task
    processor: str
    worker: int
    start_ns: float
    work: Work
    left_ns: float


Speeds = Callable[[Sequence[Running]], Sequence[float]]


def run_on_shared_clock(schedule: Schedule, work_of: WorkOf, speeds: Speeds) -> list[TaskEvent]:
    """Drive a schedule to its end.

    Args:
        schedule: a new one.
        work_of: what a task takes alone.
        speeds: of the tasks that run, above 0 and at most 1.

    Returns:
        Every task in the order in which they ended; the clock starts at 0.
    """
    now = 0.0
    idle = {processor.name: list(reversed(range(processor.workers))) for processor in schedule.processors}
    running: list[Running] = []
    events = []
    while not schedule.is_finished:
        for processor in schedule.processors:
            workers = idle[processor.name]
            while workers and (task := schedule.claim(processor)) is not None:
                work = work_of(task)
                running.append(
                    Running(
                        task=task,
                        processor=processor.name,
                        worker=workers.pop(),
                        start_ns=now,
                        work=work,
                        left_ns=work.ns,
                    )
                )
        rates = speeds(running)
        step = min(r.left_ns / rate for r, rate in zip(running, rates, strict=True))
        now += step
        for r, rate in zip(running, rates, strict=True):
            r.left_ns -= step * rate
        for r in [r for r in running if r.left_ns < NOTHING_LEFT_NS]:
            running.remove(r)
            idle[r.processor].append(r.worker)
            schedule.complete(r.task)
            events.append(TaskEvent(r.task, r.processor, r.worker, round(r.start_ns), round(now)))
    return events


def memory_speeds(gb_per_s: float) -> Speeds:
    """Speeds of tasks that share a memory."""
    return _shared(gb_per_s, lambda work: work.num_bytes)


def link_speeds(gb_per_s: float) -> Speeds:
    """Speeds of tasks that share a link; those that send nothing over it have 1."""
    return _shared(gb_per_s, lambda work: work.sent_bytes)


def slowest(*parts: Speeds) -> Speeds:
    """Each task's least speed."""
    return lambda running: [min(speeds) for speeds in zip(*(part(running) for part in parts), strict=True)]


def _shared(gb_per_s: float, bytes_of: Callable[[Work], float]) -> Speeds:
    """Each task gets what it asks for, or an equal share of what others leave.

    Max-min fairness. A task's progress is as its share of what it would stream alone.
    """

    def speeds(running: Sequence[Running]) -> list[float]:
        wanted = [bytes_of(r.work) / r.work.ns if r.work.ns else 0.0 for r in running]
        if sum(wanted) <= gb_per_s:
            return [1.0] * len(running)
        left, granted = gb_per_s, [0.0] * len(running)
        by_need = sorted(range(len(running)), key=wanted.__getitem__)
        for rank, index in enumerate(by_need):
            granted[index] = min(wanted[index], left / (len(running) - rank))
            left -= granted[index]
        return [share / need if need else 1.0 for share, need in zip(granted, wanted, strict=True)]

    return speeds


def crowd_speeds(speeds_of: Callable[[Task], Sequence[float]]) -> Speeds:
    """Speeds by how many tasks run, as a measured profile gives them for each; entry k-1 for k tasks."""

    def speeds(running: Sequence[Running]) -> list[float]:
        by_number = [speeds_of(r.task) for r in running]
        return [numbers[min(len(running), len(numbers)) - 1] for numbers in by_number]

    return speeds
