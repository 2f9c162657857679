"""Linear layers whose weights are stored as integers; activations stay floats.

| weights | storage | product |
| --- | --- | --- |
| int8 | int8, symmetric, a scale for each output channel | DequantizeLinear, MatMul |
| int4 | unsigned 4 bits with a zero point of 8, a scale for each block of 32 inputs | com.microsoft::MatMulNBits |

An LM head that is tied to the embedding shares the table's integers: the embedding reads rows of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from chunkrt.errors import QuantizationError, UnsupportedModelError
from chunkrt.graph.modules import Float32
from chunkrt.graph.partition import Planned
from chunkrt.graph.plan import linear_weights
from chunkrt.onnx.exporting.emitter import CONTRIB_DOMAIN, FLOAT, Emitter, Weights
from chunkrt.onnx.exporting.export_settings import Settings
from chunkrt.quant.arithmetic import COLUMNS_AT_ONCE, quantize_weight

BLOCK = 32
"""Number of inputs that share a scale of 4-bit weights."""

ZERO_POINT = 8
"""Integer of 4-bit weights that stands for 0; the default of ONNX Runtime's operators."""


@dataclass(frozen=True)
class Rounded:
    """A linear's weight [N, K], rounded.

    Attributes:
        integers: int8 [N, K]; or, for 4 bits, uint8 [N, ceil(K / 32), 16], where the lower half of a byte comes first.
        scales: float32 [N]; or, for 4 bits, [N, ceil(K / 32)].
    """

    integers: NDArray[Any]
    scales: Float32

    def dequantise(self, depth: int) -> Float32:
        """Return the values that the integers stand for, float32 [N, K] with K = depth."""
        if self.integers.ndim == 2:
            return self.integers.astype(np.float32) * self.scales[:, None]
        halves = np.stack([self.integers & 15, self.integers >> 4], axis=-1).reshape(*self.scales.shape, BLOCK)
        values = (halves.astype(np.float32) - ZERO_POINT) * self.scales[..., None]
        return values.reshape(len(values), -1)[:, :depth]


