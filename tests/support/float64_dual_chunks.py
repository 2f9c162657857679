"""A Qwen2 with dual chunk attention in NumPy's float64, row by row and key by key, written from the definition.

Source: vLLM, `dual_chunk_rope.py` and `dual_chunk_flash_attn.py`, with attention to all keys.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import log, sqrt
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

Float64 = NDArray[np.float64]


def rotate(x: Float64, position: int, base: float, rotary_dim: int) -> Float64:
    """Rotate heads x [..., D] for one position; columns from `rotary_dim` on are unchanged."""
    half = rotary_dim // 2
    angles = position * base ** (-np.arange(0, rotary_dim, 2) / rotary_dim)
    cos, sin = np.cos(angles), np.sin(angles)
    first, second, rest = x[..., :half], x[..., half:rotary_dim], x[..., rotary_dim:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


def query_position(row: int, key: int, chunk_size: int, local_size: int) -> int:
    """Return the position that the query of a row is rotated for where it meets a key."""
    length = chunk_size - local_size
    chunks_back = row // length - key // length
    if chunks_back == 0:
        return row % length
    if chunks_back == 1:
        return min(row % length + length, chunk_size)
    return min(2 * length - 1, chunk_size)


def factor(row: int, num_prompt: int, original: int) -> float:
    """Return the factor of the query and the key of a row, in a prompt of `num_prompt` tokens or behind it."""
    return max(1.0, 1 + 0.1 * log(max(num_prompt, row + 1) / original)) if original else 1.0


def attend(
    q: Float64,
    k: Float64,
    v: Float64,
    num_prompt: int,
    *,
    scale: float,
    sizes: tuple[int, int, int],
    base: float,
    rotary_dim: int,
) -> Float64:
    """Return the heads' results [T, heads, D] of q [T, heads, D], k and v [T, kv_heads, D] before rotation.

    Args:
        num_prompt: number of tokens of the prompt; later rows were generated.
        sizes: chunk_size, local_size and original_max_position_embeddings of the config.
    """
    chunk_size, local_size, original = sizes
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    factors = [factor(row, num_prompt, original) for row in range(len(q))]
    length = chunk_size - local_size
    keys = [rotate(k[key], key % length, base, rotary_dim) * factors[key] for key in range(len(k))]
    out = np.empty_like(q)
    for row in range(len(q)):
        scores = np.empty((q.shape[1], row + 1))
        for key in range(row + 1):
            query = rotate(q[row], query_position(row, key, chunk_size, local_size), base, rotary_dim) * factors[row]
            scores[:, key] = scale * (query * keys[key]).sum(axis=-1)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        out[row] = np.einsum("hk,khd->hd", weights, v[: row + 1])
    return out


def logits(folder: Path, tokens: Sequence[int], num_prompt: int | None = None) -> Float64:
    """Return the logits [T, V] of a checkpoint of Qwen2 whose config has the sizes of dual chunk attention.

    Args:
        num_prompt: number of the first tokens that form the prompt; by default all.
    """
    config = json.loads((folder / "config.json").read_text())
    weights = {name: array.astype(np.float64) for name, array in load_file(folder / "model.safetensors").items()}
    dual = config["dual_chunk_attention_config"]
    names = ("chunk_size", "local_size", "original_max_position_embeddings")
    dim = config["hidden_size"] // config["num_attention_heads"]

    def norm(x: Float64, name: str) -> Float64:
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + config["rms_norm_eps"]) * weights[f"{name}.weight"]

    def linear(x: Float64, name: str) -> Float64:
        return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0.0)

    x = weights["model.embed_tokens.weight"][list(tokens)]
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        normed = norm(x, f"{layer}.input_layernorm")
        q, k, v = (linear(normed, f"{layer}.self_attn.{n}_proj").reshape(len(tokens), -1, dim) for n in "qkv")
        attended = attend(
            *(q, k, v),
            len(tokens) if num_prompt is None else num_prompt,
            scale=1 / sqrt(dim),
            sizes=(dual[names[0]], dual[names[1]], dual.get(names[2], 0)),
            base=config["rope_theta"],
            rotary_dim=dim,
        )
        x = x + linear(attended.reshape(len(tokens), -1), f"{layer}.self_attn.o_proj")
        normed = norm(x, f"{layer}.post_attention_layernorm")
        gate = linear(normed, f"{layer}.mlp.gate_proj")
        x = x + linear(gate / (1 + np.exp(-gate)) * linear(normed, f"{layer}.mlp.up_proj"), f"{layer}.mlp.down_proj")
    return norm(x, "model.norm") @ weights["model.embed_tokens.weight"].T
