"""A job: a run on its way through the decoder, from where the state begins it to where the state advances.

Chunks take its tokens, a segment each. Whoever asked for the run changes the state, in a thread of their own; whoever
computes it only writes into the state's tensors.
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
    """A run, how far chunks have taken its tokens, and what they gave.

    Args:
        run: what is asked for; the state does not advance before the job is done.
        plan: the decoder.
        logit_group: rows of logits that are written at once; see `BoundSubgraph.logit_group`.
        num_before: tokens that the state has been given and does not count yet, of a run whose part the job is.
    """

    def __init__(self, run: Run, plan: Plan, logit_group: int = 1, *, num_before: int = 0) -> None:
        self.run = run
        self.position = run.state.position + num_before
        """Of its first token."""
        self.rope_offset = run.state.rope_offset
        self.num_taken = 0
        """Tokens that chunks have taken."""
        self.records: list[RunRecord] = []
        """Of those that have been computed."""
        self.wait_for_writers: Callable[[], None] | None = None
        """Waits until nobody writes into the state, where the job was left while somebody might."""
        self._num_rows = 0 if run.is_for_others else {"last": 1, "all": run.token_ids.size}.get(run.logits, 0)
        rows = -(-self._num_rows // logit_group) * logit_group
        self.logits = aligned_zeros((rows, plan.vocab_size), np.float32)
        """float32 [rows asked for, rounded up to whole groups, V]."""
        self.hidden: NDArray[np.float32] | None = None
        """float32 [tokens, H], if they are asked for."""
        if run.logits == "hidden" and not run.is_for_others:
            assert plan.hidden is not None
            self.hidden = aligned_zeros((run.token_ids.size, int(plan.tensors[plan.hidden].shape[-1])), np.float32)

    @property
    def num_left(self) -> int:
        """Tokens that no chunk has taken."""
        return self.run.token_ids.size - self.num_taken

    @property
    def rest(self) -> Segment:
        """The tokens that no chunk has taken."""
        num_rows = {"all": self.num_left, "last": 1}.get(self.run.logits, 0)
        return Segment(self, self.num_taken, self.num_left, num_rows)

    def take(self, most: int) -> Segment:
        """The next tokens, at most so many, as a segment of the next chunk."""
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
        """Note what was computed of the job: consecutive segments, a chunk each, whose events count them from 0."""
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
        """Have every token computed, and the state advance.

        Raises:
            BaseException: what `compute` raises; the state is what it was.
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
        """Make the state what it was, now or as soon as nobody writes into it."""
        self.run.state.roll_back(wait=self.wait_for_writers)
        if self.wait_for_writers is None:
            del self.run  # as in `finish`

    def finish(self) -> RunResult:
        """Advance the state: all has been computed."""
        self.run.state.advance(self.run.token_ids.size)
        del self.run  # whoever computed it or keeps its error may hold the job on, but not the memory of the state
        logits = self.logits[: self._num_rows] if self._num_rows else None
        return RunResult(logits=logits, hidden=self.hidden, records=self.records)


class Segment(NamedTuple):
    """Consecutive tokens of a job that lie in one chunk.

    start: of the first, among the job's tokens. num_rows: how many of the last of them have logits that are wanted.
    """

    job: Job
    start: int
    num_tokens: int
    num_rows: int

    @property
    def token_ids(self) -> NDArray[np.int64]:
        """int64 [num_tokens]."""
        return self.job.run.token_ids[self.start : self.start + self.num_tokens]

    @property
    def position(self) -> int:
        """Of the first token."""
        return self.job.position + self.start

    @property
    def logits(self) -> NDArray[np.float32]:
        """The job's logits from those of the first wanted row on."""
        return self.job.logits[self.start if self.job.run.logits == "all" else 0 :]
