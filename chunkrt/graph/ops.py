"""Tracing: a decoder's module tree is run once and recorded as an ONNX graph of operators.

While a trace is open, each function for an operator adds one node to the graph and returns its output. Shapes are
computed here, because a module needs them to build the next layer and the plan needs them for bytes and FLOPs. Nodes
and values are named after the module that made them ("model.layers.0.mlp.down_proj.output"), so the graph is readable
in Netron. A node's metadata state the device of its module, so partitioning does not need the modules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from chunkrt.errors import ChunkrtError, ModelError
from chunkrt.graph.linear_attention import find_variant
from chunkrt.graph.operators import OPERATOR_NAMES, check_node, find_operator, require
from chunkrt.graph.plan import (
    ALL_GATHER_OP,
    ALL_REDUCE_OP,
    DOMAIN,
    POSITIONS_OP,
    SHARED_GATHER_OP,
    Attribute,
    Device,
)

OPSET = 23
"""Opset of traced graphs: the first with RMSNormalization, RotaryEmbedding and Attention."""
IR_VERSION = 10
DEVICE_KEY = "chunkrt.device"
"""Metadata key of a node's device; a node without the key is placed by rule."""
MODULE_KEY = "chunkrt.module"
STATE_KEY = "chunkrt.state"
"""Mark of a graph input that persists from chunk to chunk."""
CONTEXT_KEY = "chunkrt.context_length"
LONG_CONTEXT_KEY = "chunkrt.long_context_from"
NO_HEAD_KEY = "chunkrt.no_head"
"""Metadata keys: the number of positions that the graph can distinguish, the number of tokens above which it uses its
long rotary tables, and the mark of a decoder without an LM head.
"""
ROTARY_KEY = "chunkrt.rotary"
"""Mark of a weight that is a rotary table made by chunkrt; see `Tensor.rotary`."""
ALONE_KEY = "chunkrt.alone"
"""Mark of a node that becomes a separate subgraph, with its name."""

_current: ContextVar[Trace] = ContextVar("trace")


def current_trace() -> Trace:
    """Return the trace to which operators append nodes. Raises LookupError outside of `Trace.open`."""
    return _current.get()


@dataclass(frozen=True, kw_only=True)
class DualChunks:
    """Sizes of dual chunk attention, which limits the distances of RoPE in long contexts (An et al., Training-Free
    Long-Context Scaling of Large Language Models, 2024).

    The key of position j is rotated for position j modulo `period`. The query of position p is rotated for p modulo
    `period` where it meets keys of its own chunk of `period` positions; for the smaller of p modulo `period` + `period`
    and `limit` where it meets keys of the chunk before; and for the smaller of 2 `period` - 1 and `limit` where it
    meets keys of earlier chunks. With `long_context_from`, the query and the key of position p are also multiplied by 1
    + 0.1 ln(n / `long_context_from`) if that exceeds 1, where n is the larger of p + 1 and the number of tokens of the
    prompt.

    Attributes:
        context_length: number of positions that the decoder can distinguish, which may exceed the rows of its tables.
        long_context_from: None if queries and keys have no factor.
    """

    period: int
    limit: int
    context_length: int
    long_context_from: int | None = None


