"""Table of all operators: names, inputs and outputs, FLOPs, and whether they are dynamic.

A plan that was read from a file is checked against the table (`Plan.from_json`), so that backends and kernels can rely
on its contents. A plug-in adds a row for each operator of its own by `register_operator`; an operator without a row is
not checked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from sys import float_info
from typing import Any

from chunkrt.errors import ConfigError
from chunkrt.graph.linear_attention import find_variant
from chunkrt.graph.plan import (
    ATTENTION_OPS,
    CACHES,
    DOMAIN,
    DUAL_CHUNK_ATTRIBUTES,
    INPUTS,
    Node,
    Plan,
    Subgraph,
    Tensor,
    read_only_caches,
    reads_shared_cache,
    resolve,
)

Dimension = int | str
Shape = tuple[Dimension, ...]
Attributes = Mapping[str, Any]

MOST_PARTS = 8
"""Limit of the inputs that Concat joins."""

EXPERT_GROUPS = ("num_groups", "top_groups", "best_of_group")
"""Attributes of routed experts that are chosen in groups; see `ops.routed_experts`."""

MOST = 2**31 - 1
"""Limit of every whole number in a plan."""


@dataclass(frozen=True, kw_only=True)
class Operator:
    """One row of the table.

    Attributes:
        num_inputs: number of inputs, including optional inputs.
        optional: indices of inputs that may be missing (an empty string).
        least_inputs: number of inputs after which the others may be omitted; None if no input may be omitted.
        indices: indices of int64 inputs; other inputs are float32.
        weights: indices of inputs that are weights, which a form that is a class gets once, in its `prepare`.
        attributes: types of the attributes; all except `defaulted` are required.
        output: computes the shape of the first output from the attributes and the shapes of the inputs (None for a
            missing input); raises ValueError if they do not match. The plan states the shapes of other outputs.
        name: the canonical name, if it is not ONNX's name in lower case.
        is_dynamic: True if the computation depends on position, state, run-time indices, other ranks or on which values
            are large. The node then runs on the CPU unless placed.
        flops: FLOPs for one row of the result; for attention, for each pair of a row and a position that it attends to.
            None for operators with one FLOP for each element of their results.
        expansion: for an operator of a plug-in: an ONNX function in ONNX's text form, opset 23, without its header:
            "Name <attributes> (inputs) => (outputs) { nodes }". Its inputs and attributes are the node's; its outputs
            are the result, then the new states. It may call functions of the domain "chunkrt". If it is empty, the
            operator cannot be exported, and `onnxrt` leaves it to the operator's function.
    """

    num_inputs: int
    output: Callable[[Attributes, Sequence[Any]], Shape]
    attributes: Mapping[str, type] = field(default_factory=dict)
    optional: tuple[int, ...] = ()
    least_inputs: int | None = None
    indices: tuple[int, ...] = ()
    weights: tuple[int, ...] = ()
    defaulted: tuple[str, ...] = ()
    name: str = ""
    is_dynamic: bool = False
    flops: Callable[[Attributes, Sequence[Any]], int] | None = None
    expansion: str = ""


def check_node(
    domain: str, op: str, attributes: Attributes, inputs: Sequence[tuple[str, Shape] | None], output: Shape
) -> None:
    """Check one node against its operator's row.

    Args:
        inputs: type and shape of each input, None for a missing input.
        output: the shape of its first output.

    Raises:
        ValueError: the operator is unknown, or is used in an unsupported way.
    """
    if (row := find_operator(domain, op)) is None:
        require(domain not in ("", DOMAIN), f"unknown operator {op!r}")
        return
    least = row.num_inputs if row.least_inputs is None else row.least_inputs
    require(least <= len(inputs) <= row.num_inputs, f"it has {len(inputs)} inputs, expected {row.num_inputs}")
    missing = [place for place, given in enumerate(inputs) if given is None and place not in row.optional]
    require(not missing, f"its inputs {missing} are missing")
    for place, given in enumerate(inputs):
        dtype = "int64" if place in row.indices else "float32"
        require(given is None or given[0] == dtype, f"its input {place} is {given and given[0]}, expected {dtype}")
    for name in row.attributes.keys() | attributes.keys():
        require(name in row.attributes, f"it has no attribute {name!r}")
        if name not in attributes:
            require(name in row.defaulted, f"its attribute {name!r} is missing")
            continue
        kind, value = row.attributes[name], attributes[name]
        is_number = type(value) is kind or (kind is float and type(value) is int)
        require(is_number, f"its attribute {name!r} is {value!r}, expected {kind.__name__}")
        require(kind is not int or -1 <= value <= MOST, f"its attribute {name!r} is {value!r}")
        require(kind is not float or abs(value) <= float_info.max, f"its attribute {name!r} is not a finite number")
    expected = row.output(attributes, [given and given[1] for given in inputs])
    require(output == expected, f"it returns {list(output)}, not {list(expected)}")


def require(condition: object, message: str) -> None:
    """Raise ValueError unless a condition holds."""
    if not condition:
        raise ValueError(message)


def _matrix(shape: Shape) -> Shape:
    require(len(shape) == 2, f"its operand is {list(shape)}, expected rows and columns")
    return shape


def _same(attributes: Attributes, inputs: Sequence[Shape]) -> Shape:
    return _matrix(inputs[0])


def _elementwise(attributes: Attributes, inputs: Sequence[Shape]) -> Shape:
    """Check operands that broadcast: two matrices, or a matrix and a value for each column or row, or a single
    value.
    """
    left, right = inputs
    require(
        right == left or right in (left[1:], (*left[:1], 1), (1,), ()),
        f"its operands {list(left)} and {list(right)} do not match",
    )
    return _matrix(left)


def _gather(attributes: Attributes, inputs: Sequence[Shape]) -> Shape:
    table, rows = _matrix(inputs[0]), inputs[1]
    require(len(rows) == 1 and attributes.get("axis", 0) == 0, f"it cannot pick {list(rows)} of {list(table)}")
    return (rows[0], table[1])


def _product(attributes: Attributes, inputs: Sequence[Shape]) -> Shape:
    left, right = map(_matrix, inputs)
    require(left[1] == right[0], f"it cannot multiply {list(left)} with {list(right)}")
    return (left[0], right[1])


def _norm(attributes: Attributes, inputs: Sequence[Shape]) -> Shape:
    value, weight = _matrix(inputs[0]), inputs[1]
    require(
        weight == value[1:] and attributes.get("axis", -1) in (-1, 1),
        f"it cannot normalise {list(value)} with {list(weight)}",
    )
    return value


def _layer_norm(attributes: Attributes, inputs: Sequence[Shape]) -> Shape:
    require(inputs[1] == inputs[2], f"its weight {list(inputs[1])} and bias {list(inputs[2])} differ")
    return _norm(attributes, inputs)


def _positions(attributes: Attributes, inputs: Sequence[Shape]) -> Shape:
    hidden, table, position = inputs
    require(_matrix(table)[1] == _matrix(hidden)[1], f"its table {list(table)} does not match {list(hidden)}")
    require(position == (1,), f"its position is {list(position)}, expected [1]")
    return hidden


def _xielu(attributes: Attributes, inputs: Sequence[Shape]) -> Shape:
    require(inputs[1] == (4,), f"its parameters are {list(inputs[1])}, expected [4]")
    return _matrix(inputs[0])


def _selective_scan(attributes: Attributes, inputs: Sequence[Shape]) -> Shape:
    x, step, bc, rates, skip, state = inputs
    rows, channels = _matrix(x)
    state_dim = _matrix(rates)[0]
    require(step == x and skip == (channels,), f"its step {list(step)} and skip {list(skip)} do not match {list(x)}")
    require(rates == state == (state_dim, channels), f"its rates {list(rates)} and state {list(state)} do not match")
    require(bc == (rows, 2 * int(state_dim)), f"its b and c {list(bc)} do not match {state_dim} states")
    return x


def _selective_scan_flops(attributes: Attributes, inputs: Sequence[Shape]) -> int:
    return 7 * _size(inputs[3])


def _concat(attributes: Attributes, inputs: Sequence[Shape]) -> Shape:
    shapes = [_matrix(shape) for shape in inputs]
    rows, axis = {shape[0] for shape in shapes}, attributes.get("axis", -1)
    is_possible = len(rows) == 1 and axis in (-1, 1) and all(isinstance(columns, int) for _, columns in shapes)
    require(is_possible, f"it cannot join {[list(shape) for shape in shapes]} along axis {axis}")
    return (shapes[0][0], sum(int(columns) for _, columns in shapes))


def _split(attributes: Attributes, inputs: Sequence[Shape]) -> Shape:
    rows, columns = _matrix(inputs[0])
    parts, axis = attributes["num_outputs"], attributes.get("axis", 0)
    is_possible = parts > 0 and axis in (-1, 1) and isinstance(columns, int) and columns % parts == 0
    require(is_possible, f"it cannot split {columns} columns in {parts} along axis {axis}")
    return (rows, int(columns) // parts)


def _head_norm(attributes: Attributes, inputs: Sequence[Shape]) -> Shape:
    value, (heads, columns) = _matrix(inputs[0]), _matrix(inputs[1])
    require(
        int(heads) * int(columns) <= int(value[1]), f"it cannot normalise {heads} heads of {columns} in {list(value)}"
    )
    return value


def _attention(attributes: Attributes, inputs: Sequence[Shape]) -> Shape:
    qkv, position, rope_position, cos, sin, keys, values, *others = inputs
    sinks, bias = [*others, None, None][:2]
    positions = (position, rope_position)
    heads, kv_heads, head_dim = (attributes[name] for name in ("num_heads", "num_kv_heads", "head_dim"))
    rotary, window = attributes["rotary_dim"], attributes["window"]
    require(min(heads, kv_heads, head_dim, rotary) > 0 and window >= 0, f"its sizes {dict(attributes)} are invalid")
    require(heads % kv_heads == 0, f"{heads} heads cannot share {kv_heads} evenly")
    require(rotary % 2 == 0 and rotary <= head_dim, f"it cannot rotate {rotary} of {head_dim} columns")
    appends = attributes.get("appends", 1)
    require(appends in (0, 1), f"its attribute 'appends' is {appends}")
    columns = (heads + 2 * kv_heads * appends) * head_dim
    require(_matrix(qkv)[1] == columns, f"its q, k and v {list(qkv)} do not match its heads")
    require(all(position == (1,) for position in positions), f"its positions are {positions}, expected [1]")
    require(cos == sin and _matrix(cos)[1] == rotary // 2, f"its rotary tables {list(cos)} and {list(sin)} are invalid")
    require(sinks in (None, (heads,)), f"its sinks are {sinks}, expected {[heads]}")
    require(bias in (None, qkv[1:]), f"the bias {bias} does not match q, k and v")
    require(attributes.get("soft_cap", 0.0) >= 0, f"its soft cap is {attributes.get('soft_cap')}, expected 0 or more")
    period, limit = (attributes.get(name, 0) for name in DUAL_CHUNK_ATTRIBUTES[:2])
    if period or limit:
        require(0 < period <= limit, f"its sizes of dual chunks are {period} and {limit}")
        require(not window, "it has dual chunks and a window")
    require(period or "long_context_from" not in attributes, "it has a factor without dual chunks")
    slots = keys[1] if len(keys) == 3 and keys[1] in ("P", "W" if window and appends else "P") else "P"
    cache = (kv_heads, slots, head_dim)
    require(keys == values == cache, f"its caches are {list(keys)} and {list(values)}, expected {list(cache)}")
    return (qkv[0], heads * head_dim)


def _linear_attention(attributes: Attributes, inputs: Sequence[Any]) -> Shape:
    qkv, gate, beta, weight, bias, state, matrices, *skip = inputs
    variant = find_variant(attributes["attn_type"])
    heads, key_dim, value_dim = (attributes[name] for name in ("num_v_heads", "head_k_dim", "head_v_dim"))
    require(min(heads, value_dim) > 0, f"its sizes {dict(attributes)} are invalid")
    require(
        len(weight) == 3 and weight[1] == 1 and weight[2] > 1, f"its convolution has invalid weights {list(weight)}"
    )
    channels = weight[0]
    require(
        _matrix(qkv)[1] == variant.columns_per_channel * channels,
        f"its input {list(qkv)} does not match {channels} channels",
    )
    require(bias in (None, (channels,)), f"its convolution has invalid biases {bias}")
    require(state == (channels, weight[2] - 1), f"its convolution has the invalid state {list(state)}")
    if variant.is_recurrent:
        steps = (qkv[0], heads)
        key_heads = attributes["num_k_heads"]
        require(key_heads > 0 and heads % key_heads == 0, f"{heads} heads cannot share {key_heads} evenly")
        require({gate, beta} <= {None, steps}, f"its gates are {gate} and {beta}, expected {list(steps)}")
        num_gates = sum(shape is not None for shape in (gate, beta))
        require(variant.num_gates in (None, num_gates), f"it has {num_gates} gates, expected {variant.num_gates}")
        require(
            matrices == (heads, key_dim, value_dim) and key_dim > 0, f"its state {matrices} does not match its heads"
        )
    else:
        require((gate, beta, matrices) == (None, None, None), "it has inputs of a recurrence, but its kind has none")
    of_heads = [(heads,)] if variant.has_skip else []
    require(skip == of_heads, f"its inputs after the states are {skip}, expected {of_heads}")
    return (qkv[0], heads * value_dim)


def _experts(attributes: Attributes, inputs: Sequence[Shape]) -> Shape:
    hidden, logits, gate_up, down, *biases = inputs
    selection_bias, gate_up_bias, down_bias = [*biases, None, None, None][:3]
    rows, width = _matrix(hidden)
    require(len(gate_up) == len(down) == 3, f"its experts {list(gate_up)} and {list(down)} do not match")
    experts, _, inner = gate_up
    require(logits == (rows, experts), f"its logits {list(logits)} do not match {experts} experts")
    require(gate_up[1] == width and int(inner) % 2 == 0, f"its experts {list(gate_up)} do not match its input")
    require(down == (experts, int(inner) // 2, width), f"its experts {list(gate_up)} and {list(down)} do not match")
    require(1 <= attributes["top_k"] <= int(experts), f"it cannot pick {attributes['top_k']} of {experts} experts")
    groups, open_groups, best = (attributes.get(name, 1) for name in EXPERT_GROUPS)
    require(min(groups, open_groups, best) > 0, f"its groups of experts {dict(attributes)} are invalid")
    require(int(experts) % groups == 0, f"{experts} experts cannot form {groups} groups")
    require(open_groups <= groups, f"it cannot pick {open_groups} of {groups} groups")
    size = int(experts) // groups
    require(best <= size, f"it cannot rank groups of {size} experts by their {best} best")
    require(
        attributes["top_k"] <= open_groups * size,
        f"it cannot pick {attributes['top_k']} of the {open_groups * size} experts of {open_groups} groups",
    )
    require(selection_bias in (None, (experts,)), f"its selection bias {selection_bias} is not [{experts}]")
    require(gate_up_bias in (None, (experts, inner)), f"its bias {gate_up_bias} does not match {list(gate_up)}")
    require(down_bias in (None, (experts, width)), f"its bias {down_bias} does not match {list(down)}")
    limit = attributes.get("swiglu_limit", 0.0)
    require(limit >= 0, f"its swiglu_limit is {limit}, expected 0 or more")
    return hidden


def _low_rank(attributes: Attributes, inputs: Sequence[Shape]) -> Shape:
    product, hidden, adapters = inputs
    is_sound = _matrix(product)[0] == _matrix(hidden)[0] == adapters[0] and len(adapters) == 1
    require(is_sound, f"the rows of {list(product)}, {list(hidden)} and {list(adapters)} differ")
    return product


def _sum(attributes: Attributes, inputs: Sequence[Shape]) -> Shape:
    require(inputs[1] == (1,), f"its position is {list(inputs[1])}")
    return _matrix(inputs[0])


def _gathered(attributes: Attributes, inputs: Sequence[Shape]) -> Shape:
    rows, _ = _sum(attributes, inputs)
    return rows, sum(len(part) for part in column_ranges(attributes["columns"]))


def _picked(attributes: Attributes, inputs: Sequence[Shape]) -> Shape:
    rows, width = _matrix(inputs[0])[0], int(inputs[0][1])
    ranges = column_ranges(attributes["columns"])
    require(all(r.stop <= width or r.start >= width for r in ranges), f"its columns end inside of {width}")
    return rows, sum(len(part) for part in ranges)


def column_ranges(columns: str) -> list[range]:
    """Return the ranges in the attribute `columns` of an operator. Raises ValueError if it is invalid."""
    try:
        ranges = [range(*map(int, part.split(":", 1))) for part in columns.split(",")]
    except (TypeError, ValueError):
        ranges = []
    require(ranges and all(0 <= r.start < r.stop <= MOST for r in ranges), f"its columns are {columns[:40]!r}")
    return ranges


def _size(shape: Shape) -> int:
    return prod(map(int, shape))


def _product_flops(attributes: Attributes, inputs: Sequence[Shape]) -> int:
    return 2 * _size(inputs[1])


def _attention_flops(attributes: Attributes, inputs: Sequence[Shape]) -> int:
    """Return the FLOPs of a score and its weighted value, for all heads."""
    return 4 * int(attributes["num_heads"] * attributes["head_dim"])


def _linear_attention_flops(attributes: Attributes, inputs: Sequence[Any]) -> int:
    """Return the FLOPs of the convolution's taps, and those for every element of the state matrices: 1 for its decay, 2
    for its update, 2 for its product with q and, except in Mamba-2, 2 for its product with k.
    """
    of_element = 5 if attributes["attn_type"] == "mamba2" else 7
    return 2 * _size(inputs[3]) + (0 if inputs[6] is None else of_element * _size(inputs[6]))


def _experts_flops(attributes: Attributes, inputs: Sequence[Shape]) -> int:
    """Return the FLOPs of the experts that the router picks for a row."""
    return 2 * int(attributes["top_k"]) * sum(_size(shape[1:]) for shape in inputs[2:4])


_ATTENTION = Operator(
    name="cached_attention",
    is_dynamic=True,
    flops=_attention_flops,
    num_inputs=8,
    least_inputs=7,
    optional=(7,),
    output=_attention,
    indices=(1, 2),
    weights=(3, 4, 7, 8),
    attributes={
        **dict.fromkeys(("num_heads", "num_kv_heads", "head_dim", "rotary_dim", "window", "appends"), int),
        **dict.fromkeys(DUAL_CHUNK_ATTRIBUTES, int),
        **dict.fromkeys(("scale", "soft_cap"), float),
    },
    defaulted=("soft_cap", "appends", *DUAL_CHUNK_ATTRIBUTES),
)
_LINEAR_ATTENTION = Operator(
    is_dynamic=True,
    flops=_linear_attention_flops,
    num_inputs=8,
    least_inputs=7,
    output=_linear_attention,
    optional=(1, 2, 4, 6),
    weights=(3, 4, 7),
    attributes={
        "attn_type": str,
        **dict.fromkeys(("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim", "use_qk_l2norm"), int),
    },
)

OPERATORS: Mapping[tuple[str, str], Operator] = {
    **{("", op): Operator(num_inputs=1, output=_same) for op in ("Relu", "Sigmoid", "Softplus", "Tanh")},
    **{("", op): Operator(num_inputs=2, output=_elementwise) for op in ("Add", "Mul")},
    ("", "Concat"): Operator(
        is_dynamic=True, num_inputs=MOST_PARTS, least_inputs=1, output=_concat, attributes={"axis": int}
    ),
    ("", "Gather"): Operator(
        name="gather_rows",
        is_dynamic=True,
        num_inputs=2,
        output=_gather,
        attributes={"axis": int},
        defaulted=("axis",),
        indices=(1,),
        weights=(0,),
    ),
    ("", "Gelu"): Operator(num_inputs=1, output=_same, attributes={"approximate": str}, defaulted=("approximate",)),
    ("", "LayerNormalization"): Operator(
        name="layer_norm",
        num_inputs=3,
        output=_layer_norm,
        weights=(1, 2),
        attributes={"axis": int, "epsilon": float},
        defaulted=("axis",),
    ),
    ("", "MatMul"): Operator(name="linear", num_inputs=2, output=_product, weights=(1,), flops=_product_flops),
    ("", "RMSNormalization"): Operator(
        name="rms_norm",
        num_inputs=2,
        output=_norm,
        weights=(1,),
        attributes={"axis": int, "epsilon": float},
        defaulted=("axis",),
    ),
    ("", "Split"): Operator(
        num_inputs=1, output=_split, attributes={"axis": int, "num_outputs": int}, defaulted=("axis",)
    ),
    ("", "ThresholdedRelu"): Operator(num_inputs=1, output=_same, is_dynamic=True, attributes={"alpha": float}),
    ("chunkrt", "AddPositions"): Operator(is_dynamic=True, num_inputs=3, output=_positions, weights=(1,), indices=(2,)),
    ("chunkrt", "AllGather"): Operator(
        is_dynamic=True, num_inputs=2, output=_gathered, indices=(1,), attributes={"columns": str}
    ),
    ("chunkrt", "AllReduce"): Operator(is_dynamic=True, num_inputs=2, output=_sum, indices=(1,)),
    ("chunkrt", "CachedAttention"): _ATTENTION,
    ("chunkrt", "FloatLinear"): Operator(num_inputs=2, output=_product, weights=(1,), flops=_product_flops),
    ("chunkrt", "GatherShare"): Operator(
        is_dynamic=True,
        num_inputs=2,
        output=_gather,
        weights=(0,),
        indices=(1,),
        attributes={"first": int, "all_rows": int},
    ),
    ("chunkrt", "HeadNorm"): Operator(num_inputs=2, output=_head_norm, weights=(1,), attributes={"epsilon": float}),
    ("chunkrt", "LinearAttention"): _LINEAR_ATTENTION,
    ("chunkrt", "LowRankSum"): Operator(
        is_dynamic=True, num_inputs=3, output=_low_rank, indices=(2,), attributes={"weight": str}
    ),
    ("chunkrt", "PickColumns"): Operator(is_dynamic=True, num_inputs=1, output=_picked, attributes={"columns": str}),
    ("chunkrt", "QuickGelu"): Operator(is_dynamic=True, num_inputs=1, output=_same),
    ("chunkrt", "RawKeyAttention"): replace(_ATTENTION, num_inputs=9),
    ("chunkrt", "RoutedExperts"): Operator(
        is_dynamic=True,
        flops=_experts_flops,
        num_inputs=7,
        least_inputs=4,
        optional=(4, 5, 6),
        weights=(2, 3, 4, 5, 6),
        output=_experts,
        attributes={
            **dict.fromkeys(("top_k", "norm_topk_prob", "use_sigmoid", "uses_gelu", *EXPERT_GROUPS), int),
            **dict.fromkeys(("norm_epsilon", "swiglu_alpha", "swiglu_limit"), float),
        },
        defaulted=("use_sigmoid", "norm_epsilon", "swiglu_alpha", "swiglu_limit", "uses_gelu", *EXPERT_GROUPS),
    ),
    ("chunkrt", "SelectiveScan"): Operator(
        is_dynamic=True, num_inputs=6, output=_selective_scan, weights=(3, 4), flops=_selective_scan_flops
    ),
    ("chunkrt", "ShadowLinear"): Operator(is_dynamic=True, num_inputs=2, output=_product, weights=(1,)),
    ("chunkrt", "Xielu"): Operator(is_dynamic=True, num_inputs=2, output=_xielu, weights=(1,)),
}


OPERATOR_NAMES = frozenset(op for _, op in OPERATORS)
"""Operators that quantisation treats by name, without a domain; a plug-in's operator has another name."""


