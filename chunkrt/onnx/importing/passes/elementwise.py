"""Conversion of elementwise operators.

Nodes that change no value are removed: Identity, Dropout, and casts between types of floats. Fused activations become
Sigmoid, Mul and Gelu. Constant terms and factors of rows become weights, and division and subtraction become
multiplication and addition.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from chunkrt.onnx.importing.constants import is_constant, row, scalar, stored
from chunkrt.onnx.importing.draft import CONTRIB, Draft, Weight, float_attribute, input_of
from chunkrt.onnx.importing.onnx_source import Derived, Float32

FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE)


def drop_identities(draft: Draft) -> None:
    """Remove nodes that change no value.

    Requires: the graph as it was read. Ensures: no such node is between values that depend on tokens.

    Casts between float types are removed because chunkrt computes in float32 between linears, regardless of the
    exporter's
    types.
    """
    for node in list(draft.graph):
        read = node.inputs[0] if node.inputs else None
        if read is None or draft.evaluator.is_positional(read.name or "") or node.domain:
            continue
        if node.op_type in ("Identity", "Dropout") or _is_float_cast(node):
            draft.replace(node.outputs[0], read)


def _is_float_cast(node: ir.Node) -> bool:
    return node.op_type == "Cast" and ir.DataType(int(node.attributes["to"].value)) in FLOATS


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
