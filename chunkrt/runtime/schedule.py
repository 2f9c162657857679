"""The schedule of tasks: it records which tasks are ready, running and ended.

The schedule is a state machine without threads, locks or clocks. The executor's workers drive it under their lock, and
simulators drive it on a virtual clock.

These rules determine the order of tasks:

- A task waits for the tasks of its chunk whose values it reads. Several tasks of a chunk may be ready or running at
  once.
- A subgraph that owns state processes the chunks of a sequence in order, and starts the next chunk after the task of
  the previous one has ended. So attention of a chunk waits for the same subgraph on all earlier chunks of its
  sequences.
- All other tasks wait only for tasks of their own chunk, so chunks may overtake each other.
- A chunk enters when a chunk slot is free, and keeps the slot until its last task has ended.
- A chunk without requested logits passes only through the subgraphs on which the state depends, because no task uses
  the other results.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import get_args

from chunkrt.errors import ChunkrtError, ConfigError
from chunkrt.graph.flow import Flow, Route
from chunkrt.graph.plan import Device, Plan
from chunkrt.runtime.policy import Policy
from chunkrt.runtime.tasks import Processor, Task
from chunkrt.runtime.virtual_clock import run_on_virtual_clock


class Schedule:
    """Tasks of chunks, and their progress.

    A schedule is open until it is closed: `admit` adds chunks. A failed chunk does not stop other chunks. If all chunks
    of a prompt are known at the beginning, `routes` admits them, so that every chunk follows the previous one, and the
    schedule is closed.

    Args:
        plan: the decoder.
        routes: the subgraphs that every chunk of a prompt passes through; empty for an open schedule.
        chunks_in_flight: number of chunk slots, at least 1.
        processors: processors that claim tasks.
        policy: chooses among ready tasks.
        durations: estimated duration of every task of `routes` in nanoseconds, [subgraphs][chunks], for the policy. By
            default all tasks are assumed to take equally long.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        routes: Sequence[Route] = (),
        chunks_in_flight: int,
        processors: Sequence[Processor],
        policy: Policy,
        durations: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self.processors = tuple(processors)
        self.is_open = True
        """True if more chunks may come."""
        self.num_chunks = 0
        """Number of chunks admitted so far."""
        self.num_tasks = 0
        """Number of tasks of the admitted chunks. While the schedule is open, chunks that have ended do not count."""
        self.chunks_done = 0
        self.running: list[Task] = []
        """Tasks that were claimed and have not ended yet."""
        self.is_cancelled = False
        self.ended: list[tuple[int, tuple[Task, BaseException] | None]] = []
        """Maps the number of each chunk that has ended to its first failed task with the error, or to None. The reader
        removes the entries.
        """
        self._plan = plan
        self._flow = plan.flow
        self._chunks_in_flight = chunks_in_flight
        self._policy = policy
        self._upward_ranks: dict[int, Sequence[int]] = {}
        """Upward ranks by chunk; empty until a policy requests one."""
        self._makespans: dict[Policy, int] = {}
        self._devices = [subgraph.device for subgraph in plan.subgraphs]
        self._ready = _task_lists(self.processors)
        """Ready tasks by device."""
        self._ready_for = {p.name: _distinct(self._ready[device] for device in p.devices) for p in self.processors}
        self._chunks: dict[int, _Progress] = {}
        """All chunks; while the schedule is open, those that have not ended."""
        self._slots: dict[int, int] = {}
        """Chunk slot of every chunk that has entered."""
        self._free_slots = list(reversed(range(chunks_in_flight)))
        self._outside: list[int] = []
        """Chunks that have not entered."""
        self._errors: dict[int, tuple[Task, BaseException]] = {}
        for chunk, route in enumerate(routes):
            self.admit(route, [chunk - 1], [of_subgraph[chunk] for of_subgraph in durations or ()])
        self.is_open = not routes

    @property
    def ready(self) -> list[Task]:
        """The tasks that could run now, in no particular order."""
        return list(chain(*_distinct(self._ready.values())))

    @property
    def is_finished(self) -> bool:
        """True if no further task can be claimed, because all chunks are done or the schedule was cancelled."""
        return self.is_cancelled or (self.chunks_done == self.num_chunks and not self.is_open)

    def admit(self, route: Route, after: Iterable[int] = (), durations: Sequence[int] = ()) -> int:
        """Admit a chunk, which enters as soon as a slot is free.

        Args:
            route: the subgraphs that the chunk passes through.
            after: numbers of the chunks that precede this one at subgraphs with state, because they contain earlier
                tokens of the same sequences. Some of these may have ended.
            durations: estimated durations of its tasks, in nanoseconds by subgraph.

        Returns:
            Number of the chunk.
        """
        assert self.is_open
        number = self.num_chunks
        before = [self._chunks[earlier] for earlier in after if earlier in self._chunks]
        durations = durations or [1] * len(self._devices)
        self._chunks[number] = chunk = _Progress(number, route, durations, before, self._flow)
        self.num_chunks += 1
        self.num_tasks += chunk.left
        self._outside.append(number)
        self._upward_ranks.clear()
        self._makespans.clear()
        if self._free_slots:
            self._release((first, number) for first in self._enter())
        return number

    def close(self) -> None:
        """Close the schedule: no more chunks are admitted."""
        self.is_open = False

    def recall(self) -> int:
        """Withdraw the last chunks of which no task was claimed yet, and return the number of chunks left."""
        while self.num_chunks:
            number = self.num_chunks - 1
            chunk = self._chunks.get(number)
            if chunk is None or chunk.num_running or chunk.left < len(chunk.route.subgraphs):
                break
            self._clear(number)
            del self._chunks[number]
            for earlier in self._chunks.values():
                if chunk in earlier.next:
                    earlier.next.remove(chunk)
            if number in self._slots:
                self._free_slots.append(self._slots.pop(number))
            else:
                self._outside.remove(number)
            self.num_chunks -= 1
            self.num_tasks -= chunk.left
            self._upward_ranks.clear()
            self._makespans.clear()
        return self.num_chunks

    def slot(self, chunk: int) -> int:
        """Return the chunk slot of a chunk that has entered."""
        return self._slots[chunk]

    def device(self, task: Task) -> Device:
        """Return the device that a task is for."""
        return self._devices[task.subgraph]

    def duration(self, task: Task) -> int:
        """Return the estimated duration of a task."""
        return self._chunks[task.chunk].durations[task.subgraph]

    def upward_rank(self, task: Task) -> int:
        """Return the longest path from a task's start to the end of all admitted chunks; see `upward_ranks`."""
        if not self._upward_ranks:
            chunks = list(self._chunks.values())
            durations = list(zip(*(chunk.durations for chunk in chunks), strict=True))
            routes, has_state = [chunk.route for chunk in chunks], self._flow.has_state
            ranks = upward_ranks(durations, routes, has_state, self._chunks_in_flight)
            self._upward_ranks = dict(zip(self._chunks, ranks, strict=True))
        return self._upward_ranks[task.chunk][task.subgraph]

    def makespan(self, policy: Policy) -> int:
        """Estimate the total duration of all admitted chunks under a policy, from their beginning."""
        if policy not in self._makespans:
            chunks = self._chunks.values()
            fresh = Schedule(
                self._plan,
                routes=[chunk.route for chunk in chunks],
                chunks_in_flight=self._chunks_in_flight,
                processors=self.processors,
                policy=policy,
                durations=list(zip(*(chunk.durations for chunk in chunks), strict=True)),
            )
            self._makespans[policy] = run_on_virtual_clock(fresh, fresh.duration)[-1].end_ns
        return self._makespans[policy]

    def num_ready(self, processor: Processor) -> int:
        """Return the number of ready tasks that a processor could run."""
        return sum(map(len, self._ready_for[processor.name]))

    def claim(self, processor: Processor) -> Task | None:
        """Claim the task that the policy chooses for one of the processors. Return None if no task can run at present.

        Raises:
            ConfigError: the policy chose no task although none is running, so the schedule would never continue.
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
        chunk = self._chunks[task.chunk]
        chunk.num_running += 1
        return task

    def _select(self, ready: Sequence[Task]) -> Task | None:
        """Call the policy, built-in or from a plug-in, and check its choice."""
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
        """Return the tasks that would become ready if a ready or running task ended now."""
        released = self._released_by(task)
        unlocked = []
        for subgraph, number in released:
            waits = self._chunks[number].waits[subgraph]
            if waits == 1 or waits == released.count((subgraph, number)):
                unlocked.append(Task(subgraph, number))
        return unlocked if len(unlocked) < 2 else list(dict.fromkeys(unlocked))

    def complete(self, task: Task) -> None:
        """Complete a running task: tasks without other dependencies become ready."""
        chunk = self._end(task)
        if self.is_cancelled:
            return
        if not chunk.is_failed:
            released = self._released_by(task)
            chunk.left -= 1
            if self._flow.has_state[task.subgraph]:
                chunk.passed.add(task.subgraph)
            if not chunk.left:
                self._leave(chunk)
            self._release(released)
        elif not chunk.num_running:
            self._release(self._leave(chunk))

    def fail(self, task: Task, error: BaseException) -> None:
        """Mark a running task as failed. No further task of the same chunk can be claimed, and later chunks do not wait
        for it. The first failure of a chunk is kept.
        """
        chunk = self._end(task)
        if self.is_cancelled:
            return
        if not chunk.is_failed:
            chunk.is_failed = True
            self._errors[chunk.number] = task, error
            self._clear(chunk.number)
            turns = [s for s, owns in enumerate(self._flow.has_state) if owns and s not in chunk.passed]
            after = [later.number for later in chunk.next if later.number in self._chunks]
            self._release((subgraph, later) for later in after for subgraph in turns)
        if not chunk.num_running:
            self._release(self._leave(chunk))

    def cancel(self) -> None:
        """Stop the schedule: no further task can be claimed."""
        self._clear()
        self.is_cancelled = True

    def _end(self, task: Task) -> _Progress:
        self.running.remove(task)
        chunk = self._chunks[task.chunk]
        chunk.num_running -= 1
        return chunk

    def _clear(self, chunk: int | None = None) -> None:
        """Remove all ready tasks, or those of one chunk."""
        for queue in self._ready.values():
            queue[:] = [] if chunk is None else [task for task in queue if task.chunk != chunk]

    def _enter(self) -> Sequence[int]:
        """Assign a slot to the next chunk, and return the subgraphs of its first tasks."""
        number = self._outside.pop(0)
        self._slots[number] = self._free_slots.pop()
        return self._chunks[number].route.first

    def _leave(self, chunk: _Progress) -> list[tuple[int, int]]:
        """End a chunk, assign its slot to the next chunk, and return the tasks (subgraph, chunk) that waited for the
        slot.
        """
        number = chunk.number
        self.chunks_done += 1
        self.ended.append((number, self._errors.pop(number, None)))
        self._free_slots.append(self._slots[number])
        if self.is_open:
            del self._chunks[number], self._slots[number]
            self.num_tasks -= len(chunk.route.subgraphs)
        if not self._outside:
            return []
        entering = self._outside[0]
        return [(first, entering) for first in self._enter()]

    def _released_by(self, task: Task) -> list[tuple[int, int]]:
        """Return the tasks (subgraph, chunk) that depend on a task. A task with two such dependencies occurs twice."""
        subgraph, number = task
        chunk = self._chunks[number]
        released = [(follower, number) for follower in chunk.route.followers[subgraph]]
        if self._flow.has_state[subgraph]:
            released += [(subgraph, later.number) for later in chunk.next if later.number in self._chunks]
        if chunk.left == 1 and self._outside:
            entering = self._outside[0]
            released += [(first, entering) for first in self._chunks[entering].route.first]
        return released

    def _release(self, tasks: Iterable[tuple[int, int]]) -> None:
        for subgraph, number in tasks:
            waits = self._chunks[number].waits
            waits[subgraph] -= 1
            if not waits[subgraph] and not self._chunks[number].is_failed:
                self._ready[self._devices[subgraph]].append(Task(subgraph, number))


class _Progress:
    """Progress of one chunk: its remaining tasks and their dependencies.

    Args:
        number: number of the chunk.
        route: subgraphs that the chunk passes through.
        durations: estimated durations of its tasks, by subgraph.
        after: the chunks that precede this one at subgraphs with state.
        flow: data flow of the decoder.
    """

    def __init__(
        self, number: int, route: Route, durations: Sequence[int], after: Sequence[_Progress], flow: Flow
    ) -> None:
        self.number, self.route, self.durations = number, route, durations
        self.left = len(route.subgraphs)
        """Number of tasks that have not ended."""
        self.num_running = 0
        self.is_failed = False
        self.next: list[_Progress] = []
        """Chunks that follow this one at subgraphs with state."""
        self.passed: set[int] = set()
        """Subgraphs with state that the chunk has passed."""
        self.waits = [len(waits_for) or 1 for waits_for in flow.waits_for]
        """Number of unmet dependencies of each task. A task depends on tasks of its chunk, or, if it reads no other
        task, on the chunk's entry. A task with state also depends on the preceding chunks.
        """
        for earlier in after:
            earlier.next.append(self)
            for subgraph, owns in enumerate(flow.has_state):
                self.waits[subgraph] += owns and subgraph not in earlier.passed


def upward_ranks(
    durations: Sequence[Sequence[int]],
    routes: Sequence[Route],
    has_state: Sequence[bool],
    chunks_in_flight: int,
) -> list[list[int]]:
    """Return the upward rank of every task: the longest path from its start to the end of all chunks, which includes
    the task's own duration.

    A path follows the dependencies of tasks. It leads from a task to the tasks of its chunk that read its outputs. At a
    subgraph that owns state, it leads to the task of the next chunk. At the end of a chunk, it leads to the chunk that
    takes over the chunk slot. The next owner of a slot depends on the order in which chunks end. This function assumes
    that with N slots chunk c is followed by chunk c + N.

    Args:
        durations: duration of every task, [subgraphs][chunks].
        routes: the subgraphs that each chunk passes through, [chunks].
        has_state: True for a subgraph that owns state and therefore processes the chunks in order, [subgraphs].
        chunks_in_flight: number of chunk slots.

    Returns:
        Ranks [chunks][subgraphs]. The rank is 0 for subgraphs that a chunk does not pass through.
    """
    num_chunks, num_subgraphs = len(routes), len(durations)
    ranks = [[0] * num_subgraphs for _ in routes]
    for chunk in reversed(range(num_chunks)):
        route, own = routes[chunk], ranks[chunk]
        heir = chunk + chunks_in_flight
        after_chunk = max(ranks[heir][first] for first in routes[heir].first) if heir < num_chunks else 0
        following = ranks[chunk + 1] if chunk + 1 < num_chunks else own
        for subgraph in reversed(route.subgraphs):
            followers = route.followers[subgraph]
            longest = 0 if followers else after_chunk
            for follower in followers:
                longest = max(longest, own[follower])
            if has_state[subgraph]:
                longest = max(longest, following[subgraph])
            own[subgraph] = longest + durations[subgraph][chunk]
    return ranks


def _task_lists(processors: Sequence[Processor]) -> dict[Device, list[Task]]:
    """Map each device to an empty list of tasks. Devices of the same processor share one list."""
    lists: dict[frozenset[str], list[Task]] = {}
    takers = {d: frozenset(p.name for p in processors if d in p.devices) for d in get_args(Device)}
    return {device: lists.setdefault(names, []) for device, names in takers.items()}


def _distinct(queues: Iterable[list[Task]]) -> list[list[Task]]:
    return list({id(queue): queue for queue in queues}.values())
