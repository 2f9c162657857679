"""The ONNX model of a static subgraph in the NPU's form.

Linears are in QDQ form (`backends/onnx/qdq.py`), all values between linears are float16, and shapes are fixed. Inputs
and outputs of the graph are float16, which takes half the bytes of float32 and needs no calibrated ranges. The integers
of int8 caches are int8.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from chunkrt.backends.onnx.plan_models import to_onnx
from chunkrt.backends.onnx.qdq import COLUMN_LIMIT_SUFFIX
from chunkrt.backends.onnx.scheme_models import initializer_values, quantize_linears
from chunkrt.backends.qnn.executable import FLOAT16_SUFFIX, INT8_SUFFIX
from chunkrt.backends.qnn.htp_support import MEAN_DROPPED, graph_rows
from chunkrt.backends.qnn.windowed_attention import write_out
from chunkrt.engine_directory.store import INPUT_STEP_SUFFIX, SCALE_SUFFIX, WeightStore
from chunkrt.errors import CompileError
from chunkrt.graph.plan import Node, Plan, Subgraph
from chunkrt.quant.scheme import Scheme

FLOAT16_OVERFLOW = 65520
"""Smallest magnitude that float16 rounds to infinity."""


def npu_model(plan: Plan, subgraph: Subgraph, chunk_length: int, scheme: Scheme, weights: WeightStore) -> bytes:
    """Build an ONNX model, with weights, of one subgraph for chunks of exactly `chunk_length` rows.

    Raises:
        CompileError: the grid of a column exceeds float16, and the NPU would silently clip its values.
    """
    rows = graph_rows(chunk_length, scheme)
    model = to_onnx(plan, [subgraph], name=f"{subgraph.name}.{rows}")
    quantize_linears(model, scheme)
    graph = model.graph
    values = initializer_values(plan, scheme, weights, list(graph.initializers))
    for name in values:
        if name.endswith(COLUMN_LIMIT_SUFFIX) and (reach := values[name].max()) >= FLOAT16_OVERFLOW:
            raise CompileError(
                f"the outputs of {name.removesuffix(COLUMN_LIMIT_SUFFIX)} reach {reach:.6g} and exceed the NPU's "
                "float16 "
                "(65504); run this model with `npu='native'`"
            )
    for name, initializer in graph.initializers.items():
        initializer.const_value = ir.tensor(values[name], name=name)
    write_out(graph, subgraph.nodes, rows)
    for node in subgraph.nodes:
        if node.op == "MatMul" and scheme.activation_bits_of(node.inputs[1]) == 16:
            _make_up_for_dropped_bits(graph, node, weights)
    for value in (*graph.inputs, *(v for node in graph for v in node.outputs)):
        if value.shape is not None:
            value.shape = ir.Shape([rows if d in ("T", "R") else d for d in value.shape])
    for index, value in enumerate(list(graph.inputs)):
        if value.dtype == ir.DataType.INT8:
            value.name = f"{value.name}{INT8_SUFFIX}"
        else:
            graph.inputs[index] = _arrive_as_float16(graph, value)
    for index, value in enumerate(list(graph.outputs)):
        graph.outputs[index] = _leave_as_float16(graph, value)
    serialized: bytes = ir.to_proto(model).SerializeToString()
    return serialized


def _make_up_for_dropped_bits(graph: ir.Graph, linear: Node, weights: WeightStore) -> None:
    """Add the mean of the NPU's rounding error, half of the dropped bits of each sum, to a linear's result.

    The error has the same sign at every position, so it accumulates over the layers; this correction more than halves
    it.
    """
    weight, name = linear.inputs[1], linear.outputs[0]
    missing = weights.array(weight + INPUT_STEP_SUFFIX) * weights.array(weight + SCALE_SUFFIX) * MEAN_DROPPED
    mean = ir.Value(
        name=f"{weight}.dropped",
        type=ir.TensorType(ir.DataType.FLOAT),
        shape=ir.Shape(missing.shape),
        const_value=ir.tensor(missing.astype(np.float32), name=f"{weight}.dropped"),
    )
    graph.register_initializer(mean)
    result = next(value for node in graph for value in node.outputs if value.name == name)
    add = ir.Node("", "Add", [result, mean], num_outputs=1, name=f"{weight}.made_up")
    whole = add.outputs[0]
    for user, index in tuple(result.uses()):
        if user is not add:
            user.replace_input_with(index, whole)
    for index, output in enumerate(graph.outputs):
        if output is result:
            graph.outputs[index] = whole
    graph.insert_after(result.producer() or graph[0], add)
    whole.type, whole.shape = result.type, result.shape
    result.name, whole.name = f"{weight}.less", name


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
