"""Uses of operators in a plan, by their canonical names, independent of the backend that runs them.

A use of an operator is one node, or several nodes that form one operation: the four nodes of a gate with SiLU are one
`silu_mul`. This module needs only the standard library, like the plan itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from chunkrt.graph.operators import OPERATORS, all_operators, find_operator
from chunkrt.graph.plan import ATTENTION_OPS, DOMAIN, Device, Dimension, Node, Plan, Subgraph

_NAMES = {op: row.name for (_, op), row in OPERATORS.items() if row.name}

PARTS: Mapping[str, tuple[str, ...]] = {
    "cached_attention": ("rope",),
    "linear": ("quantize",),
    "logits": ("quantize",),
    "routed_experts": ("quantize",),
}
"""Operators that are steps of other operators and not separate nodes: the rotation of queries and keys, and the
quantisation of activations under dynamic schemes.
"""

SAMPLER = "sampler"
"""The operator that no plan contains: the choice of the next token in a session."""


@dataclass(frozen=True, kw_only=True)
class Use:
    """A use of an operator in a plan.

    Attributes:
        node: the inputs, attributes and outputs with which a function for the operator is called.
        nodes: the plan's nodes that form the use, in their order.
    """

    operator: str
    node: Node
    nodes: tuple[Node, ...]


@dataclass(frozen=True, kw_only=True)
class OperatorNode(Node):
    """A node as the forms of its operator see it: with the sizes of its operands.

    Attributes:
        operator: the canonical name, which depends on the use: "linear", "logits" or "matmul".
        input_shapes: shapes of the inputs; None for an absent input. "T" and "R" are numbers of rows, "P" and "W" those
            of positions in caches.
        output_shapes: shapes of the outputs.
        device: the device on which the plan places the node, "npu" or "cpu".
        scheme: name of the scheme.
    """

    operator: str
    input_shapes: tuple[tuple[Dimension, ...] | None, ...]
    output_shapes: tuple[tuple[Dimension, ...], ...]
    device: Device
    scheme: str


def declare(use: Use, subgraph: Subgraph, plan: Plan, scheme: str) -> OperatorNode:
    """Return the declaration of a use in a plan."""
    tensors = plan.tensors
    return OperatorNode(
        **vars(use.node),
        operator=use.operator,
        input_shapes=tuple(tensors[name].shape if name else None for name in use.node.inputs),
        output_shapes=tuple(tensors[name].shape for name in use.node.outputs),
        device=subgraph.device,
        scheme=scheme,
    )


def weight_places(use: Use) -> tuple[int, ...]:
    """Return the indices of the inputs of a use that are weights, also of those that are absent."""
    row = find_operator(use.node.domain, use.node.op)
    of_values = use.operator in (
        "matmul",
        "gather_rows",
    )  # these operators have rows of ONNX that serve for weights too
    return () if row is None or of_values else tuple(i for i in row.weights if i < len(use.node.inputs))


def uses(subgraph: Subgraph, plan: Plan) -> tuple[Use, ...]:
    """Return the uses in a subgraph in execution order; each node belongs to one use."""
    gated = {use.nodes[-1].name: use for use in gated_products(subgraph)}
    inner = {node.name for use in gated.values() for node in use.nodes[:-1]}
    last_linears = _last_linears(subgraph, plan)
    found = []
    for node in subgraph.nodes:
        if node.name in gated:
            found.append(gated[node.name])
        elif node.name not in inner:
            use = use_of(node)
            is_of_weight = len(node.inputs) > 1 and plan.tensors[node.inputs[0]].kind == "weight"
            if use.operator == "gather_rows" and is_of_weight:
                use = replace(use, operator="embedding")
            elif node.name in last_linears:
                use = replace(use, operator="logits")
            elif use.operator == "linear" and not _is_linear(node, plan):
                use = replace(use, operator="matmul")
            found.append(use)
    return tuple(found)


def use_of(node: Node) -> Use:
    """Return the use of a node as a separate operator.

    Both kinds of cached attention are one operator, whose function distinguishes the kinds by the attribute
    `has_raw_keys`.
    """
    called = node
    if node.op in ATTENTION_OPS:
        raw = int(node.op == "RawKeyAttention")
        called = replace(node, op=ATTENTION_OPS[0], attributes={**node.attributes, "has_raw_keys": raw})
    return Use(operator=canonical_name(node.domain, node.op), node=called, nodes=(node,))


def canonical_name(domain: str, op: str) -> str:
    """Return an operator's canonical name, e.g. "rms_norm". The name of a plug-in's operator begins with its domain:
    "acme_mixer".
    """
    if domain.partition(".")[0] in ("", DOMAIN) and op in _NAMES:
        return _NAMES[op]
    is_foreign = domain.partition(".")[0] not in ("", DOMAIN)
    words = [*(domain.split(".") if is_foreign else ()), op]
    return "_".join(re.sub(r"(?<=[a-z0-9])(?=[A-Z])|\W+", "_", word).lower() for word in words)


def operator_names() -> set[str]:
    """Return the canonical names of all operators with a row, chunkrt's and those of imported plug-ins."""
    return {canonical_name(domain, op) for domain, op in all_operators()}


