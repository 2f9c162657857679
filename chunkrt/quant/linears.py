"""One pass: the linears of an ONNX model become what a scheme says.

Requires: linears are MatMul nodes whose right operand is an initializer. Ensures: under an 8-bit scheme each is one
`chunkrt::DynamicLinear`, whose weight is an int8 initializer [K, N] of the same name, with its scales float32 [N]
beside it; the function that defines the operator is in the model. Under "float" nothing changes.
"""

from __future__ import annotations

import onnx_ir as ir

from chunkrt.graph.functions import DOMAIN, expansion
from chunkrt.quant.scheme import Scheme
from chunkrt.weights.store import SCALE_SUFFIX


def quantize_linears(model: ir.Model, scheme: Scheme) -> None:
    """Apply the pass in place."""
    if scheme.weight_bits is None:
        return
    graph = model.graph
    for node in list(graph):
        weight = node.inputs[1] if node.op_type == "MatMul" else None
        if weight is None or weight.name not in graph.initializers:
            continue
        assert weight.shape is not None
        weight.type = ir.TensorType(ir.DataType.INT8)
        scale = ir.Value(
            name=f"{weight.name}{SCALE_SUFFIX}",
            type=ir.TensorType(ir.DataType.FLOAT),
            shape=ir.Shape([weight.shape[-1]]),
        )
        graph.initializers[scale.name or ""] = scale
        node.domain, node.op_type = DOMAIN, "DynamicLinear"
        node.resize_inputs(3)
        node.replace_input_with(2, scale)
    function = expansion("DynamicLinear")
    model.functions.setdefault(function.identifier(), function)
