"""The operators that a decoder may use while it is traced: standard ONNX, plus what carries state.

Each function adds one node to the graph under construction and returns its output. Shapes are worked out here,
because a module needs them to build the next layer and the plan needs them for bytes and FLOPs.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from chunkrt.graph.tracing import current_trace


def shape_of(value: ir.Value) -> tuple[int | str, ...]:
    """A traced value's shape, symbols as strings."""
    assert value.shape is not None
    return tuple(d if isinstance(d, int) else str(d.value) for d in value.shape)


def add(left: ir.Value, right: ir.Value, *, name: str = "add") -> ir.Value:
    """left + right; right has left's shape, or is a row [N]."""
    return _one("Add", [left, right], shape_of(left), name)


def mul(left: ir.Value, right: ir.Value, *, name: str = "mul") -> ir.Value:
    """left * right, element by element."""
    return _one("Mul", [left, right], shape_of(left), name)


def sigmoid(value: ir.Value, *, name: str = "sigmoid") -> ir.Value:
    """1 / (1 + exp(-value))."""
    return _one("Sigmoid", [value], shape_of(value), name)


def matmul(left: ir.Value, right: ir.Value, *, name: str = "matmul") -> ir.Value:
    """left [T, K] @ right [K, N]."""
    return _one("MatMul", [left, right], (*shape_of(left)[:-1], shape_of(right)[-1]), name)


def rms_normalization(value: ir.Value, weight: ir.Value, *, epsilon: float, name: str = "norm") -> ir.Value:
    """value * rsqrt(mean(value^2) + epsilon) * weight over the last axis."""
    attributes = {"axis": -1, "epsilon": epsilon}
    return _one("RMSNormalization", [value, weight], shape_of(value), name, attributes=attributes)


def gather_rows(table: ir.Value, indices: ir.Value, *, name: str = "gather") -> ir.Value:
    """Rows of table [V, H] at indices [T] (or [R])."""
    shape = (*shape_of(indices), *shape_of(table)[1:])
    return _one("Gather", [table, indices], shape, name, attributes={"axis": 0})


def split_columns(value: ir.Value, *, names: Sequence[str]) -> list[ir.Value]:
    """Cut the last axis into equal parts, one a name."""
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
    name: str = "attention",
) -> ir.Value:
    """Rotate q and k, append k and v to this layer's cache, attend causally over all of it.

    Args:
        qkv: [T, (num_heads + 2 * num_kv_heads) * head_dim], columns q | k | v, head after head.
        cos, sin: [positions, rotary_dim / 2] tables for rotate-half RoPE.

    Returns:
        [T, num_heads * head_dim]. The caches [num_kv_heads, P, head_dim] belong to the module being traced.
        `graph/functions.py` holds the operator's meaning in standard ONNX.
    """
    trace = current_trace()
    key, value = (trace.state(n, (num_kv_heads, "P", head_dim)) for n in ("key_cache", "value_cache"))
    shape = (shape_of(qkv)[0], num_heads * head_dim)
    rotary_dim = 2 * int(shape_of(cos)[1])
    attributes = {
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "rotary_dim": rotary_dim,
        "scale": scale,
    }
    output, present_key, present_value = trace.node(
        "CachedAttention",
        [qkv, trace.position(), cos, sin, key, value],
        [
            (name, shape),
            ("present_key", (num_kv_heads, "P + T", head_dim)),
            ("present_value", (num_kv_heads, "P + T", head_dim)),
        ],
        attributes=attributes,
        domain="chunkrt",
    )
    trace.update_state(key, present_key)
    trace.update_state(value, present_value)
    return output


def _one(
    op: str,
    inputs: Sequence[ir.Value],
    shape: Sequence[int | str],
    name: str,
    *,
    attributes: dict[str, int | float] | None = None,
) -> ir.Value:
    return current_trace().node(op, inputs, [(name, tuple(shape))], attributes=attributes or {})[0]