def round_weight(weight: Float32, weights: Weights, scale_type: ir.DataType, name: str) -> Rounded:
    """Round a linear's weight float32 [N, K]; scales have values of `scale_type`.

    Raises:
        QuantizationError: a weight is not finite, or a scale exceeds the type.
    """
    if weights == "int8":
        integers, scales = quantize_weight(weight.T, name=name)
        return Rounded(np.ascontiguousarray(integers.T), _in_type(scales, scale_type, name))
    rows, depth = weight.shape
    num_blocks = -(-depth // BLOCK)
    packed = np.empty((rows, num_blocks, BLOCK // 2), np.uint8)
    all_scales = np.empty((rows, num_blocks), np.float32)
    for begin in range(0, rows, COLUMNS_AT_ONCE):
        part = slice(begin, begin + COLUMNS_AT_ONCE)
        padded = np.zeros((len(weight[part]), num_blocks * BLOCK), np.float32)
        padded[:, :depth] = weight[part]
        blocks = padded.reshape(-1, num_blocks, BLOCK)
        if not np.isfinite(blocks).all():
            raise QuantizationError(f"{name} holds values that are not finite; the checkpoint is damaged")
        largest = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=-1)[..., None], axis=-1)
        scales = _in_type((largest / -ZERO_POINT).astype(np.float32), scale_type, name)
        steps = blocks / np.where(scales == 0, np.float32(np.inf), scales)
        integers = (np.rint(steps) + ZERO_POINT).clip(0, 15).astype(np.uint8)
        packed[part] = integers[..., 0::2] | integers[..., 1::2] << 4
        all_scales[part] = scales[..., 0]
    return Rounded(packed, all_scales)


def _in_type(scales: Float32, dtype: ir.DataType, name: str) -> Float32:
    with np.errstate(over="ignore"):
        rounded: Float32 = scales.astype(dtype.numpy()).astype(np.float32)
    if not np.isfinite(rounded).all():
        raise QuantizationError(f"{name} holds values that exceed float16; use --dtype fp32")
    return rounded


def scale_type(weights: Weights, dtype: ir.DataType, opset: int) -> ir.DataType:
    """Return the type of scales. DequantizeLinear has no float16 scales before opset 19."""
    return FLOAT if weights == "int8" and opset < 19 else dtype


def emit_linear(e: Emitter, x: ir.Value, name: str, out: str) -> None:
    """Add the product of x [..., K] and a linear's weight [K, N]."""
    integers, scales = _stored(e, name)
    stored = e.tied.get(name, name)
    is_tied = stored != name
    columns = e.width(name)
    if e.weights == "int4":
        value = e.op(
            "MatMulNBits",
            x,
            integers,
            scales,
            name=out,
            domain=CONTRIB_DOMAIN,
            K=e.depth(name),
            N=columns,
            bits=4,
            block_size=BLOCK,
            accuracy_level=1,  # activations are not rounded
        )
        value.shape = ir.Shape([*e.rows, columns])
        return
    values = e.op("DequantizeLinear", integers, scales, name=f"{stored}/values", dtype=scales.dtype, axis=1 - is_tied)
    values = e.cast(values, e.dtype)
    if is_tied:
        values = e.op("Transpose", values, name=name, perm=[1, 0])
    e.op("MatMul", x, values, name=out)


def emit_rows(e: Emitter, table: str, indices: ir.Value, out: str) -> None:
    """Add the look-up of rows of an embedding whose table is also the LM head's weight."""
    integers, scales = _stored(e, next(head for head, other in e.tied.items() if other == table))
    if e.weights == "int4":
        flat = e.reshape(integers, 0, -1, name=f"{table}/flat")
        value = e.op(
            "GatherBlockQuantized",
            flat,
            indices,
            scales,
            name=out,
            dtype=e.dtype,
            domain=CONTRIB_DOMAIN,
            bits=4,
            block_size=BLOCK,
            gather_axis=0,
            quantize_axis=1,
        )
        value.shape = ir.Shape([*e.rows, e.width(table)])
        return
    rows = e.cast(e.op("Gather", integers, indices, name=f"{out}/integers", axis=0), scales.dtype or FLOAT)
    of_rows = e.op("Gather", scales, indices, name=f"{out}/scale", axis=0)
    column = e.op("Unsqueeze", of_rows, e.ints(-1), name=f"{out}/scales")
    e.alias(out, e.cast(e.op("Mul", rows, column, name=f"{out}/scaled"), e.dtype))


def _stored(e: Emitter, name: str) -> tuple[ir.Value, ir.Value]:
    """Return the integers and the scales of a linear's weight [K, N]. int8 is stored as [K, N], unless the weight is
    tied to a table [N, K].
    """
    assert e.weights != "float"
    stored = e.tied.get(name, name)
    weights, dtype, is_tied = e.weights, scale_type(e.weights, e.dtype, e.opset), stored != name
    depth, columns = e.depth(name), e.width(name)

    def rounded() -> Rounded:
        loaded = e.load(stored)
        return round_weight(loaded if is_tied else loaded.T, weights, dtype, stored)

    def integers() -> NDArray[Any]:
        found = e.remembered(stored, rounded).integers
        return found if weights == "int4" or is_tied else np.ascontiguousarray(found.T)

    num_blocks = -(-depth // BLOCK)
    shapes = {"int4": (columns, num_blocks, BLOCK // 2), "int8": (columns, depth) if is_tied else (depth, columns)}
    scale_shape = (columns, num_blocks) if weights == "int4" else (columns,)
    kind = ir.DataType.UINT8 if weights == "int4" else ir.DataType.INT8
    return (
        e.stored(f"{stored}.{weights}", kind, shapes[weights], integers),
        e.stored(f"{stored}.scale", dtype, scale_shape, lambda: e.remembered(stored, rounded).scales),
    )


def check_integer_weights(planned: Planned, weights: Weights, tied: dict[str, str]) -> None:
    """Raise UnsupportedModelError if a decoder's weights cannot be stored as integers."""
    if weights == "float":
        return
    plan = planned.plan
    experts = [node.name for s in plan.subgraphs for node in s.nodes if node.op == "RoutedExperts"]
    if experts:
        raise UnsupportedModelError(f"{experts[0]} has experts, which --weights {weights} does not cover; omit it")
    for name in tied.keys() & linear_weights(plan):
        depth = int(plan.tensors[name].shape[0])
        if weights == "int4" and depth % BLOCK:
            raise UnsupportedModelError(
                f"{name} is tied to the embedding and has {depth} inputs, "
                f"not a multiple of {BLOCK}; omit --weights int4"
            )


def with_rounded_weights(planned: Planned, settings: Settings, tied: Mapping[str, str]) -> Planned:
    """Return the decoder with the values that its rounded weights stand for, as floats."""
    if settings.weights == "float":
        return planned
    heads = {table: head for head, table in tied.items()}
    linears = linear_weights(planned.plan)
    dtype = scale_type(settings.weights, settings.tensor_type, settings.opset)

    class RoundedPlanned(Planned):
        def load(self, name: str) -> Float32:
            weight = super().load(name)
            is_table = heads.get(name) in linears
            if name not in linears and not is_table:
                return weight
            rows = weight if is_table else weight.T
            values = round_weight(rows, settings.weights, dtype, name).dequantise(rows.shape[1])
            return values if is_table else values.T

    return RoundedPlanned(source=planned.source, decoder=planned.decoder, plan=planned.plan)
