"""Plans whose attention is static, over a window of a fixed number of past slots, so that an NPU can compute it.

Such a plan has the same state as the original plan, and can replace it as long as the history fits the window. A short
convolution reads the same few rows before a chunk at any position, so its history always fits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

from chunkrt.graph.linear_attention import LINEAR_ATTENTION_OP
from chunkrt.graph.plan import ATTENTION_OPS, INT8_GROUP, Node, Plan, Subgraph, reads_shared_cache, resolve
from chunkrt.graph.rewrites import merged

HEAD_NORM_OP = "HeadNorm"
"""Operator of chunkrt's domain: RMS normalisation of each head's columns."""

PAST_SLOTS = "past_slots"
"""Attribute of static attention: number of slots of its cache that a graph reads, in addition to the rows of the chunk;
for a convolution, the number of rows of its state.
"""

KEPT_SLOTS = "kept_slots"
"""Attribute of static attention that slides: number of first positions that each row sees, in addition to the last
`past_slots` - `kept_slots` positions up to its own. Without it, a row sees all positions up to its own.
"""

INT8_CACHES = "int8_caches"
"""Attribute of static attention, present if its caches are int8: the graph reads integers and scales."""

CONVOLUTION = "short_conv"
"""The kind of linear attention that can be static."""


def attention_nodes(plan: Plan) -> list[str]:
    """Return the names of all nodes with attention over a cache that can be static."""
    nodes = [node for s in plan.subgraphs if _is_attention(s) for node in s.nodes]
    return [node.name for node in nodes if node.op in ATTENTION_OPS]


def convolution_nodes(plan: Plan) -> list[str]:
    """Return the names of all nodes with linear attention that can be static."""
    return [node.name for s in plan.subgraphs if _is_attention(s) for node in s.nodes if is_convolution(node)]


def can_be_static(node: Node) -> bool:
    """Return whether a node is attention over a cache, or a convolution, that a plan may have on the NPU. Dual chunk
    attention is not."""
    is_plain = not reads_shared_cache(node) and "rope_period" not in node.attributes
    return (node.op == "CachedAttention" and is_plain) or is_convolution(node)


def is_convolution(node: Node) -> bool:
    """Return whether a node is linear attention of the kind that can be static."""
    return node.op == LINEAR_ATTENTION_OP and node.attributes["attn_type"] == CONVOLUTION


def with_static_attention(
    plan: Plan,
    nodes: Collection[str],
    slots: Mapping[str, int],
    *,
    fits: Callable[[Subgraph], bool],
    kept: int | None = None,
    has_int8_caches: bool = False,
) -> Plan:
    """Move attention to the NPU, and fuse it with adjacent subgraphs on the NPU.

    Args:
        plan: a plan whose attention is in separate subgraphs on the CPU, alone or with norms of heads.
        nodes: the names of nodes that become static: attention over caches, and convolutions.
        slots: number of slots by symbol, "P" for caches and "W" for rings; convolutions need none. If `kept` is given,
            a layer with a window above "P" has the slots of a ring.
        fits: returns whether a subgraph is small enough to be one graph on the NPU.
        kept: number of first positions that attention keeps in sight when the history exceeds the slots "P"; None if
            the plan does not run with longer histories.
        has_int8_caches: True if the state's caches are int8.
    """
    subgraphs = tuple(_static(s, plan, nodes, slots, kept, has_int8_caches) for s in plan.subgraphs)
    plan = replace(plan, subgraphs=subgraphs)
    made: list[Subgraph] = []
    for device, group in groupby(subgraphs, key=lambda s: (s.device, s.rows)):
        neighbours = list(group)
        made += _melted(neighbours, plan, fits) if device == ("npu", "T") else neighbours
    return replace(plan, subgraphs=tuple(made))


def num_layers(subgraph: Subgraph) -> int:
    """Return the nodes of a subgraph with attention over caches, or with convolutions."""
    return sum(node.op in ATTENTION_OPS or is_convolution(node) for node in subgraph.nodes)


def num_static(subgraph: Subgraph) -> int:
    """Return the nodes of a subgraph with static attention or static convolutions."""
    return sum(PAST_SLOTS in node.attributes for node in subgraph.nodes)


class WindowElements(NamedTuple):
    """Numbers of elements that static attention adds to the inputs and outputs of a chunk's subgraphs."""

    entering: int
    leaving: int
    history: int
    history_bytes: int