class Trace:
    """One graph under construction.

    `state_updates` pairs every cache input with the output that holds its new content. `failed_in` is the path of the
    innermost module whose forward raised an exception; None if none did.
    """

    def __init__(self) -> None:
        self.nodes: list[ir.Node] = []
        self.inputs: dict[str, ir.Value] = {}
        self.weights: dict[str, ir.Value] = {}
        self.state_updates: list[tuple[ir.Value, ir.Value]] = []
        self.metadata: dict[str, str] = {}
        self.failed_in: str | None = None
        self._scopes: list[tuple[str, Device | None]] = [("", None)]
        self._names: set[str] = set()

    @contextmanager
    def open(self) -> Iterator[Trace]:
        """Make this the current trace."""
        token = _current.set(self)
        try:
            yield self
        finally:
            _current.reset(token)

    @contextmanager
    def scope(self, path: str, device: Device | None) -> Iterator[None]:
        """Name the nodes added in this context after a module, and place them on the device of the module or of its
        nearest placed ancestor.
        """
        self._scopes.append((path, device or self._scopes[-1][1]))
        try:
            yield
        except Exception:
            self.failed_in = path if self.failed_in is None else self.failed_in
            raise
        finally:
            self._scopes.pop()

    def node(
        self,
        op: str,
        inputs: Sequence[ir.Value | None],
        outputs: Sequence[tuple[str, tuple[int | str, ...]]],
        *,
        attributes: Mapping[str, int | float | str],
        domain: str = "",
    ) -> list[ir.Value]:
        """Append a node with float32 outputs, given as (name within the module, shape).

        Raises:
            ValueError: the shapes do not fit the operator, or the name of an output already exists.
        """
        path, device = self._scopes[-1]
        try:
            for given in inputs:
                _require_value(given)
            is_foreign = domain not in ("", DOMAIN)
            require(
                not (is_foreign and op in OPERATOR_NAMES),
                f"chunkrt has its own {op}; rename that of {domain}",
            )
            check_node(
                domain,
                op,
                attributes,
                [_type_of(value) if value is not None else None for value in inputs],
                outputs[0][1],
            )
        except ValueError as error:
            raise ValueError(f"operator {op} {outputs[0][0]!r}: {error}") from error
        values = [_value(self._unique(name), ir.DataType.FLOAT, shape) for name, shape in outputs]
        metadata = {DEVICE_KEY: device} if device else {}
        node = ir.Node(
            domain,
            op,
            inputs,
            [attribute(name, value) for name, value in attributes.items()],
            outputs=values,
            name=values[0].name,
            metadata_props={**metadata, MODULE_KEY: path},
        )
        self.nodes.append(node)
        return values

    def input(self, name: str, shape: tuple[int | str, ...]) -> ir.Value:
        """Return an int64 input of the graph; the same name returns the same value."""
        if name not in self.inputs:
            self.inputs[name] = _value(name, ir.DataType.INT64, shape)
        return self.inputs[name]

    def position(self) -> ir.Value:
        """Return the graph input that holds the position of row 0: int64 [1]."""
        return self.input("position", (1,))

    def rope_position(self) -> ir.Value:
        """Return the graph input that holds the index of row 0 in the concatenated rotary tables: int64 [1]."""
        return self.input("rope_position", (1,))

    def weight(self, name: str, shape: tuple[int, ...]) -> ir.Value:
        """Add a float32 weight by its full name; its values are loaded later, from the checkpoint."""
        if name not in self.weights:
            self.weights[name] = _value(name, ir.DataType.FLOAT, shape)
        return self.weights[name]

    def state(self, name: str, shape: tuple[int | str, ...]) -> ir.Value:
        """Add a tensor that persists to the module being traced: a cache, or a recurrent state."""
        full_name = self._unique(name)
        self.inputs[full_name] = _value(full_name, ir.DataType.FLOAT, shape)
        self.inputs[full_name].metadata_props[STATE_KEY] = "1"
        return self.inputs[full_name]

    def shared_state(self, full_name: str) -> ir.Value:
        """Return a state of another module, by its full name. Raises ValueError if no module has added it yet."""
        if full_name not in self.inputs:
            raise ValueError(f"no earlier module has the state {full_name!r}; call the module that owns it first")
        return self.inputs[full_name]

    def update_state(self, old: ir.Value, new: ir.Value) -> None:
        """Record that `new` is the updated content of the state `old`: an output, after the first, of the operator that
        reads the state. The operator's function updates the state in place.

        Raises:
            ValueError: another operator makes `new`, or `new` is the operator's first output.
        """
        maker = new.producer()
        is_sound = maker is not None and old in maker.inputs and new is not maker.outputs[0]
        require(is_sound, f"{new.name!r} cannot update the state {old.name!r}; use apply(states=...)")
        self.state_updates.append((old, new))

    def set_context(self, length: int, long_from: int | None) -> None:
        """Record the number of positions that the decoder can distinguish; see `Plan`."""
        known = int(self.metadata.get(CONTEXT_KEY, length))
        self.metadata[CONTEXT_KEY] = str(min(known, length))
        if long_from is not None:
            self.metadata[LONG_CONTEXT_KEY] = str(long_from)

    def leave_out_head(self) -> None:
        """Record that the logits are not valid; see `Plan.has_head`."""
        self.metadata[NO_HEAD_KEY] = "1"

    def _unique(self, name: str) -> str:
        path = self._scopes[-1][0]
        full = f"{path}.{name}" if path else name
        if full in self._names:
            raise ValueError(f"two values are named {full!r}; give the second operator another name")
        self._names.add(full)
        return full