_of_plugins: dict[tuple[str, str], Operator] = {}


def register_operator(domain: str, op: str, operator: Operator) -> None:
    """Add the row of a plug-in's operator. Call this where the package is imported by its decoder family.

    Raises:
        ConfigError: the domain or the name is chunkrt's, or the operator has a row already.
    """
    if not domain or domain.partition(".")[0] == DOMAIN:
        raise ConfigError(f"the domain {domain!r} is not free; register {op} in a domain of your own")
    if op in OPERATOR_NAMES:
        raise ConfigError(f"chunkrt has its own {op}; rename that of {domain}")
    if (domain, op) in _of_plugins:
        raise ConfigError(f"the operator {domain}::{op} is already registered")
    _of_plugins[domain, op] = operator


def find_operator(domain: str, op: str) -> Operator | None:
    """Return the row of an operator, chunkrt's or a plug-in's; None if it has none."""
    return OPERATORS.get((domain, op)) or _of_plugins.get((domain, op))


def all_operators() -> tuple[tuple[str, str], ...]:
    """Return the domain and name of each operator with a row, chunkrt's and those of imported plug-ins."""
    return (*OPERATORS, *_of_plugins)


def is_dynamic(domain: str, op: str) -> bool:
    """Return whether a node that is not placed goes to the CPU; an operator without a row goes to the NPU."""
    row = find_operator(domain, op)
    return row is not None and row.is_dynamic


