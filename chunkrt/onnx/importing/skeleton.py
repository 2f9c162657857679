"""A decoder without its weights, in which every value has its original shape, at almost no cost.

The sizes of masks and positions are often read from the shapes of values that depend on tokens. The contents of these
values do not matter, so products with constant matrices, and the look-up of tokens, need no matrix.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

import numpy as np
import onnx
import onnx_ir as ir
from onnx import helper, numpy_helper

CONTRIB = "com.microsoft"
PRODUCTS = (("", "MatMul"), ("", "MatMulInteger"), (CONTRIB, "MatMulNBits"))
UNDER = ("Identity", "Transpose", "DequantizeLinear")
"""Operators that may stand between an initializer and a matrix."""


class Skeleton(NamedTuple):
    """Nodes in the decoder's order, and initializers: the decoder's, and replacements of matrices."""

    nodes: list[onnx.NodeProto]
    initializers: dict[str, onnx.TensorProto]


class Matrix(NamedTuple):
    """A constant's first two sizes, and its type in ONNX."""

    rows: int
    columns: int
    data_type: int


def skeleton(proto: onnx.ModelProto, data: Collection[str]) -> Skeleton:
    """Return the nodes of a decoder with replacements for products and look-ups.

    Args:
        data: values that depend on tokens or states; only their shapes are needed.

    Ensures: values keep their names, types and shapes; values outside `data` are unchanged.
    """
    initializers = {tensor.name: tensor for tensor in proto.graph.initializer}
    writers = {name: node for node in proto.graph.node for name in node.output if name}
    nodes: list[onnx.NodeProto] = []
    for node in proto.graph.node:
        kind = node.domain, node.op_type
        if kind in PRODUCTS and node.input[0] in data:
            rank = 3 if node.op_type == "MatMulNBits" else 2
            made = _product(node, _matrix(node.input[1], writers, initializers, rank), initializers)
        elif kind == ("", "Gather") and node.input[1] in data and not any(a.i for a in node.attribute):
            made = _lookup(node, _matrix(node.input[0], writers, initializers), initializers)
        else:
            made = []
        nodes += made or [node]
    return Skeleton(nodes, initializers)


def _product(
    node: onnx.NodeProto, matrix: Matrix | None, initializers: dict[str, onnx.TensorProto]
) -> list[onnx.NodeProto]:
    """Replace a product: repeat its left operand's first column for each column of the matrix; empty if that is
    unknown."""
    if matrix is None:
        return []
    columns = matrix.rows if node.op_type == "MatMulNBits" else matrix.columns
    first = f"skeleton/{columns}"
    initializers[first] = numpy_helper.from_array(np.zeros(columns, np.int64), first)
    if node.op_type != "MatMulInteger":
        return [helper.make_node("Gather", [node.input[0], first], node.output, axis=-1)]
    narrow = f"{node.output[0]}/skeleton"
    return [
        helper.make_node("Gather", [node.input[0], first], [narrow], axis=-1),
        helper.make_node("Cast", [narrow], node.output, to=onnx.TensorProto.INT32),
    ]


def _lookup(
    node: onnx.NodeProto, matrix: Matrix | None, initializers: dict[str, onnx.TensorProto]
) -> list[onnx.NodeProto]:
    """Replace a look-up: a row of zeros for every token; empty if the table is unknown."""
    if matrix is None or (bits := ir.DataType(matrix.data_type).bitwidth) < 8:
        return []
    first, row = f"{node.output[0]}/first", f"{node.output[0]}/row"
    zeros = bytes(matrix.columns * bits // 8)
    initializers[row] = helper.make_tensor(row, matrix.data_type, [1, matrix.columns], zeros, raw=True)
    return [
        helper.make_node("Sub", [node.input[1], node.input[1]], [first]),
        helper.make_node("Gather", [row, first], node.output),
    ]


def _matrix(
    name: str, writers: Mapping[str, onnx.NodeProto], initializers: Mapping[str, onnx.TensorProto], rank: int = 2
) -> Matrix | None:
    """Return the known sizes of a constant: an initializer, or a transposed or dequantised one."""
    is_transposed, data_type = False, 0
    while name not in initializers:
        node = writers.get(name)
        if node is None or node.domain not in ("", CONTRIB) or node.op_type not in UNDER or not node.input:
            return None
        if node.op_type == "Transpose":
            is_transposed = not is_transposed
            if [list(a.ints) for a in node.attribute] not in ([], [[1, 0]]):
                return None
        if node.op_type == "DequantizeLinear" and not data_type:
            if len(node.input) < 2 or node.input[1] not in initializers:
                return None
            data_type = initializers[node.input[1]].data_type
        name = node.input[0]
    tensor = initializers[name]
    sizes = list(tensor.dims)[::-1] if is_transposed else list(tensor.dims)
    if len(sizes) != rank or 0 in sizes:
        return None
    return Matrix(sizes[0], sizes[1], data_type or tensor.data_type)
