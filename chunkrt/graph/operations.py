"""Operations: how many floating point operations an operator of a plan takes; a multiply-add counts as two."""

from __future__ import annotations

from math import prod
from typing import cast

from chunkrt.graph.linear_attention import LINEAR_ATTENTION_OP, find_variant
from chunkrt.graph.plan import EXPERTS_OP, Node, Plan, resolve


def operations_per_row(node: Node, plan: Plan) -> int:
    """Of any operator but attention, for one row of its result.

    A product with a weight counts what it multiplies and adds; routed experts count those that a row picks. Linear
    attention counts the taps of its convolution and, for every element of its matrices, 7: it decays, is multiplied
    with k and summed, gets its update, and is multiplied with q and summed. Every other operator counts one for each
    element of its results.
    """
    if node.op in ("MatMul", "FloatLinear"):
        return 2 * prod(resolve(plan.tensors[node.inputs[1]].shape, {}))
    if node.op == EXPERTS_OP:
        elements = sum(prod(resolve(plan.tensors[name].shape, {})[1:]) for name in node.inputs[2:])
        return 2 * cast(int, node.attributes["top_k"]) * elements
    if node.op == LINEAR_ATTENTION_OP:
        operations = 2 * prod(resolve(plan.tensors[node.inputs[3]].shape, {}))
        if find_variant(cast(str, node.attributes["attn_type"])).is_recurrent:
            operations += 7 * prod(resolve(plan.tensors[node.inputs[6]].shape, {}))
        return operations
    return sum(prod(resolve(plan.tensors[name].shape[1:], {})) for name in node.outputs)


def operations_per_pair(node: Node, plan: Plan) -> int:
    """Of attention, for each pair of a row and a position that it attends to: score and weighted sum, for all heads."""
    return 4 * resolve(plan.tensors[node.outputs[0]].shape[1:], {})[0]


def attended_pairs(position: int, num_tokens: int, window: int = 0) -> int:
    """Pairs of a row and a position that it attends to: itself and all before, or the last of these.

    Args:
        position: of the first row.
        num_tokens: rows.
        window: how many positions a row sees at most; 0 for all.
    """
    growing = min(num_tokens, max(0, window - position)) if window else num_tokens
    return growing * position + growing * (growing + 1) // 2 + (num_tokens - growing) * window
