"""The schedule of one run: which tasks are ready, running and ended.

A state machine without threads, locks or clocks. The executor's workers drive it under their lock, simulators on a
virtual clock.

The rules. A task waits for the tasks of its chunk whose values it reads, so several of a chunk may be ready or running
at once. A subgraph that owns state takes the chunks in order; the turn passes on when a task ends. So attention of a
chunk waits for what all chunks up to its own give it, and any other task only for its own chunk: others may overtake. A
chunk enters when a chunk slot is free and keeps it until its last task has ended. A chunk whose logits nobody asked for
passes only through what state is made of, because nothing reads the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import get_args

from chunkrt.errors import ChunkrtError, ConfigError
from chunkrt.graph.flow import Route
from chunkrt.graph.plan import Device, Plan
from chunkrt.runtime.critical_path import upward_ranks
from chunkrt.runtime.policy import Policy
from chunkrt.runtime.tasks import Processor, Task
from chunkrt.runtime.virtual_clock import run_on_virtual_clock


class Schedule:
    """The tasks of one run and their states.

    Args:
        plan: the decoder.
        routes: what every chunk passes through, at least one.
        chunks_in_flight: chunk slots, at least 1.
        processors: who asks for tasks.
        policy: chooses among ready tasks.
        durations: of every task as estimated, for the policy to go by: nanoseconds, [subgraphs][chunks]. Without them
            it takes every task to last equally long.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        routes: Sequence[Route],
        chunks_in_flight: int,
        processors: Sequence[Processor],
        policy: Policy,
        durations: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self.num_chunks = num_chunks = len(routes)
        self.processors = tuple(processors)
        self.chunks_done = 0
        self.running: list[Task] = []
        self.failure: tuple[Task, BaseException] | None = None
        """The first task that failed, and its error."""
        self.is_cancelled = False
        self._plan = plan
        self._routes = routes
        self._chunks_in_flight = chunks_in_flight
        self._policy = policy
        self._durations = durations or [[1] * num_chunks] * len(plan.subgraphs)
        self._upward_ranks: list[list[int]] = []
        """Empty until a policy asks for one."""
        self._makespans: dict[Policy, int] = {}
        self._devices = [subgraph.device for subgraph in plan.subgraphs]
        flow = plan.flow
        self._has_state = flow.has_state
        self._left = [len(route.subgraphs) for route in routes]
        """Tasks of every chunk that have not ended."""
        self.num_tasks = sum(self._left)
        self._waits = [list(flow.num_waits) for _ in range(num_chunks)]
        """How many things every task still waits for, [chunks][subgraphs]; see `Flow.num_waits`."""
        self._ready = _queues(self.processors)
        """By device."""
        self._ready_for = {p.name: _distinct(self._ready[device] for device in p.devices) for p in self.processors}
        self._slots: list[int] = []
        """The chunk slot of every chunk that has entered."""
        self._release((index, 0) for index, owns in enumerate(flow.has_state) if owns)
        for slot in range(min(chunks_in_flight, num_chunks)):
            self._slots.append(slot)
            self._release((first, slot) for first in self._routes[slot].first)

    @property
    def ready(self) -> list[Task]:
        """The tasks that could run now, in no order."""
        return list(chain(*_distinct(self._ready.values())))

    @property
    def is_finished(self) -> bool:
        """Whether no further task will be handed out: all chunks are done, or the run was stopped."""
        return self.chunks_done == self.num_chunks or self.is_stopped

    @property
    def is_stopped(self) -> bool:
        """Whether the run failed or was cancelled."""
        return self.is_cancelled or self.failure is not None

    def slot(self, chunk: int) -> int:
        """The chunk slot of a chunk that has entered."""
        return self._slots[chunk]

    def device(self, task: Task) -> Device:
        """The device that a task is for."""
        return self._devices[task.subgraph]

    def duration(self, task: Task) -> int:
        """How long a task is estimated to take."""
        return self._durations[task.subgraph][task.chunk]

    def upward_rank(self, task: Task) -> int:
        """The longest path from a task's start to the run's end; see `upward_ranks`."""
        if not self._upward_ranks:
            self._upward_ranks = upward_ranks(self._durations, self._routes, self._has_state, self._chunks_in_flight)
        return self._upward_ranks[task.chunk][task.subgraph]

    def makespan(self, policy: Policy) -> int:
        """How long the whole run would take under a policy if every task took as long as estimated."""
        if policy not in self._makespans:
            fresh = Schedule(
                self._plan,
                routes=self._routes,
                chunks_in_flight=self._chunks_in_flight,
                processors=self.processors,
                policy=policy,
                durations=self._durations,
            )
            self._makespans[policy] = run_on_virtual_clock(fresh, fresh.duration)[-1].end_ns
        return self._makespans[policy]

    def num_ready(self, processor: Processor) -> int:
        """How many ready tasks a processor could run."""
        return sum(map(len, self._ready_for[processor.name]))

    def claim(self, processor: Processor) -> Task | None:
        """Hand out the task that the policy chooses for a processor, one of `processors`, or None if there is none now.

        Raises:
            ConfigError: the policy chose nothing although no task runs, so that nothing would ever happen.
        """
        queues = self._ready_for[processor.name]
        ready = queues[0] if len(queues) == 1 else list(chain(*queues))
        if not ready:
            return None
        task = self._select(ready)
        if task is None:
            if not self.running:
                raise ConfigError(
                    f"policy {self._policy.name!r} chose none of {len(ready)} ready tasks while none runs; "
                    "a policy may wait only for a running task"
                )
            return None
        self._ready[self._devices[task.subgraph]].remove(task)
        self.running.append(task)
        return task

    def _select(self, ready: Sequence[Task]) -> Task | None:
        """What the policy chooses, whoever wrote it."""
        try:
            chosen = self._policy.select(ready, self)
        except ChunkrtError:
            raise
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            raise ConfigError(f"policy {self._policy.name!r} failed: {what}; choose another") from error
        if chosen is not None and chosen not in ready:
            raise ConfigError(f"policy {self._policy.name!r} chose {chosen!r}, which is not ready; choose another")
        return None if chosen is None else Task(*chosen)

    def unlocked_by(self, task: Task) -> Sequence[Task]:
        """The tasks that would become ready if a ready or running task ended now."""
        released = self._released_by(task)
        unlocked = []
        for subgraph, chunk in released:
            waits = self._waits[chunk][subgraph]
            if waits == 1 or waits == released.count((subgraph, chunk)):
                unlocked.append(Task(subgraph, chunk))
        return unlocked if len(unlocked) < 2 else list(dict.fromkeys(unlocked))

    def complete(self, task: Task) -> None:
        """A running task ended well: what waited for nothing else becomes ready."""
        self.running.remove(task)
        if self.is_stopped:
            return
        self._release(self._released_by(task))
        chunk = task.chunk
        self._left[chunk] -= 1
        if not self._left[chunk]:
            self.chunks_done += 1
            if len(self._slots) < self.num_chunks:
                self._slots.append(self._slots[chunk])

    def fail(self, task: Task, error: BaseException) -> None:
        """A running task failed: nothing further is handed out. The first failure is kept."""
        self.running.remove(task)
        self._clear()
        if self.failure is None:
            self.failure = task, error

    def cancel(self) -> None:
        """Stop the run: nothing further is handed out."""
        self._clear()
        self.is_cancelled = True

    def _clear(self) -> None:
        for queue in self._ready.values():
            queue.clear()

    def _released_by(self, task: Task) -> list[tuple[int, int]]:
        """The tasks, (subgraph, chunk), that wait for one thing less once a task has ended; twice is two things."""
        subgraph, chunk = task
        released = [(follower, chunk) for follower in self._routes[chunk].followers[subgraph]]
        if self._has_state[subgraph] and chunk + 1 < self.num_chunks:
            released.append((subgraph, chunk + 1))
        entering = len(self._slots)
        if self._left[chunk] == 1 and entering < self.num_chunks:
            released += [(first, entering) for first in self._routes[entering].first]
        return released

    def _release(self, tasks: Iterable[tuple[int, int]]) -> None:
        for subgraph, chunk in tasks:
            waits = self._waits[chunk]
            waits[subgraph] -= 1
            if not waits[subgraph]:
                self._ready[self._devices[subgraph]].append(Task(subgraph, chunk))


def _queues(processors: Sequence[Processor]) -> dict[Device, list[Task]]:
    """A list for the ready tasks of every device; devices of the same processors share one."""
    lists: dict[frozenset[str], list[Task]] = {}
    takers = {d: frozenset(p.name for p in processors if d in p.devices) for d in get_args(Device)}
    return {device: lists.setdefault(names, []) for device, names in takers.items()}


def _distinct(queues: Iterable[list[Task]]) -> list[list[Task]]:
    return list({id(queue): queue for queue in queues}.values())
