"""Conversion of constant terms and factors of rows to weights, and of division and subtraction to multiplication and
addition.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from chunkrt.onnx.importing.constants import is_constant, row, scalar, stored
from chunkrt.onnx.importing.draft import Draft, Weight
from chunkrt.onnx.importing.tensors import Derived, Float32

OPS = ("Add", "Mul", "Sub", "Div")


def raise_constants(draft: Draft) -> None:
    """Turn constant operands of elementwise operators into weights.

    Requires: linears are converted. Ensures: the constant operand of Add and Mul is the second operand, and is a weight
    [N] or one number; Sub and Div of a constant are Add and Mul.
    """
    for node in list(draft.graph):
        if node.domain or node.op_type not in OPS or draft.evaluator.is_positional(node.outputs[0].name or ""):
            continue
        left, right = node.inputs
        if is_constant(draft, left) and node.op_type in ("Add", "Mul"):
            left, right = right, left
        if right is None or not is_constant(draft, right):
            continue
        op = {"Sub": "Add", "Div": "Mul"}.get(node.op_type, node.op_type)
        (output,) = draft.insert(node, op, [left, _weight(draft, node, right)])
        draft.replace(node.outputs[0], output)
        draft.graph.remove(node, safe=True)


def _weight(draft: Draft, node: ir.Node, value: ir.Value) -> ir.Value:
    if (number := scalar(draft, value)) is not None:
        changed = {"Sub": -number, "Div": 1 / number if number else np.inf}.get(node.op_type, number)
        tensor = Derived((1,), "F32", lambda: np.full(1, changed, np.float32))
        name = draft.source.add(f"{value.name}.{node.op_type}", tensor)
        return draft.add_weight(Weight(tensors=(name,), layout="as it is"))
    under = stored(draft, value)
    if node.op_type in ("Sub", "Div"):
        flat, is_divisor = under, node.op_type == "Div"

        def changed_row() -> Float32:
            values = flat.read().reshape(-1)
            return np.reciprocal(values) if is_divisor else -values

        if row(draft, value) is None:
            raise draft.unsupported(
                node, f"its constant has the shape {list(flat.shape)}, expected a vector of columns"
            )
        name = draft.keep(f"{value.name}.{node.op_type}", Derived(flat.shape[-1:], flat.stored_as, changed_row))
        return draft.add_weight(Weight(tensors=(name,), layout="as it is"))
    if (vector := row(draft, value)) is None:
        raise draft.unsupported(node, f"its constant has the shape {list(under.shape)}, expected a vector of columns")
    return draft.add_weight(Weight(tensors=(vector,), layout="as it is"))
