"""The reference backend: one NumPy function for each operator, written for readability.

This backend defines the correct values: integer products are exact, and all other computations are in float32 or
better. It is slow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import cast

import numpy as np
from numpy.typing import NDArray

from chunkrt.backends.base import Array, Executable, Support
from chunkrt.backends.function_executable import FunctionExecutable, Operator, constants
from chunkrt.backends.recurrences import linear_attention, missing_kind, selective_scan
from chunkrt.backends.registry import REFERENCE, operators
from chunkrt.engine_directory.store import WeightStore
from chunkrt.errors import PartitionError
from chunkrt.graph.operators import column_ranges
from chunkrt.graph.plan import Attribute, Plan, Subgraph
from chunkrt.graph.uses import uses
from chunkrt.quant.arithmetic import DynamicWeight, Quantize, QuantizedWeight, StaticWeight, quantize_rows
from chunkrt.quant.scheme import Scheme

Float32 = NDArray[np.float32]
Rope = Callable[[Float32, Float32, Float32], Float32]
"""Function that rotates x [T, heads, D] by cos, sin [T, rotary_dim / 2]. chunkrt's is `rotate_half`."""


class ReferenceBackend:
    """Backend that runs any plan, under any scheme, on any machine."""

    name = "reference"
    concurrency: int | None = None
    cache_dtypes: tuple[str, ...] = ("float32", "float16")

    def supports(self, subgraph: Subgraph, plan: Plan, scheme: Scheme) -> Support:
        """Accept a subgraph if every operator is known."""
        for use in uses(subgraph, plan):
            if reason := operators.missing(use, REFERENCE):
                return Support(ok=False, node=use.node.name, reason=reason)
        return Support(ok=True)

    def compile(
        self, subgraph: Subgraph, plan: Plan, chunk_length: int, scheme: Scheme, weights: WeightStore
    ) -> Executable:
        """Look up the operators and the weights.

        Raises:
            PartitionError: see `supports`.
        """
        self.supports(subgraph, plan, scheme).require(self.name, subgraph)
        steps = [(use.node, own_function(use.operator)) for use in uses(subgraph, plan)]
        return FunctionExecutable(
            subgraph.name, steps, constants(subgraph.weights, plan, scheme, weights), plan.tensors
        )


def own_function(operator: str) -> Operator:
    """Return the reference's function of an operator, by its canonical name."""
    found = operators.find_own(operator, REFERENCE)
    assert found is not None
    return found.function


@operators.register("linear", REFERENCE, parts=("quantize",))
@operators.register("logits", REFERENCE, parts=("quantize",))
def _linear(left: Float32, right: Float32 | QuantizedWeight, *, quantize: Quantize = quantize_rows) -> Float32:
    if isinstance(right, np.ndarray):
        return left @ right
    return right.multiply(left) if isinstance(right, StaticWeight) else right.multiply(left, quantize)


@operators.register("matmul", REFERENCE)
def _matmul(left: Float32, right: Float32) -> Float32:
    product: Float32 = left @ right
    return product


@operators.register("shadow_linear", REFERENCE)
def _shadow_linear(left: Float32, right: StaticWeight) -> Float32:
    return right.multiply_excess(left)


@operators.register("add", REFERENCE)
def _add(left: Float32, right: Float32) -> Float32:
    return left + right


@operators.register("mul", REFERENCE)
def _mul(left: Float32, right: Float32) -> Float32:
    return left * right


@operators.register("sigmoid", REFERENCE)
def _sigmoid(x: Float32) -> Float32:
    decay = np.exp(-np.abs(x))
    result: Float32 = np.where(x >= 0, 1 / (1 + decay), decay / (1 + decay))
    return result


@operators.register("relu", REFERENCE)
def _relu(x: Float32) -> Float32:
    return np.maximum(x, np.float32(0))


@operators.register("thresholded_relu", REFERENCE)
def _thresholded_relu(x: Float32, *, alpha: float) -> Float32:
    return np.where(x <= np.float32(alpha), np.float32(0), x)


@operators.register("softplus", REFERENCE)
def _softplus(x: Float32) -> Float32:
    result: Float32 = np.logaddexp(x, np.float32(0))
    return result


