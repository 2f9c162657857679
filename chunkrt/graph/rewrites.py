"""Plans that are rewritten when a model is loaded: with fewer subgraphs, or with keys cached without their bias.

A bias of hundreds that is added to all keys in a few channels, as in Qwen2 and Qwen2.5, would make the scales of an
int8 cache so coarse in these channels that the differences between keys would be lost. The bias is a constant, so no
cache has to hold it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from chunkrt.graph.adaptable import LOW_RANK_OP
from chunkrt.graph.plan import ATTENTION_OPS, CACHES, Node, Plan, Subgraph, reads_shared_cache


def merged_on_cpu(plan: Plan) -> Plan:
    """Return a plan of the same decoder for the CPU alone.

    All subgraphs between sums over ranks are fused, except those that run on the rows of logits. The plan has the same
    state, and its results are bit-identical.
    """
    plan = plan.on_cpu()

    def home(subgraph: Subgraph) -> tuple[str, ...]:
        return subgraph.device, subgraph.rows, subgraph.name if subgraph.device == "link" else ""

    groups = [list(group) for _, group in groupby(plan.subgraphs, key=home)]
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
        shared_state=tuple(name for name in names("shared_state") if name not in names("state")),
    )


def without_key_biases(plan: Plan) -> Plan:
    """Return the decoder with keys cached before RoPE and without their bias.

    The bias becomes an input of each attention node that has one; keys that other layers read keep it. A decoder
    without such biases is returned unchanged.
    """
    biases = _key_biases(plan)
    if not biases:
        return plan

    def told(node: Node) -> Node:
        if node.name not in biases:
            return node
        sinks = node.inputs[7:] or ("",)
        return replace(node, inputs=(*node.inputs[:7], *sinks, biases[node.name]))

    def rewritten(subgraph: Subgraph) -> Subgraph:
        added = [biases[node.name] for node in subgraph.nodes if node.name in biases]
        weights = tuple(dict.fromkeys((*subgraph.weights, *added)))
        return replace(subgraph, nodes=tuple(map(told, subgraph.nodes)), weights=weights)

    raw = plan.with_raw_keys()
    return replace(raw, subgraphs=tuple(map(rewritten, raw.subgraphs)))


def has_key_biases(plan: Plan) -> bool:
    """Return whether biases take part in the keys of some attention, also those that `without_key_biases` cannot
    remove: biases of a latent from which keys are made, or in front of a norm of heads.
    """
    nodes = [node for subgraph in plan.subgraphs for node in subgraph.nodes]
    makers = {name: node for node in nodes for name in node.outputs}
    return any(_has_bias(n, plan, makers) for n in nodes if n.op in ATTENTION_OPS and not reads_shared_cache(n))


def _has_bias(attention: Node, plan: Plan, makers: Mapping[str, Node]) -> bool:
    """Return whether a weight is added to a row within the module of an attention node, up to the node."""
    module = f"{attention.name.rpartition('.')[0]}."
    seen: set[str] = set()
    waiting = [attention.inputs[0]]
    while waiting:
        node = makers.get(waiting.pop())
        if node is None or node.name in seen or not node.name.startswith(module):
            continue
        seen.add(node.name)
        added = node.inputs if node.op == "Add" else node.inputs[2:] if node.op == "LayerNormalization" else ()
        if any(name and plan.tensors[name].kind == "weight" for name in added):
            return True
        waiting += filter(None, node.inputs)
    return False


def _key_biases(plan: Plan) -> dict[str, str]:
    """Return the weights that are added to the keys of attention nodes, by name of the node."""
    nodes = [node for subgraph in plan.subgraphs for node in subgraph.nodes]
    makers = {name: node for node in nodes for name in node.outputs}
    shared = {
        name
        for subgraph in plan.subgraphs
        for node in subgraph.nodes
        if reads_shared_cache(node)
        for name in node.inputs[CACHES]
    }
    alone = (n for n in nodes if n.op in ATTENTION_OPS and shared.isdisjoint(n.inputs[CACHES]))
    found = {node.name: _bias(node.inputs[0], plan, makers) for node in alone}
    return {name: bias for name, bias in found.items() if bias}


def _bias(value: str, plan: Plan, makers: Mapping[str, Node]) -> str:
    """Return the name of the weight that is added to each row of a value; empty if there is none.

    Other terms, such as the products of adapters, may be added too. If a norm of heads follows the addition, the name
    is empty.
    """
    node = makers.get(value)
    if node is not None and node.op == LOW_RANK_OP:
        return _bias(node.inputs[0], plan, makers)
    if node is None or (node.domain, node.op) != ("", "Add"):
        return ""
    tensors = [plan.tensors[name] for name in node.inputs]
    weights = (t.name for t in tensors if t.kind == "weight" and t.shape == plan.tensors[value].shape[1:])
    return next(weights, "") or next(filter(None, (_bias(name, plan, makers) for name in node.inputs)), "")