def trace(decoder: Callable[[ir.Value, ir.Value], ir.Value], *, title: str = "decoder") -> ir.Model:
    """Record a decoder as an ONNX graph.

    Args:
        decoder: module that is called once with "input_ids" int64 [T] and "logit_rows" int64 [R]; it returns logits [R,
            vocab].
        title: noun phrase for the decoder in errors, without an article.

    Returns:
        A model with inputs input_ids, logit_rows, position and the state of every layer; outputs logits and the updated
        state. Weights are initializers without values, which come from the checkpoint.

    Raises:
        ModelError: a forward raised an exception, or passed shapes to an operator that do not fit it.
    """
    record = Trace()
    try:
        with record.open():
            logits = decoder(record.input("input_ids", ("T",)), record.input("logit_rows", ("R",)))
            require(isinstance(logits, ir.Value), f"its forward returns {logits!r}, expected the logits")
    except ChunkrtError:
        raise
    except Exception as error:  # a plug-in's forward may raise any exception
        module = f"module {record.failed_in!r}, " if record.failed_in else ""
        what = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
        raise ModelError(f"the {title} cannot be traced: {module}{what}; correct its forward, or the config") from error
    graph = ir.Graph(
        list(record.inputs.values()),
        [logits, *(new for _, new in record.state_updates)],
        nodes=record.nodes,
        initializers=(),
        opset_imports={"": OPSET, "chunkrt": 1},
        name="decoder",
        metadata_props=record.metadata,
    )
    for weight in record.weights.values():
        graph.initializers[weight.name or ""] = weight
    return ir.Model(graph, ir_version=IR_VERSION, producer_name="chunkrt")


def _type_of(value: ir.Value) -> tuple[str, tuple[int | str, ...]]:
    """Return the name of a value's data type, and its shape."""
    assert value.shape is not None
    name = "int64" if value.dtype == ir.DataType.INT64 else "float32"
    return name, tuple(d if isinstance(d, int) else str(d.value) for d in value.shape)


def _require_value(given: object) -> None:
    """Raise ValueError for an operand that is neither a value nor None."""
    hint = "; pass its value()" if hasattr(given, "value") else ""
    is_value = given is None or isinstance(given, ir.Value)
    require(is_value, f"an operand is a {type(given).__name__}, expected a value of the graph{hint}")


def _value(name: str, dtype: ir.DataType, shape: Sequence[int | str]) -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))


def attribute(name: str, value: Attribute) -> ir.Attr:
    """Convert a plan's attribute to ONNX."""
    if isinstance(value, int):
        return ir.AttrInt64(name, value)
    if isinstance(value, float):
        return ir.AttrFloat32(name, value)
    if isinstance(value, str):
        return ir.AttrString(name, value)
    is_int = all(isinstance(v, int) for v in value)
    return ir.AttrInt64s(name, [int(v) for v in value]) if is_int else ir.AttrFloat32s(name, value)


def shape_of(value: ir.Value) -> tuple[int | str, ...]:
    """Return a traced value's shape, symbols as strings. Raises ValueError for an object that is no value."""
    _require_value(value)
    assert value.shape is not None
    return tuple(d if isinstance(d, int) else str(d.value) for d in value.shape)


def add(left: ir.Value, right: ir.Value, *, name: str = "add") -> ir.Value:
    """Return left + right; right has the shape of left, or is a row [N]."""
    return _one("Add", [left, right], shape_of(left), name)


