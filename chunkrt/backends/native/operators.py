"""Lowering: the emission of each operator by calls of a ProgramBuilder."""

from __future__ import annotations

from collections.abc import Callable

from chunkrt._native import Program, ProgramBuilder
from chunkrt.backends.base import AttentionMath
from chunkrt.backends.low_rank import NATIVE_TABLES
from chunkrt.backends.registry import NATIVE, operators
from chunkrt.engine_directory.store import (
    HOT_CHANNELS_SUFFIX,
    INPUT_STEP_SUFFIX,
    MULTIPLIER_SUFFIX,
    OUTPUT_STEP_SUFFIX,
    WeightStore,
    pack,
)
from chunkrt.graph.operators import EXPERT_GROUPS, column_ranges
from chunkrt.graph.plan import (
    DUAL_CHUNK_ATTRIBUTES,
    EXPERTS_OP,
    Attribute,
    Node,
    Plan,
    Subgraph,
    reads_shared_cache,
)
from chunkrt.graph.uses import use_of
from chunkrt.quant.scheme import LEVELS, Scheme

Emitter = Callable[["Lowering", Node], list[int]]
"""A function that appends a node's instructions to the program and returns the values of its outputs."""

linear_attentions: dict[str, Emitter] = {}
"""Emitters for LinearAttention, by `attn_type`."""


class Lowering:
    """A program under construction: the builder, and the builder's value of every tensor so far."""

    def __init__(
        self,
        builder: ProgramBuilder,
        subgraph: Subgraph,
        plan: Plan,
        scheme: Scheme,
        weights: WeightStore,
        attention_math: AttentionMath = "float32",
    ) -> None:
        self.builder = builder
        self.plan = plan
        self.scheme = scheme
        self.weights = weights
        self.attention_math = attention_math
        self._outputs = subgraph.outputs
        self._values: dict[str, int] = {}
        for name in subgraph.inputs:
            tensor = plan.tensors[name]
            self._values[name] = self.builder.input(name, tensor.dtype, tensor.shape)
        for name in subgraph.all_state:
            self._values[name] = self.builder.state(name, plan.tensors[name].shape)

    def lower(self, node: Node) -> None:
        """Append one node by the function below that is registered for its operator. Raises ValueError if its operands
        do not fit.
        """
        emitter = operators.find_own(use_of(node).operator, NATIVE)
        assert emitter is not None
        self._values.update(zip(node.outputs, emitter.function(self, node), strict=False))

    def value(self, name: str) -> int:
        """Return the builder's value of a tensor; a weight becomes a constant at its first use."""
        if name not in self._values:
            self._values[name] = self.builder.constant(self.weights.array(name))
        return self._values[name]

    def values(self, node: Node) -> list[int]:
        """Return the values of a node's inputs."""
        return [self.value(name) for name in node.inputs]

    def optional_value(self, name: str) -> int | None:
        """Return the value of an input that may be absent."""
        return self.value(name) if name else None

    def width(self, name: str) -> int:
        """Return the size of a tensor's last axis."""
        return int(self.plan.tensors[name].shape[-1])

    def build(self) -> Program:
        """Declare the outputs and finish the program."""
        for name in self._outputs:
            self.builder.output(name, self._values[name])
        return self.builder.build()


def check_node(node: Node, plan: Plan, scheme: Scheme) -> str:
    """Return the reason why a node of a known operator cannot be lowered; empty if it can."""
    if node.op == "Gelu" and (approximation := node.attributes.get("approximate", "none")) not in ("none", "tanh"):
        return f"Gelu has the approximations 'none' and 'tanh', not {approximation!r}"
    rank = len(plan.tensors[node.inputs[0]].shape)
    axis = node.attributes.get("axis")
    if node.op == "Gather" and axis not in (None, 0):
        return f"native gathers rows (axis 0) only, not axis {axis}"
    if node.op in ("Concat", "Split", "LayerNormalization", "RMSNormalization") and axis not in (-1, rank - 1):
        return f"native supports {node.op} over the last axis only, not over axis {axis} of {rank}"
    if node.op in ("MatMul", "ShadowLinear") and plan.tensors[node.inputs[1]].kind != "weight":
        return f"native multiplies by weights only; {node.inputs[1]!r} is computed"
    if node.op in ("MatMul", EXPERTS_OP) and scheme.weight_bits is None:
        what = "this linear is" if node.op == "MatMul" else "these experts are"
        return (
            f"under the scheme {scheme.name!r} {what} not int8 by int8, the only products of native; use a "
            "quantised scheme such as 'w8a8-dynamic', or `npu='onnxrt'` or `npu='reference'`"
        )
    if node.op == EXPERTS_OP and any(plan.tensors[name].kind != "weight" for name in node.inputs[2:4]):
        return f"native supports {EXPERTS_OP} only with weights as experts; these are computed"
    if node.op == "ShadowLinear" and not (scheme.is_static and scheme.activation_bits_of(node.inputs[1]) == 8):
        return (
            f"under the scheme {scheme.name!r} the activations of this linear layer have no static 8-bit grid, so "
            "no input saturates"
        )
    return ""


