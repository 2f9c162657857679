"""Policies: which ready task runs next.

A policy is pure: it sees the ready tasks and the schedule, names one, and keeps nothing. The threaded executor and the
simulator drive the same objects, so what was simulated is what runs. No policy can change a result, only when it comes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from operator import itemgetter
from typing import Any, Protocol

from chunkrt.errors import ConfigError
from chunkrt.graph.plan import Device
from chunkrt.plugins import PluginGroup
from chunkrt.runtime.tasks import Processor, Task

DEFAULT_POLICY = "look_ahead"

MOST_TASKS_FORESEEN = 256
"""Tasks of the longest run that `LookAhead` simulates. Longer ones are hardly ever quicker by another policy than the
critical path, and simulating them would take longer than they could gain."""


BY_CHUNK = itemgetter(1, 0)
"""Sorts tasks by chunk, and those of a chunk as the plan does."""


class ScheduleView(Protocol):
    """What a policy may know beyond the ready tasks."""

    @property
    def processors(self) -> Sequence[Processor]:
        """Who asks for tasks."""
        ...

    @property
    def num_tasks(self) -> int:
        """Tasks of the whole run; while more chunks may come, of those that there are."""
        ...

    @property
    def is_open(self) -> bool:
        """Whether more chunks may come: those of many sequences, which nobody knows beforehand."""
        ...

    @property
    def running(self) -> Collection[Task]:
        """Tasks claimed and not yet ended."""
        ...

    def device(self, task: Task) -> Device:
        """The device that a task is for."""
        ...

    def duration(self, task: Task) -> float:
        """How long a task is estimated to take."""
        ...

    def upward_rank(self, task: Task) -> float:
        """The time from a task's start to the end of all if every task after it started at once: the longest path."""
        ...

    def makespan(self, policy: Policy) -> float:
        """How long the whole run would take under a policy if every task took as long as estimated."""
        ...

    def unlocked_by(self, task: Task) -> Sequence[Task]:
        """The tasks that would become ready if a ready or running task ended now."""
        ...


class Policy(Protocol):
    """Chooses among ready tasks."""

    name: str
    is_concurrent: bool
    """Whether it ever lets two tasks run at once; if not, the executor starts no threads."""

    def select(self, ready: Sequence[Task], schedule: ScheduleView) -> Task | None:
        """Name the task to run next.

        Args:
            ready: the tasks that the asking processor could run now, at least one, in no order.
            schedule: the rest of the picture.

        Returns:
            One of `ready`, or None to wait until a running task ends. None is allowed only while one runs.
        """
        ...


class Sequential:
    """One task at a time, chunk after chunk: the baseline without overlap."""

    name = "sequential"
    is_concurrent = False

    def select(self, ready: Sequence[Task], schedule: ScheduleView) -> Task | None:
        """The earliest chunk's earliest task, unless one runs."""
        return None if schedule.running else earliest(ready)


class InOrder:
    """The pipeline: every processor takes the earliest chunk that has a task for it, and its earliest task."""

    name = "in_order"
    is_concurrent = True

    def select(self, ready: Sequence[Task], schedule: ScheduleView) -> Task | None:
        """The earliest chunk's earliest task."""
        return earliest(ready)


class OutOfOrder:
    """The rule of llm.npu: what gives the NPU the most to do comes first.

    Source: Xu et al., Fast On-device LLM Inference with NPUs, ASPLOS 2025, out-of-order subgraph execution.
    """

    name = "out_of_order"
    is_concurrent = True

    def select(self, ready: Sequence[Task], schedule: ScheduleView) -> Task | None:
        """The task of the largest C, of several the earliest.

        C is the time of the NPU's tasks that become ready when the task ends; negative for the NPU's own tasks.
        """

        def contribution(task: Task) -> float:
            unlocked = schedule.unlocked_by(task)
            npu_time = sum([schedule.duration(other) for other in unlocked if schedule.device(other) == "npu"])
            return -npu_time if schedule.device(task) == "npu" else npu_time

        if len(ready) == 1:
            return ready[0]
        return min(ready, key=lambda task: (-contribution(task), task.chunk, task.subgraph))


class CriticalPath:
    """List scheduling by upward rank: what the most work must wait for comes first.

    Source: Topcuoglu et al., Performance-effective and low-complexity task scheduling (HEFT), TPDS 2002, equation 8.
    """

    name = "critical_path"
    is_concurrent = True

    def select(self, ready: Sequence[Task], schedule: ScheduleView) -> Task | None:
        """The task of the longest path to the run's end, of several the earliest."""
        if len(ready) == 1:
            return ready[0]
        return min(ready, key=lambda task: (-schedule.upward_rank(task), task.chunk, task.subgraph))


class LookAhead:
    """Follows whichever policy ends first by the estimated durations.

    So it is never slower than any of them, as far as the estimates are right. A long run goes by the first, and so does
    one on a single processor: there every order keeps the workers busy, and foreseeing costs more than it gains. Where
    more chunks may come, the earliest goes first: somebody waits for it.
    """

    name = "look_ahead"
    is_concurrent = True

    def __init__(self, *policies: Policy) -> None:
        self._policies = policies

    def select(self, ready: Sequence[Task], schedule: ScheduleView) -> Task | None:
        """What the quickest policy selects."""
        if len(ready) == 1:
            return ready[0]
        if schedule.is_open:
            return earliest(ready)
        if schedule.num_tasks > MOST_TASKS_FORESEEN or len(schedule.processors) == 1:
            return self._policies[0].select(ready, schedule)
        return min(self._policies, key=schedule.makespan).select(ready, schedule)


POLICIES: dict[str, Policy] = {
    policy.name: policy
    for policy in (
        Sequential(),
        InOrder(),
        OutOfOrder(),
        CriticalPath(),
        LookAhead(CriticalPath(), OutOfOrder(), InOrder()),
    )
}


def _check_plugin(name: str, found: Any) -> str:
    if isinstance(found, type):
        return "is a class, expected a policy made of it"
    if not callable(getattr(found, "select", None)) or not isinstance(getattr(found, "is_concurrent", None), bool):
        return "is no policy: expected name, is_concurrent and select"
    return "" if getattr(found, "name", None) == name else f"is named {getattr(found, 'name', None)!r}, not {name!r}"


ALL = "all"
"""What stands for every policy on the command line."""

PLUGINS: PluginGroup[Policy] = PluginGroup(
    "chunkrt.policies", error=ConfigError, own=(*POLICIES, ALL), check=_check_plugin
)
"""Each is a policy, of the entry point's name."""


def policy_names() -> tuple[str, ...]:
    """Our policies, and those of plug-ins."""
    return (*POLICIES, *PLUGINS.names)


def find_policy(name: str) -> Policy:
    """Look a policy up by name, ours or a plug-in's.

    Raises:
        ConfigError: there is none of that name, and the message offers the nearest and lists all; or the plug-in is
            broken.
    """
    return PLUGINS.choose(name, POLICIES, "policy")


def earliest(ready: Sequence[Task]) -> Task:
    """The earliest chunk's task, and of several the one that comes first in the plan."""
    return min(ready, key=BY_CHUNK)
