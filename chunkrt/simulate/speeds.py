"""Rules for the mutual slowdown of concurrent tasks; `runtime/virtual_clock.py` uses them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from chunkrt.runtime.tasks import Task
from chunkrt.runtime.virtual_clock import Speeds
from chunkrt.simulate.work import WorkOf


def memory_speeds(gb_per_s: float, work_of: WorkOf) -> Speeds:
    """Return speeds of tasks that share a memory."""
    return _shared(gb_per_s, lambda task: (work_of(task).num_bytes, work_of(task).ns))


def link_speeds(gb_per_s: float, work_of: WorkOf) -> Speeds:
    """Return speeds of tasks that share a link; tasks that send nothing over the link have speed 1."""
    return _shared(gb_per_s, lambda task: (work_of(task).sent_bytes, work_of(task).ns))


def crowd_speeds(speeds_of: Callable[[Task], Sequence[float]]) -> Speeds:
    """Return speeds by the number of running tasks, from a measured profile; entry k-1 is for k tasks."""

    def speeds(running: Collection[Task]) -> list[float]:
        by_number = [speeds_of(task) for task in running]
        return [numbers[min(len(running), len(numbers)) - 1] for numbers in by_number]

    return speeds


def slowest(*parts: Speeds) -> Speeds:
    """Combine several rules: each task runs at the lowest of its speeds."""
    return lambda running: [min(speeds) for speeds in zip(*(part(running) for part in parts), strict=True)]


def _shared(gb_per_s: float, streamed_by: Callable[[Task], tuple[float, int]]) -> Speeds:
    """Give each task the bandwidth that it needs, or an equal share of the remainder (max-min fairness).

    A task's speed is its granted bandwidth divided by the bandwidth that it uses alone, i.e. its bytes divided by its
    nanoseconds.
    """

    def speeds(running: Collection[Task]) -> list[float]:
        wanted = [num_bytes / ns if ns else 0.0 for num_bytes, ns in map(streamed_by, running)]
        if sum(wanted) <= gb_per_s:
            return [1.0] * len(running)
        left, granted = gb_per_s, [0.0] * len(running)
        by_need = sorted(range(len(running)), key=wanted.__getitem__)
        for num_served, index in enumerate(by_need):
            granted[index] = min(wanted[index], left / (len(running) - num_served))
            left -= granted[index]
        return [share / need if need else 1.0 for share, need in zip(granted, wanted, strict=True)]

    return speeds
