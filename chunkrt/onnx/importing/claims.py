"""Validation of a foreign graph's nodes, before a node is analysed or run.

A file of a few bytes can request an array of 10^9 elements, and a node may lack operands that its operator needs.
"""

from __future__ import annotations

from math import prod
from pathlib import Path

import onnx
from onnx import defs, helper, shape_inference

from chunkrt.errors import ModelError, UnsupportedModelError

MOST_ELEMENTS = 2**28
"""Largest number of elements of a value whose size does not depend on the number of tokens, unless a weight is
larger.
"""
STANDARD = {"ai.onnx": ""}
"""Two names of ONNX's default domain."""

SMALL = 1024
"""Largest number of elements of a constant that may determine the size of another value."""

_LEAST_OPERANDS = {
    "CausalConvWithState": 2,
    "DynamicQuantizeMatMul": 3,
    "FastGelu": 1,
    "GatherBlockQuantized": 3,
    "Gelu": 1,
    "GatedRMSNorm": 3,
    "GroupQueryAttention": 7,
    "LinearAttention": 3,
    "LinearAttentionGate": 3,
    "MRotaryEmbedding": 4,
    "MatMulNBits": 3,
    "MultiHeadAttention": 1,
    "RotaryEmbedding": 4,
    "SimplifiedLayerNormalization": 2,
    "SkipSimplifiedLayerNormalization": 3,
}
"""Smallest numbers of operands for operators without a schema in ONNX."""


def check_claims(proto: onnx.ModelProto, path: Path) -> None:
    """Check the operands of all nodes, and the sizes of all values.

    Raises:
        ModelError: a node has too few operands or results for its operator, or a value has an impossible size.
        UnsupportedModelError: the file states no version for a node's domain.
    """
    versions = {STANDARD.get(opset.domain, opset.domain): opset.version for opset in proto.opset_import}
    for node in proto.graph.node:
        domain = STANDARD.get(node.domain, node.domain)
        if domain not in versions:
            raise UnsupportedModelError(
                f"{path}: {_described(node)}, cannot be imported: the file imports no version of that domain"
            )
        _check_operands(node, versions[domain], path)
    _check_sizes(proto, path)


def _check_operands(node: onnx.NodeProto, version: int, path: Path) -> None:
    try:
        schema = defs.get_schema(node.op_type, version, node.domain)
    except defs.SchemaError:
        least, most = _LEAST_OPERANDS.get(node.op_type, 0), len(node.input)
    else:
        least, most = schema.min_input, schema.max_input
    found = len(node.input) - (0 if all(node.input[:least]) else 1)
    if not least <= found <= most or not any(node.output):
        raise ModelError(
            f"{path} is damaged: {_described(node)}, has the operands {list(node.input)!r:.200}, "
            f"expected at least {least}"
        )


def _described(node: onnx.NodeProto) -> str:
    return f"node {node.name!r}, an operator {node.op_type} of the domain {node.domain or 'ai.onnx'}"


def _check_sizes(proto: onnx.ModelProto, path: Path) -> None:
    """Return the sizes that ONNX's own shape inference finds without the weights' values."""
    light = onnx.ModelProto(ir_version=proto.ir_version)
    light.opset_import.extend(proto.opset_import)
    light.graph.name = "sizes"
    light.graph.node.extend(proto.graph.node)
    light.graph.output.extend(onnx.ValueInfoProto(name=value.name) for value in proto.graph.output)
    largest = MOST_ELEMENTS
    for tensor in proto.graph.initializer:
        size = prod(tensor.dims)
        largest = max(largest, size)
        if size <= SMALL and not tensor.external_data:
            light.graph.initializer.append(tensor)
        else:
            light.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    names = {tensor.name for tensor in proto.graph.initializer}
    light.graph.input.extend(value for value in proto.graph.input if value.name not in names)
    try:
        inferred = shape_inference.infer_shapes(light)
    except Exception as error:  # onnx raises many types of exceptions
        raise ModelError(f"{path} is damaged: {str(error).splitlines()[0]:.300}; fetch it again") from error
    for value in (*inferred.graph.value_info, *inferred.graph.output, *proto.graph.input):
        dims = value.type.tensor_type.shape.dim
        size = prod(d.dim_value for d in dims if d.HasField("dim_value"))
        if size > largest or any(d.dim_value < 0 for d in dims):
            shape = [d.dim_value if d.HasField("dim_value") else d.dim_param or "?" for d in dims]
            raise ModelError(
                f"{path}: {value.name!r} would have the shape {shape!s:.200}, which is larger than in any decoder"
            )
