"""The ONNX model of a static subgraph as the NPU gets it.

Linears in QDQ form (`quant/qdq.py`), everything between them float16, fixed shapes. Values arrive and leave as float16:
half the bytes, and no range that anybody had to calibrate.
"""

from __future__ import annotations

import onnx_ir as ir

from chunkrt.backends.qnn.executable import FLOAT16_SUFFIX
from chunkrt.graph.export import to_onnx
from chunkrt.graph.plan import Plan, Subgraph
from chunkrt.quant.linears import initializer_values, quantize_linears
from chunkrt.quant.scheme import Scheme
from chunkrt.weights.store import WeightStore


def npu_model(plan: Plan, subgraph: Subgraph, chunk_length: int, scheme: Scheme, weights: WeightStore) -> bytes:
    """One static subgraph for chunks of exactly `chunk_length` rows, weights included, as ONNX."""
    model = to_onnx(plan, [subgraph], name=f"{subgraph.name}.{chunk_length}")
    quantize_linears(model, scheme)
    graph = model.graph
    values = initializer_values(plan, scheme, weights, list(graph.initializers))
    for name, initializer in graph.initializers.items():
        initializer.const_value = ir.tensor(values[name], name=name)
    for value in (*graph.inputs, *(v for node in graph for v in node.outputs)):
        if value.shape is not None:
            value.shape = ir.Shape([chunk_length if d in ("T", "R") else d for d in value.shape])
    for index, value in enumerate(list(graph.inputs)):
        graph.inputs[index] = _arrive_as_float16(graph, value)
    for index, value in enumerate(list(graph.outputs)):
        graph.outputs[index] = _leave_as_float16(graph, value)
    serialized: bytes = ir.to_proto(model).SerializeToString()
    return serialized


def _arrive_as_float16(graph: ir.Graph, value: ir.Value) -> ir.Value:
    source = _float16(value.name, value.shape)
    to = ir.AttrInt64("to", ir.DataType.FLOAT)
    cast = ir.Node("", "Cast", [source], [to], num_outputs=1, name=f"{source.name}.in")
    ir.convenience.replace_all_uses_with(value, cast.outputs[0])
    cast.outputs[0].name, value.name = value.name, None
    graph.insert_before(graph[0], cast)
    return source


def _leave_as_float16(graph: ir.Graph, value: ir.Value) -> ir.Value:
    result = _float16(value.name, value.shape)
    to = ir.AttrInt64("to", ir.DataType.FLOAT16)
    graph.append(ir.Node("", "Cast", [value], [to], outputs=[result], name=f"{result.name}.out"))
    return result


def _float16(name: str | None, shape: ir.Shape | None) -> ir.Value:
    return ir.Value(name=f"{name}{FLOAT16_SUFFIX}", type=ir.TensorType(ir.DataType.FLOAT16), shape=shape)
