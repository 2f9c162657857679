"""Conversion of fused activations: SiLU becomes Mul(x, Sigmoid(x)), and GELU in its tanh form becomes Gelu."""

from __future__ import annotations

import onnx_ir as ir

from chunkrt.onnx.importing.draft import CONTRIB, Draft, float_attribute, input_of


def raise_activations(draft: Draft) -> None:
    """Express fused activations as Sigmoid, Mul and Gelu.

    Requires: nothing. Ensures: Gelu(approximate="tanh") is the only fused activation; SiLU is Sigmoid and Mul.

    QuickGelu and Swish with alpha = 1 are SiLU; other values of alpha are not supported.
    """
    for node in list(draft.graph):
        kind = node.domain, node.op_type
        if kind in ((CONTRIB, "QuickGelu"), ("", "Swish")):
            usual = 1.702 if node.op_type == "QuickGelu" else 1.0
            if float_attribute(node, "alpha", usual) != 1:
                raise draft.unsupported(node, f"its alpha is {float_attribute(node, 'alpha', usual):.4g}, expected 1")
            (squashed,) = draft.insert(node, "Sigmoid", [node.inputs[0]])
            _replace(draft, node, draft.insert(node, "Mul", [node.inputs[0], squashed])[0])
        elif kind == (CONTRIB, "FastGelu"):
            if input_of(node, 1) is not None:
                raise draft.unsupported(node, "it has a bias")
            _replace(draft, node, draft.insert(node, "Gelu", [node.inputs[0]], approximate="tanh")[0])


def _replace(draft: Draft, node: ir.Node, value: ir.Value) -> None:
    draft.replace(node.outputs[0], value)
    draft.graph.remove(node, safe=True)
