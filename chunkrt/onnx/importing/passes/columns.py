"""Conversion of Split and Slice along the last axis to Columns(x; start, stop, groups)."""

from __future__ import annotations

from itertools import accumulate

import onnx_ir as ir

from chunkrt.graph.plan import DOMAIN
from chunkrt.onnx.importing.constants import is_constant, numbers
from chunkrt.onnx.importing.draft import Draft, input_of, int_attribute, producer, width
from chunkrt.onnx.importing.projections import find_projection, merge

LAST_OF_ROWS, LAST_OF_HEADS = (-1, 2), (-1, 3)


def separate_columns(draft: Draft) -> None:
    """Split linears whose columns are read separately.

    Requires: a pruned graph. Ensures: columns of a linear that have separate readers become a separate linear.
    """
    for node in list(draft.graph):
        users = {user.op_type for user, _ in node.outputs[0].uses()}
        if (node.domain, node.op_type) != (DOMAIN, "Columns") or users <= {"Columns"}:
            continue
        part = find_projection(draft, node.outputs[0])
        if part is not None and (separate := merge(draft, node, [part])) is not None:
            draft.replace(node.outputs[0], separate)


def raise_columns(draft: Draft) -> None:
    """Replace slices of rows by Columns.

    Requires: linears are converted. Ensures: a selection of a row's columns is Columns, and so is the same selection of
    every head's columns. This operator exists between passes only.
    """
    for node in list(draft.graph):
        if draft.evaluator.is_positional(node.outputs[0].name or "") or node.domain:
            continue
        if node.op_type == "Split" and int_attribute(node, "axis") in LAST_OF_ROWS:
            _split(draft, node)
        if node.op_type == "Split" and int_attribute(node, "axis") in LAST_OF_HEADS:
            _split_heads(draft, node)
        elif node.op_type == "Slice":
            _slice(draft, node)


def _split(draft: Draft, node: ir.Node) -> None:
    if (columns := width(draft, node.inputs[0])) is None:
        return
    ends = _ends(draft, node, columns)
    for output, start, stop in zip(node.outputs, [0, *ends], ends, strict=False):
        _replace(draft, node, output, start, stop)


def _ends(draft: Draft, node: ir.Node, columns: int) -> list[int]:
    """Return the end of each part of a Split."""
    sizes = input_of(node, 1)
    if sizes is None:
        each = -(-columns // len(node.outputs))
        ends = [min(columns, each * (i + 1)) for i in range(len(node.outputs))]
    elif is_constant(draft, sizes):
        ends = list(accumulate(int(size) for size in numbers(draft, sizes)))
    else:
        raise draft.unsupported(node, "its sizes are not constant")
    if len(ends) != len(node.outputs) or ends[-1] != columns:
        raise draft.unsupported(node, f"its sizes end at {ends}, of {columns} columns")
    return ends


def _split_heads(draft: Draft, node: ir.Node) -> None:
    """Replace rows that are reshaped to heads [batch, T, heads, D], split in the same way for every head, and joined to
    rows again.
    """
    before = producer(node.inputs[0], "Reshape")
    columns = None if before is None else width(draft, before.inputs[0])
    if before is None or columns is None or (shape := _constant_shape(draft, before)) is None or len(shape) != 4:
        return
    if shape[:2] != [0, 0] or -1 in shape[2:] or shape[2] * shape[3] != columns:
        return
    heads, ends = shape[2], _ends(draft, node, shape[3])
    for output, start, stop in zip(node.outputs, [0, *ends], ends, strict=False):
        joined = {-1, heads * (stop - start)}
        for user, _ in list(output.uses()):
            to = _constant_shape(draft, user) if user.op_type == "Reshape" else None
            if to is not None and len(to) == 3 and to[:2] == [0, 0] and to[2] in joined:
                _replace(draft, before, user.outputs[0], start, stop, heads)


def _constant_shape(draft: Draft, node: ir.Node) -> list[int] | None:
    """Return a Reshape's result sizes, by batch, tokens and columns; None if they are computed."""
    shape = node.inputs[1]
    if shape is None or not is_constant(draft, shape) or int_attribute(node, "allowzero"):
        return None
    return [int(size) for size in numbers(draft, shape)]


def _slice(draft: Draft, node: ir.Node) -> None:
    operands = [input_of(node, index) for index in range(1, 5)]
    columns = width(draft, node.inputs[0])
    if columns is None or any(v is not None and not is_constant(draft, v) for v in operands):
        return
    starts, ends, axes, steps = (None if v is None else numbers(draft, v).tolist() for v in operands)
    if starts is None or ends is None or axes is None or len(axes) != 1 or axes[0] not in LAST_OF_ROWS:
        return
    start, stop, step = slice(starts[0], ends[0], steps[0] if steps else 1).indices(columns)
    if step == 1 and start < stop:
        _replace(draft, node, node.outputs[0], start, stop)


def _replace(draft: Draft, node: ir.Node, output: ir.Value, start: int, stop: int, groups: int = 1) -> None:
    (part,) = draft.insert(node, "Columns", [node.inputs[0]], domain=DOMAIN, start=start, stop=stop, groups=groups)
    draft.replace(output, part)
