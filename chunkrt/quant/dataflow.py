"""The data flow of a plan: the node that computes each value, and the nodes that read it, over all subgraphs."""

from __future__ import annotations

from chunkrt.graph.plan import Node, Plan


class DataFlow:
    """A plan's nodes and the values between them.

    Attributes:
        nodes: the nodes of all subgraphs, in execution order.
        makers: maps a value to the node that computes it.
        readers: maps a value or a weight to the nodes that read it, once for each read.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.nodes = [node for subgraph in plan.subgraphs for node in subgraph.nodes]
        self.makers = {name: node for node in self.nodes for name in node.outputs}
        self.readers: dict[str, list[Node]] = {name: [] for name in plan.tensors}
        for node in self.nodes:
            for name in filter(None, node.inputs):
                self.readers[name].append(node)

    def is_weight(self, name: str) -> bool:
        """Return whether a tensor is constant."""
        return bool(name) and self.plan.tensors[name].kind == "weight"

    def owns(self, node: Node, weight: str) -> bool:
        """Return whether a tensor is a weight that no other node reads."""
        return self.is_weight(weight) and self.readers[weight] == [node]

    def alone_reads(self, node: Node, value: str) -> bool:
        """Return whether a value has this node as its only reader, which reads it once."""
        return self.readers[value] == [node] and value != self.plan.output

    def is_linear(self, node: Node) -> bool:
        """Return whether a node is a MatMul whose right operand is a weight that no other node reads."""
        return node.op == "MatMul" and self.owns(node, node.inputs[1]) and not self.is_weight(node.inputs[0])

    def is_norm(self, node: Node) -> bool:
        """Return whether a node is an RMSNorm over the channels whose weight no other node reads."""
        over_channels = node.op == "RMSNormalization" and node.attributes.get("axis", -1) == -1
        return over_channels and self.owns(node, node.inputs[1])

    def picks_rows(self, node: Node) -> bool:
        """Return whether a node picks rows of a value, which keeps channels unchanged."""
        return node.op == "Gather" and node.attributes.get("axis", 0) == 0 and not self.is_weight(node.inputs[0])

    def width(self, name: str) -> int:
        """Return the number of channels of a tensor."""
        return int(self.plan.tensors[name].shape[-1]) if self.plan.tensors[name].shape else 1

    def linears_of(self, value: str) -> list[Node] | Node:
        """Return the linears that read a value or rows picked from it; if a reader is not a linear, return that reader.

        The decoder's output has readers outside the plan, so the node that computes it is returned.
        """
        if value == self.plan.output:
            return self.makers[value]
        linears: list[Node] = []
        for node in self.readers[value]:
            if self.picks_rows(node) and node.inputs[0] == value:
                found = self.linears_of(node.outputs[0])
            else:
                found = [node] if self.is_linear(node) else node
            if isinstance(found, Node):
                return found
            linears += found
        return linears
