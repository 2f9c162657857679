"""A Llama in NumPy's float64, written from the paper's equations, as a reference for decoders with rounded weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Float64 = NDArray[np.float64]


def sliding_mask(num_tokens: int, window: int, sinks: int) -> NDArray[np.bool_]:
    """Return which positions each row sees, [T, T]: the first `sinks`, and the last `window` - `sinks`."""
    row, key = np.arange(num_tokens)[:, None], np.arange(num_tokens)
    seen: NDArray[np.bool_] = (key <= row) & ((key < sinks) | (key > row - (window - sinks)))
    return seen


def float64_logits(
    config: Mapping[str, Any],
    weights: Mapping[str, Float64],
    tokens: Sequence[int],
    sees: NDArray[np.bool_] | None = None,
) -> Float64:
    """Return logits [T, V] of a prompt.

    Args:
        config: of Hugging Face, without scaling of RoPE.
        weights: by the names of a plan; linears are [K, N].
        sees: positions that each row sees, [T, T]; by default all up to its own.
    """
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    dim = config.get("head_dim") or config["hidden_size"] // heads
    frequencies = config.get("rope_theta", 10000.0) ** (-np.arange(0, dim, 2) / dim)
    angles = np.outer(np.arange(len(tokens)), frequencies)[:, None]
    if sees is None:
        sees = np.tri(len(tokens), dtype=bool)
    mask = np.where(sees, 0.0, -np.inf)

    def norm(x: Float64, name: str) -> Float64:
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + config["rms_norm_eps"]) * weights[f"{name}.weight"]

    def rotated(x: Float64) -> Float64:
        first, second = np.split(x, 2, axis=-1)
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    x = weights["model.embed_tokens.weight"][list(tokens)]
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        qkv = norm(x, f"{layer}.input_layernorm") @ weights[f"{layer}.self_attn.qkv_proj.weight"]
        qkv = qkv + weights.get(f"{layer}.self_attn.qkv_proj.bias", 0.0)
        q, k, v = np.split(qkv.reshape(len(tokens), -1, dim), [heads, heads + kv_heads], axis=1)
        q, k = rotated(q), rotated(k)
        k, v = (np.repeat(each, heads // kv_heads, axis=1) for each in (k, v))
        q, k, v = (each.transpose(1, 0, 2) for each in (q, k, v))
        scores = q @ k.transpose(0, 2, 1) / np.sqrt(dim) + mask
        shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
        shares /= shares.sum(axis=-1, keepdims=True)
        attended = (shares @ v).transpose(1, 0, 2).reshape(len(tokens), -1)
        x = x + attended @ weights[f"{layer}.self_attn.o_proj.weight"]
        gate, up = np.split(
            norm(x, f"{layer}.post_attention_layernorm") @ weights[f"{layer}.mlp.gate_up_proj.weight"], 2, axis=-1
        )
        x = x + (gate / (1 + np.exp(-gate)) * up) @ weights[f"{layer}.mlp.down_proj.weight"]
    return norm(x, "model.norm") @ weights["lm_head.weight"]
