"""An open stream: chunks on their way through an executor, several at a time, as somebody forms them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from chunkrt.backends.base import Passage
from chunkrt.runtime.executor import Executor
from chunkrt.runtime.stream import Chunk
from chunkrt.runtime.tasks import Task, TaskEvent
from chunkrt.runtime.workers import Workers


class EndedChunk(NamedTuple):
    """A chunk that has passed, its tasks in the order in which they ended, and why it failed if it did."""

    number: int
    chunk: Chunk
    events: list[TaskEvent]
    error: BaseException | None


class OpenStream:
    """Threads that take chunks through an executor, which is nobody else's meanwhile.

    Args:
        executor: whose subgraphs, slots and policy they are.
        on_end: called, in any thread, when a chunk has passed or everything has stopped. It must not wait.
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
        """Chunks that are on their way, or have passed and not been taken out."""
        return len(self._stream.chunks)

    @property
    def has_room(self) -> bool:
        """Whether another chunk would find a slot."""
        return self.num_in_flight < len(self._executor.slots)

    def admit(self, chunk: Chunk, after: Iterable[int]) -> int:
        """Have a chunk enter; there is room. `after`: the numbers of those with earlier tokens of the same sequences.

        Returns:
            Its number.
        """
        durations = self._executor.durations_of(chunk)

        def admit() -> int:
            number = self._schedule.admit(chunk.route, after, durations)
            self._stream.chunks[number] = chunk
            return number

        return self._workers.change(admit)

    def take_ended(self) -> list[EndedChunk]:
        """Those that have passed since this was called last. Raises what a policy raised."""
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
        """End the threads, and wait for the tasks that run."""
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
