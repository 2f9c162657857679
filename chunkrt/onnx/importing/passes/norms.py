"""Conversion of all exporters' root-mean-square norms to RMSNormalization, and of norms of single heads to HeadNorm.

Reshapes and transpositions between rows and heads around four-dimensional attention are removed.
"""

from __future__ import annotations

from typing import NamedTuple

import onnx_ir as ir

from chunkrt.graph.plan import DOMAIN
from chunkrt.onnx.importing.constants import row
from chunkrt.onnx.importing.draft import (
    CONTRIB,
    Draft,
    Weight,
    float_attribute,
    input_of,
    int_attribute,
    producer,
    width,
)
from chunkrt.onnx.importing.evaluation import decimal
from chunkrt.onnx.importing.passes.rotary import Tables, take_off

PLAIN = (("", "SimplifiedLayerNormalization"), (CONTRIB, "SimplifiedLayerNormalization"), ("", "RMSNormalization"))
SKIP = (CONTRIB, "SkipSimplifiedLayerNormalization")


def raise_norms(draft: Draft) -> None:
    """Replace norms by RMSNormalization.

    Requires: linears are converted. Ensures: a norm is RMSNormalization(x, w) with w [N] among `draft.weights`; the sum
    that was fused with it is an Add before it.
    """
    for node in list(draft.graph):
        kind = node.domain, node.op_type
        if kind in PLAIN:
            _check_axis(draft, node)
            _replace(draft, node, node.inputs[0], input_of(node, 1), float_attribute(node, "epsilon", 1e-5))
        elif kind == SKIP:
            (total,) = draft.insert(node, "Add", list(node.inputs[:2]))
            if (bias := input_of(node, 3)) is not None:
                total = _with_bias(draft, node, total, bias)
            if len(node.outputs) > 3:
                draft.replace(node.outputs[3], total)
            if any(output.uses() for output in node.outputs[1:3]):
                raise draft.unsupported(node, "its mean or its inverse deviation is used")
            _replace(draft, node, total, input_of(node, 2), float_attribute(node, "epsilon", 1e-12))


def raise_head_norms(draft: Draft) -> None:
    """Replace norms of single heads by HeadNorm.

    Requires: norms are converted. Ensures: a norm between two Reshapes, which normalises slices of each row, is
    HeadNorm(x, w) with w [heads, head_dim] among `draft.weights`.
    """
    for node in list(draft.graph):
        if (node.domain, node.op_type) != ("", "RMSNormalization") or node.inputs[1] not in draft.weights:
            continue
        before = producer(node.inputs[0], "Reshape")
        users = [user for user, _ in node.outputs[0].uses()]
        if before is None or any(user.op_type != "Reshape" for user in users):
            continue
        columns = width(draft, before.inputs[0])
        (head_dim,) = draft.shape(node.inputs[1])
        if columns is None or columns % head_dim:
            raise draft.unsupported(node, f"its {head_dim} columns do not divide a row of {columns}")
        weight = draft.weights[node.inputs[1]]
        by_head = draft.add_weight(Weight(tensors=weight.tensors, layout="heads", repeats=(columns // head_dim,)))
        epsilon = float_attribute(node, "epsilon")
        (output,) = draft.insert(node, "HeadNorm", [before.inputs[0], by_head], domain=DOMAIN, epsilon=epsilon)
        for user in users:
            draft.replace(user.outputs[0], output)


def _check_axis(draft: Draft, node: ir.Node) -> None:
    if int_attribute(node, "axis", -1) not in (-1, 2) or any(output.uses() for output in node.outputs[1:]):
        raise draft.unsupported(node, "it is not over the last axis, or more than its result is used")


def _replace(draft: Draft, node: ir.Node, x: ir.Value | None, weight: ir.Value | None, epsilon: float) -> None:
    if weight is None or (name := row(draft, weight)) is None:
        raise draft.unsupported(node, "its weight is not a constant vector")
    vector = draft.add_weight(Weight(tensors=(name,), layout="as it is"))
    (output,) = draft.insert(node, "RMSNormalization", [x, vector], epsilon=decimal(epsilon))
    draft.replace(node.outputs[0], output)
    draft.graph.remove(node, safe=True)


def _with_bias(draft: Draft, node: ir.Node, total: ir.Value, bias: ir.Value) -> ir.Value:
    if (name := row(draft, bias)) is None:
        raise draft.unsupported(node, "its bias is not a constant vector")
    vector = draft.add_weight(Weight(tensors=(name,), layout="as it is"))
    return draft.insert(node, "Add", [total, vector])[0]


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
