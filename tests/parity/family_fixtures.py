"""The fixtures of families that differ from Llama in single parts: their configs, and their weights.

Configs omit keys whose values are Transformers' defaults wherever published configs of that size could omit them, so
that the logits also depend on chunkrt's defaults.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import numpy as np
from numpy.typing import NDArray

Weights = dict[str, NDArray[Any]]
NUM_TOKENS = 95

_SIZES: dict[str, Any] = {
    "vocab_size": 53,
    "hidden_size": 24,
    "intermediate_size": 36,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "torch_dtype": "float16",
}
_GRANITE = {
    "embedding_multiplier": 12,
    "logits_scaling": 0.5,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.3,
    "rms_norm_eps": 1e-5,
}
_LONGROPE = {"rope_type": "longrope", "short_factor": [1.0, 1.2, 1.5], "long_factor": [1.1, 2.0, 3.0]}


def _family(name: str, architecture: str, **changes: Any) -> dict[str, Any]:
    return {**_SIZES, "architectures": [architecture], "model_type": name, **changes}


CONFIGS: dict[str, dict[str, Any]] = {
    "smollm3": _family("smollm3", "SmolLM3ForCausalLM", num_hidden_layers=4),
    "smollm3_window": _family(
        "smollm3",
        "SmolLM3ForCausalLM",
        num_hidden_layers=3,
        no_rope_layers=[1, 0, 1],
        use_sliding_window=True,
        sliding_window=9,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=False,
        rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    ),
    "granite": _family("granite", "GraniteForCausalLM", **_GRANITE, tie_word_embeddings=True, rope_theta=300.0),
    "granite_biased": _family("granite", "GraniteForCausalLM", attention_bias=True, mlp_bias=True, logits_scaling=2),
    "granite_hybrid": _family(
        "granitemoehybrid",
        "GraniteMoeHybridForCausalLM",
        **_GRANITE,
        num_local_experts=0,
        num_experts_per_tok=0,
        shared_intermediate_size=28,
        layer_types=["attention", "attention"],
        position_embedding_type="rope",
        tie_word_embeddings=True,
        mamba_n_heads=4,
    ),
    "granite_hybrid_nope": _family(
        "granitemoehybrid",
        "GraniteMoeHybridForCausalLM",
        num_local_experts=0,
        shared_intermediate_size=28,
        layer_types=["attention", "attention"],
        position_embedding_type="nope",
        mamba_n_heads=4,
    ),
    "minicpm": _family(
        "minicpm",
        "MiniCPMForCausalLM",
        scale_emb=12,
        scale_depth=1.4,
        dim_model_base=48,
        rms_norm_eps=1e-5,
        rope_scaling=_LONGROPE | {"original_max_position_embeddings": 64},
    ),
    "ernie4_5": _family("ernie4_5", "Ernie4_5ForCausalLM", head_dim=8, num_hidden_layers=3),
    "ernie4_5_biased": _family(
        "ernie4_5", "Ernie4_5ForCausalLM", head_dim=6, use_bias=True, tie_word_embeddings=False, rope_theta=700.0
    ),
    "helium": _family("helium", "HeliumForCausalLM", head_dim=6, num_key_value_heads=4, rope_theta=100.0),
    "glm": _family("glm", "GlmForCausalLM", head_dim=8),
    "glm4": _family(
        "glm4", "Glm4ForCausalLM", head_dim=12, rope_theta=500.0, partial_rotary_factor=1 / 3, attention_bias=False
    ),
    "olmo2": _family("olmo2", "Olmo2ForCausalLM", num_key_value_heads=4, attention_bias=True),
    "olmo3": _family(
        "olmo3",
        "Olmo3ForCausalLM",
        num_key_value_heads=4,
        num_hidden_layers=4,
        sliding_window=11,
        rope_scaling={
            "rope_type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 16,
            "beta_fast": 8.0,
            "beta_slow": 0.5,
            "attention_factor": 1.2,
        },
    ),
    "exaone4": _family(
        "exaone4",
        "Exaone4ForCausalLM",
        num_hidden_layers=3,
        sliding_window=None,
        layer_types=["full_attention"] * 3,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 1000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ),
    "exaone4_hybrid": _family("exaone4", "Exaone4ForCausalLM", num_hidden_layers=4, sliding_window=10),
    "gemma": _family(
        "gemma", "GemmaForCausalLM", head_dim=10, num_key_value_heads=1, hidden_act="gelu", attention_bias=True
    ),
    "lfm3": _family("lfm3", "Lfm3ForCausalLM", num_hidden_layers=5, head_dim=8, sliding_window=7, conv_bias=True),
    "lfm3_bare": _family(
        "lfm3",
        "Lfm3ForCausalLM",
        num_hidden_layers=3,
        head_dim=8,
        conv_L_cache=3,
        layer_types=["sliding_attention", "conv", "full_attention"],
        sliding_window=12,
        use_sandwich_norm=False,
        use_attention_gate=False,
        attention_bias=True,
        tie_word_embeddings=False,
        rope_parameters={
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.75, "factor": 2.0},
            "sliding_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 100.0},
        },
    ),
}


def equivalent(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config that Transformers knows, with the same decoder.

    MiniCPM's code is outside of Transformers. Its factors are those of Granite under other names (OpenBMB's
    `modeling_minicpm.py`: `MiniCPMDecoderLayer.forward`, `MiniCPMForCausalLM.forward`).
    """
    if config["model_type"] != "minicpm":
        return config
    own = ("scale_emb", "scale_depth", "dim_model_base")
    return {key: value for key, value in config.items() if key not in own} | {
        "architectures": ["GraniteForCausalLM"],
        "model_type": "granite",
        "tie_word_embeddings": config.get("tie_word_embeddings", True),
        "embedding_multiplier": config["scale_emb"],
        "residual_multiplier": config["scale_depth"] / config["num_hidden_layers"] ** 0.5,
        "logits_scaling": config["hidden_size"] / config["dim_model_base"],
        "attention_multiplier": (config["hidden_size"] // config["num_attention_heads"]) ** -0.5,
    }


def random_weights(config: dict[str, Any], rng: np.random.Generator) -> Weights:
    """Return weights with the names and shapes that Transformers saves: linears of gain about 1, norms about 1."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    known = AutoConfig.for_model(**deepcopy(equivalent(config)))  # Transformers changes its arguments
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(known)
    is_tied = model.config.tie_word_embeddings
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if is_tied:
        del shapes["lm_head.weight"]
    weights = {_published(name): _random(name, shape, config["model_type"], rng) for name, shape in shapes.items()}
    return {name: weight.astype(config["torch_dtype"]) for name, weight in weights.items()}


def _published(name: str) -> str:
    """Return the name in published checkpoints, which Transformers changes when it loads (conversion_mapping.py)."""
    return name.replace(".self_attn.g_proj.", ".self_attn.gate_proj.")


def _random(name: str, shape: tuple[int, ...], family: str, rng: np.random.Generator) -> NDArray[np.float32]:
    drawn = rng.standard_normal(shape, np.float32)
    if "norm" in name:
        return drawn * np.float32(0.2) + np.float32(family not in ("gemma", "gemma2"))
    if name.endswith(".conv.weight"):
        return drawn * np.float32(1.2 / shape[-1] ** 0.5)
    if "embed_tokens" in name or len(shape) == 1:
        return drawn * np.float32(0.3)
    gain = 0.8 if family.startswith("lfm") else 1.2  # products of gates magnify the errors of quantised linears
    return drawn * np.float32(gain / shape[-1] ** 0.5)
