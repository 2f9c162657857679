"""A decoder without its weights: every value has the shape that it would have, at next to no work.

How large masks and positions are is often read off values that depend on tokens. Only their shapes count then, so
products with constant matrices, and the lookup of tokens, need no matrix.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

import numpy as np
import onnx
from onnx import helper, numpy_helper

CONTRIB = "com.microsoft"
PRODUCTS = (("", "MatMul"), ("", "MatMulInteger"), (CONTRIB, "MatMulNBits"))


class Skeleton(NamedTuple):
    """`nodes`: in the order of the decoder's. `initializers`: the decoder's, and those that stand for matrices."""

    nodes: list[onnx.NodeProto]
    initializers: dict[str, onnx.TensorProto]


def skeleton(proto: onnx.ModelProto, data: Collection[str]) -> Skeleton:
    """The nodes of a decoder with stand-ins for products and lookups.

    Args:
        data: values that depend on tokens or states, of which no more than the shape is wanted.

    Ensures: values keep their names, types and shapes; those that are not in `data` are what they were.
    """
    initializers = {tensor.name: tensor for tensor in proto.graph.initializer}
    writers = {name: node for node in proto.graph.node for name in node.output if name}
    nodes: list[onnx.NodeProto] = []
    for node in proto.graph.node:
        made = _stand_in(node, data, writers, initializers)
        nodes += [node] if made is None else made
    return Skeleton(nodes, initializers)


def _stand_in(
    node: onnx.NodeProto,
    data: Collection[str],
    writers: Mapping[str, onnx.NodeProto],
    initializers: dict[str, onnx.TensorProto],
) -> list[onnx.NodeProto] | None:
    """What gives a value of the shape of a node's; None if the node needs no matrix or it is not known."""

    def matrix(name: str) -> tuple[list[int], int] | None:
        """The shape and type of a constant matrix."""
        if name in initializers:
            tensor = initializers[name]
            return (list(tensor.dims), tensor.data_type) if len(tensor.dims) == 2 else None
        source = writers.get(name)
        if source is None or source.domain not in ("", CONTRIB) or not source.input:
            return None
        under = matrix(source.input[0])
        if under is None or source.op_type == "Identity":
            return under
        if source.op_type == "DequantizeLinear" and source.input[1] in initializers:
            return under[0], initializers[source.input[1]].data_type
        if source.op_type == "Transpose" and [a.ints for a in source.attribute] in ([], [[1, 0]]):
            return under[0][::-1], under[1]
        return None

    if (node.domain, node.op_type) in PRODUCTS and node.input[0] in data:
        sizes = {a.name: a.i for a in node.attribute}
        found = ([sizes["K"], sizes["N"]], 0) if node.op_type == "MatMulNBits" else matrix(node.input[1])
        if found is None:
            return None
        first = f"skeleton/{found[0][1]}_times_the_first"
        initializers[first] = numpy_helper.from_array(np.zeros(found[0][1], np.int64), first)
        if node.op_type != "MatMulInteger":
            return [helper.make_node("Gather", [node.input[0], first], node.output, axis=-1)]
        wide = f"{node.output[0]}/skeleton"
        return [
            helper.make_node("Gather", [node.input[0], first], [wide], axis=-1),
            helper.make_node("Cast", [wide], node.output, to=onnx.TensorProto.INT32),
        ]
    if (node.domain, node.op_type) == ("", "Gather") and node.input[1] in data and not _axis(node):
        found = matrix(node.input[0])
        if found is None:
            return None
        zero, row = f"{node.output[0]}/skeleton", f"{node.output[0]}/row"
        initializers[row] = helper.make_tensor(row, found[1], [1, found[0][1]], bytes(_row_bytes(*found)), raw=True)
        return [
            helper.make_node("Sub", [node.input[1], node.input[1]], [zero]),
            helper.make_node("Gather", [row, zero], node.output),
        ]
    return None


def _axis(node: onnx.NodeProto) -> int:
    return next((a.i for a in node.attribute if a.name == "axis"), 0)


def _row_bytes(shape: list[int], data_type: int) -> int:
    return shape[1] * helper.tensor_dtype_to_np_dtype(data_type).itemsize
