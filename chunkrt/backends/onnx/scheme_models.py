"""ONNX models under a scheme: rewrite linears to the scheme's form, and give initializers their values."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from chunkrt.backends.onnx.functions import expansion, expansions
from chunkrt.backends.onnx.plan_models import to_onnx
from chunkrt.backends.onnx.qdq import insert_qdq, qdq_values
from chunkrt.checkpoints.source import BLOCK_DEPTH
from chunkrt.engine_directory.store import INPUT_STEP_SUFFIX, SCALE_SUFFIX, WeightStore
from chunkrt.errors import ConfigError, cause_of
from chunkrt.files import written_aside
from chunkrt.graph.plan import (
    DOMAIN,
    EXPERTS_OP,
    SHADOW_OP,
    Plan,
    Subgraph,
    embedding_tables,
    expert_weights,
    linear_weights,
)
from chunkrt.quant.scheme import Scheme

MINIMUM_SUFFIX = ".minimum"
DATA_SUFFIX = ".data"
"""Suffix of a model's name for the file of its weights."""

DYNAMIC_FUNCTIONS = ("TakeOutliers", "QuantizeRows", "MultiplyBlocks", "DynamicLinear", "BlockLinear")
"""Functions that linears with dynamic activations call."""

DYNAMIC_EXPERTS = "DynamicRoutedExperts"

SHADOW_STEP_SUFFIX, SHADOW_SCALE_SUFFIX = ".shadow_step", ".shadow_scale"


def quantize_linears(model: ir.Model, scheme: Scheme) -> None:
    """Rewrite every linear for a scheme, in place.

    Requires: linears are MatMul nodes whose right operand is an initializer. Ensures: the initializers are those of
    `initializer_values`. Under a dynamic scheme each linear is a DynamicLinear or a BlockLinear, and the model contains
    the functions that define these. Under a static scheme each linear is standard ONNX that quantises and dequantises
    its input, weight and output, the form for an NPU's compiler. Routed experts are dynamic in either case. Under
    "float" nothing changes.
    """
    if scheme.weight_bits is None:
        return
    graph = model.graph
    for node in list(graph):
        if node.op_type == EXPERTS_OP:
            _make_experts_dynamic(model, node)
        weight = node.inputs[1] if node.op_type in ("MatMul", SHADOW_OP) else None
        if weight is None or weight.name not in graph.initializers:
            continue
        if node.op_type == SHADOW_OP:
            _complete_shadow(graph, node, weight)
        elif scheme.is_static:
            insert_qdq(graph, node, scheme)
        else:
            _make_dynamic(graph, node, weight, scheme)
    if not scheme.is_static:
        for op in DYNAMIC_FUNCTIONS:
            function = expansion(op)
            model.functions.setdefault(function.identifier(), function)


def _make_dynamic(graph: ir.Graph, node: ir.Node, weight: ir.Value, scheme: Scheme) -> None:
    assert weight.shape is not None
    assert weight.name is not None
    depth, columns = weight.shape.numpy()
    has_blocks = scheme.has_blocks(weight.name)
    weight.type = ir.TensorType(ir.DataType.UINT8 if has_blocks else ir.DataType.INT8)
    blocked = [depth // BLOCK_DEPTH, columns]
    beside = {SCALE_SUFFIX: blocked, MINIMUM_SUFFIX: blocked} if has_blocks else {SCALE_SUFFIX: [columns]}
    node.domain = DOMAIN
    node.op_type = "BlockLinear" if has_blocks else "DynamicLinear"
    node.resize_inputs(2 + len(beside))
    for index, (suffix, shape) in enumerate(beside.items(), 2):
        name = weight.name + suffix
        value = ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(shape))
        graph.initializers[name] = value
        node.replace_input_with(index, value)


def _make_experts_dynamic(model: ir.Model, node: ir.Node) -> None:
    node.op_type = DYNAMIC_EXPERTS
    weights = node.inputs[2:4]
    node.resize_inputs(9)
    for index, weight in enumerate(weights, 7):
        assert weight is not None
        assert weight.shape is not None
        experts, _, columns = weight.shape
        weight.type = ir.TensorType(ir.DataType.INT8)
        name = f"{weight.name}{SCALE_SUFFIX}"
        scale = ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([experts, 1, columns]))
        model.graph.initializers[name] = scale
        node.replace_input_with(index, scale)
    for function in expansions([(DYNAMIC_EXPERTS, "", DOMAIN)]):
        model.functions.setdefault(function.identifier(), function)


def _complete_shadow(graph: ir.Graph, node: ir.Node, weight: ir.Value) -> None:
    """Give a shadow its own copy of the weight's scale, because the output's grid of the linear may be folded into the
    original scale.
    """
    assert weight.shape is not None
    weight.type = ir.TensorType(ir.DataType.INT8)
    node.resize_inputs(4)
    for index, suffix, shape in ((2, SHADOW_STEP_SUFFIX, [1]), (3, SHADOW_SCALE_SUFFIX, [weight.shape[-1]])):
        name = f"{weight.name}{suffix}"
        value = ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(shape))
        graph.initializers[name] = value
        node.replace_input_with(index, value)