@operators.register("tanh", REFERENCE)
def _tanh(x: Float32) -> Float32:
    result: Float32 = np.tanh(x)
    return result


@operators.register("gelu", REFERENCE)
def _gelu(x: Float32, *, approximate: str = "none") -> Float32:
    if approximate == "none":
        exact: Float32 = (x * 0.5 * (1 + _erf(x / np.sqrt(2.0)))).astype(np.float32)
        return exact
    if approximate != "tanh":
        raise PartitionError(f"Gelu has the approximations 'none' and 'tanh', not {approximate!r}")
    inner = np.float32(np.sqrt(2 / np.pi)) * (x + np.float32(0.044715) * x**3)
    result: Float32 = np.float32(0.5) * x * (1 + np.tanh(inner))
    return result


_erf = np.vectorize(math.erf, otypes=[np.float64])


@operators.register("quick_gelu", REFERENCE)
def _quick_gelu(x: Float32) -> Float32:
    return x * _sigmoid(np.float32(1.702) * x)


@operators.register("xielu", REFERENCE)
def _xielu(x: Float32, parameters: Float32) -> Float32:
    wide, (a_p, a_n, b, e) = x.astype(np.float64), parameters.astype(np.float64)
    curved = np.where(wide > 0, a_p * wide**2, a_n * (np.expm1(np.minimum(wide, e)) - wide))
    result: Float32 = (curved + b * wide).astype(np.float32)
    return result


@operators.register("silu_mul", REFERENCE)
def _silu_mul(x: Float32) -> Float32:
    gate, up = np.split(x, 2, axis=-1)
    result: Float32 = gate * _sigmoid(gate) * up
    return result


@operators.register("gelu_mul", REFERENCE)
def _gelu_mul(x: Float32, *, approximate: str = "none") -> Float32:
    gate, up = np.split(x, 2, axis=-1)
    return _gelu(gate, approximate=approximate) * up


@operators.register("head_norm", REFERENCE)
def _head_norm(x: Float32, weight: Float32, *, epsilon: float) -> Float32:
    num_heads, head_dim = weight.shape
    heads = x.reshape(len(x), -1, head_dim).copy()
    first = heads[:, :num_heads].astype(np.float64)
    heads[:, :num_heads] = first / np.sqrt(np.square(first).mean(axis=-1, keepdims=True) + epsilon) * weight
    return heads.reshape(x.shape)


operators.register("linear_attention", REFERENCE, refuses=missing_kind)(linear_attention)
operators.register("selective_scan", REFERENCE)(selective_scan)


@operators.register("concat", REFERENCE)
def _concat(*parts: Float32, axis: int) -> Float32:
    return np.concatenate(parts, axis=axis)


@operators.register("split", REFERENCE)
def _split(x: Float32, *, axis: int, num_outputs: int) -> tuple[Float32, ...]:
    return tuple(np.split(x, num_outputs, axis=axis))


@operators.register("embedding", REFERENCE)
@operators.register("gather_rows", REFERENCE)
def _gather(table: Array, indices: NDArray[np.int64], *, axis: int) -> Float32:
    rows: Float32 = np.take(table, indices, axis=axis).astype(np.float32)
    return rows


@operators.register("gather_share", REFERENCE)
def _gather_share(table: Array, indices: NDArray[np.int64], *, first: int, all_rows: int) -> Float32:
    if indices.min(initial=0) < 0 or indices.max(initial=0) >= all_rows:
        raise IndexError(f"the rows {indices} are not all inside 0..{all_rows - 1}")
    is_here = (indices >= first) & (indices < first + len(table))
    rows: Float32 = np.zeros((len(indices), table.shape[1]), np.float32)
    rows[is_here] = table[indices[is_here] - first]
    return rows


@operators.register("pick_columns", REFERENCE)
def _pick_columns(x: Float32, *, columns: str) -> Float32:
    parts = [
        x[:, part.start : part.stop] if part.start < x.shape[1] else np.zeros((len(x), len(part)), np.float32)
        for part in column_ranges(columns)
    ]
    return np.concatenate(parts, axis=1)


@operators.register("rms_norm", REFERENCE)
def _rms_normalization(x: Float32, weight: Float32, *, axis: int, epsilon: float) -> Float32:
    mean_square = np.mean(np.square(x, dtype=np.float64), axis=axis, keepdims=True)
    normalised: Float32 = ((x / np.sqrt(mean_square + epsilon)) * weight).astype(np.float32)
    return normalised


