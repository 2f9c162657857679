"""Policies choose the ready task that runs next.

A policy is pure: it receives the ready tasks and the schedule, returns a task, and keeps no state. The threaded
executor and the simulator use the same objects, so the real order is the simulated one. A policy cannot change a
result, only the time at which it is available.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Protocol

from chunkrt.errors import ConfigError
from chunkrt.plugins import PluginGroup
from chunkrt.runtime.tasks import Task

if TYPE_CHECKING:  # a schedule calls a policy
    from chunkrt.runtime.schedule import Schedule

DEFAULT_POLICY = "look_ahead"

MOST_TASKS_FORESEEN = 256
"""Number of tasks of the longest run that `_LookAhead` simulates. In longer runs other policies are hardly ever faster
than the critical path, and a simulation would take longer than it could gain.
"""


BY_CHUNK = itemgetter(1, 0)
"""Sort key that orders tasks by chunk, and tasks of the same chunk in the plan's order."""


class Policy(Protocol):
    """Rule that chooses among ready tasks."""

    name: str
    is_concurrent: bool
    """True if the policy may let two tasks run at once. Otherwise the executor starts no threads."""

    def select(self, ready: Sequence[Task], schedule: Schedule) -> Task | None:
        """Choose the task to run next.

        Args:
            ready: the tasks that the claiming processor could run now, at least one, in no particular order.
            schedule: the schedule. A policy may use its attributes `processors`, `num_tasks`, `is_open` and `running`,
                and its methods `device`, `duration`, `upward_rank`, `makespan` and `unlocked_by`.

        Returns:
            A task of `ready`, or None to wait until a running task ends. None is allowed only while a task runs.
        """
        ...


class SequentialPolicy:
    """Policy that runs one task at a time, chunk after chunk; this is the baseline without overlap."""

    name = "sequential"
    is_concurrent = False

    def select(self, ready: Sequence[Task], schedule: Schedule) -> Task | None:
        """Select the earliest task of the earliest chunk, unless a task is running."""
        return None if schedule.running else earliest(ready)


class _InOrder:
    """Pipeline order: every processor takes the earliest chunk that has a ready task for this processor, and the
    earliest such task.
    """

    name = "in_order"
    is_concurrent = True

    def select(self, ready: Sequence[Task], schedule: Schedule) -> Task | None:
        """Select the earliest task of the earliest chunk."""
        return earliest(ready)


class _OutOfOrder:
    """Policy of llm.npu: the task that unlocks the most NPU work comes first.

    Source: Xu et al., Fast On-device LLM Inference with NPUs, ASPLOS 2025, out-of-order subgraph execution.
    """

    name = "out_of_order"
    is_concurrent = True

    def select(self, ready: Sequence[Task], schedule: Schedule) -> Task | None:
        """Select the task with the largest contribution, or the earliest task in case of a tie.

        The contribution (C in the source) is the total time of the NPU's tasks that become ready when the task ends. If
        the task itself runs on the NPU, this time counts as negative.
        """

        def contribution(task: Task) -> float:
            unlocked = schedule.unlocked_by(task)
            npu_time = sum([schedule.duration(other) for other in unlocked if schedule.device(other) == "npu"])
            return -npu_time if schedule.device(task) == "npu" else npu_time

        if len(ready) == 1:
            return ready[0]
        return min(ready, key=lambda task: (-contribution(task), task.chunk, task.subgraph))


class _CriticalPath:
    """List scheduling by upward rank: the task with the longest path to the end comes first.

    Source: Topcuoglu et al., Performance-effective and low-complexity task scheduling (HEFT), TPDS 2002, equation 8.
    """

    name = "critical_path"
    is_concurrent = True

    def select(self, ready: Sequence[Task], schedule: Schedule) -> Task | None:
        """Select the task with the longest path to the end of the run, or the earliest task in case of a tie."""
        if len(ready) == 1:
            return ready[0]
        return min(ready, key=lambda task: (-schedule.upward_rank(task), task.chunk, task.subgraph))


class _LookAhead:
    """Policy that simulates several other policies with the estimated durations, and follows the fastest one.

    If the estimates are right, it is never slower than any of these policies. Long runs use the first policy without
    simulation. Runs on a single processor do the same, because every order keeps the workers busy there, and a
    simulation costs more than it gains. While more chunks may come, the earliest chunk goes first, because a caller
    waits for it.
    """

    name = "look_ahead"
    is_concurrent = True

    def __init__(self, *policies: Policy) -> None:
        self._policies = policies

    def select(self, ready: Sequence[Task], schedule: Schedule) -> Task | None:
        """Return the choice of the fastest policy."""
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
        SequentialPolicy(),
        _InOrder(),
        _OutOfOrder(),
        _CriticalPath(),
        _LookAhead(_CriticalPath(), _OutOfOrder(), _InOrder()),
    )
}


def _check_plugin(name: str, found: Any) -> str:
    if isinstance(found, type):
        return "is a class, expected an instance of it"
    if not callable(getattr(found, "select", None)) or not isinstance(getattr(found, "is_concurrent", None), bool):
        return "is not a policy: expected name, is_concurrent and select"
    return "" if getattr(found, "name", None) == name else f"is named {getattr(found, 'name', None)!r}, not {name!r}"


ALL = "all"
"""Command-line name that stands for every policy."""

PLUGINS: PluginGroup[Policy] = PluginGroup(
    "chunkrt.policies", error=ConfigError, own=(*POLICIES, ALL), check=_check_plugin
)
"""Entry points of plug-in policies. The name of an entry point is the name of its policy."""


def policy_names() -> tuple[str, ...]:
    """Return the names of the built-in policies, and of those from plug-ins."""
    return (*POLICIES, *PLUGINS.names)


def find_policy(policy: str | Policy) -> Policy:
    """Find a built-in or plug-in policy by name; return a policy unchanged.

    Raises:
        ConfigError: no policy has that name (the message suggests the nearest name and lists all), or the plug-in is
            broken; or the object is no policy.
    """
    return PLUGINS.choose(policy, POLICIES, "policy")


def earliest(ready: Sequence[Task]) -> Task:
    """Return the task of the earliest chunk. If the chunk has several tasks, return the first one in the plan."""
    return min(ready, key=BY_CHUNK)
