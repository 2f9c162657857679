"""The plan's operators without state, in primitives of any opset from 14 on, or as ONNX's own operators where they
exist.

Norms, softmax, gates of the recurrence and routers compute in float32 regardless of the model's type, because squares
of float16 overflow from 256 on. A result has the type of its left operand.
"""

from __future__ import annotations

from collections.abc import Callable
from math import pi, sqrt
from typing import Any, cast

import numpy as np
import onnx_ir as ir

from chunkrt.graph.operators import EXPERT_GROUPS
from chunkrt.graph.plan import DOMAIN, Node
from chunkrt.onnx.exporting.emitter import BOOL, FLOAT, Emitter
from chunkrt.onnx.exporting.integer_weights import emit_linear, emit_rows

Lowering = Callable[[Emitter, Node], None]
"""A function that lowers a node of the plan; the result has the name of the node's output."""


def _embedding(e: Emitter, node: Node) -> None:
    table, indices = node.inputs
    if e.has_integers(table):
        emit_rows(e, table, e.read(indices), node.outputs[0])
        return
    e.op("Gather", e.read(table), e.read(indices), name=node.outputs[0], axis=0)


def _matmul(e: Emitter, node: Node) -> None:
    left, right = node.inputs
    if e.has_integers(right):
        emit_linear(e, e.read(left, e.dtype), right, node.outputs[0])
        return
    e.op("MatMul", e.read(left, e.dtype), e.read(right, e.dtype), name=node.outputs[0])


def _float_linear(e: Emitter, node: Node) -> None:
    left, right = (e.read(name, FLOAT) for name in node.inputs)
    e.op("MatMul", left, right, name=node.outputs[0])


def _elementwise(e: Emitter, node: Node) -> None:
    left = e.read(node.inputs[0])
    e.op(node.op, left, *(e.read(name, left.dtype) for name in node.inputs[1:]), name=node.outputs[0])


def _softplus(e: Emitter, node: Node) -> None:
    e.op("Softplus", e.read(node.inputs[0], FLOAT), name=node.outputs[0])


def _gelu(e: Emitter, node: Node) -> None:
    _gelu_of(e, e.read(node.inputs[0]), node.outputs[0], str(node.attributes.get("approximate", "none")))


def _gelu_of(e: Emitter, x: ir.Value, out: str, approximate: str) -> ir.Value:
    if e.opset >= 20:
        return e.op("Gelu", x, name=out, approximate=approximate)
    wide = e.cast(x, FLOAT)
    if approximate == "none":
        erf = e.op("Erf", e.op("Mul", wide, e.number(sqrt(0.5)), name=f"{out}/argument"), name=f"{out}/erf")
        half = e.op("Mul", wide, e.number(0.5), name=f"{out}/half")
        return finish(e, "Mul", half, e.op("Add", erf, e.number(1.0), name=f"{out}/gate"), dtype=x.dtype, name=out)
    cube = e.op("Mul", e.op("Mul", wide, wide, name=f"{out}/square"), wide, name=f"{out}/cube")
    bent = e.op("Add", wide, e.op("Mul", cube, e.number(0.044715), name=f"{out}/bend"), name=f"{out}/bent")
    tanh = e.op("Tanh", e.op("Mul", bent, e.number(sqrt(2 / pi)), name=f"{out}/angle"), name=f"{out}/tanh")
    half = e.op("Mul", wide, e.number(0.5), name=f"{out}/half")
    return finish(e, "Mul", half, e.op("Add", tanh, e.number(1.0), name=f"{out}/gate"), dtype=x.dtype, name=out)


def _thresholded_relu(e: Emitter, node: Node) -> None:
    (out,), alpha = node.outputs, cast(float, node.attributes["alpha"])
    x = e.read(node.inputs[0])
    finish(e, "ThresholdedRelu", e.cast(x, FLOAT), dtype=x.dtype, name=out, alpha=alpha)


def _quick_gelu(e: Emitter, node: Node) -> None:
    (out,), x = node.outputs, e.read(node.inputs[0], FLOAT)
    angle = e.op("Mul", x, e.number(1.702), name=f"{out}/angle")
    gate = e.op("Sigmoid", angle, name=f"{out}/gate")
    e.alias(out, e.cast(e.op("Mul", x, gate, name=f"{out}/float"), e.dtype))


