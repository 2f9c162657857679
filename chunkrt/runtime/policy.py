"""Policies: which ready task runs next.

A policy is pure: it sees the ready tasks and the schedule, names one, and keeps nothing. The threaded
executor and the simulator drive the same objects, so what was simulated is what runs. No policy can change
a result, only when it comes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

from chunkrt.errors import unknown_name


class Task(NamedTuple):
    """One subgraph on one chunk, by their indices."""

    subgraph: int
    chunk: int


class ScheduleView(Protocol):
    """What a policy may know beyond the ready tasks."""

    @property
    def running(self) -> Collection[Task]:
        """Tasks claimed and not yet ended."""
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
            ready: the tasks that the asking processor could run now: at least one, at most one a chunk.
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
        """The earliest chunk's task, unless a task runs."""
        return None if schedule.running else earliest(ready)


class InOrder:
    """The pipeline: every processor takes the earliest chunk that has a task for it."""

    name = "in_order"
    is_concurrent = True

    def select(self, ready: Sequence[Task], schedule: ScheduleView) -> Task | None:
        """The earliest chunk's task."""
        return earliest(ready)


POLICIES: dict[str, Policy] = {policy.name: policy for policy in (Sequential(), InOrder())}


def find_policy(name: str) -> Policy:
    """Look a policy up by name.

    Raises:
        ConfigError: there is none of that name; the message offers the nearest and lists all.
    """
    if name not in POLICIES:
        raise unknown_name("policy", name, POLICIES)
    return POLICIES[name]


def earliest(ready: Sequence[Task]) -> Task:
    """The task of the earliest chunk; no two ready tasks share one."""
    return min(ready, key=lambda task: task.chunk)