def mul(left: ir.Value, right: ir.Value, *, name: str = "mul") -> ir.Value:
    """Return left * right, element by element."""
    return _one("Mul", [left, right], shape_of(left), name)


def sigmoid(value: ir.Value, *, name: str = "sigmoid") -> ir.Value:
    """Return 1 / (1 + exp(-value))."""
    return _one("Sigmoid", [value], shape_of(value), name)


def matmul(left: ir.Value, right: ir.Value, *, name: str = "matmul") -> ir.Value:
    """Return left [T, K] @ right [K, N]."""
    return _one("MatMul", [left, right], (*shape_of(left)[:-1], shape_of(right)[-1]), name)


def rms_normalization(value: ir.Value, weight: ir.Value, *, epsilon: float, name: str = "norm") -> ir.Value:
    """Return value * rsqrt(mean(value^2) + epsilon) * weight over the last axis."""
    attributes = {"axis": -1, "epsilon": epsilon}
    return _one("RMSNormalization", [value, weight], shape_of(value), name, attributes=attributes)


def layer_normalization(
    value: ir.Value, weight: ir.Value, bias: ir.Value, *, epsilon: float, name: str = "norm"
) -> ir.Value:
    """Return (value - mean) * rsqrt(variance + epsilon) * weight + bias over the last axis; Ba et al., 2016."""
    attributes = {"axis": -1, "epsilon": epsilon}
    return _one("LayerNormalization", [value, weight, bias], shape_of(value), name, attributes=attributes)


def add_positions(hidden: ir.Value, table: ir.Value, *, name: str = "positions") -> ir.Value:
    """Return hidden [T, H] plus the rows of table [P, H] from the position of row 0 on. The context is at most P."""
    trace = current_trace()
    trace.set_context(int(shape_of(table)[0]), None)
    return _one(POSITIONS_OP, [hidden, table, trace.position()], shape_of(hidden), name, domain="chunkrt")


def gather_rows(table: ir.Value, indices: ir.Value, *, name: str = "gather") -> ir.Value:
    """Return the rows of table [V, H] at indices [T] (or [R])."""
    shape = (*shape_of(indices), *shape_of(table)[1:])
    return _one("Gather", [table, indices], shape, name, attributes={"axis": 0})


def softplus(value: ir.Value, *, name: str = "softplus") -> ir.Value:
    """Return log(1 + exp(value))."""
    return _one("Softplus", [value], shape_of(value), name)


def relu(value: ir.Value, *, name: str = "relu") -> ir.Value:
    """Return max(value, 0)."""
    return _one("Relu", [value], shape_of(value), name)


def thresholded_relu(value: ir.Value, threshold: float, *, name: str = "relu") -> ir.Value:
    """Return the value where it exceeds a threshold, otherwise 0."""
    return _one("ThresholdedRelu", [value], shape_of(value), name, attributes={"alpha": threshold})


def tanh(value: ir.Value, *, name: str = "tanh") -> ir.Value:
    """Return the hyperbolic tangent."""
    return _one("Tanh", [value], shape_of(value), name)


def silu(value: ir.Value, *, name: str = "silu") -> ir.Value:
    """Return value * sigmoid(value)."""
    return mul(value, sigmoid(value, name=f"{name}_sigmoid"), name=name)


def gelu_tanh(value: ir.Value, *, name: str = "gelu") -> ir.Value:
    """Return 0.5 value (1 + tanh(sqrt(2 / pi) (value + 0.044715 value^3))); Hendrycks and Gimpel, 2016, section 2."""
    return _one("Gelu", [value], shape_of(value), name, attributes={"approximate": "tanh"})


def gelu(value: ir.Value, *, name: str = "gelu") -> ir.Value:
    """Return 0.5 value (1 + erf(value / sqrt(2))); Hendrycks and Gimpel, 2016, section 2."""
    return _one("Gelu", [value], shape_of(value), name, attributes={"approximate": "none"})