def _xielu(e: Emitter, node: Node) -> None:
    """Compute xIELU in float32; Elu is expm1 for negative values."""
    (out,), x = node.outputs, e.read(node.inputs[0], FLOAT)
    parameters = e.read(node.inputs[1], FLOAT)
    positive, negative, linear, limit = (
        e.cut(parameters, i, i + 1, axis=0, name=f"{out}/parameter.{i}") for i in range(4)
    )
    bent = e.op("Elu", e.op("Min", x, limit, name=f"{out}/bounded"), name=f"{out}/decayed")
    below = e.op("Mul", e.op("Sub", bent, x, name=f"{out}/bent"), negative, name=f"{out}/below")
    above = e.op("Mul", e.op("Mul", x, x, name=f"{out}/square"), positive, name=f"{out}/above")
    is_above = e.op("Greater", x, e.number(0.0), name=f"{out}/is_above", dtype=BOOL)
    curved = e.op("Where", is_above, above, below, name=f"{out}/curved", dtype=FLOAT)
    total = e.op("Add", curved, e.op("Mul", x, linear, name=f"{out}/linear"), name=f"{out}/float")
    e.alias(out, e.cast(total, e.dtype))


def _layer_norm(e: Emitter, node: Node) -> None:
    (out,), epsilon = node.outputs, cast(float, node.attributes["epsilon"])
    x, dtype = e.read(node.inputs[0], FLOAT), e.read(node.inputs[0]).dtype
    weight, bias = (e.read(name, FLOAT) for name in node.inputs[1:])
    if e.opset >= 17:
        attributes: dict[str, Any] = {"axis": -1, "epsilon": epsilon}
        finish(e, "LayerNormalization", x, weight, bias, dtype=dtype, name=out, **attributes)
        return
    centred = e.op("Sub", x, e.reduce_mean(x, name=f"{out}/value_mean"), name=f"{out}/centred")
    weighted = e.op("Mul", _normed(e, centred, epsilon, out), weight, name=f"{out}/weighted")
    finish(e, "Add", weighted, bias, dtype=dtype, name=out)


def _concat(e: Emitter, node: Node) -> None:
    e.op("Concat", *(e.read(name) for name in node.inputs), name=node.outputs[0], axis=-1)


def _split(e: Emitter, node: Node) -> None:
    if e.opset >= 18:
        e.ops("Split", e.read(node.inputs[0]), names=node.outputs, axis=-1, num_outputs=len(node.outputs))
    else:
        e.ops("Split", e.read(node.inputs[0]), names=node.outputs, axis=-1)


def _rms_norm(e: Emitter, node: Node) -> None:
    (out,) = node.outputs
    x = e.read(node.inputs[0])
    weight, epsilon = e.read(node.inputs[1], FLOAT), cast(float, node.attributes["epsilon"])
    if e.opset >= 23:
        attributes: dict[str, Any] = {"axis": -1, "epsilon": epsilon}
        finish(e, "RMSNormalization", e.cast(x, FLOAT), weight, dtype=x.dtype, name=out, **attributes)
    else:
        normed = _normed(e, e.cast(x, FLOAT), epsilon, out)
        finish(e, "Mul", normed, weight, dtype=x.dtype, name=out)


def _head_norm(e: Emitter, node: Node) -> None:
    """Normalise the first heads of a row, each with its own row of the weight [heads, D]; the other heads are
    unchanged.
    """
    (out,) = node.outputs
    x = e.read(node.inputs[0])
    weight, epsilon = e.read(node.inputs[1], FLOAT), cast(float, node.attributes["epsilon"])
    assert weight.shape is not None
    num_heads, dim = weight.shape.numpy()
    heads = e.reshape(x, 0, 0, -1, dim, name=f"{out}/heads")
    first = e.cast(e.cut(heads, 0, num_heads, axis=2, name=f"{out}/first"), FLOAT)
    if e.opset >= 23:
        ones = e.constant(f"ones.{dim}", np.ones(dim, np.float32))
        normed = e.op("RMSNormalization", first, ones, name=f"{out}/normed", axis=-1, epsilon=epsilon)
    else:
        normed = _normed(e, first, epsilon, out)
    assert x.dtype is not None
    weighted = e.cast(e.op("Mul", normed, weight, name=f"{out}/weighted"), x.dtype)
    if num_heads * dim == e.width(node.inputs[0]):
        e.reshape(weighted, 0, 0, -1, name=out)
        return
    rest = e.cut(heads, num_heads, np.iinfo(np.int32).max, axis=2, name=f"{out}/rest")
    joined = e.op("Concat", weighted, rest, name=f"{out}/joined", axis=2)
    e.reshape(joined, 0, 0, -1, name=out)