@operators.register("layer_norm", REFERENCE)
def _layer_normalization(x: Float32, weight: Float32, bias: Float32, *, axis: int, epsilon: float) -> Float32:
    wide = x.astype(np.float64)
    centred = wide - wide.mean(axis=axis, keepdims=True)
    scale = np.sqrt(np.square(centred).mean(axis=axis, keepdims=True) + epsilon)
    normalised: Float32 = (centred / scale * weight + bias).astype(np.float32)
    return normalised


@operators.register("add_positions", REFERENCE)
def _add_positions(hidden: Float32, table: Float32, position: NDArray[np.int64]) -> Float32:
    first, last = int(position[0]), int(position[0]) + len(hidden)
    if first < 0 or last > len(table):
        raise IndexError(f"the positions {first} to {last - 1} are not inside the {len(table)} of the table")
    return hidden + table[first:last]


@operators.register("float_linear", REFERENCE)
def _float_linear(left: Float32, weight: Float32) -> Float32:
    result: Float32 = (left.astype(np.float64) @ weight).astype(np.float32)
    return result


@operators.register("routed_experts", REFERENCE, parts=("quantize",))
def routed_experts(
    hidden: Float32,
    router_logits: Float32,
    gate_up: Float32 | Sequence[DynamicWeight],
    down: Float32 | Sequence[DynamicWeight],
    selection_bias: Float32 | None = None,
    gate_up_bias: Float32 | None = None,
    down_bias: Float32 | None = None,
    *,
    top_k: int,
    norm_topk_prob: int,
    use_sigmoid: int = 0,
    norm_epsilon: float = 0.0,
    swiglu_alpha: float = 1.0,
    swiglu_limit: float = 0.0,
    uses_gelu: int = 0,
    num_groups: int = 1,
    top_groups: int = 1,
    best_of_group: int = 1,
    quantize: Quantize = quantize_rows,
) -> Float32:
    if use_sigmoid:
        scores = values = _sigmoid(router_logits)
    else:
        scores = np.exp(router_logits - router_logits.max(axis=-1, keepdims=True))
        scores, values = scores / scores.sum(axis=-1, keepdims=True), router_logits
    if selection_bias is not None:
        values = scores + selection_bias
    if num_groups > 1:
        values = scores if selection_bias is None else values
        values = _in_best_groups(values, num_groups, top_groups, best_of_group)
    picked = np.argsort(-values, axis=-1, kind="stable")[:, :top_k]  # the first of equal values
    weights = np.take_along_axis(scores, picked, axis=-1)
    if norm_topk_prob:
        weights /= weights.sum(axis=-1, keepdims=True) + np.float32(norm_epsilon)
    activate = partial(_gelu_mul, approximate="tanh") if uses_gelu else _silu_mul
    output = np.zeros_like(hidden)
    for expert in np.unique(picked):
        rows, places = np.nonzero(picked == expert)
        gate_and_up = _linear(hidden[rows], gate_up[expert], quantize=quantize)
        if gate_up_bias is not None:
            gate_and_up = gate_and_up + gate_up_bias[expert]
        gated = _clamped_swiglu(gate_and_up, swiglu_alpha, swiglu_limit) if swiglu_limit else activate(gate_and_up)
        result = _linear(gated, down[expert], quantize=quantize)
        if down_bias is not None:
            result = result + down_bias[expert]
        output[rows] += weights[rows, places, None] * result
    return output


def _in_best_groups(values: Float32, num_groups: int, top_groups: int, best_of_group: int) -> Float32:
    """Replace the values of experts outside of a row's best groups by minus infinity."""
    groups = values.reshape(len(values), num_groups, -1)
    ranks = np.sort(groups, axis=-1)[..., -best_of_group:].sum(axis=-1)
    best = np.argsort(-ranks, axis=-1, kind="stable")[:, :top_groups]  # the first of equal groups
    is_open = np.zeros(ranks.shape, bool)
    np.put_along_axis(is_open, best, True, axis=-1)
    result: Float32 = np.where(is_open[..., None], groups, np.float32(-np.inf)).reshape(values.shape)
    return result


