"""GGUF's vocabulary in Hugging Face's words: tensor names and metadata keys, one table row an architecture.

Source: llama.cpp's gguf-py/gguf/tensor_mapping.py and convert_hf_to_gguf.py.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from chunkrt.errors import ModelError, UnsupportedModelError


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """What sets one `general.architecture` apart.

    `modules` maps stems of tensor names (before ".weight" or ".bias"); those of a layer begin with "blk.N."
    in GGUF and with "model.layers.N." in Hugging Face. `permuted` are the modules whose rows GGUF reorders
    for interleaved RoPE, with the config key that counts their heads. `refused` are metadata keys (after the
    architecture's name) that would change the result and are not implemented, unless they are 0.
    """

    model_type: str
    modules: Mapping[str, str]
    permuted: Mapping[str, str]
    refused: Collection[str]


_MODEL = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "rope_freqs": "rope_freqs",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_SCALINGS = (
    "attention.clamp_kqv",
    "attention.max_alibi_bias",
    "attention.scale",
    "attn_logit_softcapping",
    "embedding_scale",
    "expert_count",
    "final_logit_softcapping",
    "logit_scale",
    "residual_scale",
    "rope.scale_linear",
)

ARCHITECTURES = {
    "llama": Architecture(
        model_type="llama",
        modules=_MODEL | _LAYER,
        permuted={"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"},
        refused=_SCALINGS,
    ),
}

_TENSOR_NAME = re.compile(r"(blk\.(?P<layer>0|[1-9][0-9]*)\.)?(?P<module>[a-z_]+)\.(?P<part>weight|bias)")


def find_architecture(name: Any) -> Architecture:
    """Look an architecture up by its `general.architecture`.

    Raises:
        UnsupportedModelError: it is not in the table.
    """
    if isinstance(name, str) and name in ARCHITECTURES:
        return ARCHITECTURES[name]
    known = ", ".join(sorted(ARCHITECTURES))
    raise UnsupportedModelError(f"the GGUF architecture {name!r} is not implemented; there are: {known}")


def translate_name(architecture: Architecture, name: str) -> tuple[str, str | None]:
    """A tensor's name in Hugging Face's words, and the config key that counts its heads if it is permuted.

    Raises:
        UnsupportedModelError: the architecture has no such tensor.
    """
    match = _TENSOR_NAME.fullmatch(name)
    module = match["module"] if match else ""
    if match is None or module not in architecture.modules or (module in _MODEL) == bool(match["layer"]):
        raise UnsupportedModelError(
            f"it holds the tensor {name!r}, which {architecture.model_type} as implemented lacks"
        )
    prefix = f"model.layers.{match['layer']}." if match["layer"] else ""
    return f"{prefix}{architecture.modules[module]}.{match['part']}", architecture.permuted.get(module)


def translate_config(
    architecture: Architecture, metadata: Mapping[str, Any], tensors: Mapping[str, tuple[int, ...]]
) -> dict[str, Any]:
    """Hugging Face's config keys from the metadata and the tensors' shapes (under their GGUF names).

    Raises:
        ModelError: a key is missing, of the wrong type or out of range.
        UnsupportedModelError: a key asks for what is not implemented.
    """
    keys = _Keys(metadata, f"{metadata['general.architecture']}.")
    for key in architecture.refused:
        if keys.get(key):
            raise UnsupportedModelError(f"{keys.prefix}{key} = {keys.get(key)} is not implemented")
    hidden_size, num_heads = keys.count("embedding_length"), keys.count("attention.head_count")
    head_dim = keys.count("attention.key_length", default=hidden_size // num_heads or None)
    if keys.count("attention.value_length", default=head_dim) != head_dim:
        raise UnsupportedModelError(
            "keys and values of different length (GGUF attention.value_length) are not implemented"
        )
    rotary_dim = keys.count("rope.dimension_count", default=head_dim)
    if rotary_dim > head_dim:
        raise ModelError(f"{keys.prefix}rope.dimension_count = {rotary_dim} exceeds the head length {head_dim}")
    embedding = tensors.get("token_embd.weight", ())
    if len(embedding) != 2 or embedding[1] != hidden_size:
        raise ModelError(
            f"token_embd.weight has shape {list(embedding)}, expected [vocabulary, {hidden_size}]; "
            "is it a vocabulary or an adapter, not a model?"
        )
    num_layers = keys.count("block_count")
    if not any(name.startswith(f"blk.{num_layers - 1}.") for name in tensors):
        raise ModelError(f"{keys.prefix}block_count = {num_layers}, but no tensor blk.{num_layers - 1}.* exists")
    return {
        "model_type": architecture.model_type,
        "vocab_size": embedding[0],
        "hidden_size": hidden_size,
        "intermediate_size": keys.count("feed_forward_length"),
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": keys.count("attention.head_count_kv", default=num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": keys.count("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": keys.number("rope.freq_base", default=10000.0),
        "partial_rotary_factor": rotary_dim / head_dim,
        "rope_scaling": _rope_scaling(keys),
        "sliding_window": keys.count("attention.sliding_window", default=0) or None,
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in tensors,
    }


def _rope_scaling(keys: _Keys) -> dict[str, Any] | None:
    kind = keys.get("rope.scaling.type")
    if kind in (None, "none"):
        return None
    if not isinstance(kind, str):
        raise ModelError(f"{keys.prefix}rope.scaling.type must be a string, found {kind!r}")
    scaling = {"rope_type": kind, "factor": keys.number("rope.scaling.factor", default=1.0)}
    if original := keys.count("rope.scaling.original_context_length", default=0):
        scaling["original_max_position_embeddings"] = original
    return scaling


class _Keys:
    """An architecture's metadata keys, read with their types checked."""

    def __init__(self, metadata: Mapping[str, Any], prefix: str) -> None:
        self.metadata = metadata
        self.prefix = prefix

    def get(self, key: str) -> Any:
        return self.metadata.get(self.prefix + key)

    def count(self, key: str, default: int | None = None) -> int:
        """A positive integer. 0 means the default, if there is one; a list (one a layer) must be uniform."""
        value = self.get(key)
        if isinstance(value, list) and value:
            if len(set(value)) > 1:
                raise UnsupportedModelError(f"{self.prefix}{key} differs between layers: {value[:8]}")
            value = value[0]
        if value in (None, 0) and default is not None:
            return default
        if type(value) is not int or value <= 0:
            raise ModelError(f"{self.prefix}{key} must be a positive integer, found {value!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive, finite number."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if type(value) not in (int, float) or not 0 < value < float("inf"):
            raise ModelError(f"{self.prefix}{key} must be a positive number, found {value!r}")
        return float(value)