def _emitter(call: Callable[..., int]) -> Emitter:
    return lambda lowering, node: [call(lowering.builder, *lowering.values(node))]


_CALLS: dict[str, Callable[..., int]] = {
    "embedding": ProgramBuilder.gather,
    "gather_rows": ProgramBuilder.gather,
    "float_linear": ProgramBuilder.float_linear,
    "add": ProgramBuilder.add,
    "mul": ProgramBuilder.mul,
    "sigmoid": ProgramBuilder.sigmoid,
    "quick_gelu": ProgramBuilder.quick_gelu,
    "xielu": ProgramBuilder.xielu,
    "add_positions": ProgramBuilder.add_positions,
    "selective_scan": ProgramBuilder.selective_scan,
    "relu": ProgramBuilder.relu,
    "softplus": ProgramBuilder.softplus,
    "tanh": ProgramBuilder.tanh,
    "silu_mul": ProgramBuilder.silu_mul,
}
"""Operators that take their nodes' inputs, and no attributes."""

for _operator, _call in _CALLS.items():
    operators.register(_operator, NATIVE)(_emitter(_call))


@operators.register("thresholded_relu", NATIVE)
def _thresholded_relu(lowering: Lowering, node: Node) -> list[int]:
    (value,) = lowering.values(node)
    return [lowering.builder.thresholded_relu(value, _number(node.attributes["alpha"]))]


@operators.register("gelu", NATIVE)
def _gelu(lowering: Lowering, node: Node) -> list[int]:
    (value,) = lowering.values(node)
    return [lowering.builder.gelu(value) if _is_tanh(node) else lowering.builder.erf_gelu(value)]


@operators.register("gelu_mul", NATIVE)
def _gelu_mul(lowering: Lowering, node: Node) -> list[int]:
    builder, (value,) = lowering.builder, lowering.values(node)
    if _is_tanh(node):
        return [builder.gelu_mul(value)]
    width = lowering.width(node.inputs[0]) // 2
    gate, up = builder.columns(value, 0, width), builder.columns(value, width, width)
    return [builder.mul(builder.erf_gelu(gate), up)]


def _is_tanh(node: Node) -> bool:
    return node.attributes.get("approximate", "none") == "tanh"


@operators.register("gather_share", NATIVE)
def _gather_share(lowering: Lowering, node: Node) -> list[int]:
    first, all_rows = (int(_number(node.attributes[name])) for name in ("first", "all_rows"))
    return [lowering.builder.gather_share(*lowering.values(node), first=first, all_rows=all_rows)]


@operators.register("pick_columns", NATIVE)
def _pick_columns(lowering: Lowering, node: Node) -> list[int]:
    ranges = [(part.start, part.stop) for part in column_ranges(str(node.attributes["columns"]))]
    return [lowering.builder.pick_columns(lowering.value(node.inputs[0]), ranges)]


@operators.register("rms_norm", NATIVE)
def _rms_normalization(lowering: Lowering, node: Node) -> list[int]:
    value, weight = lowering.values(node)
    return [lowering.builder.rms_norm(value, weight, _number(node.attributes.get("epsilon", 1e-5)))]


@operators.register("layer_norm", NATIVE)
def _layer_normalization(lowering: Lowering, node: Node) -> list[int]:
    value, weight, bias = lowering.values(node)
    return [lowering.builder.layer_norm(value, weight, bias, _number(node.attributes["epsilon"]))]