def _clamped_swiglu(x: Float32, alpha: float, limit: float) -> Float32:
    gate, up = np.split(x, 2, axis=-1)
    gate, up = np.minimum(gate, np.float32(limit)), np.clip(up, np.float32(-limit), np.float32(limit))
    result: Float32 = (up + np.float32(1)) * (gate * _sigmoid(np.float32(alpha) * gate))
    return result


@operators.register("rope", REFERENCE)
def rotate_half(x: Float32, cos: Float32, sin: Float32) -> Float32:
    """Apply RoPE to x [T, heads, D] with cos, sin [T, rotary_dim / 2]; dimensions from rotary_dim on are unchanged."""
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = cos[:, None], sin[:, None]
    rotated: Float32 = np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)
    return rotated


@operators.register("cached_attention", REFERENCE, parts=("rope",))
def cached_attention(
    qkv: Float32,
    position: NDArray[np.int64],
    rope_position: NDArray[np.int64],
    cos: Float32,
    sin: Float32,
    key_cache: Array,
    value_cache: Array,
    sinks: Float32 | None = None,
    *,
    has_raw_keys: int,
    appends: int = 1,
    rope: Rope = rotate_half,
    **attributes: Attribute,
) -> Float32:
    start, stop, table_row = int(position[0]), int(position[0]) + len(qkv), int(rope_position[0])
    here = slice(table_row, table_row + len(qkv))
    if "rope_period" in attributes:
        return _dual_chunk_attention(
            qkv,
            start,
            table_row - start,
            lambda x, rows: rope(x, cos[rows], sin[rows]),
            (key_cache, value_cache),
            sinks,
            bool(has_raw_keys),
            {**attributes, "appends": appends},
        )
    if appends:
        q, k, v = _heads(qkv, attributes)
        new_keys = k if has_raw_keys else rope(k, cos[here], sin[here])
        _append(key_cache, value_cache, new_keys, v, start)
    else:
        q = qkv.reshape(len(qkv), -1, cast(int, attributes["head_dim"]))
    window = cast(int, attributes["window"])
    first = max(0, start + 1 - window) if window else 0
    keys, values = (_read(cache, first, stop) for cache in (key_cache, value_cache))
    if has_raw_keys:
        of_keys = slice(table_row - start + first, table_row - start + stop)
        rows = np.ascontiguousarray(keys.transpose(1, 0, 2))
        keys = rope(rows, cos[of_keys], sin[of_keys]).transpose(1, 0, 2)
    scores = _scores(rope(q, cos[here], sin[here]), keys, attributes)
    return _attend(scores, values, sinks, start, first, attributes)


def _dual_chunk_attention(
    qkv: Float32,
    position: int,
    num_prompt: int,
    rope: Callable[[Float32, NDArray[np.int64]], Float32],
    caches: tuple[Array, Array],
    sinks: Float32 | None,
    has_raw_keys: bool,
    attributes: Mapping[str, Attribute],
) -> Float32:
    """Compute dual chunk attention; see `ops.DualChunks`.

    Args:
        num_prompt: number of tokens of the prompt if queries and keys have a factor, otherwise 0.
        rope: rotates x [T, heads, D] for positions [T].
    """
    period, limit = (cast(int, attributes[name]) for name in ("rope_period", "rope_limit"))
    stop = position + len(qkv)
    rows, keys_at = np.arange(position, stop), np.arange(stop)

    def rotated(x: Float32, positions: NDArray[np.int64], rotations: NDArray[np.int64]) -> Float32:
        return rope(x, rotations) * _length_factors(positions, num_prompt, attributes)[:, None, None]

    if attributes.get("appends", 1):
        q, k, v = _heads(qkv, attributes)
        _append(*caches, k if has_raw_keys else rotated(k, rows, rows % period), v, position)
    else:
        q = qkv.reshape(len(qkv), -1, cast(int, attributes["head_dim"]))
    keys, values = (_read(cache, 0, stop) for cache in caches)
    if has_raw_keys:
        of_rows = np.ascontiguousarray(keys.transpose(1, 0, 2))
        keys = rotated(of_rows, keys_at, keys_at % period).transpose(1, 0, 2)
    num_back = rows[:, None] // period - keys_at // period  # number of chunks between a row and a key
    rotations = (rows % period, np.minimum(rows % period + period, limit), rows * 0 + min(2 * period - 1, limit))
    ranges = (num_back <= 0, num_back == 1, num_back > 1)
    scores = np.zeros(1, np.float32)
    for is_in_range, rotation in zip(ranges, rotations, strict=True):
        if (reaching := is_in_range.any(axis=1)).any():
            of_range = _scores(rotated(q, rows, np.where(reaching, rotation, 0)), keys, attributes)
            scores = np.where(is_in_range, of_range, scores)
    return _attend(scores, values, sinks, position, 0, attributes)


