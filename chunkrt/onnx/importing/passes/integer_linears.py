"""Conversion of integer products with dynamically quantised activations to MatMul with the dequantised weight.

    DynamicQuantizeLinear(x) -> MatMulInteger(., W) -> Cast -> Mul(scale of x * scale of W)

The scheme, and not the file, determines how activations are rounded.
"""

from __future__ import annotations

import onnx_ir as ir

from chunkrt.onnx.importing.constants import is_constant, raw
from chunkrt.onnx.importing.draft import CONTRIB, Draft, input_of, producer
from chunkrt.onnx.importing.passes.linears import put_linear
from chunkrt.onnx.importing.tensors import dequantised_tensor, transposed


def raise_integer_linears(draft: Draft) -> None:
    """Replace integer products by MatMul with a dequantised weight.

    Requires: casts are where the exporter put them. Ensures: no MatMulInteger or DynamicQuantizeMatMul is left.

    Raises:
        UnsupportedModelError: the nodes around an integer product do not form a linear.
    """
    for node in list(draft.graph):
        if (node.domain, node.op_type) == ("", "MatMulInteger"):
            _integer(draft, node)
        elif (node.domain, node.op_type) == (CONTRIB, "DynamicQuantizeMatMul"):
            matrix = _matrix(draft, node, node.inputs[1], input_of(node, 2), input_of(node, 3))
            put_linear(draft, node, node.inputs[0], matrix, input_of(node, 4))


def _integer(draft: Draft, node: ir.Node) -> None:
    quantised = producer(node.inputs[0], "DynamicQuantizeLinear")
    casts = [user for user, _ in node.outputs[0].uses()]
    scaled = [user for cast in casts for user, _ in cast.outputs[0].uses()]
    if quantised is None or len(casts) != 1 or casts[0].op_type != "Cast" or len(scaled) != 1:
        raise draft.unsupported(node, "its input is not quantised right before it, or its result not scaled after it")
    result = scaled[0]
    factors = [value for value in result.inputs if value is not casts[0].outputs[0]]
    of_both = producer(factors[0], "Mul") if result.op_type == "Mul" and len(factors) == 1 else None
    scales = [value for value in of_both.inputs if value is not quantised.outputs[1]] if of_both else []
    if len(scales) != 1 or input_of(node, 2) not in (None, quantised.outputs[2]):
        raise draft.unsupported(node, "its result is not multiplied by the scales of its input and its weight")
    matrix = _matrix(draft, node, node.inputs[1], scales[0], input_of(node, 3))
    put_linear(draft, result, quantised.inputs[0], matrix, None)


def _matrix(draft: Draft, node: ir.Node, value: ir.Value | None, scale: ir.Value | None, zero: ir.Value | None) -> str:
    """Put a constant [K, N], with one scale or one per column, into the source as [N, K]."""
    if value is None or scale is None or not is_constant(draft, value) or not is_constant(draft, scale):
        raise draft.unsupported(node, "its weight or its scale is not constant")
    integers, steps = raw(value), raw(scale)
    zeros = None if zero is None else raw(zero)
    if integers is None or steps is None or (zero is not None and zeros is None) or len(integers.shape) != 2:
        raise draft.unsupported(node, "its weight is not an initializer [in, out]")
    where = f"{draft.where}: node {node.name!r}"
    tensor = dequantised_tensor(integers, steps, zeros, axis=1, block_size=0, where=where)
    return draft.keep(value.name or "", transposed(tensor))
