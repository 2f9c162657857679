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
SANDWICH_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
GEMMA3_27B_LAYERS = 62
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


def _gemma3(keys: Keys, config: Config) -> Config:
    """Norms hold 1 + w; the scale of attention is in no key, llama.cpp knows it from the number of layers."""
    num_layers, head_dim = config["num_hidden_layers"], config["head_dim"]
    is_27b = num_layers == GEMMA3_27B_LAYERS
    found = {
        "norm_offset": 0,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": config["hidden_size"] // config["num_attention_heads"] if is_27b else head_dim,
        "rope_local_base_freq": keys.number("rope.freq_base_swa", default=10000.0),
        "final_logit_softcapping": keys.get("final_logit_softcapping") or None,
    }
    if config["sliding_window"] is None:
        return found | {"layer_types": ["full_attention"] * num_layers}
    return found | {"sliding_window_pattern": keys.count("attention.sliding_window_pattern", default=6)}


def _phi3(keys: Keys, config: Config) -> Config:
    """Factors of longrope are tensors; their attention factor is a key."""
    context = config["max_position_embeddings"]
    found = {"original_max_position_embeddings": keys.count("rope.scaling.original_context_length", default=context)}
    if not {LONG_FACTORS, SHORT_FACTORS} & keys.shapes.keys():
        return found
    half = round(config["head_dim"] * config["partial_rotary_factor"]) // 2
    scaling: Config = {
        "rope_type": "longrope",
        "long_factor": keys.vector(LONG_FACTORS, half),
        "short_factor": keys.vector(SHORT_FACTORS, half),
    }
    if keys.get("rope.scaling.attn_factor") is not None:
        scaling["attention_factor"] = keys.number("rope.scaling.attn_factor")
    return found | {"rope_scaling": scaling}


ARCHITECTURES = {
    "llama": Architecture(
        model_type="llama",
        model=MODEL | {"rope_freqs": "rope_freqs"},
        layer=LAYER,
        permuted={"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"},
        refused=SCALINGS,
    ),
    "qwen2": Architecture(model_type="qwen2", model=MODEL, layer=LAYER, refused=SCALINGS),
    "gemma3": Architecture(
        model_type="gemma3_text",
        model=MODEL,
        layer=LAYER | HEAD_NORMS | SANDWICH_NORMS,
        refused=SCALINGS - {"final_logit_softcapping"},
        config=_gemma3,
    ),
    "phi3": Architecture(
        model_type="phi3",
        model=MODEL,
        layer=LAYER | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        in_config=(LONG_FACTORS, SHORT_FACTORS),
        refused=SCALINGS,
        config=_phi3,
    ),
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
