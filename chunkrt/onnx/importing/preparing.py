"""Rewriting of a foreign decoder to an equivalent one that the passes recognise and that ONNX Runtime can run on a CPU.

The rewritten decoder also serves as the original with which an import is compared. Its weights stay in their files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from chunkrt.onnx.importing.draft import CONTRIB
from chunkrt.onnx.importing.reading import sort_nodes
from chunkrt.onnx.importing.signature import Signature

PREPARED_KEY = "chunkrt.prepared"
"""Metadata key of a model that was changed after it was read."""

NORM_WEIGHTS = (14, 15)
"""Inputs of GroupQueryAttention: weights of the norms of single heads of queries and keys."""

ROWWISE = ("Add", "Cast", "Div", "Identity", "MatMul", "MatMulNBits", "Mul", "Tanh")
"""Operators between the last hidden rows and the logits."""

OTHER_OPTIONS = ("softcap", "qk_matmul_output_mode", "softmax_precision", "q_num_heads", "kv_num_heads")
"""Attributes of ONNX's Attention with effects that its form in small operators does not have."""

LARGEST = np.iinfo(np.int32).max


def prepare(proto: onnx.ModelProto, signature: Signature, path: Path) -> None:
    """Rewrite a decoder in place.

    Ensures: logits and states are the only outputs, all rows have logits, bfloat16 is replaced by float32, norms of
    heads inside GroupQueryAttention are nodes before it, and the operator Attention has states or is written as small
    operators.
    """
    steps: tuple[Callable[[onnx.GraphProto, Signature], bool], ...] = (
        _without_extra_outputs,
        _with_all_logits,
        _with_norms_before_attention,
        _in_float32,
        _with_attention_in_small_operators,
    )
    if any([step(proto.graph, signature) for step in steps]):  # noqa: C419 - every step is to run
        sort_nodes(proto.graph, path)
        proto.metadata_props.add(key=PREPARED_KEY, value="1")


def is_prepared(proto: onnx.ModelProto) -> bool:
    """Return whether a model was rewritten after it was read."""
    return any(entry.key == PREPARED_KEY for entry in proto.metadata_props)


def _without_extra_outputs(graph: onnx.GraphProto, signature: Signature) -> bool:
    kept = {signature.logits, *(state.present for state in signature.states.values())}
    extra = [value for value in graph.output if value.name not in kept]
    for value in extra:
        graph.output.remove(value)
    return bool(extra)


def _with_all_logits(graph: onnx.GraphProto, signature: Signature) -> bool:
    """Remove the selection of the last row before the LM head, because chunkrt selects rows itself."""
    writers = {name: node for node in graph.node for name in node.output}
    node = writers.get(signature.logits)
    while node is not None and node.op_type in ROWWISE:
        node = writers.get(node.input[0])
    picked = node
    if node is not None and node.op_type == "Unsqueeze" and _ints(graph, node, 1, "axes") == [1]:
        picked = writers.get(node.input[0])
    if node is None or picked is None or not _is_last_row(graph, picked, keeps_axis=picked is node):
        return False
    for reader in graph.node:
        reader.input[:] = [picked.input[0] if name == node.output[0] else name for name in reader.input]
    graph.node.remove(node)
    if picked is not node and not any(picked.output[0] in reader.input for reader in graph.node):
        graph.node.remove(picked)
    logits = next(value for value in graph.output if value.name == signature.logits)
    logits.type.tensor_type.ClearField("shape")
    del graph.value_info[:]
    return True


def _is_last_row(graph: onnx.GraphProto, node: onnx.NodeProto, *, keeps_axis: bool) -> bool:
    """Return whether a node picks the last of the rows [batch, T, H]."""
    if node.op_type == "Gather":
        axis = next((a.i for a in node.attribute if a.name == "axis"), 0)
        indices = _constant(graph, node.input[1])
        is_row = indices is not None and indices.reshape(-1).tolist() == [-1]
        return axis == 1 and is_row and indices is not None and indices.ndim == int(keeps_axis)
    if node.op_type != "Slice" or not keeps_axis:
        return False
    starts, ends = _ints(graph, node, 1, "starts"), _ints(graph, node, 2, "ends")
    axes, steps = _ints(graph, node, 3, "axes"), _ints(graph, node, 4, "steps")
    is_last = starts == [-1] and ends is not None and len(ends) == 1 and ends[0] >= LARGEST
    return is_last and axes == [1] and steps in (None, [1])


