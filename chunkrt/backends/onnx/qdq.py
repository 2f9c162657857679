"""The QDQ form of static linears in standard ONNX, which NPU compilers read and any ONNX runtime can run.

    input -> Quantize -> Dequantize -> MatMul(., Dequantize(weight)) -> Quantize -> Dequantize [-> Mul(column limits)]

Activations are unsigned with their zero in the middle, because Hexagon's matrix unit takes this form. The matrix unit
supports one grid for all columns of an output. If columns have separate grids, the weight's scales bring the columns to
the range -1..1, and the Mul multiplies them by their limits again. An output that stays in float has neither grid nor
Mul.

Unsigned integers have one more level below zero than above. A shadow assumes that the grid is symmetric, so a Max keeps
the input of a linear with a shadow above that additional level.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from chunkrt.engine_directory.store import (
    INPUT_STEP_SUFFIX,
    OUTPUT_STEP_SUFFIX,
    SCALE_SUFFIX,
    WeightStore,
)
from chunkrt.quant.scheme import BLOCK_LENGTH, LEVELS, Scheme

INPUT_ZERO_SUFFIX, OUTPUT_ZERO_SUFFIX, COLUMN_LIMIT_SUFFIX = ".input_zero", ".output_zero", ".column_limit"
INPUT_LOWEST_SUFFIX = ".input_lowest"

ACTIVATION_DTYPES: dict[int, np.dtype[Any]] = {8: np.dtype(np.uint8), 16: np.dtype(np.uint16)}
ZERO = {8: 128, 16: 32768}


def qdq_values(weight: str, scheme: Scheme, weights: WeightStore) -> dict[str, NDArray[Any]]:
    """Return the initializers of one static linear in QDQ form, by name; the weight itself is int8 or int4 [K, N]."""
    bits = scheme.activation_bits_of(weight)
    integers, scale = weights.linear(weight)
    zero = np.full((), ZERO[bits], ACTIVATION_DTYPES[bits])
    values: dict[str, NDArray[Any]] = {
        weight + INPUT_STEP_SUFFIX: weights.array(weight + INPUT_STEP_SUFFIX).reshape(()),
        weight + INPUT_ZERO_SUFFIX: zero,
    }
    if scheme.is_shadowed(weight):
        values[weight + INPUT_LOWEST_SUFFIX] = np.array(-LEVELS[bits] * values[weight + INPUT_STEP_SUFFIX], np.float32)
    if not scheme.has_float_output(weight):
        output_step = weights.array(weight + OUTPUT_STEP_SUFFIX)
        values[weight + OUTPUT_STEP_SUFFIX] = output_step[:1].reshape(())
        values[weight + OUTPUT_ZERO_SUFFIX] = zero
    if scheme.has_column_grids(weight):
        limit = output_step * np.float32(LEVELS[bits])
        scale = scale / limit
        values[weight + COLUMN_LIMIT_SUFFIX] = limit
        values[weight + OUTPUT_STEP_SUFFIX] = np.full((), 1 / LEVELS[bits], np.float32)
    if scheme.weight_bits_of(weight) == 4:
        multiplier = weights.multipliers(weight)
        by_row = np.repeat(multiplier, BLOCK_LENGTH, axis=0)[: len(integers)]
        integers, scale = (integers // by_row).astype(ml_dtypes.int4), multiplier * scale
    return values | {weight: integers, weight + SCALE_SUFFIX: scale.astype(np.float32)}


def insert_qdq(graph: ir.Graph, linear: ir.Node, scheme: Scheme) -> None:
    """Put one linear, a MatMul with an initializer, into QDQ form, in place. Its output keeps its name."""
    source, weight = linear.inputs
    result = linear.outputs[0]
    assert source is not None
    assert weight is not None
    assert weight.shape is not None
    name, (depth, columns) = weight.name or "", weight.shape.numpy()
    builder = _QdqNodes(graph, linear)
    bits, is_4_bit = scheme.activation_bits_of(name), scheme.weight_bits_of(name) == 4
    activation = ir.DataType.from_numpy(ACTIVATION_DTYPES[bits])

    def constant(suffix: str, dtype: ir.DataType, shape: Sequence[int] = ()) -> ir.Value:
        value = ir.Value(name=name + suffix, type=ir.TensorType(dtype), shape=ir.Shape(shape))
        graph.initializers[name + suffix] = value
        return value

    def through_grid(value: ir.Value, step: str, zero: str, label: str) -> ir.Value:
        grid = [constant(step, ir.DataType.FLOAT), constant(zero, activation)]
        quantized = builder.node("QuantizeLinear", [value, *grid], f"{label}.quantized")
        return builder.node("DequantizeLinear", [quantized, *grid], f"{label}.dequantized")

    weight.type = ir.TensorType(ir.DataType.INT4 if is_4_bit else ir.DataType.INT8)
    if is_4_bit:
        scale = constant(SCALE_SUFFIX, ir.DataType.FLOAT, [-(-depth // BLOCK_LENGTH), columns])
        attributes = {"axis": 0, "block_size": BLOCK_LENGTH}
    else:
        scale, attributes = constant(SCALE_SUFFIX, ir.DataType.FLOAT, [columns]), {"axis": 1}
    if scheme.is_shadowed(name):
        source = builder.node("Max", [source, constant(INPUT_LOWEST_SUFFIX, ir.DataType.FLOAT)], f"{name}.input.kept")
    left = through_grid(source, INPUT_STEP_SUFFIX, INPUT_ZERO_SUFFIX, f"{name}.input")
    right = builder.node("DequantizeLinear", [weight, scale], f"{name}.dequantized", attributes)
    product = builder.node("MatMul", [left, right], f"{name}.product")
    output = product
    if not scheme.has_float_output(name):
        output = through_grid(product, OUTPUT_STEP_SUFFIX, OUTPUT_ZERO_SUFFIX, f"{name}.output")
    if scheme.has_column_grids(name):
        limit = constant(COLUMN_LIMIT_SUFFIX, ir.DataType.FLOAT, [columns])
        output = builder.node("Mul", [output, limit], f"{name}.by_column")
    builder.replace(result, output)


class _QdqNodes:
    """Builder of nodes in front of a node that will be replaced."""

    def __init__(self, graph: ir.Graph, old: ir.Node) -> None:
        self._graph = graph
        self._old = old

    def node(
        self, op: str, inputs: Sequence[ir.Value], output: str, attributes: dict[str, int] | None = None
    ) -> ir.Value:
        attribute_list = [ir.AttrInt64(key, value) for key, value in (attributes or {}).items()]
        node = ir.Node("", op, inputs, attribute_list, num_outputs=1, name=output)
        node.outputs[0].name = output
        self._graph.insert_before(self._old, node)
        return node.outputs[0]

    def replace(self, old: ir.Value, new: ir.Value) -> None:
        """Replace `old` by `new`, which takes its name, and remove the old node."""
        name, new.type, new.shape = old.name, old.type, old.shape
        for index, output in enumerate(self._graph.outputs):
            if output is old:
                self._graph.outputs[index] = new
        for user, index in tuple(old.uses()):
            user.replace_input_with(index, new)
        self._graph.remove(self._old, safe=True)
        old.name = None
        new.name = name
