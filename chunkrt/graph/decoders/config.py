"""What a decoder family needs to know of a checkpoint, read from Hugging Face's config keys and checked.

A key that would change the result and is not implemented is refused by name: nothing is ignored in silence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chunkrt.errors import ModelError, UnsupportedModelError
from chunkrt.graph.rope import inverse_frequencies
from chunkrt.weights.source import TensorSource

LONGEST_CONTEXT = 2**24
ROPE_DIVISOR = "rope_freqs.weight"


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Sizes in elements, counts, and switches; names as in the glossary."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    rms_norm_eps: float
    attention_bias: bool
    mlp_bias: bool
    tie_word_embeddings: bool
    inverse_frequencies: NDArray[np.float64]
    rope_divisor: str | None


def read_config(source: TensorSource) -> DecoderConfig:
    """Read and check the config of a checkpoint.

    Raises:
        ModelError: a key is missing or makes no sense.
        UnsupportedModelError: a key asks for something that is not implemented (a sliding window, another
            activation, an unknown rope scaling).
    """
    config = source.config
    _refuse_unsupported(config, source)
    hidden, heads = _count(source, "hidden_size"), _count(source, "num_attention_heads")
    kv_heads = _count(source, "num_key_value_heads", default=heads)
    head_dim = _count(source, "head_dim", default=hidden // heads)
    if heads % kv_heads:
        raise ModelError(f"{source.path.name}: {heads} query heads cannot share {kv_heads} key/value heads evenly")
    if head_dim % 2:
        raise ModelError(f"{source.path.name}: head_dim is {head_dim}; RoPE needs an even one")
    if (layers := _count(source, "num_hidden_layers")) > len(source.names()):
        raise ModelError(
            f"{source.path.name}: {layers} layers are claimed, but there are {len(source.names())} tensors"
        )
    return DecoderConfig(
        hidden_size=hidden,
        intermediate_size=_count(source, "intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=_count(source, "vocab_size"),
        context_length=_context_length(source),
        rms_norm_eps=_epsilon(source),
        attention_bias=bool(config.get("attention_bias", False)),
        mlp_bias=bool(config.get("mlp_bias", False)),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        inverse_frequencies=inverse_frequencies(config, head_dim),
        rope_divisor=ROPE_DIVISOR if ROPE_DIVISOR in source.names() else None,
    )


def _count(source: TensorSource, key: str, *, default: int | None = None) -> int:
    value: Any = source.config.get(key)
    value = default if value is None else value
    if value is None:
        raise ModelError(f"{source.path.name}: the config does not give {key!r}")
    if type(value) is not int or value < 1:
        raise ModelError(f"{source.path.name}: {key} is {value!r}, expected a positive whole number")
    return value


def _epsilon(source: TensorSource) -> float:
    value: Any = source.config.get("rms_norm_eps", 1e-6)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise ModelError(f"{source.path.name}: rms_norm_eps is {value!r}, expected a number in [0, 1)")
    return float(value)


def _context_length(source: TensorSource) -> int:
    """The context, refused where it is beyond any model's: RoPE tables of that length will be allocated."""
    length = _count(source, "max_position_embeddings")
    if length > LONGEST_CONTEXT:
        raise ModelError(
            f"{source.path.name}: the config claims a context of {length} tokens; at most {LONGEST_CONTEXT} is believed"
        )
    return length


def _refuse_unsupported(config: Mapping[str, Any], source: TensorSource) -> None:
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedModelError(f"{source.path.name}: hidden_act {activation!r} is not supported, only silu")
    window, context = config.get("sliding_window"), config.get("max_position_embeddings")
    if isinstance(window, int) and isinstance(context, int) and 0 < window < context:
        raise UnsupportedModelError(
            f"{source.path.name}: a sliding window of {window} in a context of {context} is not supported"
        )
    if config.get("quantization_config"):
        raise UnsupportedModelError(
            f"{source.path.name}: the checkpoint is quantised by another library; use the float checkpoint or a GGUF"
        )
