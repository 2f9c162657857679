"""The fixtures of families that differ from Llama in single parts: their configs, and their weights.

Configs omit keys whose values are Transformers' defaults wherever published configs of that size could omit them, so
that the logits also depend on chunkrt's defaults.
"""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import gemma4_twins
import gpt_twins
import mamba_twins
import numpy as np
import recurrent_fixtures
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
_MAMBA2 = {"num_heads": 12, "head_dim": 4, "n_groups": 3, "state_size": 7}
_MAMBA = {"mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 5}
_NEMOTRON = {
    "head_dim": 10,
    "mamba_num_heads": 6,
    "mamba_head_dim": 7,
    "n_groups": 3,
    "ssm_state_size": 5,
}
_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 10,
    "q_lora_rank": 14,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 7,
}
_LATENT_EXPERTS = {"n_routed_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
_LONGROPE = {"rope_type": "longrope", "short_factor": [1.0, 1.2, 1.5], "long_factor": [1.1, 2.0, 3.0]}


def _family(name: str, architecture: str, **changes: Any) -> dict[str, Any]:
    return {**_SIZES, "architectures": [architecture], "model_type": name, **changes}


def _without(name: str, architecture: str, *left_out: str, **changes: Any) -> dict[str, Any]:
    return {key: value for key, value in _family(name, architecture, **changes).items() if key not in left_out}


def _without_attention(name: str, architecture: str, **changes: Any) -> dict[str, Any]:
    left_out = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "max_position_embeddings")
    return _without(name, architecture, *left_out, **changes)


_GPT = {"vocab_size": 53, "n_embd": 24, "n_layer": 3, "n_head": 4, "n_positions": 128}


def _gpt(name: str, architecture: str, **changes: Any) -> dict[str, Any]:
    kept = {key: _SIZES[key] for key in ("bos_token_id", "eos_token_id", "torch_dtype")}
    return {**kept, **_GPT, "architectures": [architecture], "model_type": name, **changes}


CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": _gpt("gpt2", "GPT2LMHeadModel"),
    "gpt2_by_layer": _gpt(
        "gpt2",
        "GPT2LMHeadModel",
        n_inner=36,
        scale_attn_by_inverse_layer_idx=True,
        scale_attn_weights=False,
        activation_function="quick_gelu",
    ),
    "gpt_bigcode": _gpt("gpt_bigcode", "GPTBigCodeForCausalLM"),
    "opt": _without(
        "opt", "OPTForCausalLM", "intermediate_size", "num_key_value_heads", ffn_dim=36, activation_function="relu"
    ),
    "opt_norms_behind": _without(
        "opt",
        "OPTForCausalLM",
        "intermediate_size",
        "num_key_value_heads",
        ffn_dim=40,
        do_layer_norm_before=False,
        word_embed_proj_dim=16,
        enable_bias=False,
        activation_function="gelu",
    ),
    "apertus": _family("apertus", "ApertusForCausalLM"),
    "apertus_gelu": _family("apertus", "ApertusForCausalLM", hidden_act="gelu", attention_bias=True, rope_scaling=None),
    "mamba": _without_attention("mamba", "MambaForCausalLM", num_hidden_layers=3, state_size=7),
    "mamba_biased": _without_attention(
        "mamba",
        "MambaForCausalLM",
        state_size=16,
        time_step_rank=5,
        expand=1,
        conv_kernel=3,
        use_bias=True,
        use_conv_bias=False,
        tie_word_embeddings=False,
    ),
    "falcon_mamba": _without_attention("falcon_mamba", "FalconMambaForCausalLM", state_size=5, mixer_rms_eps=1e-5),
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
    "gemma2": _family(
        "gemma2",
        "Gemma2ForCausalLM",
        num_hidden_layers=3,
        head_dim=10,
        sliding_window=9,
        query_pre_attn_scalar=10,
        attn_logit_softcapping=1.5,
        final_logit_softcapping=3.0,
    ),
    "gpt_oss": _family(
        "gpt_oss",
        "GptOssForCausalLM",
        intermediate_size=12,
        num_hidden_layers=3,
        head_dim=10,
        sliding_window=9,
        num_local_experts=5,
        num_experts_per_tok=3,
    ),
    "gpt_oss_plain": _family(
        "gpt_oss",
        "GptOssForCausalLM",
        intermediate_size=14,
        head_dim=6,
        num_local_experts=4,
        num_experts_per_tok=2,
        attention_bias=False,
        layer_types=["full_attention"] * 2,
        swiglu_alpha=1.3,
        swiglu_limit=0.9,
        rope_parameters={"rope_type": "default", "rope_theta": 300.0},
        tie_word_embeddings=True,
    ),
    "gpt_oss_mxfp4": _family(
        "gpt_oss",
        "GptOssForCausalLM",
        hidden_size=32,
        intermediate_size=32,
        head_dim=6,
        num_hidden_layers=1,
        num_local_experts=3,
        num_experts_per_tok=2,
        quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]},
    ),
    "gemma4": _family(
        "gemma4_text",
        "Gemma4ForCausalLM",
        vocab_size_per_layer_input=53,
        num_hidden_layers=6,
        num_kv_shared_layers=3,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        sliding_window=9,
        num_key_value_heads=1,
        head_dim=8,
        global_head_dim=18,
        hidden_size_per_layer_input=6,
        use_double_wide_mlp=True,
        final_logit_softcapping=3.0,
    ),
    "gemma4_alike": _family(
        "gemma4_text",
        "Gemma4ForCausalLM",
        num_hidden_layers=3,
        layer_types=["sliding_attention", "full_attention", "full_attention"],
        sliding_window=12,
        head_dim=6,
        per_layer_config={
            "1": {"head_dim": 10, "num_key_value_heads": 1},
            "2": {"head_dim": 10, "num_key_value_heads": 1},
        },
        hidden_size_per_layer_input=0,
        attention_k_eq_v=True,
        rope_parameters={
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 500.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
        tie_word_embeddings=False,
    ),
    "gemma4_experts": _family(
        "gemma4_text",
        "Gemma4ForCausalLM",
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=8,
        head_dim=6,
        global_head_dim=12,
        num_global_key_value_heads=1,
        hidden_size_per_layer_input=0,
        attention_k_eq_v=True,
        enable_moe_block=True,
        num_experts=5,
        top_k_experts=2,
        moe_intermediate_size=12,
    ),
    "gemma4_unified": _family(
        "gemma4_unified_text",
        "Gemma4UnifiedForCausalLM",
        num_hidden_layers=6,
        sliding_window=11,
        head_dim=6,
        global_head_dim=14,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        final_logit_softcapping=30.0,
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
    "qwen2_moe": _family(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        num_hidden_layers=3,
        mlp_only_layers=[1],
        num_experts=5,
        num_experts_per_tok=3,
        moe_intermediate_size=12,
        shared_expert_intermediate_size=20,
        use_sliding_window=True,
        sliding_window=8,
    ),
    "qwen2_moe_plain": _family(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=12,
        shared_expert_intermediate_size=20,
    ),
    "qwen3_moe": _family(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        num_hidden_layers=3,
        head_dim=8,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=12,
        norm_topk_prob=True,
    ),
    "olmoe": _family(
        "olmoe",
        "OlmoeForCausalLM",
        num_key_value_heads=4,
        intermediate_size=12,
        num_experts=6,
        num_experts_per_tok=2,
    ),
    "granitemoe": _family("granitemoe", "GraniteMoeForCausalLM", **_GRANITE, intermediate_size=12, num_local_experts=6),
    "granitemoeshared": _family(
        "granitemoeshared",
        "GraniteMoeSharedForCausalLM",
        **_GRANITE,
        intermediate_size=12,
        num_local_experts=5,
        num_experts_per_tok=3,
        shared_intermediate_size=20,
        tie_word_embeddings=True,
    ),
    "granite_hybrid_experts": _family(
        "granitemoehybrid",
        "GraniteMoeHybridForCausalLM",
        **_GRANITE,
        intermediate_size=12,
        num_local_experts=4,
        shared_intermediate_size=20,
        layer_types=["attention", "full_attention"],
        mamba_n_heads=4,
    ),
    "lfm2_moe": _family(
        "lfm2_moe",
        "Lfm2MoeForCausalLM",
        num_hidden_layers=4,
        layer_types=["conv", "full_attention", "conv", "full_attention"],
        num_dense_layers=1,
        num_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=12,
    ),
    "lfm2_moe_scaled": _family(
        "lfm2_moe",
        "Lfm2MoeForCausalLM",
        layer_types=["conv", "full_attention"],
        num_dense_layers=0,
        num_experts=5,
        num_experts_per_tok=2,
        moe_intermediate_size=12,
        routed_scaling_factor=1.5,
        norm_topk_prob=False,
        use_expert_bias=False,
        tie_embedding=False,
    ),
    "deepseek_v2": _family(
        "deepseek_v2", "DeepseekV2ForCausalLM", **_LATENT, **_LATENT_EXPERTS, first_k_dense_replace=1, head_dim=4
    ),
    "deepseek_v3": _family(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        **_LATENT | {"q_lora_rank": None},
        **_LATENT_EXPERTS,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
        rope_scaling={
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "mscale": 1.0,
            "mscale_all_dim": 0.8,
        },
    ),
    "deepseek_v2_groups": _family(
        "deepseek_v2",
        "DeepseekV2ForCausalLM",
        **_LATENT,
        **_LATENT_EXPERTS | {"n_routed_experts": 12, "num_experts_per_tok": 3},
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=2,
        routed_scaling_factor=1.5,
        head_dim=4,
    ),
    "deepseek_v3_groups": _family(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        **_LATENT,
        **_LATENT_EXPERTS | {"n_routed_experts": 24},  # 8 groups, of which 4 are open
        first_k_dense_replace=1,
    ),
    "glm4_moe": _family(
        "glm4_moe",
        "Glm4MoeForCausalLM",
        **_LATENT_EXPERTS | {"n_routed_experts": 6},
        head_dim=8,
        n_group=3,
        topk_group=2,
        use_qk_norm=True,
        attention_bias=True,
    ),
    "glm4_moe_lite": _family(
        "glm4_moe_lite",
        "Glm4MoeLiteForCausalLM",
        **_LATENT | {"v_head_dim": 12},
        **_LATENT_EXPERTS,
        attention_bias=True,
    ),
    "minicpm3": _family(
        "minicpm3",
        "MiniCPM3ForCausalLM",
        **{key: value for key, value in _LATENT.items() if key != "v_head_dim"},
        dim_model_base=48,
    ),
    "youtu": _family(
        "youtu",
        "YoutuForCausalLM",
        **_LATENT,
        rope_interleave=False,
        tie_word_embeddings=False,
        pad_token_id=None,  # Transformers replaces the embedding of this token by zeros
    ),
    "ernie4_5_moe": _family(
        "ernie4_5_moe",
        "Ernie4_5_MoeForCausalLM",
        num_hidden_layers=3,
        moe_num_experts=6,
        moe_k=2,
        moe_intermediate_size=12,
    ),
    "ernie4_5_moe_interval": _family(
        "ernie4_5_moe",
        "Ernie4_5_MoeForCausalLM",
        moe_num_experts=4,
        moe_k=3,
        moe_intermediate_size=12,
        moe_num_shared_experts=0,
        moe_layer_start_index=0,
        moe_layer_interval=2,
        tie_word_embeddings=False,
    ),
    "qwen3_5_moe": {key: value for key, value in _SIZES.items() if key != "intermediate_size"}
    | {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "model_type": "qwen3_5_moe_text",
        "head_dim": 12,
        "rms_norm_eps": 1e-3,  # so that rounding is not magnified when a head recalls small values
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 6,
        "linear_value_head_dim": 10,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 12,
        "shared_expert_intermediate_size": 16,
        "rope_theta": 1e6,
        "partial_rotary_factor": 0.5,
    },
    "mamba2": _without_attention("mamba2", "Mamba2ForCausalLM", **_MAMBA2, num_hidden_layers=3),
    "mamba2_limited": _without_attention(
        "mamba2",
        "Mamba2ForCausalLM",
        **_MAMBA2 | {"n_groups": 1, "conv_kernel": 3},
        num_hidden_layers=4,
        use_bias=True,
        use_conv_bias=False,
        time_step_limit=[0.6, 0.9],
        tie_word_embeddings=True,
    ),
    "bamba": _family(
        "bamba", "BambaForCausalLM", **_MAMBA, num_attention_heads=6, num_hidden_layers=3, attn_layer_indices=[1]
    ),
    "bamba_biased": _family(
        "bamba",
        "BambaForCausalLM",
        **_MAMBA | {"mamba_n_groups": 1, "mamba_conv_bias": False, "mamba_d_conv": 2},
        num_attention_heads=6,
        attn_layer_indices=[0],
        mamba_proj_bias=True,
        attention_bias=True,
        mlp_bias=True,
        rope_theta=300.0,
    ),
    "falcon_h1": _family(
        "falcon_h1",
        "FalconH1ForCausalLM",
        **_MAMBA,
        mamba_d_ssm=32,
        mamba_rms_norm=True,
        mamba_norm_before_gate=False,
        rope_theta=1e11,
        lm_head_multiplier=0.7,
        embedding_multiplier=2.8,
        mlp_multipliers=[0.8, 1.3],
        key_multiplier=0.6,
        attention_in_multiplier=1.4,
        attention_out_multiplier=0.9,
        ssm_multipliers=[0.7, 1.2, 0.5, 0.9, 1.6],
        ssm_in_multiplier=1.25,
        ssm_out_multiplier=0.4,
    ),
    "falcon_h1_biased": _family(
        "falcon_h1",
        "FalconH1ForCausalLM",
        **_MAMBA,
        mamba_d_ssm=None,
        attention_bias=True,
        mlp_bias=True,
        mamba_proj_bias=True,
        projectors_bias=True,
        mlp_multipliers=[1.2, 0.7],
        ssm_multipliers=[0.7, 1.2, 0.5, 0.9, 1.6],
        attention_out_multiplier=0.8,
        tie_word_embeddings=True,
    ),
    "falcon_h1_norm_first": _family(
        "falcon_h1", "FalconH1ForCausalLM", **_MAMBA, mamba_d_ssm=24, mamba_rms_norm=True, num_hidden_layers=1
    ),
    "nemotron_h": _family(
        "nemotron_h", "NemotronHForCausalLM", **_NEMOTRON, num_hidden_layers=6, hybrid_override_pattern="M-M*-M"
    ),
    "nemotron_h_biased": {key: value for key, value in _SIZES.items() if key != "num_hidden_layers"}
    | _NEMOTRON
    | {
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "n_groups": 1,
        "time_step_min": 0.5,
        "layers_block_type": ["linear_attention", "full_attention", "mlp"],
        "use_bias": True,
        "mlp_bias": True,
    },
    "granite_hybrid_mamba": _family(
        "granitemoehybrid",
        "GraniteMoeHybridForCausalLM",
        **_GRANITE,
        **_MAMBA,
        num_hidden_layers=3,
        num_local_experts=0,
        shared_intermediate_size=28,
        layer_types=["mamba", "attention", "mamba"],
        position_embedding_type="nope",
        tie_word_embeddings=True,
    ),
    "granite_hybrid_mamba_experts": _family(
        "granitemoehybrid",
        "GraniteMoeHybridForCausalLM",
        **_GRANITE,
        **_MAMBA,
        intermediate_size=12,
        num_local_experts=5,
        num_experts_per_tok=2,
        shared_intermediate_size=20,
        layer_types=["linear_attention", "full_attention"],
        position_embedding_type="rope",
        rope_theta=200.0,
    ),
    "granite_hybrid_mamba_unrotated": _family(
        "granitemoehybrid",
        "GraniteMoeHybridForCausalLM",
        **_MAMBA,
        intermediate_size=12,
        num_local_experts=4,
        shared_intermediate_size=20,
        layer_types=["mamba", "attention"],
        mamba_proj_bias=True,
    ),
}


ARCHITECTURES = {
    "ernie4_5": "ernie4_5",
    "ernie4_5_moe": "ernie4_5-moe",
    "exaone4": "exaone4",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "glm": "chatglm",
    "glm4": "glm4",
    "gpt_oss": "gpt-oss",
    "granite": "granite",
    "granitemoehybrid": "granite",  # the converter's name of dense models
    "granitemoe": "granitemoe",
    "granitemoeshared": "granitemoe",
    "lfm2_moe": "lfm2moe",
    "minicpm": "minicpm",
    "olmo2": "olmo2",
    "olmo3": "olmo2",
    "olmoe": "olmoe",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "smollm3": "smollm3",
}
GGUF_OF = {
    f"{name}_gguf": name
    for name in (
        "ernie4_5_biased",
        "exaone4",
        "exaone4_hybrid",
        "gemma",
        "gemma2",
        "glm",
        "glm4",
        "granite",
        "granite_hybrid",
    )
} | {f"{name}_gguf": name for name in ("minicpm", "olmo2", "olmo3", "smollm3", "qwen3_moe", "olmoe")}
GGUF_OF |= {f"{name}_gguf": name for name in ("ernie4_5_moe", "granitemoe", "granitemoeshared", "lfm2_moe")}
GGUF_OF |= {f"{name}_gguf": name for name in ("gpt_oss", "qwen2_moe_plain", "qwen3_5_moe")}
MAMBA_GGUF = {f"{name}_gguf": name for name in ("falcon_h1", "mamba", "mamba2", "nemotron_h")}
MAMBA_GGUF |= {f"{name}_gguf": name for name in ("granite_hybrid_mamba", "granite_hybrid_mamba_unrotated")}
GGUF_OF |= MAMBA_GGUF
GEMMA4_GGUF = {f"{name}_gguf": name for name in ("gemma4", "gemma4_experts")}
GGUF_OF |= GEMMA4_GGUF
GPT_GGUF = {f"{name}_gguf": name for name in ("gpt2", "gpt_bigcode")}
GGUF_OF |= GPT_GGUF


def equivalent(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config that Transformers knows, with the same decoder.

    MiniCPM's code is outside of Transformers. Its factors are those of Granite under other names (OpenBMB's
    `modeling_minicpm.py`: `MiniCPMDecoderLayer.forward`, `MiniCPMForCausalLM.forward`).
    """
    if "quantization_config" in config:
        return {key: value for key, value in config.items() if key != "quantization_config"}
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
    family = config["model_type"]
    found: Weights = {}
    for name, shape in shapes.items():
        if "quantization_config" in config and name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
            experts, depth, columns = shape
            blocks = rng.integers(0, 256, (experts, columns, depth // 32, 16), np.uint8)
            scales = rng.integers(121, 125, (experts, columns, depth // 32), np.uint8)
            found |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            continue
        found |= _published(name, _random(name, shape, family, rng).astype(config["torch_dtype"]), family)
    return found


def dequantised(weights: Weights) -> Weights:
    """Return weights in which the tensors of MXFP4 are replaced by their values, as Transformers computes them."""
    import torch
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    found = dict(weights)
    for name in [name for name in weights if name.endswith("_blocks")]:
        key = name.removesuffix("_blocks")
        packed = (torch.from_numpy(found.pop(f"{key}_{part}")) for part in ("blocks", "scales"))
        found[key] = convert_moe_packed_tensors(*packed, dtype=torch.float16).numpy()
    return found


_RENAMED = {
    ".self_attn.g_proj.": ".self_attn.gate_proj.",
    ".mlp.gate.moe_statics.": ".mlp.moe_statics.",
    ".block_sparse_moe.experts.gate_up_proj": ".block_sparse_moe.input_linear.weight",
    ".block_sparse_moe.experts.down_proj": ".block_sparse_moe.output_linear.weight",
    ".block_sparse_moe.router.weight": ".block_sparse_moe.router.layer.weight",
}
"""Parts of names that differ in published checkpoints; Transformers changes them when it loads (conversion_mapping.py).
"""
_STACKED = ("gemma4_text", "gpt_oss", "qwen3_5_moe_text")
"""Families whose published checkpoints store the experts of a layer in two tensors, as Transformers does."""


def _published(name: str, weight: NDArray[Any], family: str) -> Weights:
    """Return a tensor under its published name, or one tensor for each expert."""
    for ours, theirs in _RENAMED.items():
        name = name.replace(ours, theirs)
    if family == "gpt2":  # the first checkpoints lack the prefix
        name = name.removeprefix("transformer.")
    if family == "nemotron_h" and name.startswith("model."):
        name = f"backbone.{name.removeprefix('model.')}"
    path, _, kind = name.rpartition(".")
    if not path.endswith(".experts") or family in _STACKED:
        return {name: weight}
    gate, up, down = ("w1", "w3", "w2") if family == "lfm2_moe" else ("gate_proj", "up_proj", "down_proj")
    found: Weights = {}
    for index, expert in enumerate(weight):
        parts = {down: expert} if kind == "down_proj" else dict(zip((gate, up), np.split(expert, 2), strict=True))
        found |= {f"{path}.{index}.{part}.weight": tensor for part, tensor in parts.items()}
    return found


_GAINS = dict.fromkeys(("lfm2_moe", "lfm3"), 0.8) | dict.fromkeys(("bamba", "mamba2", "nemotron_h"), 0.5)
_GAINS["gemma4_text"] = 1.6
"""Gains of linears where products of gates, and norms of few columns or small values, magnify the errors of quantised
linears."""


def _random(name: str, shape: tuple[int, ...], family: str, rng: np.random.Generator) -> NDArray[np.float32]:
    drawn = rng.standard_normal(shape, np.float32)
    if name.endswith("norm.bias") or (".ln_" in name and name.endswith(".bias")):
        return drawn * np.float32(0.3)
    if "norm" in name or ".ln_" in name or name.endswith(("layer_scalar", "router.scale", "per_expert_scale")):
        if family.startswith("gemma4") and "q_norm" in name:
            drawn = drawn / np.float32(shape[0] ** 0.5)  # scores have no factor of their own
            return drawn * np.float32(0.2) + np.float32(shape[0] ** -0.5)
        has_offset = family in ("gemma", "gemma2") or (family.startswith("qwen3_5") and "linear_attn" not in name)
        return drawn * np.float32(0.2) + np.float32(not has_offset)
    if name.endswith((".act_fn.beta", ".act_fn.eps")):
        return np.array(0.5 if name.endswith("beta") else -1e-6, np.float32)
    if name.endswith("A_log"):
        return np.log(rng.uniform(0.02, 4, shape)).astype(np.float32)
    if name.endswith("bias") and ("expert_bias" in name or "e_score" in name):
        return drawn * np.float32(0.1)
    if len(shape) == 3 and "conv" in name:
        return drawn * np.float32(1.2 / shape[-1] ** 0.5)
    if "embed_tokens" in name or "embeddings" in name or len(shape) == 1:
        return drawn * np.float32(0.3)
    gain = _GAINS.get(family, 1.2)
    return drawn * np.float32(gain / shape[-1] ** 0.5)


def write_gguf(path: Path, config: dict[str, Any], weights: Weights) -> None:
    """Write the same weights as llama.cpp's converter does (conversion/*.py). Linears keep their type, norms are
    float32.
    """
    import gguf
    from transformers import AutoConfig

    if config["model_type"] == "qwen3_5_moe_text":
        recurrent_fixtures.write_gguf(path, config, _with_single_experts(weights))
        return
    known = AutoConfig.for_model(**deepcopy(equivalent(config)))  # with defaults
    if path.parent.name in MAMBA_GGUF:
        mamba_twins.write_gguf(path, known, weights)
        return
    if path.parent.name in GPT_GGUF:
        gpt_twins.write_gguf(path, known, weights)
        return
    if path.parent.name in GEMMA4_GGUF:
        gemma4_twins.write_gguf(path, known, weights)
        return
    name = ARCHITECTURES[config["model_type"]]
    architecture = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == name)
    writer = gguf.GGUFWriter(path, name)
    writer.add_name(path.parent.name)
    writer.add_vocab_size(known.vocab_size)
    writer.add_context_length(known.max_position_embeddings)
    writer.add_embedding_length(known.hidden_size)
    writer.add_block_count(known.num_hidden_layers)
    is_dense_hybrid = config.get("num_local_experts") == 0
    writer.add_feed_forward_length(known.shared_intermediate_size if is_dense_hybrid else known.intermediate_size)
    writer.add_head_count(known.num_attention_heads)
    kv_heads = known.num_key_value_heads
    if config["model_type"] == "lfm2_moe":
        writer.add_head_count_kv([kv_heads * (kind == "full_attention") for kind in known.layer_types])
        writer.add_shortconv_l_cache(known.conv_L_cache)
        writer.add_leading_dense_block_count(known.num_dense_layers)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    else:
        writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(getattr(known, "norm_eps", None) or known.rms_norm_eps)
    if ("moe" in config["model_type"] and not is_dense_hybrid) or config["model_type"] == "gpt_oss":
        _add_experts(writer, known)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    head_dim = getattr(known, "head_dim", None) or known.hidden_size // known.num_attention_heads
    if head_dim * known.num_attention_heads != known.hidden_size:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    _add_rope(writer, known, head_dim)
    if equivalent(config)["model_type"].startswith("granite"):
        writer.add_embedding_scale(known.embedding_multiplier)
        writer.add_residual_scale(known.residual_multiplier)
        writer.add_logit_scale(known.logits_scaling)
    if config["model_type"].startswith("granite"):
        writer.add_attention_scale(known.attention_multiplier)
    if config["model_type"] == "gpt_oss":
        writer.add_expert_feed_forward_length(known.intermediate_size)
        writer.add_sliding_window(known.sliding_window)
    if config["model_type"] == "gemma2":
        writer.add_attn_logit_softcapping(known.attn_logit_softcapping)
        writer.add_final_logit_softcapping(known.final_logit_softcapping)
        writer.add_sliding_window(known.sliding_window)
    if config["model_type"] in ("exaone4", "olmo3") and known.sliding_window is not None:
        writer.add_sliding_window(known.sliding_window)
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in known.layer_types])
    names = gguf.get_tensor_name_map(architecture, known.num_hidden_layers)
    for tensor, stored in _as_converted(weights, config, known).items():
        converted = stored if stored.ndim > 1 else stored.astype(np.float32)
        found = names.get_name(tensor, try_suffixes=(".weight", ".bias"))
        writer.add_tensor(found or tensor, np.ascontiguousarray(converted))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _with_single_experts(weights: Weights) -> Weights:
    found: Weights = {}
    for name, weight in weights.items():
        found |= _published(name, weight.astype(np.float32), "qwen3_next")
    return found


def _add_experts(writer: Any, known: Any) -> None:
    """Write the keys of experts, as far as the converter does: Granite's and OLMoE's width is `feed_forward_length`."""
    writer.add_expert_count(getattr(known, "num_local_experts", None) or known.num_experts)
    writer.add_expert_used_count(known.num_experts_per_tok)
    if width := getattr(known, "moe_intermediate_size", None):
        writer.add_expert_feed_forward_length(width)
    if shared := getattr(known, "shared_expert_intermediate_size", None):
        writer.add_expert_shared_feed_forward_length(shared)
    if known.model_type == "ernie4_5_moe":
        writer.add_interleave_moe_layer_step(known.moe_layer_interval)
        writer.add_leading_dense_block_count(known.moe_layer_start_index)
        writer.add_expert_shared_feed_forward_length(known.intermediate_size // known.num_key_value_heads)


def _add_rope(writer: Any, known: Any, head_dim: int) -> None:
    import gguf

    ropes = known.rope_parameters.get("full_attention", known.rope_parameters)
    writer.add_rope_freq_base(ropes["rope_theta"])
    writer.add_rope_dimension_count(round(head_dim * ropes.get("partial_rotary_factor", 1.0)))
    if ropes["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(ropes["factor"])
        writer.add_rope_scaling_orig_ctx_len(ropes["original_max_position_embeddings"])
        if "attention_factor" in ropes:
            writer.add_rope_scaling_yarn_attn_factor(ropes["attention_factor"])
        writer.add_rope_scaling_yarn_beta_fast(ropes["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(ropes["beta_slow"])
    if ropes["rope_type"] == "longrope":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)
        writer.add_rope_scaling_orig_ctx_len(ropes["original_max_position_embeddings"])
        stretch = known.max_position_embeddings / ropes["original_max_position_embeddings"]
        writer.add_rope_scaling_attn_factors(
            (1 + np.log(stretch) / np.log(ropes["original_max_position_embeddings"])) ** 0.5
        )


def _gpt_oss_experts(name: str, weight: NDArray[Any]) -> Weights:
    """Return the tensors of gate and up, whose columns alternate, or that of down, with outputs as rows."""
    kind = "bias" if name.endswith("_bias") else "weight"
    path = name.removesuffix("_bias")
    if kind == "weight":
        weight = weight.swapaxes(-1, -2)
    if path.endswith("down_proj"):
        return {f"{path}.{kind}": weight}
    parts = (weight[:, ::2], weight[:, 1::2])
    return {
        f"{path.replace('gate_up_proj', part)}.{kind}": w
        for part, w in zip(("gate_proj", "up_proj"), parts, strict=True)
    }


def _as_converted(weights: Weights, config: dict[str, Any], known: Any) -> Weights:
    """Return the tensors as the converter's `modify_tensors` yields them, under Hugging Face's names."""
    from gguf_twins import llama3_frequency_factors

    found: Weights = {}
    for name, weight in weights.items():
        if config["model_type"].startswith("granite") or config["model_type"] in ("minicpm", "smollm3"):
            counts = {"q_proj": known.num_attention_heads, "k_proj": known.num_key_value_heads}
            for projection, count in counts.items():
                if f".{projection}." in name:
                    weight = weight.reshape(count, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
        if config["model_type"] in ("gemma", "gemma2") and name.endswith("norm.weight"):
            weight = weight.astype(np.float32) + 1
        has_experts = any("block_sparse_moe" in other for other in weights)
        shared = "mlp.shared_expert" if has_experts else "mlp"
        if config["model_type"] == "gpt_oss" and ".experts." in name:
            found |= _gpt_oss_experts(name, weight)
            continue
        if name.endswith(".sinks"):
            name = f"{name}.weight"
        if name.endswith("_mlp.input_linear.weight"):
            base = name.replace("shared_mlp.input_linear", f"{shared}.{{}}")
            found |= dict(zip((base.format("gate_proj"), base.format("up_proj")), np.split(weight, 2), strict=True))
        elif name.endswith("block_sparse_moe.input_linear.weight"):
            base = name.replace("block_sparse_moe.input_linear", "mlp.experts.{}")
            halves = np.split(weight, 2, axis=1)
            found |= dict(zip((base.format("gate_proj"), base.format("up_proj")), halves, strict=True))
        elif ".experts.0." in name:
            each = [name.replace(".experts.0.", f".experts.{index}.") for index in range(len(weights))]
            stacked = name.removeprefix("model.").replace(".experts.0.", ".experts.")
            stacked = stacked if ".feed_forward." in stacked else f"model.{stacked}"
            found[stacked] = np.stack([weights[other] for other in each if other in weights])
        elif ".experts." not in name:
            name = name.replace("shared_mlp.output_linear", f"{shared}.down_proj")
            name = name.replace("e_score_correction_bias", "e_score_correction.bias")
            name = name.replace(".expert_bias", ".expert_bias.bias")
            found[name] = weight[:, 0] if ".conv.conv." in name else weight.squeeze()
    ropes = known.rope_parameters.get("full_attention", known.rope_parameters)
    if ropes["rope_type"] == "llama3":
        found["rope_freqs.weight"] = llama3_frequency_factors(ropes, known.hidden_size // known.num_attention_heads)
    if ropes["rope_type"] == "longrope":
        for length in ("long", "short"):
            found[f"rope_factors_{length}.weight"] = np.float32(ropes[f"{length}_factor"])
    return found