def gated_products(subgraph: Subgraph) -> list[Use]:
    """Find gates: one half of a value goes through an activation and is multiplied by the other half.

        Split -> Sigmoid(gate) -> Mul(gate, .) -> Mul(., up)   SiluMul(x)
        Split -> Gelu(gate) -> Mul(., up)                      GeluMul(x)

    Nodes are not fused if an inner result is needed elsewhere. A fused node takes the place of its last node, where its
    operand is available.
    """
    readers = _Readers(subgraph)
    found = (_gated_product(node, readers) for node in subgraph.nodes if node.op == "Split")
    return [use for use in found if use]


class _Readers:
    """Return the nodes of a subgraph that read each value."""

    def __init__(self, subgraph: Subgraph) -> None:
        self._outputs = set(subgraph.outputs)
        self._readers: dict[str, list[Node]] = {}
        for node in subgraph.nodes:
            for name in node.inputs:
                self._readers.setdefault(name, []).append(node)

    def only(self, name: str, op: str) -> Node | None:
        """Return the only reader of a value if it has a given operator and the value is not needed elsewhere; otherwise
        None.
        """
        found = self.inside(name)
        return found[0] if len(found) == 1 and found[0].op == op else None

    def inside(self, name: str) -> list[Node]:
        """Return all readers of a value; empty if the value is an output of the subgraph."""
        return [] if name in self._outputs else self._readers.get(name, [])


def _gated_product(split: Node, readers: _Readers) -> Use | None:
    if len(split.outputs) != 2:
        return None
    gate, up = split.outputs
    gelu = readers.only(gate, "Gelu")
    op, activation = ("GeluMul", [gelu]) if gelu else ("SiluMul", _silu(gate, readers))
    last = readers.only(activation[-1].outputs[0], "Mul") if activation else None
    if last is None or readers.only(up, "Mul") is not last:
        return None
    attributes = gelu.attributes if gelu else {}
    whole = replace(last, op=op, domain=DOMAIN, inputs=split.inputs, attributes=attributes)
    return Use(operator=canonical_name(DOMAIN, op), node=whole, nodes=(split, *activation, last))


def _silu(gate: str, readers: _Readers) -> list[Node]:
    users = {user.op: user for user in readers.inside(gate)}
    if set(users) != {"Sigmoid", "Mul"} or len(readers.inside(gate)) != 2:
        return []
    sigmoid, silu = users["Sigmoid"], users["Mul"]
    return [sigmoid, silu] if readers.only(sigmoid.outputs[0], "Mul") is silu else []


def _is_linear(node: Node, plan: Plan) -> bool:
    return node.op == "MatMul" and plan.tensors[node.inputs[1]].kind == "weight"


def _last_linears(subgraph: Subgraph, plan: Plan) -> set[str]:
    """Return the linears that compute the plan's output, by node; only elementwise operations and the collection of
    all ranks' parts may follow them.
    """
    writers = {name: node for node in subgraph.nodes for name in node.outputs}
    of_link = (node for s in plan.subgraphs if s.device == "link" for node in s.nodes)
    found, pending = set(), [plan.output, *(node.inputs[0] for node in of_link if plan.output in node.outputs)]
    while pending:
        node = writers.get(pending.pop())
        if node and _is_linear(node, plan):
            found.add(node.name)
        elif node and node.op in ("Add", "Mul", "Tanh"):
            pending += node.inputs
    return found