@operators.register("head_norm", NATIVE)
def _head_norm(lowering: Lowering, node: Node) -> list[int]:
    value, weight = lowering.values(node)
    return [lowering.builder.head_norm(value, weight, _number(node.attributes["epsilon"]))]


@operators.register("linear", NATIVE)
@operators.register("logits", NATIVE)
def _linear(lowering: Lowering, node: Node) -> list[int]:
    left, weight, *added = node.inputs
    bias, residual = added or ("", "")
    builder, scheme = lowering.builder, lowering.scheme
    if scheme.storage_of(weight) == "blocks":
        packed, scales = (builder.constant(array) for array in lowering.weights.packed_blocks(weight))
        beside = lowering.optional_value(bias), lowering.optional_value(residual)
        return [builder.block_linear(lowering.value(left), packed, scales, lowering.width(weight), *beside)]
    packed, scales = (builder.constant(array) for array in lowering.weights.packed_linear(weight))
    multipliers = None
    if scheme.storage_of(weight) == "int4":
        multipliers = builder.constant(lowering.weights.array(weight + MULTIPLIER_SUFFIX))
    biases, residuals = lowering.optional_value(bias), lowering.optional_value(residual)
    operands = (lowering.value(left), packed, scales, biases, residuals, scheme.num_digits(weight))
    if not scheme.is_static:
        return [builder.linear(*operands)]
    input_step = float(lowering.weights.array(weight + INPUT_STEP_SUFFIX)[0])
    result = builder.linear(*operands, input_step=input_step, multipliers=multipliers)
    if scheme.has_float_output(weight):
        return [result]
    output_step = builder.constant(lowering.weights.array(weight + OUTPUT_STEP_SUFFIX))
    return [builder.round_to_grid(result, output_step, LEVELS[scheme.activation_bits_of(weight)])]


@operators.register("shadow_linear", NATIVE)
def _shadow_linear(lowering: Lowering, node: Node) -> list[int]:
    left, weight = node.inputs
    builder, weights = lowering.builder, lowering.weights
    integers, scale = weights.packed_linear(weight)
    if lowering.scheme.storage_of(weight) == "int4":
        integers = pack(weights.linear(weight)[0])  # a copy, because a shadow multiplies only a few rows of int8
    packed, scales = builder.constant(integers), builder.constant(scale)
    input_step = float(weights.array(weight + INPUT_STEP_SUFFIX)[0])
    hot_channels = builder.constant(weights.array(weight + HOT_CHANNELS_SUFFIX))
    return [builder.shadow_linear(lowering.value(left), packed, scales, input_step, hot_channels)]


@operators.register("low_rank_sum", NATIVE)
def _low_rank_sum(lowering: Lowering, node: Node) -> list[int]:
    weight = node.attributes["weight"]
    assert isinstance(weight, str)
    assert NATIVE_TABLES is not None
    product, hidden, adapters = lowering.values(node)
    return [lowering.builder.low_rank_sum(product, hidden, adapters, NATIVE_TABLES, weight)]


@operators.register("routed_experts", NATIVE)
def _routed_experts(lowering: Lowering, node: Node) -> list[int]:
    hidden, router_logits, *experts = node.inputs[:4]
    weights = (lowering.builder.constant(array) for name in experts for array in lowering.weights.packed_linear(name))
    value = lowering.builder.routed_experts(
        lowering.value(hidden),
        lowering.value(router_logits),
        *weights,
        *map(lowering.optional_value, node.inputs[4:]),
        top_k=int(_number(node.attributes["top_k"])),
        norm_topk_prob=bool(_number(node.attributes["norm_topk_prob"])),
        use_sigmoid=bool(_number(node.attributes.get("use_sigmoid", 0))),
        norm_epsilon=_number(node.attributes.get("norm_epsilon", 0.0)),
        swiglu_alpha=_number(node.attributes.get("swiglu_alpha", 1.0)),
        swiglu_limit=_number(node.attributes.get("swiglu_limit", 0.0)),
        uses_gelu=bool(_number(node.attributes.get("uses_gelu", 0))),
        **{name: int(_number(node.attributes.get(name, 1))) for name in EXPERT_GROUPS},
    )
    return [value]


@operators.register("concat", NATIVE)
def _concat(lowering: Lowering, node: Node) -> list[int]:
    return [lowering.builder.concat(lowering.values(node))]


