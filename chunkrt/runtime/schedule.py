"""The schedule of one run: which tasks are ready, running and ended.

A state machine without threads, locks or clocks. The executor's workers drive it under their lock, simulators on a
virtual clock.

The rules. A chunk passes through the subgraphs in order, so it has at most one task ready or running. A subgraph that
owns state takes the chunks in order; the turn passes on when a task ends. So attention of a chunk waits for what all
chunks up to its own give it, and any other task only for its own chunk: others may overtake. A chunk enters when a ring
slot is free and keeps it until its last task has ended. A chunk whose logits nobody asked for ends at the last subgraph
that owns state, because nothing reads what would come after.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

from chunkrt.errors import ConfigError
from chunkrt.graph.plan import Device, Subgraph
from chunkrt.runtime.policy import Policy, Task
from chunkrt.runtime.ranks import upward_ranks
from chunkrt.runtime.virtual_clock import run_on_virtual_clock


@dataclass(frozen=True, kw_only=True)
class Processor:
    """Workers that run tasks of one device role, or of both when both run on the same CPU threads.

    `workers` is how many tasks it runs at once: 1 for an NPU.
    """

    name: str
    devices: frozenset[Device]
    workers: int


class Schedule:
    """The tasks of one run and their states.

    Args:
        subgraphs: the plan's subgraphs, in order.
        num_chunks: chunks of the prompt, at least 1.
        logit_chunks: the chunks that have rows whose logits are wanted.
        chunks_in_flight: ring slots, at least 1.
        processors: who asks for tasks.
        policy: chooses among ready tasks.
        durations: of every task as estimated, for the policy to go by: nanoseconds, [subgraphs][chunks]. Without them
            it takes every task to last equally long.
    """

    def __init__(
        self,
        subgraphs: Sequence[Subgraph],
        *,
        num_chunks: int,
        logit_chunks: Container[int],
        chunks_in_flight: int,
        processors: Sequence[Processor],
        policy: Policy,
        durations: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self.num_chunks = num_chunks
        self.processors = tuple(processors)
        self.chunks_done = 0
        self.ready: list[Task] = []
        self.running: list[Task] = []
        self.failure: tuple[Task, BaseException] | None = None
        """The first task that failed, and its error."""
        self.is_cancelled = False
        self._subgraphs = subgraphs
        self._logit_chunks = logit_chunks
        self._chunks_in_flight = chunks_in_flight
        self._policy = policy
        self._durations = durations or [[1] * num_chunks for _ in subgraphs]
        self._ranks: list[list[int]] = []
        """Empty until a policy asks for one."""
        self._makespans: dict[Policy, int] = {}
        self._devices = [subgraph.device for subgraph in subgraphs]
        self._is_ordered = [bool(subgraph.state) for subgraph in subgraphs]
        without_logits = max((i + 1 for i, ordered in enumerate(self._is_ordered) if ordered), default=1)
        self._lengths = [len(subgraphs) if chunk in logit_chunks else without_logits for chunk in range(num_chunks)]
        self.num_tasks = sum(self._lengths)
        self._turn = [0] * len(subgraphs)
        """The chunk that an ordered subgraph takes next."""
        self._place = [0] * num_chunks
        """The subgraph that a chunk runs or waits for."""
        self._slots: list[int] = []
        """The ring slot of every chunk that has entered."""
        for slot in range(min(chunks_in_flight, num_chunks)):
            self._slots.append(slot)
            if self._is_open(0, slot):
                self.ready.append(Task(0, slot))

    @property
    def is_finished(self) -> bool:
        """Whether no further task will be handed out: all chunks are done, or the run was stopped."""
        return self.is_stopped or self.chunks_done == self.num_chunks

    @property
    def is_stopped(self) -> bool:
        """Whether the run failed or was cancelled."""
        return self.is_cancelled or self.failure is not None

    def slot(self, chunk: int) -> int:
        """The ring slot of a chunk that has entered."""
        return self._slots[chunk]

    def device(self, task: Task) -> Device:
        """The device that a task is for."""
        return self._devices[task.subgraph]

    def duration(self, task: Task) -> int:
        """How long a task is estimated to take."""
        return self._durations[task.subgraph][task.chunk]

    def rank(self, task: Task) -> int:
        """The longest path from a task's start to the run's end; see `upward_ranks`."""
        if not self._ranks:
            self._ranks = upward_ranks(self._durations, self._lengths, self._is_ordered, self._chunks_in_flight)
        return self._ranks[task.chunk][task.subgraph]

    def makespan(self, policy: Policy) -> int:
        """How long the whole run would take under a policy if every task took as long as estimated."""
        if policy not in self._makespans:
            fresh = Schedule(
                self._subgraphs,
                num_chunks=self.num_chunks,
                logit_chunks=self._logit_chunks,
                chunks_in_flight=self._chunks_in_flight,
                processors=self.processors,
                policy=policy,
                durations=self._durations,
            )
            self._makespans[policy] = run_on_virtual_clock(fresh, fresh.duration)[-1].end_ns
        return self._makespans[policy]

    def num_ready(self, processor: Processor) -> int:
        """How many ready tasks a processor could run."""
        return sum(self._devices[task.subgraph] in processor.devices for task in self.ready)

    def claim(self, processor: Processor) -> Task | None:
        """Hand out the task that the policy chooses for a processor, or None if there is none for now.

        Raises:
            ConfigError: the policy chose nothing although no task runs, so that nothing would ever happen.
        """
        ready = [task for task in self.ready if self._devices[task.subgraph] in processor.devices]
        if not ready:
            return None
        task = self._policy.select(ready, self)
        if task is None:
            if not self.running:
                raise ConfigError(
                    f"policy {self._policy.name!r} chose none of {len(ready)} ready tasks while none runs; "
                    "a policy may wait only for a running task"
                )
            return None
        self.ready.remove(task)
        self.running.append(task)
        return task

    def unlocked_by(self, task: Task) -> Sequence[Task]:
        """The tasks that would become ready if a ready or running task ended now."""
        subgraph, chunk = task
        unlocked = []
        num_entered = len(self._slots)
        if subgraph + 1 < self._lengths[chunk]:
            if self._is_open(subgraph + 1, chunk):
                unlocked.append(Task(subgraph + 1, chunk))
        elif num_entered < self.num_chunks:
            num_entered += 1
            if self._is_open(0, num_entered - 1):
                unlocked.append(Task(0, num_entered - 1))
        if self._is_ordered[subgraph] and chunk + 1 < num_entered and self._place[chunk + 1] == subgraph:
            unlocked.append(Task(subgraph, chunk + 1))
        return unlocked

    def complete(self, task: Task) -> None:
        """A running task ended well: its successors become ready."""
        self.running.remove(task)
        if self.is_stopped:
            return
        self.ready += self.unlocked_by(task)
        subgraph, chunk = task
        self._turn[subgraph] = chunk + 1
        self._place[chunk] = subgraph + 1
        if subgraph + 1 == self._lengths[chunk]:
            self.chunks_done += 1
            if len(self._slots) < self.num_chunks:
                self._slots.append(self._slots[chunk])

    def fail(self, task: Task, error: BaseException) -> None:
        """A running task failed: nothing further is handed out. The first failure is kept."""
        self.running.remove(task)
        self.ready.clear()
        if self.failure is None:
            self.failure = task, error

    def cancel(self) -> None:
        """Stop the run: nothing further is handed out."""
        self.ready.clear()
        self.is_cancelled = True

    def _is_open(self, subgraph: int, chunk: int) -> bool:
        return not self._is_ordered[subgraph] or self._turn[subgraph] == chunk