def _with_attention_in_small_operators(graph: onnx.GraphProto, signature: Signature) -> bool:
    """Write ONNX's Attention over all heads of queries, keys and values as products around a Softmax.

    torch exports its scaled_dot_product_attention as this operator, after it has rotated, appended and repeated the
    keys with small operators. An Attention that appends to states itself, has other options, or has operands of unknown
    types is kept.
    """
    known = {value.name: value.type.tensor_type for value in graph.value_info}
    types = {name: kind.elem_type for name, kind in known.items()}

    def heads(name: str) -> int:
        sizes = known[name].shape.dim if name in known else []
        return sizes[1].dim_value if len(sizes) == 4 else 0

    found = [
        node
        for node in graph.node
        if node.op_type == "Attention"
        and node.domain in ("", "ai.onnx")
        and heads(node.input[0]) == heads(node.input[1])
    ]
    expanded = [(node, made) for node in found if (made := _small_operators(graph, node, types))]
    for node, made in expanded:
        graph.node.remove(node)
        graph.node.extend(made)
    return bool(expanded)


def _small_operators(
    graph: onnx.GraphProto, node: onnx.NodeProto, types: Mapping[str, int]
) -> list[onnx.NodeProto] | None:
    query, key, value, *optional = list(node.input)
    mask, others = (optional[0], optional[1:]) if optional else ("", [])
    options = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    kind, scale, is_causal = types.get(query), options.get("scale"), options.pop("is_causal", 0)
    is_plain = not any(others) and not any(node.output[1:]) and not any(options.get(name) for name in OTHER_OPTIONS)
    if kind not in (TensorProto.FLOAT, TensorProto.FLOAT16) or scale is None or not is_plain:
        return None
    if mask and (is_causal or types.get(mask) not in (TensorProto.BOOL, kind)):
        return None
    nodes: list[onnx.NodeProto] = []

    def add(op: str, *inputs: str, to: str = "", **attributes: Any) -> str:
        name = to or f"{node.name}/{op}_{len(nodes)}"
        nodes.append(helper.make_node(op, inputs, [name], name=name, **attributes))
        return name

    def constant(name: str, number: float | list[int], dtype: Any) -> str:
        name = f"{node.name}/{name}"
        graph.initializer.append(numpy_helper.from_array(np.array(number, dtype), name))
        return name

    dtype = helper.tensor_dtype_to_np_dtype(kind)
    scaled = add("Mul", query, constant("scale", scale, dtype))
    scores = add("MatMul", scaled, add("Transpose", key, perm=[0, 1, 3, 2]))
    if is_causal:
        zero, one = constant("zero", 0, np.int64), constant("one", 1, np.int64)
        axis = constant("axis", 2, np.int64)
        rows, keys = (add("Range", zero, add("Gather", add("Shape", name), axis), one) for name in (query, key))
        seen = add("LessOrEqual", keys, add("Unsqueeze", rows, constant("last", [-1], np.int64)))
        mask, types = seen, {seen: TensorProto.BOOL}
    if mask and types[mask] == TensorProto.BOOL:
        shown, hidden = constant("shown", 0, dtype), constant("hidden", np.finfo(dtype).min, dtype)
        mask = add("Where", mask, shown, hidden)
    if mask:
        scores = add("Add", scores, mask)
    add("MatMul", add("Softmax", scores, axis=-1), value, to=node.output[0])
    return nodes


def _with_norms_before_attention(graph: onnx.GraphProto, signature: Signature) -> bool:
    nodes, is_changed = list(graph.node), False
    sizes = {tensor.name: tensor.dims[0] for tensor in graph.initializer if len(tensor.dims) == 1}
    for node in nodes:
        weights = [node.input[i] if i < len(node.input) else "" for i in NORM_WEIGHTS]
        is_attention = (node.domain, node.op_type) == (CONTRIB, "GroupQueryAttention")
        if not is_attention or not all(weights) or not sizes.keys() >= set(weights):
            continue
        graph.node.extend(_norm_heads(graph, node, sizes[weights[0]]))
        is_changed = True
    return is_changed


