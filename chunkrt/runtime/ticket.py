"""Tickets: jobs that wait for rows of shared chunks."""

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
    """A job that waits for rows of shared chunks.

    Args:
        job: a job that has begun; its owner finishes or abandons it after the ticket has ended.
        step: see `Waiting.step`.
        on_end: called in the conductor's thread when the ticket ends; it must not raise.
    """

    def __init__(self, job: Job, step: int, on_end: Callable[[], object]) -> None:
        self.job = job
        self._step = step
        self.error: BaseException | None = None
        """Error because of which some tokens were not computed."""
        self.is_cancelled = False
        self.num_passed = 0
        """Number of chunks formed since the last one with rows of this ticket."""
        self.num_in_flight = 0
        """Number of chunks in flight that contain tokens of the job."""
        self.last_chunk = -1
        """Number of the last chunk in an open stream that contains tokens of the job."""
        self.is_ended = False
        self._on_end = on_end
        self._pipeline: Pipeline | None = None
        self._noted: list[tuple[Segment, Sequence[TaskEvent], ChunkRecord]] = []
        self._gate = Gate()

    @property
    def is_over(self) -> bool:
        """True if no further token of the job may go into a chunk."""
        cancel = self.job.run.cancel
        return self.error is not None or self.is_cancelled or (cancel is not None and cancel.is_set())

    @property
    def waiting(self) -> Waiting:
        """View of the ticket for a batcher."""
        run = self.job.run
        return Waiting(self.job.num_left, run.token_ids.size == 1, self.num_passed, self._step)

    def wait(self) -> None:
        """Wait until the ticket has ended. An interrupt ends the wait, and leaves no lock held."""
        self.waiter()

    @property
    def waiter(self) -> Callable[[], None]:
        """Function that waits like `wait`, but does not refer to the ticket. A state that outlives the ticket can keep
        it without a reference cycle.
        """
        return self._gate.wait

    def note(self, pipeline: Pipeline, segment: Segment, events: Sequence[TaskEvent], record: ChunkRecord) -> None:
        """Record the events of a chunk with tokens of the job. Consecutive chunks of one pipeline form one record."""
        if pipeline is not self._pipeline:
            self._write_record()
            self._pipeline = pipeline
        self._noted.append((segment, events, record))

    def _write_record(self) -> None:
        if self._pipeline is None:
            return
        # a chunk may have waited at its end for rows of other runs
        noted = sorted(self._noted, key=lambda one: one[0].start)
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
        """Advance the state of a run that has ended. If the run failed, restore the state and raise the error."""
        if self.error is not None:
            self.job.give_up()
        self.check()
        return self.job.finish()

    def check(self) -> None:
        """Remove the error from the ticket and raise it, because the error and the ticket in its traceback would form a
        reference cycle.
        """
        if self.error is not None:
            try:
                raise self.error
            finally:
                self.error = None

    def stop(self, error: BaseException) -> None:
        """Prevent further tokens from going into a chunk. Only the first error is kept."""
        if self.error is None:
            self.error = _copied(error)

    def end(self, error: BaseException | None = None) -> None:
        """End the ticket: none of its tokens is computed any more."""
        if not self.is_ended:
            self.is_ended = True
            if error is not None:
                self.stop(error)
            try:
                if self.error is None:
                    self._write_record()
            except Exception as failure:  # out of memory, for example; the waiting thread gets the error
                self.stop(failure)
            self._gate.open()
            with suppress(Exception):  # the listener may be gone
                self._on_end()


def _copied(error: BaseException) -> BaseException:
    """Return a copy of the error for the waiting thread, which adds its own traceback."""
    if not isinstance(error, ChunkrtError):
        return error
    try:
        other = type(error)(*error.args)
    except Exception:  # an exception class of a plug-in may require other arguments
        return error
    other.__cause__ = error.__cause__
    return other