def _length_factors(
    positions: NDArray[np.int64], num_prompt: int, attributes: Mapping[str, Attribute]
) -> NDArray[np.float32]:
    """Return the factors of queries and keys with dual chunk attention [T]."""
    long_from = cast(int, attributes.get("long_context_from", 0))
    if not long_from:
        return np.ones(len(positions), np.float32)
    lengths = np.maximum(np.maximum(positions + 1, num_prompt), long_from)
    return (1 + 0.1 * np.log(lengths / long_from)).astype(np.float32)


def _heads(qkv: Float32, attributes: Mapping[str, Attribute]) -> Sequence[Float32]:
    """Return q, k, v, each [T, heads, D]."""
    num_heads, num_kv_heads, head_dim = (cast(int, attributes[n]) for n in ("num_heads", "num_kv_heads", "head_dim"))
    heads = qkv.reshape(len(qkv), num_heads + 2 * num_kv_heads, head_dim)
    return [np.ascontiguousarray(part) for part in np.split(heads, [num_heads, num_heads + num_kv_heads], axis=1)]


def _append(key_cache: Array, value_cache: Array, k: Float32, v: Float32, start: int) -> None:
    """Write the rows' keys and values to their slots in the caches."""
    slots = np.arange(start, start + len(k)) % key_cache.shape[1]
    key_cache[:, slots], value_cache[:, slots] = k.transpose(1, 0, 2), v.transpose(1, 0, 2)


def _read(cache: Array, first: int, stop: int) -> Float32:
    """Return positions first to stop of a cache [kv_heads, slots, D]; a ring holds position p at slot p modulo its
    size."""
    return cache[:, np.arange(first, stop) % cache.shape[1]].astype(np.float32)


def _scores(q: Float32, keys: Float32, attributes: Mapping[str, Attribute]) -> Float32:
    """Return scaled products [kv_heads, heads for each, T, keys] of q [T, heads, D] and keys [kv_heads, keys, D]."""
    rows, num_heads, head_dim = q.shape
    grouped = q.reshape(rows, len(keys), num_heads // len(keys), head_dim)
    scale = np.float32(cast(float, attributes["scale"]))
    scores: Float32 = np.einsum("tgrd,gpd->grtp", grouped, keys, optimize=True) * scale
    return scores


def _attend(
    scores: Float32,
    values: Float32,
    sinks: Float32 | None,
    start: int,
    first: int,
    attributes: Mapping[str, Attribute],
) -> Float32:
    """Compute the sums of values, weighted by the softmax of scores, of the rows at positions from `start` on over the
    keys at positions from `first` on."""
    window, (num_kv_heads, _, rows, _) = cast(int, attributes["window"]), scores.shape
    if soft_cap := np.float32(cast(float, attributes.get("soft_cap", 0.0))):
        scores = soft_cap * np.tanh(scores / soft_cap)
    key_positions, row_positions = np.arange(first, start + rows), np.arange(start, start + rows)[:, None]
    hidden = key_positions > row_positions
    if window:
        hidden |= key_positions <= row_positions - window
    scores[..., hidden] = -np.inf
    largest = scores.max(axis=-1, keepdims=True)
    if sinks is None:
        weights = np.exp(scores - largest)
        weights /= weights.sum(axis=-1, keepdims=True)
    else:
        by_group = sinks.reshape(num_kv_heads, -1, 1, 1)
        largest = np.maximum(largest, by_group)
        weights = np.exp(scores - largest)
        weights /= weights.sum(axis=-1, keepdims=True) + np.exp(by_group - largest)
    attended: Float32 = np.einsum("grtp,gpd->tgrd", weights, values, optimize=True).reshape(rows, -1)
    return attended