def _normed(e: Emitter, x: ir.Value, epsilon: float, out: str) -> ir.Value:
    """Compute x / sqrt(mean(x^2) + epsilon)."""
    mean = e.reduce_mean(e.op("Mul", x, x, name=f"{out}/square"), name=f"{out}/mean")
    root = e.op("Sqrt", e.op("Add", mean, e.number(epsilon), name=f"{out}/safe"), name=f"{out}/root")
    return e.op("Div", x, root, name=f"{out}/normed")


def _routed_experts(e: Emitter, node: Node) -> None:
    """Compute all experts for all rows; the factor of an expert is 0 for rows that do not use it."""
    (out,) = node.outputs
    hidden, router_logits = e.read(node.inputs[0], e.dtype), e.read(node.inputs[1], FLOAT)
    gate_up, down = (e.read(name, e.dtype) for name in node.inputs[2:4])
    assert down.shape is not None
    inner = int(down.shape.numpy()[1])
    if node.attributes.get("use_sigmoid", 0):
        probabilities = e.op("Sigmoid", router_logits, name=f"{out}/probabilities")
    else:
        probabilities = e.op("Softmax", router_logits, name=f"{out}/probabilities", axis=-1)
    values = router_logits
    selection_bias, gate_up_bias, down_bias = (*node.inputs[4:], "", "", "")[:3]
    if selection_bias:
        values = e.op("Add", probabilities, e.read(selection_bias, FLOAT), name=f"{out}/values")
    if cast(int, node.attributes.get("num_groups", 1)) > 1:
        values = _in_best_groups(e, node, values if selection_bias else probabilities)
    top_k = e.ints(cast(int, node.attributes["top_k"]))
    largest, indices = e.ops("TopK", values, top_k, names=[f"{out}/largest", f"{out}/picked"], axis=-1)
    del largest
    indices.type = ir.TensorType(ir.DataType.INT64)
    picked = e.op("GatherElements", probabilities, indices, name=f"{out}/weights", axis=-1)
    if node.attributes["norm_topk_prob"]:
        divisor = e.reduce_sum(picked, -1, name=f"{out}/sum")
        if epsilon := cast(float, node.attributes.get("norm_epsilon", 0.0)):
            divisor = e.op("Add", divisor, e.number(epsilon), name=f"{out}/divisor")
        picked = e.op("Div", picked, divisor, name=f"{out}/normed")
    nothing = e.op("Sub", probabilities, probabilities, name=f"{out}/nothing")
    weights = e.op("ScatterElements", nothing, indices, picked, name=f"{out}/of_all", axis=-1)
    rows = e.op("Unsqueeze", hidden, e.ints(1), name=f"{out}/rows")
    both = e.op("MatMul", rows, gate_up, name=f"{out}/gate_up")
    if gate_up_bias:
        both = e.op("Add", both, _of_experts(e, gate_up_bias), name=f"{out}/gate_up_biased")
    gate, up = e.split(both, [inner, inner], [f"{out}/gate", f"{out}/up"])
    angle = gate
    if limit := cast(float, node.attributes.get("swiglu_limit", 0.0)):
        gate = e.op("Min", gate, e.number(limit, e.dtype), name=f"{out}/kept_gate")
        up = e.op("Clip", up, e.number(-limit, e.dtype), e.number(limit, e.dtype), name=f"{out}/kept_up")
        up = e.op("Add", up, e.number(1.0, e.dtype), name=f"{out}/factor")
        alpha = cast(float, node.attributes.get("swiglu_alpha", 1.0))
        angle = e.op("Mul", gate, e.number(alpha, e.dtype), name=f"{out}/angle")
    if node.attributes.get("uses_gelu", 0):
        active = _gelu_of(e, gate, f"{out}/active", "tanh")
    else:
        active = e.op("Mul", gate, e.op("Sigmoid", angle, name=f"{out}/sigmoid"), name=f"{out}/active")
    results = e.op("MatMul", e.op("Mul", active, up, name=f"{out}/gated"), down, name=f"{out}/results")
    if down_bias:
        results = e.op("Add", results, _of_experts(e, down_bias), name=f"{out}/results_biased")
    by_expert = e.op("Transpose", weights, name=f"{out}/by_expert", perm=[0, 2, 1])
    columns = e.op("Unsqueeze", by_expert, e.ints(3), name=f"{out}/columns")
    weighted = e.op("Mul", e.cast(results, FLOAT), columns, name=f"{out}/weighted")
    total = e.reduce_sum(weighted, 1, name=f"{out}/total", keepdims=False)
    e.alias(out, e.cast(total, e.dtype))


