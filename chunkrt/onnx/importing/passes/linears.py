"""Conversion of products with a constant matrix to MatMul, regardless of the form in which the exporter stored the
matrix.

Integer products with dynamically quantised activations become MatMul with the dequantised weight, because the scheme,
and not the file, determines how activations are rounded:

    DynamicQuantizeLinear(x) -> MatMulInteger(., W) -> Cast -> Mul(scale of x * scale of W)
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from chunkrt.onnx.importing.constants import is_constant, raw, row, stored
from chunkrt.onnx.importing.draft import CONTRIB, Draft, Weight, float_attribute, input_of, int_attribute, producer
from chunkrt.onnx.importing.onnx_source import dequantised_tensor, n_bits_tensor, transposed

N_BITS = (2, 4, 8)
BLOCK_SIZES = (16, 32, 64, 128, 256)


def raise_linears(draft: Draft) -> None:
    """Replace products with constants by MatMul and Add.

    Requires: nothing. Ensures: a product of rows with a constant is MatMul(x, w) with w among `draft.weights`, and a
    bias that was an operand of the product is an Add after it.
    """
    for node in list(draft.graph):
        if draft.evaluator.is_positional(node.outputs[0].name or ""):
            continue
        if (node.domain, node.op_type) == ("", "MatMul") and is_constant(draft, node.inputs[1]):
            _replace(draft, node, _matrix(draft, node, node.inputs[1]), None)
        elif (node.domain, node.op_type) == ("", "Gemm") and is_constant(draft, node.inputs[1]):
            if any(float_attribute(node, name, 1.0) != 1 for name in ("alpha", "beta")) or int_attribute(
                node, "transA"
            ):
                raise draft.unsupported(node, "its alpha and beta are not 1, or its left operand is transposed")
            is_transposed = bool(int_attribute(node, "transB"))
            _replace(draft, node, _matrix(draft, node, node.inputs[1], is_transposed), input_of(node, 2))
        elif (node.domain, node.op_type) == (CONTRIB, "MatMulNBits"):
            _replace(draft, node, _n_bits(draft, node), input_of(node, 5))


def _matrix(draft: Draft, node: ir.Node, value: ir.Value | None, is_transposed: bool = False) -> str:
    """Put a constant [K, N], or [N, K] if it is transposed, into the source as [N, K]."""
    assert value is not None
    tensor = stored(draft, value)
    if len(tensor.shape) != 2:
        raise draft.unsupported(node, f"its weight has the shape {list(tensor.shape)}, expected a matrix")
    matrix = tensor if is_transposed else transposed(tensor)
    return draft.keep(value.name or "", matrix, is_transposed=not is_transposed)


def _n_bits(draft: Draft, node: ir.Node) -> str:
    depth, columns = int_attribute(node, "K"), int_attribute(node, "N")
    if input_of(node, 4) is not None:
        raise draft.unsupported(node, "its weights are grouped by g_idx; export it without activation order")
    return packed_matrix(draft, node, [input_of(node, index) for index in (1, 2, 3)], (columns, depth))


def packed_matrix(draft: Draft, node: ir.Node, operands: Sequence[ir.Value | None], shape: tuple[int, int]) -> str:
    """Put a matrix [N, K] of 2, 4 or 8 bits into the source; the operands are its integers, scales and zero points.

    Raises:
        UnsupportedModelError: the number of bits or the size of blocks is not supported, or an operand is not constant.
        ModelError: the sizes of the operands do not match.
    """
    bits, block_size = int_attribute(node, "bits", 4), int_attribute(node, "block_size")
    if bits not in N_BITS or block_size not in BLOCK_SIZES or min(shape) < 1:
        raise draft.unsupported(
            node,
            f"it has {bits} bits in blocks of {block_size}; supported: {N_BITS} bits in blocks of {BLOCK_SIZES}",
        )
    packed, scales, zeros = (None if value is None else raw(value) for value in operands)
    name = operands[0].name if operands[0] is not None else None
    if packed is None or scales is None or (operands[2] is not None and zeros is None):
        raise draft.unsupported(node, "its weights are not initializers")
    where = f"{draft.where}: node {node.name!r}"
    tensor = n_bits_tensor(packed, scales, zeros, shape=shape, bits=bits, block_size=block_size, where=where)
    return draft.keep(name or "", tensor)


def put_linear(draft: Draft, node: ir.Node, x: ir.Value | None, matrix: str, bias: ir.Value | None) -> None:
    """Replace a node's first output by MatMul(x, matrix) + bias. Raises UnsupportedModelError if the bias is not a
    vector."""
    weight = draft.add_weight(Weight(tensors=(matrix,), layout="linear"))
    (output,) = draft.insert(node, "MatMul", [x, weight])
    if bias is not None:
        if (name := row(draft, bias)) is None:
            raise draft.unsupported(node, "its bias is not a constant vector")
        of_bias = draft.add_weight(Weight(tensors=(name,), layout="as it is"))
        (output,) = draft.insert(node, "Add", [output, of_bias])
    draft.replace(node.outputs[0], output)


def _replace(draft: Draft, node: ir.Node, matrix: str, bias: ir.Value | None) -> None:
    put_linear(draft, node, node.inputs[0], matrix, bias)
    draft.graph.remove(node, safe=True)


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
            matrix = _integer_matrix(draft, node, node.inputs[1], input_of(node, 2), input_of(node, 3))
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
    matrix = _integer_matrix(draft, node, node.inputs[1], scales[0], input_of(node, 3))
    put_linear(draft, result, quantised.inputs[0], matrix, None)


def _integer_matrix(
    draft: Draft, node: ir.Node, value: ir.Value | None, scale: ir.Value | None, zero: ir.Value | None
) -> str:
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
