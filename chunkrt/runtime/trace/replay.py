"""Replay a finished run by the schedule's rules: the times at which tasks became ready, and the reasons for their
waits.

The rules are those of `Schedule`. A task waits for the tasks of its chunk whose values it reads, and for the copies
that it needs. A task with state also waits for the preceding chunk; if several sequences share chunks, it waits for the
last chunk of each of its sequences. Every chunk waits for a chunk slot. The time at which a shared chunk was formed is
not recorded; the start of its first task is used instead.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

from chunkrt.errors import ConfigError
from chunkrt.runtime.record import RunRecord
from chunkrt.runtime.tasks import Task, TaskEvent

Worker = tuple[str, int]
"""A processor's name, and the index of one of its workers."""


class Replay:
    """The events of a run, by task and by worker, with the times at which tasks became ready.

    Args:
        record: the run.

    Raises:
        ConfigError: the events contradict the schedule's rules or each other, so they do not come from a run.
    """

    def __init__(self, record: RunRecord) -> None:
        self.record = record
        self._stages = record.pipeline.stages
        self.event_of = {event.task: event for event in record.events}
        self.workers: dict[Worker, list[TaskEvent]] = {
            (processor.name, worker): []
            for processor in record.pipeline.processors
            for worker in range(processor.workers)
        }
        """Events of every worker, by time."""
        self._check_tasks()
        self._assign()
        starts, ends = [record.end_ns] * record.num_chunks, [record.start_ns] * record.num_chunks
        for task, event in self.event_of.items():
            starts[task.chunk] = min(starts[task.chunk], event.start_ns)
            ends[task.chunk] = max(ends[task.chunk], event.end_ns)
        in_order = list(range(record.num_chunks))
        if record.chunks:
            in_order.sort(key=starts.__getitem__)
        slot_times = [record.start_ns] * record.pipeline.num_slots + sorted(ends)
        self._slot_times = dict(zip(in_order, slot_times, strict=False))
        self._formed = starts if record.chunks else [record.start_ns] * record.num_chunks
        self._before = self._chunks_before()
        self._copied: dict[Task, int] = defaultdict(lambda: record.start_ns)
        for copy in record.copies:
            self._copied[copy.task] = max(self._copied[copy.task], copy.end_ns)
        self.ready = {task: self._ready(task) for task in self.event_of}
        """Earliest possible start of every task."""
        for task, event in self.event_of.items():
            if event.start_ns < self.ready[task]:
                raise _contradiction(
                    f"{self.name(task)} started {self.ready[task] - event.start_ns} ns before it was ready"
                )

    def name(self, task: Task) -> str:
        """Return the display name of a task."""
        return f"{self._stages[task.subgraph].name} of chunk {task.chunk}"

    def sources(self, task: Task) -> list[TaskEvent]:
        """Return the events of the tasks of its chunk that a task waits for."""
        return [self.event_of[Task(index, task.chunk)] for index in self._stages[task.subgraph].waits_for]

    def turn(self, task: Task) -> int:
        """Return the time when the preceding chunks had passed a stage with state. For other stages return the run's
        start.
        """
        before = self._before[task.chunk] if self._stages[task.subgraph].has_state else ()
        ends = [self.event_of[Task(task.subgraph, chunk)].end_ns for chunk in before]
        return max(ends, default=self.record.start_ns)

    def entry(self, task: Task) -> int:
        """Return the time when a chunk slot was free for the chunk."""
        return self._slot_times[task.chunk]

    def formed(self, task: Task) -> int:
        """Return the time when the chunk had been formed."""
        return self._formed[task.chunk]

    def _ready(self, task: Task) -> int:
        times = [self.turn(task), self.formed(task), self.entry(task), self._copied[task]]
        return max(times + [source.end_ns for source in self.sources(task)])

    def _chunks_before(self) -> list[tuple[int, ...]]:
        """Return for every chunk the chunks that precede it at stages with state: the last chunks with rows of its
        sequences.

        The numbers of shared chunks do not define their order. The chunks are ordered by the time at which they first
        reach state.
        """
        record = self.record
        if not record.chunks:
            return [tuple(range(max(0, chunk - 1), chunk)) for chunk in range(record.num_chunks)]
        reached = {
            task.chunk: event.start_ns
            for task, event in sorted(self.event_of.items(), reverse=True)
            if self._stages[task.subgraph].has_state
        }
        last: dict[int, int] = {}
        before: list[tuple[int, ...]] = [()] * record.num_chunks
        for chunk in sorted(reached, key=reached.__getitem__):
            sequences = [segment.sequence for segment in record.chunks[chunk].segments]
            before[chunk] = tuple({last[sequence] for sequence in sequences if sequence in last})
            last.update(dict.fromkeys(sequences, chunk))
        return before

    def _check_tasks(self) -> None:
        """Check that every chunk passed through all stages, or through all stages on which state or hidden states
        depend.
        """
        record, stages = self.record, self._stages
        if len(self.event_of) < len(record.events):
            raise _contradiction("a task has two events")
        if not 0 < record.num_chunks <= len(record.events):
            raise _contradiction(f"{len(record.events)} tasks for {record.num_chunks} chunks")
        passed: list[list[int]] = [[] for _ in range(record.num_chunks)]
        for task in sorted(self.event_of):
            if not (0 <= task.subgraph < len(stages) and 0 <= task.chunk < len(passed)):
                raise _contradiction(f"task {tuple(task)} does not exist; {len(stages)} stages, {len(passed)} chunks")
            passed[task.chunk].append(task.subgraph)
        flow = record.pipeline.flow
        routes = [list(route.subgraphs) for route in (flow.with_logits, flow.without_logits, flow.with_hidden)]
        for chunk, subgraphs in enumerate(passed):
            if subgraphs not in routes:
                raise _contradiction(f"chunk {chunk} has {len(subgraphs)} of {len(stages)} tasks, and some are missing")

    def _assign(self) -> None:
        """Assign the events to their workers."""
        record = self.record
        devices = {processor.name: processor.devices for processor in record.pipeline.processors}
        for event in (*record.events, *record.copies):
            if not record.start_ns <= event.start_ns <= event.end_ns <= record.end_ns:
                raise _contradiction(f"{self.name(event.task)} is not between the run's start and its end")
        for copy in record.copies:
            if copy.task not in self.event_of:
                raise _contradiction(f"a copy belongs to a task that never ran: {tuple(copy.task)}")
        for event in sorted(record.events, key=lambda event: (event.start_ns, event.end_ns)):
            worker = event.processor, event.worker
            device = self._stages[event.task.subgraph].device
            if worker not in self.workers or device not in devices[event.processor]:
                raise _contradiction(
                    f"{self.name(event.task)} is for {device!r}, which no worker {event.worker} of processor "
                    f"{event.processor!r} runs"
                )
            self.workers[worker].append(event)
        for events in self.workers.values():
            for first, second in pairwise(events):
                if second.start_ns < first.end_ns:
                    raise _contradiction(f"{self.name(second.task)} overlaps {self.name(first.task)} on one worker")


def _contradiction(what: str) -> ConfigError:
    return ConfigError(f"the events are not those of a run: {what}; record the run again")
