"""Rotation of the residual stream, so that none of its channels is much larger than others.

RMSNorm divides by a length, which a rotation preserves. If the subsequent linears absorb the norms' weights, a rotation
therefore passes through the norms. Weights that write into the stream rotate it; weights that read the stream rotate it
back.
Source: Ashkboos et al., QuaRot (2024), section 4; Liu et al., SpinQuant (2024), R1 in section 3.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from chunkrt.errors import QuantizationError
from chunkrt.graph.plan import Node, Plan
from chunkrt.quant.dataflow import DataFlow
from chunkrt.quant.folding import Folding

Float32 = NDArray[np.float32]


def rotation(plan: Plan, load: Callable[[str], Float32]) -> Folding:
    """Rotate the residual stream: the embeddings, and all terms added to them.

    Args:
        load: returns a weight's float32 values by its plan name; called once for each norm of the stream.

    Raises:
        QuantizationError: a rotation would change the decoder's results; the message names the node.
    """
    stream = _RotatedStream(DataFlow(plan))
    norms = {name: load(name) for name in sorted(set(stream.norms.values()))}
    return Folding(
        ones=frozenset(norms),
        gains={linear: norms[norm] for linear, norm in stream.norms.items()},
        rotated_rows=frozenset(stream.readers),
        rotated_columns=frozenset(stream.writers),
    )


def can_rotate(plan: Plan) -> bool:
    """Return True if `rotation` does not change a decoder's results."""
    try:
        _RotatedStream(DataFlow(plan))
    except QuantizationError:
        return False
    return True


class _RotatedStream:
    """Search for the values that are rotated, starting from the embeddings, and the weights around them.

    Attributes:
        writers: weights whose columns are rotated.
        readers: linears whose rows are rotated.
        norms: for each such linear with a norm before it, the weight of the norm.
    """

    def __init__(self, flow: DataFlow) -> None:
        self.writers: set[str] = set()
        self.readers: set[str] = set()
        self.norms: dict[str, str] = {}
        self._flow = flow
        self._values: set[str] = set()
        pending = [node.outputs[0] for node in flow.nodes if node.op == "Gather" and flow.is_weight(node.inputs[0])]
        if not pending:
            raise QuantizationError("the residual stream cannot be rotated: the decoder has no table of embeddings")
        while pending:
            value = pending.pop()
            if value not in self._values:
                self._values.add(value)
                pending += [*self._goes_to(value), *self._made_from(value)]

    def _made_from(self, value: str) -> list[str]:
        """Return the values that must be rotated so that this value is rotated."""
        flow, node = self._flow, self._flow.makers.get(value)
        if node is None:
            raise QuantizationError(f"the residual stream cannot be rotated: {value!r} is an input of the decoder")
        if flow.picks_rows(node):
            return [node.inputs[0]]
        if node.op == "Add":
            weights = [name for name in node.inputs if flow.is_weight(name)]
        elif node.op == "Gather":
            weights = [node.inputs[0]]
        elif node.op == "MatMul" and flow.is_weight(node.inputs[1]):
            weights = [node.inputs[1]]
        else:
            raise _refusal(node, "makes a part of it from values that are not rotated")
        for name in weights:
            if not flow.owns(node, name) or flow.width(name) != flow.width(value):
                raise _refusal(node, f"reads {name}, which other nodes read too, or which has another width")
            self.writers.add(name)
        return [name for name in node.inputs if name not in weights] if node.op == "Add" else []

    def _goes_to(self, value: str) -> list[str]:
        """Return the values that are rotated because this value is."""
        flow = self._flow
        if value == flow.plan.output:
            raise _refusal(flow.makers[value], "makes it the decoder's output")
        further = []
        for node in flow.readers[value]:
            if node.op == "Add" or flow.picks_rows(node):
                further.append(node.outputs[0])
            elif flow.is_norm(node):
                self._pass_norm(node)
            elif flow.is_linear(node):
                self.readers.add(node.inputs[1])
            else:
                raise _refusal(
                    node, "reads it, and is neither an Add, nor a norm or a linear layer with an unshared weight"
                )
        return further

    def _pass_norm(self, norm: Node) -> None:
        linears = self._flow.linears_of(norm.outputs[0])
        if isinstance(linears, Node):
            raise _refusal(norm, f"has a weight that only linear layers can absorb, and {linears.name!r} is not one")
        for linear in linears:
            self.readers.add(linear.inputs[1])
            self.norms[linear.inputs[1]] = norm.inputs[1]


def _refusal(node: Node, reason: str) -> QuantizationError:
    return QuantizationError(
        f"the residual stream cannot be rotated: node {node.name!r} ({node.op}) {reason}; omit the rotation"
    )
