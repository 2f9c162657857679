"""Fusion of adjacent subgraphs on one processor, for plans with fewer subgraphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from chunkrt.graph.plan import Plan, Subgraph


def merged_on_cpu(plan: Plan) -> Plan:
    """Return a plan of the same decoder for the CPU alone.

    All subgraphs between sums over ranks are fused, except those that run on the rows of logits. The plan has the same
    state, and its results are bit-identical.
    """
    plan = plan.on_cpu()
    groups = [list(group) for _, group in groupby(plan.subgraphs, key=lambda s: (s.device, s.rows))]
    return replace(plan, subgraphs=tuple(merged(group, plan) for group in groups))


def merged(subgraphs: Sequence[Subgraph], plan: Plan) -> Subgraph:
    """Fuse consecutive subgraphs of a plan on one device."""
    if len(subgraphs) == 1:
        return subgraphs[0]
    inside = {name for subgraph in subgraphs for name in subgraph.outputs}
    read_outside = {name for s in plan.subgraphs if s not in subgraphs for name in s.inputs} | {plan.output}

    def names(kind: str) -> list[str]:
        return list(dict.fromkeys(name for subgraph in subgraphs for name in getattr(subgraph, kind)))

    return Subgraph(
        name=f"{subgraphs[0].name}..{subgraphs[-1].name}",
        device=subgraphs[0].device,
        is_static=False,
        rows=subgraphs[0].rows,
        nodes=tuple(node for subgraph in subgraphs for node in subgraph.nodes),
        inputs=tuple(name for name in names("inputs") if name not in inside),
        outputs=tuple(name for name in names("outputs") if name in read_outside),
        weights=tuple(names("weights")),
        state=tuple(names("state")),
    )