def window_elements(subgraph: Subgraph, plan: Plan, rows: int) -> WindowElements:
    """Count the elements that static attention transfers for a chunk.

    Inputs are masks (one for each window), rows of rotary tables, and states of convolutions. Outputs are new rows of
    the
    caches, and the rows that form the next states of convolutions. The history consists of slots of caches and rings,
    which
    stay in the graph's buffers: for one sequence they are converted once, but the driver copies all of them at each
    run,
    because the memory is not shared with the NPU. Its bytes are those of float16, or of integers and float16 scales.
    """
    leaving = history = history_bytes = 0
    shared: dict[tuple[object, ...], int] = {}
    for node in (node for node in subgraph.nodes if PAST_SLOTS in node.attributes):
        past = static_slots(node)
        if is_convolution(node):
            channels = int(plan.tensors[node.inputs[5]].shape[0])
            shared["state", node.inputs[5]] = past * channels
            leaving += rows * channels
            continue
        for cache in node.inputs[5:7]:
            kv_heads, _, dim = resolve(plan.tensors[cache].shape, {"P": past, "W": past})
            history += kv_heads * past * dim
            history_bytes += kv_heads * past * (dim + 2 * num_groups(dim) if has_int8_caches(node) else 2 * dim)
            leaving += kv_heads * rows * dim
        shared["mask", node.attributes["window"], past] = rows * (past + rows)
        for table in node.inputs[3:5]:
            shared["rows", table] = rows * int(plan.tensors[table].shape[1])
    return WindowElements(sum(shared.values()), leaving, history, history_bytes)


def static_slots(node: Node) -> int:
    """Return the number of cache slots that a node's static attention reads, or of rows of its convolution's state; 0
    if the node is not static.
    """
    return int(str(node.attributes.get(PAST_SLOTS, 0)))


def kept_slots(node: Node) -> int | None:
    """Return the number of first positions that a node's attention keeps in sight; None if it does not slide."""
    kept = node.attributes.get(KEPT_SLOTS)
    return None if kept is None else int(str(kept))


def has_int8_caches(node: Node) -> bool:
    """Return whether a node's static attention reads int8 caches."""
    return INT8_CACHES in node.attributes


def num_groups(head_dim: int) -> int:
    """Return the number of scales of a position and head of an int8 cache."""
    return -(-head_dim // INT8_GROUP)


def without_sliding(subgraph: Subgraph) -> Subgraph:
    """Return a subgraph whose attention does not slide. Its compiled graph is the same, because masks are inputs."""

    def fixed(node: Node) -> Node:
        attributes = {name: value for name, value in node.attributes.items() if name != KEPT_SLOTS}
        return replace(node, attributes=attributes)

    return replace(subgraph, nodes=tuple(map(fixed, subgraph.nodes)))


def _is_attention(subgraph: Subgraph) -> bool:
    others = {node.op for node in subgraph.nodes if not can_be_static(node)}
    return any(map(can_be_static, subgraph.nodes)) and others <= {HEAD_NORM_OP}


def _static(
    subgraph: Subgraph,
    plan: Plan,
    nodes: Collection[str],
    slots: Mapping[str, int],
    kept: int | None,
    has_int8_caches: bool,
) -> Subgraph:
    if not (_is_attention(subgraph) and any(node.name in nodes for node in subgraph.nodes)):
        return subgraph

    def static(node: Node) -> Node:
        if not can_be_static(node):
            return node
        if is_convolution(node):
            return replace(node, attributes={**node.attributes, PAST_SLOTS: plan.tensors[node.inputs[5]].shape[1]})
        symbol = str(plan.tensors[node.inputs[5]].shape[1])
        attributes = {**node.attributes, PAST_SLOTS: slots[symbol]}
        if has_int8_caches:
            attributes[INT8_CACHES] = 1
        if symbol == "P" and kept is not None:
            window = int(str(node.attributes["window"]))
            attributes[KEPT_SLOTS] = 0 if window else kept
            if window > slots[symbol]:  # the layer sees its complete window, in as many slots as a ring has
                attributes[PAST_SLOTS] = slots["W"]
        return replace(node, attributes=attributes)

    return replace(subgraph, device="npu", nodes=tuple(map(static, subgraph.nodes)))


def _melted(subgraphs: list[Subgraph], plan: Plan, fits: Callable[[Subgraph], bool]) -> list[Subgraph]:
    """Fuse adjacent subgraphs into as few graphs as possible that fit; linears with a shadow stay in separate
    subgraphs.
    """
    made: list[list[Subgraph]] = []
    for subgraph in subgraphs:
        if made and fits(merged([*made[-1], subgraph], plan)):
            made[-1].append(subgraph)
        else:
            made.append([subgraph])
    return [merged(group, plan) for group in made]
