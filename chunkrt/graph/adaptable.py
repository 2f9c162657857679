"""Plans whose linears take adapters that are chosen for each row at run time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import replace

from chunkrt.graph.plan import DOMAIN, INPUTS, Node, Plan, Subgraph, Tensor

ADAPTERS = "adapters"
LOW_RANK_OP = "LowRankSum"


def adaptable(plan: Plan, weights: Collection[str]) -> Plan:
    """Return a plan in which the products of the rows' adapters are added to the results of linears.

    The products are added after the bias and the residual of a linear, because backends fuse these three. So a row
    without an adapter has the bits of the original plan.

    Args:
        weights: the weights of the linears. All rows of a chunk pass through each of them.
    """
    tensors = dict(plan.tensors)
    tensors[ADAPTERS] = Tensor(name=ADAPTERS, dtype="int64", shape=INPUTS[ADAPTERS], kind="value")

    def rewritten(subgraph: Subgraph) -> Subgraph:
        linears: dict[str, list[Node]] = {}
        for node in subgraph.nodes:
            if node.op == "MatMul" and node.inputs[1] in weights:
                linears.setdefault(_last_sum(node, subgraph).name, []).append(node)
        nodes: list[Node] = []
        for node in subgraph.nodes:
            behind = linears.get(node.name, [])
            names = [f"{node.outputs[0]}.before{index}" for index in range(len(behind))]
            tensors.update({name: replace(tensors[node.outputs[0]], name=name) for name in names})
            names.append(node.outputs[0])
            nodes.append(replace(node, outputs=(names[0], *node.outputs[1:])))
            for linear, before, after in zip(behind, names, names[1:], strict=False):
                nodes.append(
                    Node(
                        name=f"{linear.name}.adapters",
                        op=LOW_RANK_OP,
                        domain=DOMAIN,
                        inputs=(before, linear.inputs[0], ADAPTERS),
                        outputs=(after,),
                        attributes={"weight": linear.inputs[1]},
                    )
                )
        if not linears:
            return subgraph
        return replace(subgraph, nodes=tuple(nodes), inputs=(*subgraph.inputs, ADAPTERS), is_static=False)

    subgraphs = tuple(map(rewritten, plan.subgraphs))
    return replace(plan, subgraphs=subgraphs, tensors=tensors, inputs=(*plan.inputs, ADAPTERS))


def _last_sum(linear: Node, subgraph: Subgraph) -> Node:
    """Return the last of the additions that follow a linear, at most two, or the linear if no addition follows."""
    reads = Counter(name for node in subgraph.nodes for name in node.inputs)
    last = linear
    for _ in range(2):
        (result,) = last.outputs
        users = [node for node in subgraph.nodes if result in node.inputs]
        if result in subgraph.outputs or reads[result] != 1 or users[0].op != "Add":
            return last
        last = users[0]
    return last