def import_family_of(plan: Plan) -> None:
    """Import the plug-in's family that built a plan, if rows of the plan's operators are missing.

    A compiled model runs without the family, but the family's package holds the rows. If the package is not installed
    or broken, the rows stay unknown.
    """
    nodes = (node for subgraph in plan.subgraphs for node in subgraph.nodes)
    if any(node.domain not in ("", DOMAIN) and find_operator(node.domain, node.op) is None for node in nodes):
        from chunkrt.graph.decoders import PLUGINS

        if plugin := PLUGINS.find(plan.family):
            plugin.load_or_tell()


def check_plan(plan: Plan) -> None:
    """Raise ValueError for an inconsistent plan, or KeyError for an unknown tensor name."""
    import_family_of(plan)
    require(set(plan.inputs) <= INPUTS.keys(), f"its inputs {plan.inputs} are not all known")
    require(1 <= plan.vocab_size <= MOST and 1 <= plan.context_length <= MOST, "its sizes are invalid")
    require(plan.long_context_from is None or 1 <= plan.long_context_from <= MOST, "its longer context is invalid")
    for name, tensor in plan.tensors.items():
        _check_tensor(plan, name, tensor)
    names = [subgraph.name for subgraph in plan.subgraphs]
    require(len(set(names)) == len(names), "two subgraphs share a name")
    nodes = [node.name for subgraph in plan.subgraphs for node in subgraph.nodes]
    require(len(set(nodes)) == len(nodes), "two nodes share a name")
    known, states = set(plan.inputs), set[str]()
    for subgraph in plan.subgraphs:
        is_alone = known.isdisjoint(subgraph.outputs) and states.isdisjoint(subgraph.state)
        require(is_alone, f"{subgraph.name} writes a tensor that another subgraph writes")
        is_filled = states.issuperset(subgraph.shared_state)
        require(is_filled, f"{subgraph.name} reads caches that no earlier subgraph has written")
        _check_subgraph(plan, subgraph, known)
        known.update(subgraph.outputs)
        states.update(subgraph.state)
    require(plan.output in known, f"no subgraph writes its output {plan.output!r}")
    shape = plan.tensors[plan.output].shape
    require(shape == ("R", plan.vocab_size), f"its output {plan.output!r} has the invalid shape {list(shape)}")
    attention = [node for s in plan.subgraphs for node in s.nodes if node.op in ATTENTION_OPS]
    windows = {node.attributes["window"] for node in attention} - {0}
    require(len(windows) <= 1, f"its layers have windows of {windows}; one window is possible")
    rows = plan.context_length * plan.num_rotary_tables
    sizes = {tuple(node.attributes.get(name) for name in DUAL_CHUNK_ATTRIBUTES) for node in attention}
    require(len(sizes) <= 1, f"its layers have dual chunks of {sizes}; one size is possible")
    if plan.rope_period:
        ((_, limit, long_from),) = sizes
        require(long_from == plan.long_context_from, f"its layers have factors from {long_from} on")
        rows = min(rows, int(str(limit)) + 1)
    for node in attention:
        found = plan.tensors[node.inputs[3]].shape[0]
        require(found == rows, f"{node.name!r} has rotary tables of {found} rows, expected {rows}")
    _check_shared_caches(plan, attention)
    tables = {name for node in attention for name in node.inputs[3:5]}
    others = [tensor.name for tensor in plan.tensors.values() if tensor.rotary and tensor.name not in tables]
    require(not others, f"{others} are not rotary tables")


