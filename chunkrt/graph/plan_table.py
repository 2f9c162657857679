"""A plan as a table for notebooks."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from chunkrt.html_tables import html_table

if TYPE_CHECKING:
    from chunkrt.graph.plan import Plan


def plan_html(plan: Plan) -> str:
    """Return a table with a row for each subgraph: its device, whether its shape is fixed, and its operators."""
    rows = []
    for subgraph in plan.subgraphs:
        operators = Counter(node.op for node in subgraph.nodes)
        listed = ", ".join(f"{count} {name}" if count > 1 else name for name, count in operators.items())
        kind = "static" if subgraph.is_static else "dynamic"
        rows.append(
            (subgraph.name, subgraph.device, kind, str(len(subgraph.weights)), str(len(subgraph.state)), listed)
        )
    caption = f"{plan.family}, vocabulary of {plan.vocab_size}, context of {plan.context_length}"
    return html_table(caption, ("subgraph", "on", "kind", "weights", "state", "operators"), rows)
