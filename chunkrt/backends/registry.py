"""Operators by name: what each backend has for each ONNX operator.

Looked up once, when a subgraph is compiled. An entry is whatever its backend needs: a NumPy function for
`reference`, an emitter of instructions for `native`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from chunkrt.backends.base import Support
from chunkrt.graph.plan import Node

Implementation = TypeVar("Implementation")


class OperatorRegistry(Generic[Implementation]):
    """One backend's operators."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self._entries: dict[tuple[str, str], Implementation] = {}

    def register(self, op: str, domain: str = "") -> Callable[[Implementation], Implementation]:
        """Decorator: make the implementation known under an operator's name. A name is taken once."""

        def add(implementation: Implementation) -> Implementation:
            if (domain, op) in self._entries:
                raise ValueError(f"{self.backend} has an operator {qualified(domain, op)} already")
            self._entries[domain, op] = implementation
            return implementation

        return add

    def find(self, node: Node) -> Implementation:
        """The implementation of a node's operator. Raises KeyError if there is none; ask `supports` first."""
        return self._entries[node.domain, node.op]

    def supports(self, nodes: Iterable[Node]) -> Support:
        """Whether every node's operator is known; if not, the first that is not."""
        for node in nodes:
            if (node.domain, node.op) not in self._entries:
                known = ", ".join(sorted(qualified(*key) for key in self._entries))
                reason = f"{self.backend} has no operator {qualified(node.domain, node.op)}; it has: {known}"
                return Support(ok=False, node=node.name, reason=reason)
        return Support(ok=True)


def qualified(domain: str, op: str) -> str:
    """An operator's name as people write it: "MatMul", "chunkrt::CachedAttention"."""
    return f"{domain}::{op}" if domain else op
