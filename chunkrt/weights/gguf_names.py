"""GGUF's vocabulary in Hugging Face's words: tensor names and metadata keys, one table row an architecture.

Source: llama.cpp's gguf-py/gguf/tensor_mapping.py and convert_hf_to_gguf.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from chunkrt.errors import UnsupportedModelError
from chunkrt.weights.gguf_keys import Keys, common_config

Config = dict[str, Any]


def _nothing(keys: Keys, config: Config) -> Config:
    return {}


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """What sets one `general.architecture` apart.

    `model` and `layer` map stems of tensor names (before ".weight" or ".bias", or whole) of the model and of a layer,
    where they come after "blk.N." in GGUF and "model.layers.N." in Hugging Face. `in_config` are tensors that
    Hugging Face keeps in the config. `permuted` are the modules whose rows GGUF reorders for interleaved RoPE, with
    the config key that counts their heads. `refused` are metadata keys (after the architecture's name) that would
    change the result and are not implemented, unless they are 0. `config` gives the config keys that it has besides
    the common ones or in place of them, from the metadata and the common ones. `is_hybrid`: some layers have no
    attention.
    """

    model_type: str
    model: Mapping[str, str]
    layer: Mapping[str, str]
    in_config: Collection[str] = ()
    permuted: Mapping[str, str] = field(default_factory=dict)
    refused: Collection[str]
    config: Callable[[Keys, Config], Config] = _nothing
    is_hybrid: bool = False


MODEL = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LAYER = {
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
HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
SCALINGS = frozenset(
    (
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
)

ARCHITECTURES = {
    "llama": Architecture(
        model_type="llama",
        model=MODEL | {"rope_freqs": "rope_freqs"},
        layer=LAYER,
        permuted={"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"},
        refused=SCALINGS,
    ),
    "qwen2": Architecture(model_type="qwen2", model=MODEL, layer=LAYER, refused=SCALINGS),
    "qwen3": Architecture(model_type="qwen3", model=MODEL, layer=LAYER | HEAD_NORMS, refused=SCALINGS),
}

_TENSOR_NAME = re.compile(r"(blk\.(?P<layer>0|[1-9][0-9]*)\.)?(?P<module>[a-z0-9_.]+?)(?P<part>\.(weight|bias))?")


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

    The name is "" for a tensor that Hugging Face keeps in the config.

    Raises:
        UnsupportedModelError: the architecture has no such tensor.
    """
    match = _TENSOR_NAME.fullmatch(name)
    layer, module, part = match.group("layer", "module", "part") if match else (None, "", None)
    if name in architecture.in_config:
        return "", None
    modules = architecture.model if layer is None else architecture.layer
    if module not in modules:
        raise UnsupportedModelError(
            f"it holds the tensor {name!r}, which {architecture.model_type} as implemented lacks"
        )
    prefix = "" if layer is None else f"model.layers.{layer}."
    return f"{prefix}{modules[module]}{part or ''}", architecture.permuted.get(module)


def translate_config(architecture: Architecture, keys: Keys) -> Config:
    """Hugging Face's config keys from the metadata and the tensors' shapes.

    Raises:
        ModelError: a key is missing, of the wrong type or out of range.
        UnsupportedModelError: a key asks for what is not implemented.
    """
    for key in sorted(architecture.refused):
        if keys.get(key):
            raise UnsupportedModelError(f"{keys.prefix}{key} = {keys.get(key)} is not implemented")
    config = {"model_type": architecture.model_type, **common_config(keys, is_hybrid=architecture.is_hybrid)}
    return config | architecture.config(keys, config)
