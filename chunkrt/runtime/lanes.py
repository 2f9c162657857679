"""Lanes: the executors that compute single runs, and runs that are batched into the same chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import lcm
from typing import Literal

from chunkrt.graph.linear_attention import LINEAR_ATTENTION_OP, find_variant
from chunkrt.graph.plan import Plan
from chunkrt.runtime.executor import Executor
from chunkrt.runtime.job import Job
from chunkrt.runtime.run import Run
from chunkrt.runtime.stream import Chunk
from chunkrt.runtime.workers import GivesWay

DecodeOn = Literal["auto", "cpu", "npu"]

DELTA_RULE_ROWS = 32
"""Number of rows that the native gated delta rule processes at once."""


@dataclass(frozen=True, kw_only=True)
class Lanes:
    """The executors that a conductor assigns to runs.

    Attributes:
        prompts: executor of single runs of several tokens.
        tokens: executor of single runs of one token.
        many: executor of chunks that contain rows of prompts.
        few: executor of chunks that contain only decoding sequences.
        decode_on: if `many` and `few` differ, the choice between them for single tokens: "cpu", "npu", or "auto" for
            the executor with the shorter expected time.
        near: executors with a limited reach (`Executor.reach`), in order of their reach. While the history is short,
            they take precedence over `prompts` and `many`, and with decode_on "npu" over the executors of single
            tokens.
    """

    prompts: Executor
    tokens: Executor
    many: Executor
    few: Executor
    decode_on: DecodeOn = "cpu"
    near: Sequence[Executor] = ()

    def of_lone(self, job: Job) -> Executor:
        """Return the executor for the next tokens of a job that runs alone."""
        far = self.tokens if job.run.token_ids.size == 1 else self.prompts
        return self.near_to(job.run, job.position + job.num_taken) or far

    def near_to(self, run: Run, position: int) -> Executor | None:
        """Return the executor of limited reach for a chunk of a run that begins at a position, or None."""
        if run.token_ids.size == 1 and self.decode_on != "npu":
            return None
        return next((lane for lane in self.near if lane.reaches(position)), None)

    @property
    def logit_group(self) -> int:
        """Common multiple of the executors' numbers of rows of logits per call; see `BoundSubgraph.logit_group`."""
        return lcm(*(lane.logit_group for lane in (self.prompts, self.tokens, self.many, self.few, *self.near)))

    @property
    def parting_step(self) -> int:
        """Step at which prompts may be split; see `Waiting.step`. Executors of limited reach require a step, because
        they sum a chunk's own rows separately from the preceding rows.
        """
        return self.many.chunk_length if self.near else parting_step(self.many.plan, self.many.chunk_length)

    @property
    def overlaps(self) -> bool:
        """True if several chunks in flight keep more processors busy than one chunk. With several ranks, shared chunks
        are computed one at a time, in the order in which the first rank forms them.
        """
        if (
            self.many.plan.flow.sums or self.many in self.near
        ):  # near executors compute one chunk at a time, in one thread
            return False
        return self.many is not self.few and self.many.is_concurrent and len(self.many.processors) > 1

    def decode_apart(self, positions: Sequence[int]) -> bool:
        """Return True if single tokens at these positions run only on the CPU, not in chunks with prompts."""
        if self.decode_on != "auto" or not positions:
            return self.decode_on == "cpu"
        segments = [(position, 1) for position in positions]
        return self.few.estimate(segments, len(segments)) <= self.many.estimate(segments, len(segments))

    def name_of(self, executor: Executor) -> str:
        """Return the name of an executor, by which other ranks find the corresponding executor."""
        return next(field.name for field in fields(self) if getattr(self, field.name) is executor)

    @property
    def identity(self) -> Sequence[object]:
        """Description of the lanes, which must be equal on all ranks."""
        lanes = (self.prompts, self.tokens, self.many, self.few)
        return [(lane.chunk_length, len(lane.slots), [s.name for s in lane.plan.subgraphs]) for lane in lanes]

    def longest_task_s(self) -> float:
        """Return the seconds since the oldest task in progress began, or 0 if no task is in progress."""
        lanes = (self.prompts, self.tokens, self.many, self.few, *self.near)
        return max(lane.clock.longest_s() for lane in lanes)

    def take_part(self, name: str, runs: Sequence[tuple[Run, int]], number: int, gives_way: GivesWay) -> None:
        """Compute the same work as another rank: a complete single run, or a chunk of several runs. No state advances.

        Args:
            name: name of the executor.
            runs: the runs; each one with the number of tokens that were written to its state but do not count in the
                state's position yet.
            number: see `Key.number`.
            gives_way: see `Executor.compute`.

        Raises:
            BackendError: a task failed on this rank or on another one.
        """
        lane: Executor = getattr(self, name)
        jobs = [Job(run, lane.plan, num_before=num_before) for run, num_before in runs]
        if len(jobs) == 1:
            lane.compute(jobs[0], gives_way, number=number)
        else:
            lane.compute_chunk(Chunk([job.take(lane.chunk_length) for job in jobs], lane.plan.flow), number)


def parting_step(plan: Plan, chunk_length: int) -> int:
    """Return the step (see `Waiting.step`) at which splitting a prompt does not change results.

    Most layers compute every row independently. The native gated delta rule processes up to 32 rows at once, counted
    from the beginning of a chunk. For other recurrent kinds the step is unknown.
    """
    nodes = (node for subgraph in plan.subgraphs for node in subgraph.nodes if node.op == LINEAR_ATTENTION_OP)
    kinds = {str(node.attributes["attn_type"]) for node in nodes}
    recurrent = {kind for kind in kinds if find_variant(kind).is_recurrent}
    if not recurrent:
        return 1
    is_known = recurrent == {"gated_delta_rule"} and not chunk_length % DELTA_RULE_ROWS
    return DELTA_RULE_ROWS if is_known else chunk_length
