"""Fusion: replace sequences of nodes that a kernel computes in one step by one node.

    MatMul -> Add(bias) -> Add(residual)    Linear(x, weight, bias, residual)

The products of a gate that form one named operator (`graph/uses.py`) are fused too.

Requires: nodes in execution order. Ensures: results that are bit-identical to those without fusion, except for rows
of a linear's input that have outliers. The fused kernel adds the products of outliers after bias and residual, whereas
separate nodes add them before, which rounds differently.

Under a static scheme no linear is fused, because its result is scaled, and rounded to its grid if it has one, before
another value is added. Nodes whose inner results are needed elsewhere are not fused. A fused node takes the place of
its last part, where all its operands are available.
"""

from __future__ import annotations

from chunkrt.graph.plan import Node, Plan, Subgraph
from chunkrt.graph.uses import gated_products
from chunkrt.quant.scheme import Scheme

DOMAIN = "chunkrt.native"

Match = tuple[list[Node], Node]
"""Nodes to replace, in execution order, and the node that replaces them."""


def fuse(subgraph: Subgraph, plan: Plan, scheme: Scheme) -> list[Node]:
    """Return the subgraph's nodes, fused where possible."""
    matches = {match[1].name: match for match in _Matcher(subgraph, plan, scheme).matches()}
    inner = {part.name for parts, _ in matches.values() for part in parts[:-1]}
    return [matches[n.name][1] if n.name in matches else n for n in subgraph.nodes if n.name not in inner]


class _Matcher:
    def __init__(self, subgraph: Subgraph, plan: Plan, scheme: Scheme) -> None:
        self._subgraph = subgraph
        self._outputs = set(subgraph.outputs)
        self._tensors = plan.tensors
        self._is_static = scheme.is_static
        self._users: dict[str, list[Node]] = {}
        for node in subgraph.nodes:
            for name in node.inputs:
                self._users.setdefault(name, []).append(node)

    def matches(self) -> list[Match]:
        gated = [(list(use.nodes), use.node) for use in gated_products(self._subgraph)]
        if self._is_static:
            return gated
        # If one Add joins two products, the later product takes the Add, and the earlier one is fused up to its bias,
        # as it is in a subgraph of its own.
        taken: set[str] = set()
        linears = []
        for node in reversed(self._subgraph.nodes):
            if node.op == "MatMul" and (match := self._linear(node, taken)):
                linears.append(match)
                taken.update(part.name for part in match[0])
        return [*gated, *linears]

    def _linear(self, matmul: Node, taken: set[str]) -> Match | None:
        parts, operands = [matmul], {"bias": "", "residual": ""}
        for role, fits in (("bias", self._is_bias), ("residual", self._is_residual)):
            result = parts[-1].outputs[0]
            add = self._only_user(result, "Add")
            if add and add.name not in taken and fits(other := _other_input(add, result), result):
                operands[role] = other
                parts.append(add)
        if len(parts) == 1:
            return None
        return parts, _fused(parts, (*matmul.inputs, operands["bias"], operands["residual"]))

    def _only_user(self, name: str, op: str) -> Node | None:
        users = self._users.get(name, [])
        alone = len(users) == 1 and users[0].op == op and name not in self._outputs
        return users[0] if alone else None

    def _is_bias(self, name: str, result: str) -> bool:
        tensor = self._tensors[name]
        return tensor.kind == "weight" and tensor.shape == self._tensors[result].shape[-1:]

    def _is_residual(self, name: str, result: str) -> bool:
        tensor = self._tensors[name]
        return tensor.kind == "value" and tensor.shape == self._tensors[result].shape


def _other_input(add: Node, name: str) -> str:
    left, right = add.inputs
    return right if left == name else left


def _fused(parts: list[Node], inputs: tuple[str, ...]) -> Node:
    last = parts[-1]
    return Node(name=last.name, op="Linear", domain=DOMAIN, inputs=inputs, outputs=last.outputs, attributes={})
