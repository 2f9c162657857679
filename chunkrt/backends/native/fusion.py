"""Fusion: node sequences that the kernels compute in one go become one node.

    MatMul -> Add(bias) -> Add(residual)    Linear(x, weight, bias, residual)

and the products of a gate that are one operator by name (`graph/uses.py`).

Requires: nodes in execution order. Ensures: the same bits as without fusion, except in rows of a linear's input
that have outliers: the products of these are added after bias and residual, without fusion before them, which rounds in
another order. Under a static scheme no linear takes part: its result is scaled, and rounded to a grid if it has one,
before anything is added. Nothing is fused whose inner results are needed elsewhere. A fused node stands where its last
part stood: its operands are all there then.
"""

from __future__ import annotations

from chunkrt.graph.plan import Node, Plan, Subgraph
from chunkrt.graph.uses import gated_products
from chunkrt.quant.scheme import Scheme

DOMAIN = "chunkrt.native"

Match = tuple[list[Node], Node]
"""The nodes that are replaced, the last one last, and the node that replaces them."""


def fuse(subgraph: Subgraph, plan: Plan, scheme: Scheme) -> list[Node]:
    """The subgraph's nodes, fused where that is possible."""
    matches: dict[str, Match] = {}
    for match in _Matcher(subgraph, plan, scheme).matches():
        # Of two products that one Add joins, the later takes it and the earlier stays as it is.
        matches[match[1].name] = match
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
        linears = (self._linear(node) for node in self._subgraph.nodes if node.op == "MatMul")
        return [*gated, *(match for match in linears if match)]

    def _linear(self, matmul: Node) -> Match | None:
        parts, operands = [matmul], {"bias": "", "residual": ""}
        for role, fits in (("bias", self._is_bias), ("residual", self._is_residual)):
            result = parts[-1].outputs[0]
            add = self._only_user(result, "Add")
            if add and fits(other := _other_input(add, result), result):
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
