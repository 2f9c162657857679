"""An open stream: several chunks in flight through an executor, which are admitted while others run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from chunkrt.backends.base import Passage
from chunkrt.runtime.executor import Executor
from chunkrt.runtime.stream import Chunk
from chunkrt.runtime.tasks import Task, TaskEvent
from chunkrt.runtime.workers import Workers


class EndedChunk(NamedTuple):
    """A chunk that has ended, with its tasks in the order in which they ended, and its error if it failed."""

    number: int
    chunk: Chunk
    events: list[TaskEvent]
    error: BaseException | None


class OpenStream:
    """Threads that take chunks through an executor, which is not used by other code at the same time.

    Args:
        executor: the executor, which provides subgraphs, slots and policy.
        on_end: called, in any thread, when a chunk has ended or the stream has stopped. It must not block.
    """

    def __init__(self, executor: Executor, on_end: Callable[[], None]) -> None:
        self._executor = executor
        self._schedule = executor.open_schedule()
        self._stream = executor.stream({})
        self._workers = Workers(self._schedule, self._execute, cpus=executor.cpus, on_chunk_end=on_end)
        try:
            self._workers.start()
        except BaseException:  # the system may have no more threads
            self._workers.close()
            raise

    @property
    def num_in_flight(self) -> int:
        """Number of chunks that are in flight, or have ended but were not returned by `take_ended` yet."""
        return len(self._stream.chunks)

    @property
    def has_room(self) -> bool:
        """True if a slot is free for another chunk."""
        return self.num_in_flight < len(self._executor.slots)

    def admit(self, chunk: Chunk, after: Iterable[int]) -> int:
        """Admit a chunk, and return its number. Requires `has_room`.

        `after` lists the numbers of the chunks with earlier tokens of the same sequences.
        """
        durations = self._executor.durations_of(chunk)

        def admit() -> int:
            number = self._schedule.admit(chunk.route, after, durations)
            self._stream.chunks[number] = chunk
            return number

        return self._workers.change(admit)

    def take_ended(self) -> list[EndedChunk]:
        """Return the chunks that have ended since the last call. Raise the error of the policy, if it failed."""
        passed, events = self._workers.change(self._take)
        if self._workers.error is not None:
            raise self._workers.error
        ended = []
        for number, failure in passed:
            own = [event for event in events if event.task.chunk == number]
            error: BaseException | None = None
            if failure is not None:
                error = self._executor.failure(*failure)
                error.__cause__ = failure[1]
            chunk = self._stream.chunks.pop(number)
            if error is None:
                self._executor.learn(chunk, own)
            ended.append(EndedChunk(number, chunk, own, error))
        return ended

    def close(self) -> None:
        """Stop the threads after their running tasks, and wait for them."""
        self._workers.close()

    def _take(self) -> tuple[list[tuple[int, tuple[Task, BaseException] | None]], list[TaskEvent]]:
        passed = self._schedule.ended.copy()
        self._schedule.ended.clear()
        numbers = {number for number, _ in passed}
        events = [event for event in self._workers.events if event.task.chunk in numbers]
        self._workers.events[:] = [event for event in self._workers.events if event.task.chunk not in numbers]
        return passed, events

    def _execute(self, task: Task) -> Passage | None:
        return self._stream.compute(task, self._schedule.slot(task.chunk))
