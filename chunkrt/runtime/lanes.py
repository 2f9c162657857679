"""Lanes: the executors that runs are computed by, alone or sharing chunks."""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm
from typing import Literal

from chunkrt.graph.linear_attention import LINEAR_ATTENTION_OP, find_variant
from chunkrt.graph.plan import Plan
from chunkrt.runtime.executor import Executor

DecodeOn = Literal["auto", "cpu", "npu"]

DELTA_RULE_ROWS = 32
"""Rows that the native gated delta rule takes at once."""


@dataclass(frozen=True, kw_only=True)
class Lanes:
    """The executors that a conductor shares.

    prompts: takes lone runs of several tokens. tokens: lone runs of one. many: chunks that hold rows of prompts. few:
    chunks of decoding sequences alone. decode_on: which of these two takes single tokens, where there are two: that
    on the CPU, that with the NPU, or by "auto" the one that is expected to take less time.
    """

    prompts: Executor
    tokens: Executor
    many: Executor
    few: Executor
    decode_on: DecodeOn = "cpu"

    @property
    def logit_group(self) -> int:
        """Rows of logits that suit them all; see `BoundSubgraph.logit_group`."""
        return lcm(*(lane.logit_group for lane in (self.prompts, self.tokens, self.many, self.few)))

    @property
    def parting_step(self) -> int:
        """See `Waiting.step`."""
        return parting_step(self.many.plan, self.many.chunk_length)

    @property
    def overlaps(self) -> bool:
        """Whether several chunks at once keep processors busy that one alone would not."""
        return self.many is not self.few and self.many.is_concurrent and len(self.many.processors) > 1


def parting_step(plan: Plan, chunk_length: int) -> int:
    """See `Waiting.step`: where a prompt is parted, the bits are those of running alone.

    All but one kind of layer compute every row by itself. The native gated delta rule takes up to 32 rows at once, from
    a chunk's beginning on; of other recurrent kinds nothing is known.
    """
    nodes = (node for subgraph in plan.subgraphs for node in subgraph.nodes if node.op == LINEAR_ATTENTION_OP)
    kinds = {str(node.attributes["attn_type"]) for node in nodes}
    recurrent = {kind for kind in kinds if find_variant(kind).is_recurrent}
    if not recurrent:
        return 1
    is_known = recurrent == {"gated_delta_rule"} and not chunk_length % DELTA_RULE_ROWS
    return DELTA_RULE_ROWS if is_known else chunk_length
