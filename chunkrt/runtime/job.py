"""A job: a run in progress, from the call that marks it as begun on the state to the call that advances the state.

Every chunk computes one segment of the job's tokens. The requesting thread changes the state; the computing threads
only write into the state's tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from chunkrt.graph.plan import Plan
from chunkrt.runtime.buffers import aligned_zeros
from chunkrt.runtime.record import ChunkRecord, Pipeline, RunRecord
from chunkrt.runtime.run import Run, RunResult
from chunkrt.runtime.tasks import TaskEvent


class Job:
    """A run, the progress of its chunks, and their results.

    Args:
        run: the requested run; its state does not advance before the job is done.
        plan: the decoder.
        logit_group: number of rows of logits that one call writes; see `BoundSubgraph.logit_group`.
        num_before: number of tokens that were written to the state but do not count in its position yet, if the job is
        a
            part of a run.
    """

    def __init__(self, run: Run, plan: Plan, logit_group: int = 1, *, num_before: int = 0) -> None:
        self.run = run
        self.position = run.state.position + num_before
        """Position of the first token."""
        self.rope_offset = run.state.rope_offset
        self.num_taken = 0
        """Number of tokens that chunks have taken so far."""
        self.records: list[RunRecord] = []
        """Records of the computed parts."""
        self.wait_for_writers: Callable[[], None] | None = None
        """Function that waits until no thread writes into the state. It is set if the job was abandoned while a thread
        could still write.
        """
        self._num_rows = 0 if run.is_for_others else {"last": 1, "all": run.token_ids.size}.get(run.logits, 0)
        rows = -(-self._num_rows // logit_group) * logit_group
        self.logits = aligned_zeros((rows, plan.vocab_size), np.float32)
        """Logits, float32 [N, V]; N is the number of requested rows, rounded up to complete groups."""
        self.hidden: NDArray[np.float32] | None = None
        """Hidden states, float32 [tokens, H], if requested."""
        if run.logits == "hidden" and not run.is_for_others:
            assert plan.hidden is not None
            self.hidden = aligned_zeros((run.token_ids.size, int(plan.tensors[plan.hidden].shape[-1])), np.float32)

    @property
    def num_left(self) -> int:
        """Number of tokens that no chunk has taken yet."""
        return self.run.token_ids.size - self.num_taken

    @property
    def rest(self) -> Segment:
        """Segment of the tokens that no chunk has taken yet."""
        num_rows = {"all": self.num_left, "last": 1}.get(self.run.logits, 0)
        return Segment(self, self.num_taken, self.num_left, num_rows)

    def take(self, most: int) -> Segment:
        """Return the next tokens, at most `most`, as a segment of the next chunk."""
        run, start = self.run, self.num_taken
        num_tokens = min(most, self.num_left)
        self.num_taken += num_tokens
        num_rows = {"all": num_tokens, "last": int(not self.num_left)}.get(run.logits, 0)
        return Segment(self, start, num_tokens, num_rows)

    def record(
        self,
        pipeline: Pipeline,
        segments: Sequence[Segment],
        events: Sequence[TaskEvent],
        *,
        start_ns: int,
        end_ns: int,
        chunks: Sequence[ChunkRecord] = (),
    ) -> None:
        """Record consecutive segments of the job, one for each chunk; the chunk numbers of the events start at 0."""
        record = RunRecord(
            pipeline=pipeline,
            num_tokens=sum(segment.num_tokens for segment in segments),
            position=segments[0].position,
            position_bytes=self.run.state.position_bytes,
            start_ns=start_ns,
            end_ns=end_ns,
            events=events,
            chunks=chunks,
            sequence=self.run.state.serial,
        )
        self.records.append(record)

    def carry_out(self, compute: Callable[[Job], None]) -> RunResult:
        """Compute every token and advance the state.

        Raises:
            BaseException: the error of `compute`; the state is restored.
        """
        run = self.run
        run.state.begin(run.token_ids.size)
        try:
            compute(self)
        except BaseException:
            self.give_up()
            raise
        return self.finish()

    def give_up(self) -> None:
        """Restore the state, immediately or as soon as no thread writes into it."""
        self.run.state.roll_back(wait=self.wait_for_writers)
        if self.wait_for_writers is None:
            del self.run  # releases the reference to the state, like `finish`

    def finish(self) -> RunResult:
        """Advance the state after all tokens have been computed."""
        self.run.state.advance(self.run.token_ids.size)
        del self.run  # a computing thread or an error may still refer to the job; the state's memory can be freed
        logits = self.logits[: self._num_rows] if self._num_rows else None
        return RunResult(logits=logits, hidden=self.hidden, records=self.records)


class Segment(NamedTuple):
    """Consecutive tokens of a job in one chunk.

    Attributes:
        start: index of the first token among the job's tokens.
        num_rows: number of tokens at the end of the segment whose logits are requested.
    """

    job: Job
    start: int
    num_tokens: int
    num_rows: int

    @property
    def token_ids(self) -> NDArray[np.int64]:
        """Token ids, int64 [num_tokens]."""
        return self.job.run.token_ids[self.start : self.start + self.num_tokens]

    @property
    def position(self) -> int:
        """Position of the first token."""
        return self.job.position + self.start

    @property
    def logits(self) -> NDArray[np.float32]:
        """The job's logits, starting at the first requested row of the segment."""
        return self.job.logits[self.start if self.job.run.logits == "all" else 0 :]