def _norm_heads(graph: onnx.GraphProto, attention: onnx.NodeProto, head_dim: int) -> list[onnx.NodeProto]:
    """Add nodes for the norms of an attention node, and make the attention node read their results."""
    options = {a.name: helper.get_attribute_value(a) for a in attention.attribute}
    counts = [options["num_heads"], options["kv_num_heads"]]
    nodes = []

    def add(op: str, inputs: list[str], name: str, **attributes: Any) -> str:
        name = f"{attention.name}/{name}"
        nodes.append(helper.make_node(op, inputs, [f"{name}/output_0"], name=name, **attributes))
        return f"{name}/output_0"

    def numbers(name: str, values: list[int]) -> str:
        name = f"{attention.name}/{name}"
        graph.initializer.append(numpy_helper.from_array(np.array(values, np.int64), name))
        return name

    if not attention.input[1]:
        parts = [count * head_dim for count in (counts[0], counts[1], counts[1])]
        outputs = [f"{attention.name}/{part}/output_0" for part in "qkv"]
        inputs = [attention.input[0], numbers("parts", parts)]
        nodes.append(helper.make_node("Split", inputs, outputs, name=f"{attention.name}/Split", axis=-1))
        attention.input[:3] = outputs
    usual = options.get("qk_norm_epsilon", 1e-6)
    for place, kind in enumerate("qk"):
        heads = numbers(f"{kind}_norm/heads", [0, -1, head_dim])
        rows = numbers(f"{kind}_norm/rows", [0, -1, counts[place] * head_dim])
        by_head = add("Reshape", [attention.input[place], heads], f"{kind}_norm/Reshape_1")
        normalised = add(
            "SimplifiedLayerNormalization",
            [by_head, attention.input[NORM_WEIGHTS[place]]],
            f"{kind}_norm/SimplifiedLayerNormalization",
            axis=-1,
            epsilon=options.get(f"{kind}_norm_epsilon", usual),
            stash_type=1,
        )
        attention.input[place] = add("Reshape", [normalised, rows], f"{kind}_norm/Reshape_2")
    for place in NORM_WEIGHTS:
        attention.input[place] = ""
    while not attention.input[-1]:
        attention.input.pop()
    for option in [a for a in attention.attribute if a.name in ("qk_norm_epsilon", "q_norm_epsilon", "k_norm_epsilon")]:
        attention.attribute.remove(option)
    return nodes


def _in_float32(graph: onnx.GraphProto, signature: Signature) -> bool:
    """Compute in float32 instead of bfloat16, for which ONNX Runtime's CPU provider has no operators.

    Weights are unchanged and are cast where they are read.
    """
    return _cast_halves(graph, frozenset())


def _cast_halves(graph: onnx.GraphProto, outer: frozenset[str]) -> bool:
    """Replace bfloat16 in a graph and in the graphs of its nodes; `outer` holds the names of bfloat16 values of
    enclosing graphs.
    """
    half, whole = TensorProto.BFLOAT16, TensorProto.FLOAT
    names = {tensor.name for tensor in graph.initializer if tensor.data_type == half}
    names |= {n.output[0] for n in graph.node for a in n.attribute if n.op_type == "Constant" and a.t.data_type == half}
    values = [v for v in (*graph.input, *graph.output) if v.type.tensor_type.elem_type == half]
    inner = [g for n in graph.node for a in n.attribute for g in (*([a.g] if a.HasField("g") else []), *a.graphs)]
    is_changed = any([_cast_halves(each, outer | names) for each in inner])  # noqa: C419 - every graph is rewritten
    read = {name for node in graph.node for name in node.input}
    if not names and not values and read.isdisjoint(outer):
        return is_changed
    for value in values:
        value.type.tensor_type.elem_type = whole
    del graph.value_info[:]
    for node in graph.node:
        node.input[:] = [f"{name}.float32" if name in names | outer else name for name in node.input]
        for attribute in node.attribute:
            if attribute.name in ("to", "dtype") and attribute.i == half:
                attribute.i = whole
            elif attribute.t.data_type == half and node.op_type == "ConstantOfShape":
                attribute.t.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(attribute.t).astype(np.float32)))
    graph.node.extend(helper.make_node("Cast", [n], [f"{n}.float32"], name=f"{n}.Cast", to=whole) for n in names)
    return True


def _constant(graph: onnx.GraphProto, name: str) -> np.ndarray | None:
    """Return the values of an initializer or a Constant."""
    found = next((tensor for tensor in graph.initializer if tensor.name == name), None)
    if found is None:
        nodes = (node for node in graph.node if node.op_type == "Constant" and name in node.output)
        found = next((a.t for node in nodes for a in node.attribute if a.name == "value"), None)
    return None if found is None or found.external_data else numpy_helper.to_array(found)


def _ints(graph: onnx.GraphProto, node: onnx.NodeProto, place: int, name: str) -> list[int] | None:
    """Return whole numbers from a node's input or, in early opsets, from its attribute; None if the node has
    neither.
    """
    if attribute := next((a for a in node.attribute if a.name == name), None):
        return list(attribute.ints)
    if place >= len(node.input) or not node.input[place]:
        return None
    values = _constant(graph, node.input[place])
    return None if values is None else values.reshape(-1).tolist()