def quick_gelu(value: ir.Value, *, name: str = "quick_gelu") -> ir.Value:
    """Return value * sigmoid(1.702 value); Hendrycks and Gimpel, 2016, section 2."""
    return _one("QuickGelu", [value], shape_of(value), name, domain="chunkrt")


def xielu(value: ir.Value, parameters: ir.Value, *, name: str = "xielu") -> ir.Value:
    """Return a_p value^2 + b value for positive values, and a_n (expm1(min(value, e)) - value) + b value for others.

    Source: Huang, Deriving Activation Functions Using Integration (2024), section 3.2; Hugging Face's
    `XIELUActivation`.

    Args:
        parameters: [4]: a_p, a_n, b, e.
    """
    return _one("Xielu", [value, parameters], shape_of(value), name, domain="chunkrt")


def head_norm(value: ir.Value, weight: ir.Value, *, epsilon: float, name: str = "head_norm") -> ir.Value:
    """RMS-normalise the first heads of every row.

    Args:
        value: [T, N], head after head.
        weight: [n, D]: the first n slices of D columns are normalised, each by its own row; the others pass through.
    """
    return _one("HeadNorm", [value, weight], shape_of(value), name, attributes={"epsilon": epsilon}, domain="chunkrt")


def concat(values: Sequence[ir.Value], *, name: str = "concat") -> ir.Value:
    """Return the columns of several values [T, N], one after another; up to 8 values. It runs on the CPU unless
    placed.
    """
    shapes = [shape_of(value) for value in values]
    columns = sum(int(shape[1]) for shape in shapes)
    return _one("Concat", values, (shapes[0][0], columns), name, attributes={"axis": -1})


