"""The schedule: which tasks are ready, running and ended.

The schedule is a state machine without threads, locks or clocks. The executor's workers drive it under their lock, and
simulators drive it on a virtual clock.

These rules determine the order of tasks:

- A task waits for the tasks of its chunk whose values it reads. Several tasks of a chunk may be ready or running at
  once.
- A subgraph that owns state processes the chunks of a sequence in order, and starts the next chunk after the task of
  the
  previous one has ended. So attention of a chunk waits for the same subgraph on all earlier chunks of its sequences.
- All other tasks wait only for tasks of their own chunk, so chunks may overtake each other.
- A chunk enters when a chunk slot is free, and keeps the slot until its last task has ended.
- A chunk without requested logits passes only through the subgraphs on which the state depends, because no task uses
  the
  other results.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

from chunkrt.errors import ChunkrtError, ConfigError
from chunkrt.graph.flow import Route
from chunkrt.graph.plan import Device, Plan
from chunkrt.runtime.chunk_progress import ChunkProgress
from chunkrt.runtime.critical_path import upward_ranks
from chunkrt.runtime.policy import Policy
from chunkrt.runtime.tasks import Processor, Task, task_lists
from chunkrt.runtime.virtual_clock import run_on_virtual_clock


class Schedule:
    """Tasks of chunks, and their progress.

    The schedule of a run receives all chunks at once, and every chunk follows the previous one. A schedule without
    initial chunks is open: `admit` adds chunks until the schedule is closed, and a failed chunk does not stop other
    chunks.

    Args:
        plan: the decoder.
        routes: the subgraphs that every chunk of a run passes through; empty for an open schedule.
        chunks_in_flight: number of chunk slots, at least 1.
        processors: processors that claim tasks.
        policy: chooses among ready tasks.
        durations: estimated duration of every task of a run in nanoseconds, [subgraphs][chunks], for the policy. By
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
        self.chunks_done = 0
        self.running: list[Task] = []
        self.failure: tuple[Task, BaseException] | None = None
        """The first failed task that stopped the schedule, and its error."""
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
        self._ready = task_lists(self.processors)
        """Ready tasks by device."""
        self._ready_for = {p.name: _distinct(self._ready[device] for device in p.devices) for p in self.processors}
        self._chunks: dict[int, ChunkProgress] = {}
        """All chunks of a run. In an open schedule, the chunks that have not ended."""
        self._slots: dict[int, int] = {}
        """Chunk slot of every chunk that has entered."""
        self._free_slots = list(reversed(range(chunks_in_flight)))
        self._outside: list[int] = []
        """Chunks that have not entered."""
        self._errors: dict[int, tuple[Task, BaseException]] = {}
        for chunk, route in enumerate(routes):
            self.admit(route, [chunk - 1], [of_subgraph[chunk] for of_subgraph in durations or ()])
        self._is_run = bool(routes)
        self.is_open = not routes

    @property
    def ready(self) -> list[Task]:
        """The tasks that could run now, in no particular order."""
        return list(chain(*_distinct(self._ready.values())))

    @property
    def is_finished(self) -> bool:
        """True if no further task can be claimed, because all chunks are done or the schedule was stopped."""
        return self.is_stopped or (self.chunks_done == self.num_chunks and not self.is_open)

    @property
    def is_stopped(self) -> bool:
        """True if a failure or a cancellation has stopped the schedule."""
        return self.is_cancelled or self.failure is not None

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
        self._chunks[number] = chunk = ChunkProgress(number, route, durations, before, self._flow)
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

    def withdraw(self, most: int | None = None) -> int:
        """Withdraw the last chunks of a run of which no task was claimed yet. The first chunk always stays.

        With sums over ranks, chunks that another rank may have begun stay as well. These are known, because the other
        rank has the same number of slots, and none of its chunks ends before this rank has claimed the last sum of that
        chunk. If another rank decides, `most` is the number of chunks to keep.

        Returns:
            Number of chunks left.
        """
        summed = sum(not chunk.num_sums for chunk in self._chunks.values())
        least = most or (summed + self._chunks_in_flight if self._flow.sums else 1)
        while self.num_chunks > least:
            number = self.num_chunks - 1
            chunk = self._chunks[number]
            if chunk.num_running or chunk.left < len(chunk.route.subgraphs):
                break
            self._clear(number)
            self._chunks.pop(number)
            self._chunks[number - 1].next.clear()
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
        chunk.num_sums -= task.subgraph in self._flow.sums
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
        if self.is_stopped:
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
        """Mark a running task as failed. No further task of a run can then be claimed. In an open schedule, no further
        task of the same chunk can be claimed, and later chunks do not wait for it. The first failure is kept.
        """
        chunk = self._end(task)
        if self._is_run:
            self._clear()
            if self.failure is None:
                self.failure = task, error
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

    def _end(self, task: Task) -> ChunkProgress:
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

    def _leave(self, chunk: ChunkProgress) -> list[tuple[int, int]]:
        """End a chunk, assign its slot to the next chunk, and return the tasks (subgraph, chunk) that waited for the
        slot.
        """
        number = chunk.number
        self.chunks_done += 1
        self.ended.append((number, self._errors.pop(number, None)))
        self._free_slots.append(self._slots[number])
        if not self._is_run:
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


def _distinct(queues: Iterable[list[Task]]) -> list[list[Task]]:
    return list({id(queue): queue for queue in queues}.values())
