"""Parts of a row: Split and Slice along the last axis become Columns(x; start, stop)."""

from __future__ import annotations

from itertools import accumulate

import onnx_ir as ir

from chunkrt.onnx_import.constants import is_constant, numbers
from chunkrt.onnx_import.draft import DOMAIN, Draft, input_of, int_attribute
from chunkrt.onnx_import.widths import width

LAST_OF_ROWS = (-1, 2)


def raise_columns(draft: Draft) -> None:
    """Requires: linears are raised. Ensures: a part of a row's columns is Columns; it is a word between passes only."""
    for node in list(draft.graph):
        if draft.evaluator.is_positional(node.outputs[0].name or "") or node.domain:
            continue
        if node.op_type == "Split" and int_attribute(node, "axis") in LAST_OF_ROWS:
            _split(draft, node)
        elif node.op_type == "Slice":
            _slice(draft, node)


def _split(draft: Draft, node: ir.Node) -> None:
    if (columns := width(draft, node.inputs[0])) is None:
        return
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
    for output, start, stop in zip(node.outputs, [0, *ends], ends, strict=False):
        _replace(draft, node, output, start, stop)


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


def _replace(draft: Draft, node: ir.Node, output: ir.Value, start: int, stop: int) -> None:
    (part,) = draft.insert(node, "Columns", [node.inputs[0]], domain=DOMAIN, start=start, stop=stop)
    draft.replace(output, part)
