"""Linear attention in NumPy, one function for each kind: the reference backend's implementation of
`chunkrt::LinearAttention`.

To add a kind, register its function with `register`, and its properties in `graph/linear_attention.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chunkrt.errors import ConfigError
from chunkrt.graph.plan import Node

Float32 = NDArray[np.float32]
Convolve = Callable[[Float32], Float32]
"""Function from x float32 [T, C] to float32 [T, C]: the node's causal convolution, which also advances its state. Call
it once per run.
"""

Kind = Callable[..., Float32]
"""Function that computes a kind of linear attention and returns the output [T, Hv * dv].

Its positional arguments are qkv [T, columns], gate [T, Hv] or None, beta [T, Hv] or None, convolve, and recurrent_state
[Hv, dk, dv] or None; its keyword arguments are num_k_heads, num_v_heads, head_k_dim, head_v_dim, use_qk_l2norm and, for
a kind that has it, skip [Hv]. All arrays are float32. The recurrent state is updated in place."""

_kinds: dict[str, Kind] = {}


def register(attn_type: str) -> Callable[[Kind], Kind]:
    """Register the function of a kind of linear attention (a decorator). Raises ConfigError if a function is already
    registered for the kind.
    """

    def add(kind: Kind) -> Kind:
        if attn_type in _kinds:
            raise ConfigError(f"the attn_type {attn_type!r} is already registered with the reference")
        _kinds[attn_type] = kind
        return kind

    return add


def missing_kind(node: Node) -> str:
    """Return a message if the reference lacks the kind of a linear-attention node; empty if it supports the kind."""
    if (attn_type := node.attributes["attn_type"]) in _kinds:
        return ""
    return f"reference has no linear attention of attn_type {attn_type!r}; it has: {', '.join(sorted(_kinds))}"


def linear_attention(
    qkv: Float32,
    gate: Float32 | None,
    beta: Float32 | None,
    conv_weight: Float32,
    conv_bias: Float32 | None,
    conv_state: Float32,
    recurrent_state: Float32 | None,
    skip: Float32 | None = None,
    *,
    attn_type: str,
    **sizes: Any,
) -> Float32:
    """Compute the operator as `ops.linear_attention` describes it; both states are updated in place.

    Raises:
        KeyError: the kind is not registered; check with `missing_kind` first.
    """

    def convolve(x: Float32) -> Float32:
        return causal_convolution(x, conv_weight, conv_bias, conv_state)

    options = sizes if skip is None else {**sizes, "skip": skip}
    return _kinds[attn_type](qkv, gate, beta, convolve, recurrent_state, **options)


def causal_convolution(x: Float32, weight: Float32, bias: Float32 | None, state: Float32) -> Float32:
    """Convolve every channel separately: y_t = bias + sum over j of weight_j z_(t+j), where z is the state, then x.

    Args:
        x: float32 [T, C].
        weight: float32 [C, 1, K]; the last tap applies to the row itself.
        bias: float32 [C], or None.
        state: float32 [C, K - 1], the inputs before row 0; replaced by the last K - 1 inputs.

    Returns:
        float32 [T, C].
    """
    window = np.concatenate([state, x.T], axis=1)
    num_taps = weight.shape[-1]
    seen = np.lib.stride_tricks.sliding_window_view(window, num_taps, axis=1)
    sums = np.einsum("ctk,ck->tc", seen, weight[:, 0], dtype=np.float64)
    state[...] = window[:, window.shape[1] - (num_taps - 1) :]
    result: Float32 = (sums if bias is None else sums + bias).astype(np.float32)
    return result


@register("short_conv")
def _short_conv(
    qkv: Float32, gate: None, beta: None, convolve: Convolve, recurrent_state: None, **sizes: int
) -> Float32:
    """Compute LFM2's gated short convolution: after * convolve(before * x). Source: Hugging Face's `Lfm2ShortConv`."""
    before, after, x = np.split(qkv, 3, axis=1)
    return after * convolve(before * x)


@register("silu_conv")
def _silu_conv(
    qkv: Float32, gate: None, beta: None, convolve: Convolve, recurrent_state: None, **sizes: int
) -> Float32:
    """Compute SiLU of the convolution, the first step of Mamba's mixer."""
    mixed = convolve(qkv)
    active: Float32 = (mixed / (1 + np.exp(-mixed.astype(np.float64)))).astype(np.float32)
    return active