def _check_shared_caches(plan: Plan, attention: Sequence[Node]) -> None:
    """Check that attention over the caches of another node follows that node, and rotates like it."""
    owners: dict[str, Node] = {}
    for node in attention:
        if not reads_shared_cache(node):
            require(
                owners.keys().isdisjoint(node.inputs[CACHES]), f"{node.name!r} fills caches that are filled already"
            )
            owners |= dict.fromkeys(node.inputs[CACHES], node)
            continue
        found = [owners.get(name) for name in node.inputs[CACHES]]
        require(found[0] is not None and found[0] == found[1], f"no earlier node fills the caches of {node.name!r}")
        assert found[0] is not None
        is_alike = found[0].op == node.op and found[0].inputs[3:5] == node.inputs[3:5]
        require(is_alike, f"{node.name!r} rotates its keys unlike {found[0].name!r}, which fills its caches")


def _check_tensor(plan: Plan, name: str, tensor: Tensor) -> None:
    if tensor.kind == "value":
        is_sound = tensor.dtype == ("int64" if name in INPUTS else "float32") and not {"P", "W"} & set(tensor.shape)
        is_sound = is_sound and (name not in INPUTS or tensor.shape == INPUTS[name])
    else:
        symbols = () if tensor.kind == "weight" else ("P", "W")
        is_sound = tensor.dtype == "float32" and all(type(d) is int or d in symbols for d in tensor.shape)
    sizes = [size for size in tensor.shape if size not in ("T", "R", "P", "W")]
    is_sound = is_sound and all(isinstance(size, int) and 1 <= size <= MOST for size in sizes)
    require(is_sound and tensor.name == name, f"tensor {name!r} is {tensor}")