def initializer_values(
    plan: Plan, scheme: Scheme, weights: WeightStore, names: Collection[str]
) -> dict[str, NDArray[Any]]:
    """Return the arrays of a model's initializers by name: in the scheme's form for linears, float32 for other
    initializers.
    """
    quantized = linear_weights(plan) if scheme.weight_bits else set()
    values: dict[str, NDArray[Any]] = {}
    for name in quantized.intersection(names):
        if scheme.is_static:
            values |= qdq_values(name, scheme, weights)
        elif scheme.has_blocks(name):
            blocks = weights.blocks(name)
            values[name] = np.ascontiguousarray(blocks.integers.T)
            values[name + SCALE_SUFFIX] = blocks.scales.T.astype(np.float32, order="C")
            values[name + MINIMUM_SUFFIX] = blocks.minima.T.astype(np.float32, order="C")
        else:
            values[name], values[name + SCALE_SUFFIX] = weights.linear(name)
        if scheme.is_shadowed(name):
            values[name + SHADOW_STEP_SUFFIX] = weights.array(name + INPUT_STEP_SUFFIX)
            values[name + SHADOW_SCALE_SUFFIX] = weights.array(name + SCALE_SUFFIX)
    for name in (expert_weights(plan) if scheme.weight_bits else set()).intersection(names):
        values[name], scale = weights.experts(name)
        values[name + SCALE_SUFFIX] = scale[:, None]
    rest = {name: weights.array(name).astype(np.float32, copy=False) for name in names if name not in values}
    return {name: values[name] for name in names if name in values} | rest


def save_subgraph(
    plan: Plan,
    subgraph: Subgraph,
    scheme: Scheme,
    weights: WeightStore,
    path: Path,
    *,
    keeps_float16: bool = False,
    most_in_file: int | None = None,
) -> None:
    """Write a subgraph under a scheme, with its weights, for any number of rows. Raises OSError.

    Args:
        keeps_float16: keep an embedding table in float16 if it is stored in float16; its rows become float32 after the
            gather.
        most_in_file: number of bytes of weights above which they are stored in a file next to the model, with ".data"
            added to its name; by default they are always stored in the model.
    """
    model = to_onnx(plan, [subgraph], name=subgraph.name)
    quantize_linears(model, scheme)
    values = initializer_values(plan, scheme, weights, list(model.graph.initializers))
    for name, value in model.graph.initializers.items():
        if keeps_float16 and name in embedding_tables(plan) and weights.array(name).dtype == np.float16:
            values[name] = weights.array(name)
            _widen_rows(model.graph, value)
        value.const_value = ir.tensor(values[name], name=name)
    is_large = most_in_file is not None and sum(array.nbytes for array in values.values()) > most_in_file
    with written_aside(path) as aside:
        ir.save(model, aside, external_data=path.name + DATA_SUFFIX if is_large else None)


def _widen_rows(graph: ir.Graph, table: ir.Value) -> None:
    """Store a table as float16, and convert the gathered rows to float32."""
    table.dtype = ir.DataType.FLOAT16
    for node, _ in tuple(table.uses()):
        rows = node.outputs[0]
        cast = ir.node("Cast", [rows], attributes={"to": ir.DataType.FLOAT})
        wide = cast.outputs[0]
        wide.name, wide.dtype, wide.shape = f"{rows.name}.float32", ir.DataType.FLOAT, rows.shape
        rows.dtype = ir.DataType.FLOAT16
        for user, index in tuple(rows.uses()):
            if user is not cast:
                user.replace_input_with(index, wide)
        for index, output in enumerate(graph.outputs):
            if output is rows:
                wide.name, rows.name = rows.name, f"{rows.name}.float16"
                graph.outputs[index] = wide
        graph.insert_after(node, cast)


def save_subgraphs(
    plan: Plan, scheme: Scheme, weights: WeightStore, folder: Path, progress: Callable[[int, int], None]
) -> int:
    """Write every subgraph as an ONNX file with its weights, named in execution order: "03_static.1.onnx".

    Sums over ranks are omitted, because ONNX has no operator for them.

    Returns:
        The number of written files.

    Raises:
        ConfigError: a file cannot be written.
    """
    digits = len(str(len(plan.subgraphs)))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for index, subgraph in enumerate(plan.subgraphs):
            progress(index, len(plan.subgraphs))
            if subgraph.device == "link":
                continue
            path = folder / f"{index:0{digits}}_{subgraph.name}.onnx"
            save_subgraph(plan, subgraph, scheme, weights, path)
    except OSError as error:
        raise ConfigError(f"cannot write ONNX files to {folder}: {cause_of(error)}") from error
    progress(len(plan.subgraphs), len(plan.subgraphs))
    return sum(subgraph.device != "link" for subgraph in plan.subgraphs)