@register("gated_delta_rule")
def _gated_delta_rule(
    qkv: Float32,
    gate: Float32,
    beta: Float32,
    convolve: Convolve,
    recurrent_state: Float32,
    *,
    num_k_heads: int,
    num_v_heads: int,
    head_k_dim: int,
    head_v_dim: int,
    use_qk_l2norm: int,
) -> Float32:
    """Compute the gated delta rule row by row: S <- e^g S; d = beta (v - S^T k); S <- S + k d^T; o = S^T q. Source:
    Yang et al., Gated Delta Networks (2024), equation 10.
    """
    mixed = convolve(qkv)
    active = mixed / (1 + np.exp(-mixed.astype(np.float64)))
    all_k = num_k_heads * head_k_dim
    q, k = (part.reshape(len(qkv), num_k_heads, head_k_dim) for part in np.split(active[:, : 2 * all_k], 2, axis=1))
    v = active[:, 2 * all_k :].reshape(len(qkv), num_v_heads, head_v_dim)
    if use_qk_l2norm:
        q, k = (x / np.sqrt(np.square(x).sum(axis=-1, keepdims=True) + 1e-6) for x in (q, k))
    q, k = (np.repeat(x, num_v_heads // num_k_heads, axis=1) for x in (q * head_k_dim**-0.5, k))
    decay = np.exp(gate.astype(np.float64))
    state, output = recurrent_state.astype(np.float64), np.empty_like(v)
    for t in range(len(qkv)):
        state *= decay[t, :, None, None]
        delta = beta[t, :, None] * (v[t] - np.einsum("hmn,hm->hn", state, k[t]))
        state += k[t, :, :, None] * delta[:, None, :]
        output[t] = np.einsum("hmn,hm->hn", state, q[t])
    recurrent_state[...] = state
    rows: Float32 = output.reshape(len(qkv), -1).astype(np.float32)
    return rows


@register("mamba2")
def _mamba2(
    cbx: Float32,
    gate: Float32,
    step: Float32,
    convolve: Convolve,
    recurrent_state: Float32,
    *,
    num_k_heads: int,
    num_v_heads: int,
    head_k_dim: int,
    head_v_dim: int,
    use_qk_l2norm: int,
    skip: Float32,
) -> Float32:
    """Compute Mamba-2 row by row: S <- e^g S + B (step x)^T; y = S^T C + skip x. The state is rounded after each row,
    so that calls may split rows in any way. Source: Dao and Gu, Transformers are SSMs (2024), section 7.
    """
    mixed = convolve(cbx)
    active = mixed / (1 + np.exp(-mixed.astype(np.float64)))
    all_k = num_k_heads * head_k_dim
    c, b = (part.reshape(len(cbx), num_k_heads, head_k_dim) for part in np.split(active[:, : 2 * all_k], 2, axis=1))
    x = active[:, 2 * all_k :].reshape(len(cbx), num_v_heads, head_v_dim)
    c, b = (np.repeat(part, num_v_heads // num_k_heads, axis=1) for part in (c, b))
    decay = np.exp(gate.astype(np.float64))
    output = skip[:, None] * x
    for t in range(len(cbx)):
        written = b[t, :, :, None] * (step[t, :, None] * x[t])[:, None, :]
        recurrent_state[...] = decay[t, :, None, None] * recurrent_state + written
        output[t] += np.einsum("hmn,hm->hn", recurrent_state, c[t])
    rows: Float32 = output.reshape(len(cbx), -1).astype(np.float32)
    return rows


def selective_scan(x: Float32, step: Float32, bc: Float32, rates: Float32, skip: Float32, state: Float32) -> Float32:
    """Compute Mamba's recurrence as `ops.selective_scan` describes it, row by row; the state is updated in place.

    The state is rounded after each row, so that calls may split rows in any way.
    """
    b, c = np.split(bc.astype(np.float64), 2, axis=1)
    output = skip * x.astype(np.float64)
    for t in range(len(x)):
        decay = np.exp(step[t].astype(np.float64) * rates)
        state[...] = decay * state + b[t, :, None] * (step[t] * x[t])
        output[t] += c[t] @ state
    rows: Float32 = output.astype(np.float32)
    return rows
