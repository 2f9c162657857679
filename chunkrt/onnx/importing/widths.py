"""Widths of values, derived from the constants that determine them, because shapes in a file may be wrong."""

from __future__ import annotations

import onnx_ir as ir

from chunkrt.graph.plan import DOMAIN
from chunkrt.onnx.importing.draft import Draft

SAME = {
    ("", "Add"),
    ("", "Mul"),
    ("", "Sigmoid"),
    ("", "Gelu"),
    ("", "Tanh"),
    ("", "RMSNormalization"),
    (DOMAIN, "HeadNorm"),
}
"""Operators of the vocabulary whose result is as wide as their first operand."""


def groups_of(columns: ir.Node) -> int:
    """Return the number of equal groups of a row, from each of which a Columns node takes the same columns."""
    return int(columns.attributes["groups"].value)


def width(draft: Draft, value: ir.Value | None) -> int | None:
    """Return the number of columns of a value that an operator of the vocabulary made; None for other values."""
    while value is not None and (node := value.producer()) is not None:
        kind = node.domain, node.op_type
        if kind == ("", "MatMul") and node.inputs[1] in draft.weights:
            return draft.shape(node.inputs[1])[1]
        if kind == ("", "Gather") and node.inputs[0] in draft.weights:
            return draft.shape(node.inputs[0])[1]
        if kind == (DOMAIN, "Columns"):
            return groups_of(node) * (int(node.attributes["stop"].value) - int(node.attributes["start"].value))
        if kind == (DOMAIN, "CachedAttention"):
            return int(node.attributes["num_heads"].value) * int(node.attributes["head_dim"].value)
        if kind == (DOMAIN, "LinearAttention"):
            return int(node.attributes["num_v_heads"].value) * int(node.attributes["head_v_dim"].value)
        if kind not in SAME:
            return None
        value = node.inputs[0]
    return None
