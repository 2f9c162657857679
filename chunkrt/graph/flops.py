"""FLOPs of a plan's operators; a multiply-add counts as two."""

from __future__ import annotations

from math import prod

from chunkrt.graph.operators import OPERATORS
from chunkrt.graph.plan import Node, Plan, resolve


def node_flops(node: Node, plan: Plan) -> int:
    """Return an operator's FLOPs for one row of the result; for attention, for one pair of a row and a position that it
    attends to.
    """
    row = OPERATORS.get((node.domain, node.op))
    if row is None or row.flops is None:
        return sum(prod(resolve(plan.tensors[name].shape[1:], {})) for name in node.outputs)
    return row.flops(node.attributes, [plan.tensors[name].shape if name else None for name in node.inputs])


def attended_pairs(position: int, num_tokens: int, window: int = 0) -> int:
    """Count pairs of a row and a position that it attends to: its own and all earlier positions, or the last `window`
    of these.

    Args:
        position: position of the first row.
        num_tokens: number of rows.
        window: largest number of positions that a row sees; 0 for all.
    """
    growing = min(num_tokens, max(0, window - position)) if window else num_tokens
    return growing * position + growing * (growing + 1) // 2 + (num_tokens - growing) * window
