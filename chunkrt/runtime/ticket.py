"""Tickets: jobs that wait for their share of chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

from chunkrt.errors import ChunkrtError
from chunkrt.gate import Gate
from chunkrt.runtime.batcher import Waiting
from chunkrt.runtime.job import Job, Segment
from chunkrt.runtime.record import ChunkRecord, Pipeline
from chunkrt.runtime.run import RunResult
from chunkrt.runtime.tasks import Task, TaskEvent


class Ticket:
    """A job that waits for its share of chunks.

    Args:
        job: begun; whoever asked for it finishes it or gives it up, once it has ended.
        step: see `Waiting.step`.
        on_end: called, in the conductor's thread, when nothing of it is left to compute. It must not fail.
    """

    def __init__(self, job: Job, step: int, on_end: Callable[[], object]) -> None:
        self.job = job
        self._step = step
        self.error: BaseException | None = None
        """Why not all of it was computed."""
        self.is_cancelled = False
        self.num_passed = 0
        """Chunks that were formed without it since its last."""
        self.num_in_flight = 0
        """Chunks that hold some of it."""
        self.last_chunk = -1
        """The last of them, by its number in an open stream."""
        self.is_ended = False
        self._on_end = on_end
        self._pipeline: Pipeline | None = None
        self._noted: list[tuple[Segment, Sequence[TaskEvent], ChunkRecord]] = []
        self._gate = Gate()

    @property
    def is_over(self) -> bool:
        """Whether none of its tokens shall go into another chunk."""
        cancel = self.job.run.cancel
        return self.error is not None or self.is_cancelled or (cancel is not None and cancel.is_set())

    @property
    def waiting(self) -> Waiting:
        """What a batcher sees of it."""
        run = self.job.run
        return Waiting(self.job.num_left, run.token_ids.size == 1, self.num_passed, self._step)

    def wait(self) -> None:
        """Wait until it has ended. (An interrupt gets through, and leaves nothing behind.)"""
        self.waiter()

    @property
    def waiter(self) -> Callable[[], None]:
        """What does so, for a state that outlives the ticket: with the ticket they would hold each other."""
        return self._gate.wait

    def note(self, pipeline: Pipeline, segment: Segment, events: Sequence[TaskEvent], record: ChunkRecord) -> None:
        """Remember what a chunk with some of it took. Neighbours that one pipeline computed are one record."""
        if pipeline is not self._pipeline:
            self._write_record()
            self._pipeline = pipeline
        self._noted.append((segment, events, record))

    def _write_record(self) -> None:
        if self._pipeline is None:
            return
        noted = sorted(self._noted, key=lambda one: one[0].start)  # a chunk may have waited for others' rows at its end
        events = [
            event._replace(task=Task(event.task.subgraph, chunk))
            for chunk, (_, of_chunk, _) in enumerate(noted)
            for event in of_chunk
        ]
        self.job.record(
            self._pipeline,
            [segment for segment, _, _ in noted],
            sorted(events, key=lambda event: event.end_ns),
            start_ns=min(event.start_ns for event in events),
            end_ns=max(event.end_ns for event in events),
            chunks=tuple(record for _, _, record in noted),
        )
        self._noted = []

    def result(self) -> RunResult:
        """Advance the state of a run that has ended. Raises what went wrong; the state is what it was."""
        if self.error is not None:
            self.job.give_up()
        self.check()
        return self.job.finish()

    def check(self) -> None:
        """Raises what went wrong, once: an error and the ticket in its traceback would hold each other."""
        if self.error is not None:
            try:
                raise self.error
            finally:
                self.error = None

    def stop(self, error: BaseException) -> None:
        """No further tokens go into a chunk; what is told first stays."""
        if self.error is None:
            self.error = _copied(error)

    def end(self, error: BaseException | None = None) -> None:
        """Nothing more of it is computed."""
        if not self.is_ended:
            self.is_ended = True
            if error is not None:
                self.stop(error)
            try:
                if self.error is None:
                    self._write_record()
            except Exception as failure:  # too little memory, say: who waits is told
                self.stop(failure)
            self._gate.open()
            with suppress(Exception):  # it tells somebody who may have gone
                self._on_end()


def _copied(error: BaseException) -> BaseException:
    """The same error for another thread, which adds its own traceback."""
    if not isinstance(error, ChunkrtError):
        return error
    try:
        other = type(error)(*error.args)
    except Exception:  # a plug-in's, which is made of something else
        return error
    other.__cause__ = error.__cause__
    return other