def _in_best_groups(e: Emitter, node: Node, values: ir.Value) -> ir.Value:
    """Replace the values of experts outside of a row's best groups by a number below all others."""
    (out,) = node.outputs
    num_groups, top_groups, best = (cast(int, node.attributes[name]) for name in EXPERT_GROUPS)
    groups = e.reshape(values, 0, 0, num_groups, -1, name=f"{out}/groups")
    names = [f"{out}/group_best", f"{out}/best_places"]
    largest, places = e.ops("TopK", groups, e.ints(best), names=names, axis=-1)
    ranks = e.reduce_sum(largest, -1, name=f"{out}/ranks", keepdims=False)
    names = [f"{out}/open_ranks", f"{out}/open_groups"]
    open_ranks, open_groups = e.ops("TopK", ranks, e.ints(top_groups), names=names, axis=-1)
    places.type = open_groups.type = ir.TensorType(ir.DataType.INT64)
    penalties = e.op("Add", e.op("Sub", ranks, ranks, name=f"{out}/no_rank"), e.number(-1e9), name=f"{out}/closed")
    none = e.op("Sub", open_ranks, open_ranks, name=f"{out}/no_penalty")
    penalties = e.op("ScatterElements", penalties, open_groups, none, name=f"{out}/penalties", axis=-1)
    kept = e.op("Add", groups, e.op("Unsqueeze", penalties, e.ints(3), name=f"{out}/by_group"), name=f"{out}/in_groups")
    return e.reshape(kept, 0, 0, -1, name=f"{out}/kept")


def _of_experts(e: Emitter, bias: str) -> ir.Value:
    """Return biases [E, N] as [E, 1, N]."""
    return e.op("Unsqueeze", e.read(bias, e.dtype), e.ints(1), name=f"{bias}/rows")


def finish(e: Emitter, op: str, *inputs: ir.Value, dtype: ir.DataType | None, name: str, **attributes: Any) -> ir.Value:
    """Add the last node of a lowering in float32, and a cast to `dtype` if that differs."""
    if inputs[0].dtype == dtype:
        return e.op(op, *inputs, name=name, **attributes)
    wide = e.op(op, *inputs, name=f"{name}/wide", **attributes)
    assert dtype is not None
    return e.op("Cast", wide, name=name, dtype=dtype, to=int(dtype))


LOWERINGS: dict[tuple[str, str], Lowering] = {
    ("", "Add"): _elementwise,
    ("", "Concat"): _concat,
    ("", "Gather"): _embedding,
    ("", "Gelu"): _gelu,
    ("", "LayerNormalization"): _layer_norm,
    ("", "MatMul"): _matmul,
    ("", "Mul"): _elementwise,
    ("", "RMSNormalization"): _rms_norm,
    ("", "Relu"): _elementwise,
    ("", "Sigmoid"): _elementwise,
    ("", "Softplus"): _softplus,
    ("", "Split"): _split,
    ("", "Tanh"): _elementwise,
    ("", "ThresholdedRelu"): _thresholded_relu,
    (DOMAIN, "FloatLinear"): _float_linear,
    (DOMAIN, "HeadNorm"): _head_norm,
    (DOMAIN, "QuickGelu"): _quick_gelu,
    (DOMAIN, "RoutedExperts"): _routed_experts,
    (DOMAIN, "Xielu"): _xielu,
}
"""Lowerings by domain and operator."""
