"""Conversion of all exporters' root-mean-square norms to RMSNormalization, and of norms of single heads to HeadNorm."""

from __future__ import annotations

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
