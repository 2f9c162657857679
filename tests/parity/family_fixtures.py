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
    """Return weights with the names and shapes that Transformers saves: linears of gain about 1.2, norms about 1."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    known = AutoConfig.for_model(**deepcopy(equivalent(config)))  # Transformers changes its arguments
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(known)
    is_tied = model.config.tie_word_embeddings
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    weights = {n: _random(n, s, rng) for n, s in shapes.items() if not (is_tied and n == "lm_head.weight")}
    return {name: weight.astype(config["torch_dtype"]) for name, weight in weights.items()}


def _random(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> NDArray[np.float32]:
    drawn = rng.standard_normal(shape, np.float32)
    if "norm" in name:
        return drawn * np.float32(0.2) + np.float32(1)
    if "embed_tokens" in name or len(shape) == 1:
        return drawn * np.float32(0.3)
    return drawn * np.float32(1.2 / shape[-1] ** 0.5)
