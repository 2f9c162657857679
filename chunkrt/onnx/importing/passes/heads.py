"""Removal of reshapes and transpositions between rows and heads around four-dimensional attention."""

from __future__ import annotations

from typing import NamedTuple

import onnx_ir as ir

from chunkrt.graph.plan import DOMAIN
from chunkrt.onnx.importing.draft import Draft, Weight, float_attribute, producer, width
from chunkrt.onnx.importing.passes.rotary import Tables, take_off

BY_HEAD = (0, 2, 1, 3)
"""The permutation from [batch, T, heads, D] to [batch, heads, T, D], which is its own inverse."""


class Heads(NamedTuple):
    """Rows of an operand of attention, and the tables by which its heads were rotated."""

    rows: ir.Value
    tables: Tables | None


def rows_of(draft: Draft, node: ir.Node, value: ir.Value | None) -> Heads:
    """Return the rows [T, heads * D] of an operand of an attention node, before they were reshaped to heads.

    Rotation is removed. A norm of single heads before the rotation becomes a HeadNorm after the rows.

    Raises:
        UnsupportedModelError: the operand is not made from rows.
    """
    tables, norm, found = None, None, value
    while found is not None and width(draft, found) is None:
        maker = found.producer()
        if maker is not None and maker.op_type == "RotaryEmbedding" and tables is None:
            found, tables = take_off(draft, found)
        elif producer(found, "Reshape") or is_turned(found):
            found = maker.inputs[0] if maker is not None else None
        elif tables is not None and norm is None and (norm := producer(found, "RMSNormalization")) is not None:
            found = norm.inputs[0]
        else:
            found = None
    if found is None:
        name = value.name if value is not None else ""
        raise draft.unsupported(node, f"its operand {name!r} does not come from rows of heads")
    return Heads(found if norm is None else _normed(draft, node, norm, found), tables)


def is_turned(value: ir.Value) -> bool:
    """Return whether a value is the transposition of another value from rows to heads, or from heads to rows."""
    turned = producer(value, "Transpose")
    perm = None if turned is None else turned.attributes.get("perm")
    return perm is not None and tuple(perm.value) == BY_HEAD


def results_of(draft: Draft, node: ir.Node) -> list[ir.Value]:
    """Convert an attention node's result by head to rows again.

    Raises:
        UnsupportedModelError: the result is used in another form.
    """
    turned = [user for user, _ in node.outputs[0].uses()]
    joined = [user for turn in turned for user, _ in turn.outputs[0].uses()]
    is_rows = all(is_turned(turn.outputs[0]) for turn in turned) and {user.op_type for user in joined} == {"Reshape"}
    if not is_rows:
        raise draft.unsupported(node, "its result by head is not transposed and joined to rows")
    return [user.outputs[0] for user in joined]


def _normed(draft: Draft, node: ir.Node, norm: ir.Node, rows: ir.Value) -> ir.Value:
    weight, columns = norm.inputs[1], width(draft, rows) or 0
    if weight not in draft.weights or weight is None or columns % draft.shape(weight)[0]:
        raise draft.unsupported(norm, f"it does not have the heads of a row of {columns} columns")
    repeats = (columns // draft.shape(weight)[0],)
    by_head = draft.add_weight(Weight(tensors=draft.weights[weight].tensors, layout="heads", repeats=repeats))
    epsilon = float_attribute(norm, "epsilon")
    return draft.insert(node, "HeadNorm", [rows, by_head], domain=DOMAIN, epsilon=epsilon)[0]