def split_columns(value: ir.Value, *, names: Sequence[str]) -> list[ir.Value]:
    """Cut the last axis into equal parts, one for each name."""
    *rows, width = shape_of(value)
    shape = (*rows, int(width) // len(names))
    attributes = {"axis": -1, "num_outputs": len(names)}
    return current_trace().node("Split", [value], [(name, shape) for name in names], attributes=attributes)


def cached_attention(
    qkv: ir.Value,
    cos: ir.Value,
    sin: ir.Value,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    scale: float,
    soft_cap: float = 0.0,
    sinks: ir.Value | None = None,
    window: int = 0,
    long_context_from: int | None = None,
    dual_chunks: DualChunks | None = None,
    keeps_all: bool = False,
    caches_of: str = "",
    name: str = "attention",
) -> ir.Value:
    """Rotate q and k, append k and v to this layer's cache, and attend causally over the complete cache.

    Args:
        qkv: [T, (num_heads + 2 * num_kv_heads) * head_dim], columns q | k | v, head after head; only q with
            `caches_of`.
        cos, sin: [positions, rotary_dim / 2] tables for rotate-half RoPE.
        soft_cap: if above 0, scores are replaced by soft_cap * tanh(scores / soft_cap) before the softmax.
        sinks: [num_heads], one score for each head, which only enters the sum of the softmax.
        window: number of keys that a row sees, its own included; 0 for all earlier keys.
        long_context_from: cos and sin hold a second table behind the first, for contexts of more tokens than this
            number; the input "rope_position" selects a table.
        dual_chunks: sizes of dual chunk attention, None for attention at all distances. It excludes
            `long_context_from`.
        keeps_all: whether the caches hold all positions in spite of a window, as they must if other layers read them:
            a chunk may write to a ring before the last layer has read it for an earlier chunk.
        caches_of: path of the module whose caches this layer reads instead of its own. The module must come first.

    Returns:
        [T, num_heads * head_dim]. The caches [num_kv_heads, P (W with a window), head_dim] belong to the module that is
        being traced, or to `caches_of`.
        `backends/onnx/functions.py` defines the operator in standard ONNX.
    """
    trace = current_trace()
    slots = "W" if window and not keeps_all else "P"
    key, value = (
        trace.shared_state(f"{caches_of}.{n}") if caches_of else trace.state(n, (num_kv_heads, slots, head_dim))
        for n in ("key_cache", "value_cache")
    )
    shape = (shape_of(qkv)[0], num_heads * head_dim)
    rotary_dim = 2 * int(shape_of(cos)[1])
    attributes: dict[str, int | float | str] = {
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "rotary_dim": rotary_dim,
        "scale": scale,
        "window": window,
        **({"soft_cap": soft_cap} if soft_cap else {}),
    }
    position = rope_position = trace.position()
    context_length = int(shape_of(cos)[0])
    if dual_chunks is not None:
        context_length, long_context_from = dual_chunks.context_length, dual_chunks.long_context_from
        attributes |= {"rope_period": dual_chunks.period, "rope_limit": dual_chunks.limit}
        attributes |= {} if long_context_from is None else {"long_context_from": long_context_from}
    elif long_context_from is not None:
        context_length //= 2
    if long_context_from is not None:
        rope_position = trace.rope_position()
    trace.set_context(context_length, long_context_from)
    inputs = [qkv, position, rope_position, cos, sin, key, value, *([] if sinks is None else [sinks])]
    if caches_of:
        return _one("CachedAttention", inputs, shape, name, attributes={**attributes, "appends": 0}, domain="chunkrt")
    output, present_key, present_value = trace.node(
        "CachedAttention",
        inputs,
        [
            (name, shape),
            ("present_key", (num_kv_heads, f"{slots} + T", head_dim)),
            ("present_value", (num_kv_heads, f"{slots} + T", head_dim)),
        ],
        attributes=attributes,
        domain="chunkrt",
    )
    trace.update_state(key, present_key)
    trace.update_state(value, present_value)
    return output


def linear_attention(
    qkv: ir.Value,
    gate: ir.Value | None,
    beta: ir.Value | None,
    conv_weight: ir.Value,
    conv_bias: ir.Value | None = None,
    *,
    attn_type: str,
    num_k_heads: int,
    num_v_heads: int,
    head_k_dim: int,
    head_v_dim: int,
    use_qk_l2norm: bool = False,
    skip: ir.Value | None = None,
    name: str = "linear_attention",
) -> ir.Value:
    """Compute a causal convolution over the last few rows and, by type, a recurrence over all earlier rows.

    Args:
        qkv: [T, columns], whose meaning depends on the type; see `graph/linear_attention.py`.
        gate, beta: [T, num_v_heads], if the type has a recurrence: the logarithm of the decay, and the step.
        conv_weight: [channels, 1, taps]; the last tap is for the row itself.
        conv_bias: [channels].
        skip: [num_v_heads], if the type has it: factors of v, which are added to the results.

    Returns:
        [T, num_v_heads * head_v_dim]. The states belong to the module that is being traced.
    """
    trace = current_trace()
    attributes: dict[str, int | float | str] = {
        "attn_type": attn_type,
        "num_k_heads": num_k_heads,
        "num_v_heads": num_v_heads,
        "head_k_dim": head_k_dim,
        "head_v_dim": head_v_dim,
        "use_qk_l2norm": int(use_qk_l2norm),
    }
    channels, _, taps = (int(size) for size in shape_of(conv_weight))
    states = [trace.state("conv_state", (channels, taps - 1))]
    variant = find_variant(attn_type)
    if variant.is_recurrent:
        states.append(trace.state("recurrent_state", (num_v_heads, head_k_dim, head_v_dim)))
    news = [(f"new_{state.name.rpartition('.')[2]}", shape_of(state)) for state in states if state.name]
    output, *updated = trace.node(
        "LinearAttention",
        [
            qkv,
            gate,
            beta,
            conv_weight,
            conv_bias,
            *states,
            *([None] * (2 - len(states))),
            *([skip] if variant.has_skip else []),
        ],
        [(name, (shape_of(qkv)[0], num_v_heads * head_v_dim)), *news],
        attributes=attributes,
        domain="chunkrt",
    )
    for old, new in zip(states, updated, strict=True):
        trace.update_state(old, new)
    return output


def selective_scan(
    x: ir.Value, step: ir.Value, bc: ir.Value, rates: ir.Value, skip: ir.Value, *, name: str = "scan"
) -> ir.Value:
    """Compute Mamba's recurrence: s <- exp(step rates) s + b step x for each channel and state; y = c s + skip x.

    Source: Gu and Dao, Mamba (2023), section 3.2.

    Args:
        x, step: [T, C].
        bc: [T, 2 N], columns b | c.
        rates: [N, C].
        skip: [C].

    Returns:
        [T, C]. The state [N, C] belongs to the module that is being traced.
    """
    states = {"recurrent_state": tuple(int(size) for size in shape_of(rates))}
    return apply("chunkrt", "SelectiveScan", [x, step, bc, rates, skip], states=states, name=name)


def apply(
    domain: str,
    op: str,
    inputs: Sequence[ir.Value | None],
    *,
    states: Mapping[str, tuple[int, ...]] | None = None,
    attributes: Mapping[str, int | float | str] | None = None,
    name: str = "output",
) -> ir.Value:
    """Add an operator of a plug-in and return its result.

    Args:
        domain, op: the operator, whose row `register_operator` added; see `graph/operators.py`.
        inputs: values and weights; None for a missing optional input.
        states: names and shapes of the tensors that persist from chunk to chunk. They belong to the module that is
            being traced, follow the other inputs, and are zero before the first token.

    Raises:
        ValueError: the operator has no row, or its row refuses the inputs.
    """
    row = find_operator(domain, op)
    require(row is not None, f"the operator {domain}::{op} has no row; call register_operator first")
    assert row is not None
    trace = current_trace()
    old = [trace.state(state, shape) for state, shape in (states or {}).items()]
    given = [*inputs, *old]
    try:
        shape = row.output(attributes or {}, [None if value is None else shape_of(value) for value in given])
    except (ValueError, TypeError, IndexError, KeyError) as error:
        what = str(error) if type(error) is ValueError else f"its output fails with {type(error).__name__}: {error}"
        raise ValueError(f"operator {op} {name!r}: {what}") from error
    outputs = [
        (name, shape),
        *((f"new_{state}", shape_of(value)) for state, value in zip(states or {}, old, strict=True)),
    ]
    result, *new = trace.node(op, given, outputs, attributes=attributes or {}, domain=domain)
    for before, after in zip(old, new, strict=True):
        trace.update_state(before, after)
    return result


def all_reduce(partial: ir.Value, *, name: str = "sum") -> ir.Value:
    """Sum the ranks' partial results, [T, H], in a separate subgraph on the device "link"."""
    inputs = [partial, current_trace().position()]
    return _one(ALL_REDUCE_OP, inputs, shape_of(partial), name, domain="chunkrt")


def all_gather(part: ir.Value, columns: NDArray[np.int64], *, name: str = "gathered") -> ir.Value:
    """Concatenate the columns of the ranks' parts, [T, N] or [R, N], and pick columns of the result.

    It is a separate subgraph on the device "link". If a rank leads the others and the rows are those of logits, only
    the leading rank receives the result.

    Args:
        columns: indices of the picked columns in the concatenation of all ranks' parts, in the order of ranks.
    """
    inputs = [part, current_trace().position()]
    shape = (shape_of(part)[0], len(columns))
    return _one(ALL_GATHER_OP, inputs, shape, name, attributes=_in_ranges(columns), domain="chunkrt")


def pick_columns(value: ir.Value, indices: NDArray[np.int64], *, name: str = "picked") -> ir.Value:
    """Return columns of a value [T, N], by their indices; the index N stands for a column of zeros."""
    rows, width = shape_of(value)
    is_padding = indices == width
    columns = indices + np.where(is_padding, np.cumsum(is_padding) - 1, 0)
    shape = (rows, len(indices))
    return _one("PickColumns", [value], shape, name, attributes=_in_ranges(columns), domain="chunkrt")


def _in_ranges(columns: NDArray[np.int64]) -> dict[str, str]:
    width_changes = np.flatnonzero(np.diff(columns) != 1) + 1
    runs = np.split(columns, width_changes)
    return {"columns": ",".join(f"{run[0]}:{run[-1] + 1}" for run in runs)}


def gather_share(table: ir.Value, indices: ir.Value, *, first: int, all_rows: int, name: str = "gather") -> ir.Value:
    """Pick the rows [T, H] of a rank's share of a table; rows that other ranks have are zeros.

    Args:
        table: rows `first` and following of the complete table, [N, H].
        indices: indices of rows of the complete table, which has `all_rows` rows.
    """
    shape, attributes = (*shape_of(indices), *shape_of(table)[1:]), {"first": first, "all_rows": all_rows}
    return _one(SHARED_GATHER_OP, [table, indices], shape, name, attributes=attributes, domain="chunkrt")


def float_linear(left: ir.Value, weight: ir.Value, *, name: str = "float_linear") -> ir.Value:
    """Return left [T, K] @ weight [K, N] in float32 under every scheme: for decisions such as a router's."""
    shape = (*shape_of(left)[:-1], shape_of(weight)[-1])
    return _one("FloatLinear", [left, weight], shape, name, domain="chunkrt")


def routed_experts(
    hidden: ir.Value,
    router_logits: ir.Value,
    gate_up: ir.Value,
    down: ir.Value,
    selection_bias: ir.Value | None = None,
    gate_up_bias: ir.Value | None = None,
    down_bias: ir.Value | None = None,
    *,
    top_k: int,
    norm_topk_prob: bool,
    use_sigmoid: bool = False,
    norm_epsilon: float = 0.0,
    swiglu_alpha: float = 1.0,
    swiglu_limit: float = 0.0,
    uses_gelu: bool = False,
    num_groups: int = 1,
    top_groups: int = 1,
    best_of_group: int = 1,
    name: str = "experts",
) -> ir.Value:
    """Sum the feed-forwards that a router picks for each row, weighted by their scores.

    Args:
        hidden: [T, H].
        router_logits: [T, E].
        gate_up: [E, H, 2 I], columns gate | up.
        down: [E, I, H].
        selection_bias: [E], added to the scores only where experts are picked.
        gate_up_bias, down_bias: [E, 2 I] and [E, H], added to the products with gate_up and down.
        norm_topk_prob: whether the scores of the picked experts are divided by their sum plus `norm_epsilon`.
        use_sigmoid: whether a score is the sigmoid of its logit, and not the softmax over all logits.
        swiglu_alpha, swiglu_limit: if the limit is above 0, an expert computes (u + 1) g sigmoid(swiglu_alpha g), with
            the gate g at most the limit and the up u at most the limit in magnitude; otherwise silu(gate) up.
        uses_gelu: whether the activation is the tanh form of GELU, and not SiLU.
        num_groups: number of groups of adjacent experts. Experts are picked from the `top_groups` best groups only.
        best_of_group: number of a group's largest scores, including the selection bias, whose sum ranks the group.
    """
    attributes: dict[str, int | float | str] = {
        "top_k": top_k,
        "norm_topk_prob": int(norm_topk_prob),
        "use_sigmoid": int(use_sigmoid),
        "norm_epsilon": norm_epsilon,
        **({"swiglu_alpha": swiglu_alpha, "swiglu_limit": swiglu_limit} if swiglu_limit else {}),
        **({"uses_gelu": 1} if uses_gelu else {}),
        **(
            {"num_groups": num_groups, "top_groups": top_groups, "best_of_group": best_of_group}
            if num_groups > 1
            else {}
        ),
    }
    inputs = [hidden, router_logits, gate_up, down, selection_bias, gate_up_bias, down_bias]
    while inputs[-1] is None:
        inputs.pop()
    return _one("RoutedExperts", inputs, shape_of(hidden), name, attributes=attributes, domain="chunkrt")


def _one(
    op: str,
    inputs: Sequence[ir.Value | None],
    shape: Sequence[int | str],
    name: str,
    *,
    attributes: Mapping[str, int | float | str] | None = None,
    domain: str = "",
) -> ir.Value:
    return current_trace().node(op, inputs, [(name, tuple(shape))], attributes=attributes or {}, domain=domain)[0]
