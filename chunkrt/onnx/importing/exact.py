"""A version of the original model that does not round activations, for comparison with the import.

Some exports round activations to int8 before each product. chunkrt leaves rounding to its schemes, so the import is
compared with the same graph and weights without rounding.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import helper, numpy_helper

from chunkrt.onnx.importing.draft import CONTRIB

ROUNDING = {
    ("", "DynamicQuantizeLinear"),
    ("", "MatMulInteger"),
    (CONTRIB, "DynamicQuantizeMatMul"),
    (CONTRIB, "MatMulNBits"),
}
"""Operators that round activations, or may round them."""


def is_exact(proto: onnx.ModelProto) -> bool:
    """Return whether a model does not round activations."""
    return not any((node.domain, node.op_type) in ROUNDING for node in proto.graph.node)


def without_rounding(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy of a model whose products take float activations; weights have the values of their integers.

    Ensures: DynamicQuantizeLinear returns its input with a scale of 1 and a zero point of 0; MatMulInteger multiplies
    floats; MatMulNBits computes in float32.
    """
    exact = onnx.ModelProto()
    exact.CopyFrom(proto)
    nodes = [made for node in exact.graph.node for made in _exact(node)]
    del exact.graph.node[:]
    exact.graph.node.extend(nodes)
    return exact


def _exact(node: onnx.NodeProto) -> list[onnx.NodeProto]:
    if (node.domain, node.op_type) == (CONTRIB, "MatMulNBits"):
        for attribute in node.attribute:
            if attribute.name == "accuracy_level":
                attribute.i = 1
    if (node.domain, node.op_type) == ("", "DynamicQuantizeLinear"):
        values, scale, zero = node.output
        return [
            helper.make_node("Identity", [node.input[0]], [values]),
            _constant(scale, np.float32(1)),
            _constant(zero, np.float32(0)),
        ]
    if (node.domain, node.op_type) == ("", "MatMulInteger"):
        weight, nodes = _float_weight(node, node.input[1], node.input[3] if len(node.input) > 3 else "")
        return [*nodes, helper.make_node("MatMul", [node.input[0], weight], node.output)]
    if (node.domain, node.op_type) == (CONTRIB, "DynamicQuantizeMatMul"):
        x, matrix, scale, zero, bias = (*node.input, "", "")[:5]
        weight, nodes = _float_weight(node, matrix, zero)
        result = f"{node.output[0]}.product" if bias else node.output[0]
        nodes.append(helper.make_node("Mul", [weight, scale], [f"{weight}.scaled"]))
        nodes.append(helper.make_node("MatMul", [x, f"{weight}.scaled"], [result]))
        return [*nodes, helper.make_node("Add", [result, bias], node.output)] if bias else nodes
    return [node]


def _float_weight(node: onnx.NodeProto, weight: str, zero: str) -> tuple[str, list[onnx.NodeProto]]:
    """Subtract the zero point from integers, as floats; the difference is named after the node's result."""
    name = f"{node.output[0]}.weight"
    nodes = [helper.make_node("Cast", [weight], [name], to=onnx.TensorProto.FLOAT)]
    if zero:
        nodes.append(helper.make_node("Cast", [zero], [f"{name}.zero"], to=onnx.TensorProto.FLOAT))
        nodes.append(helper.make_node("Sub", [name, f"{name}.zero"], [f"{name}.shifted"]))
        name = f"{name}.shifted"
    return name, nodes


def _constant(name: str, value: np.float32) -> onnx.NodeProto:
    return helper.make_node("Constant", [], [name], value=numpy_helper.from_array(np.asarray(value)))