def _check_subgraph(plan: Plan, subgraph: Subgraph, known: set[str]) -> None:
    of_kinds = {"weight": subgraph.weights, "state": subgraph.all_state, "value": subgraph.inputs}
    for kind, names in of_kinds.items():
        require(all(plan.tensors[name].kind == kind for name in names), f"{subgraph.name} reads {names} as {kind}")
    require(known.issuperset(subgraph.inputs), f"{subgraph.name} reads tensors that no subgraph has written")
    shared = read_only_caches(subgraph.nodes)
    require(shared == set(subgraph.shared_state), f"{subgraph.name} names {subgraph.shared_state} as caches to read")
    inside = {*subgraph.inputs, *subgraph.weights, *subgraph.all_state}
    written: set[str] = set()
    for node in subgraph.nodes:
        try:
            require(inside.issuperset(filter(None, node.inputs)), "it reads tensors that do not exist")
            require(node.outputs and inside.isdisjoint(node.outputs), "it writes tensors that exist already")
            inputs = [plan.tensors[name] if name else None for name in node.inputs]
            outputs = [plan.tensors[name] for name in node.outputs]
            require(all(output.kind == "value" for output in outputs), "it writes a weight or a state")
            taken = [None if tensor is None else (tensor.dtype, tensor.shape) for tensor in inputs]
            check_node(node.domain, node.op, node.attributes, taken, outputs[0].shape)
        except ValueError as error:
            raise ValueError(f"node {node.name!r}: {error}") from error
        inside.update(node.outputs)
        written.update(node.outputs)
    require(written.issuperset(subgraph.outputs), f"{subgraph.name} outputs a tensor that it does not write")
    require(len(set(subgraph.outputs)) == len(subgraph.outputs), f"{subgraph.name} outputs a tensor twice")
    constants = [*subgraph.weights, *subgraph.all_state]
    read = {name for node in subgraph.nodes for name in node.inputs}
    require(len(set(constants)) == len(constants) and read.issuperset(constants), f"{subgraph.name} names {constants}")


def node_flops(node: Node, plan: Plan) -> int:
    """Return an operator's FLOPs for one row of the result; for attention, for one pair of a row and a position that it
    attends to.
    """
    row = find_operator(node.domain, node.op)
    if row is None or row.flops is None:
        return sum(prod(resolve(plan.tensors[name].shape[1:], {})) for name in node.outputs)
    return row.flops(node.attributes, [plan.tensors[name].shape if name else None for name in node.inputs])


def attended_pairs(position: int, num_tokens: int, window: int = 0) -> int:
    """Count pairs of a row and a position that it attends to: its own and all earlier positions, or the last `window`
    of these.

    Args:
        position: position of the first row.
        num_tokens: number of rows.
        window: largest number of positions that a row sees; 0 for all.
    """
    growing = min(num_tokens, max(0, window - position)) if window else num_tokens
    return growing * position + growing * (growing + 1) // 2 + (num_tokens - growing) * window