@operators.register("split", NATIVE)
def _split(lowering: Lowering, node: Node) -> list[int]:
    source, begin, parts = lowering.value(node.inputs[0]), 0, []
    for name in node.outputs:
        parts.append(lowering.builder.columns(source, begin, lowering.width(name)))
        begin += lowering.width(name)
    return parts


@operators.register("cached_attention", NATIVE)
def _attention(lowering: Lowering, node: Node) -> list[int]:
    num_heads, num_kv_heads, head_dim, window = (
        int(_number(node.attributes[name])) for name in ("num_heads", "num_kv_heads", "head_dim", "window")
    )
    sinks, qkv_bias = (*node.inputs[7:], "", "")[:2]
    value = lowering.builder.attention(
        *map(lowering.value, node.inputs[:7]),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=_number(node.attributes["scale"]),
        soft_cap=_number(node.attributes.get("soft_cap", 0.0)),
        window=window,
        has_raw_keys=node.op == "RawKeyAttention",
        math=lowering.attention_math,
        qkv_bias=lowering.optional_value(qkv_bias),
        sinks=lowering.optional_value(sinks),
        appends=not reads_shared_cache(node),
        **{name: int(_number(node.attributes.get(name, 0))) for name in DUAL_CHUNK_ATTRIBUTES},
    )
    return [value]


def _missing_kind(node: Node) -> str:
    """Return a message if native lacks the kind of a linear-attention node; empty if it supports the kind."""
    if (kind := node.attributes["attn_type"]) in linear_attentions:
        return ""
    return f"native has no linear attention of attn_type {kind!r}; it has: {', '.join(sorted(linear_attentions))}"


@operators.register("linear_attention", NATIVE, refuses=_missing_kind)
def _linear_attention(lowering: Lowering, node: Node) -> list[int]:
    kind = node.attributes["attn_type"]
    assert isinstance(kind, str)
    return linear_attentions[kind](lowering, node)


def _short_conv(lowering: Lowering, node: Node) -> list[int]:
    bcx, _, _, weight, bias, conv_state = node.inputs[:6]
    builder, value = lowering.builder, lowering.value
    return [builder.short_conv(value(bcx), value(weight), lowering.optional_value(bias), value(conv_state))]


def _silu_conv(lowering: Lowering, node: Node) -> list[int]:
    x, _, _, weight, bias, conv_state = node.inputs[:6]
    builder, value = lowering.builder, lowering.value
    return [builder.silu_conv(value(x), value(weight), lowering.optional_value(bias), value(conv_state))]


def _gated_delta_rule(lowering: Lowering, node: Node) -> list[int]:
    qkv, gate, beta, weight, bias, conv_state, recurrent_state = node.inputs
    num_k_heads, num_v_heads, head_k_dim, head_v_dim, use_qk_l2norm = (
        int(_number(node.attributes[name]))
        for name in ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim", "use_qk_l2norm")
    )
    value = lowering.builder.gated_delta_rule(
        lowering.value(qkv),
        lowering.value(gate),
        lowering.value(beta),
        lowering.value(weight),
        lowering.optional_value(bias),
        lowering.value(conv_state),
        lowering.value(recurrent_state),
        num_k_heads=num_k_heads,
        num_v_heads=num_v_heads,
        head_k_dim=head_k_dim,
        head_v_dim=head_v_dim,
        use_qk_l2norm=bool(use_qk_l2norm),
    )
    return [value]


def _mamba2(lowering: Lowering, node: Node) -> list[int]:
    cbx, gate, step, weight, bias, conv_state, recurrent_state, skip = node.inputs
    num_groups, num_heads, state_dim, head_dim = (
        int(_number(node.attributes[name])) for name in ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim")
    )
    value = lowering.builder.mamba2(
        lowering.value(cbx),
        lowering.value(gate),
        lowering.value(step),
        lowering.value(weight),
        lowering.optional_value(bias),
        lowering.value(conv_state),
        lowering.value(recurrent_state),
        lowering.value(skip),
        num_groups=num_groups,
        num_heads=num_heads,
        state_dim=state_dim,
        head_dim=head_dim,
    )
    return [value]


linear_attentions.update(short_conv=_short_conv, silu_conv=_silu_conv)
linear_attentions.update(gated_delta_rule=_gated_delta_rule, mamba2=_mamba2)


def _number(attribute: Attribute) -> float:
    assert isinstance(attribute, int | float)
    return attribute
