"""The fixtures of decoders with layers whose state is not a cache: their configs, their weights, and these as GGUF."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Weights = dict[str, NDArray[np.float32]]
NUM_TOKENS = 95

_COMMON: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}
_LFM2 = _COMMON | {"architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "norm_eps": 1e-5}
_DELTA_RULE: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-3,  # so that rounding is not magnified when a head recalls small values
    "head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
_QWEN3_NEXT = (
    _COMMON
    | _DELTA_RULE
    | {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "num_hidden_layers": 4,
        "full_attention_interval": 4,
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 16,
        "norm_topk_prob": True,
    }
)

CONFIGS: dict[str, dict[str, Any]] = {
    # The first published form: the feed-forward's width before it is reduced, attention layers by index.
    "lfm2": _LFM2
    | {
        "num_hidden_layers": 4,
        "full_attn_idxs": [1, 3],
        "block_ff_dim": 72,
        "block_auto_adjust_ff_dim": True,
        "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 16,
        "conv_L_cache": 3,
        "conv_bias": False,
        "rope_theta": 1000000.0,
        "tie_embedding": True,
    },
    "lfm2_biased": _LFM2
    | {
        "num_hidden_layers": 3,
        "layer_types": ["conv", "full_attention", "conv"],
        "block_auto_adjust_ff_dim": False,
        "conv_L_cache": 4,
        "conv_bias": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        "tie_word_embeddings": True,
    },
    "qwen3_next": _QWEN3_NEXT | {"mlp_only_layers": [0, 1, 2, 3]},
    "qwen3_5": _COMMON
    | _DELTA_RULE
    | {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1000000.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
    },
    # Three of its four layers route; the checkpoint has a tensor for each expert.
    "qwen3_next_experts": _QWEN3_NEXT | {"mlp_only_layers": [1]},
}
GGUF_OF = {"lfm2_gguf": "lfm2", "qwen3_next_gguf": "qwen3_next", "qwen3_5_gguf": "qwen3_5"}
GGUF_OF |= {"qwen3_next_experts_gguf": "qwen3_next_experts"}


def random_weights(config: dict[str, Any], rng: np.random.Generator) -> Weights:
    """Return weights with the names and shapes that Transformers saves: linears of gain about 0.8."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    is_tied = model.config.tie_word_embeddings
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    weights = {
        n: random_tensor(n, s, config, rng) for n, s in shapes.items() if not (is_tied and n == "lm_head.weight")
    }
    return {name: part for whole in weights.items() for name, part in _as_published(*whole)}


def _as_published(name: str, weight: NDArray[np.float32]) -> list[tuple[str, NDArray[np.float32]]]:
    """Split the experts: Transformers keeps all of a layer in two tensors, the published checkpoints in three an
    expert."""
    if not name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
        return [(name, weight)]
    path, _, kind = name.rpartition(".")
    if kind == "down_proj":
        return [(f"{path}.{index}.down_proj.weight", expert) for index, expert in enumerate(weight)]
    parts = ((index, *np.split(expert, 2)) for index, expert in enumerate(weight))
    return [
        (f"{path}.{index}.{part}_proj.weight", tensor)
        for index, gate, up in parts
        for part, tensor in (("gate", gate), ("up", up))
    ]


def random_tensor(
    name: str, shape: tuple[int, ...], config: dict[str, Any], rng: np.random.Generator
) -> NDArray[np.float32]:
    drawn = rng.standard_normal(shape, np.float32)
    if name.endswith("A_log"):
        return np.log(rng.uniform(0.02, 4, shape)).astype(np.float32)
    if "norm" in name:
        is_plain = config["model_type"] == "lfm2" or name.endswith("linear_attn.norm.weight")
        return drawn * np.float32(0.2) + np.float32(is_plain)
    if "conv" in name and len(shape) == 3:
        return drawn * np.float32(0.8)
    if "embed_tokens" in name:
        return drawn
    if len(shape) == 1:
        return drawn * np.float32(0.3)
    return drawn * np.float32(0.8 / shape[-1] ** 0.5)


def write_gguf(path: Path, config: dict[str, Any], weights: Weights) -> None:
    """Write the same weights as llama.cpp's converter does (conversion/qwen.py, and its `LFM2Model`)."""
    import gguf

    is_lfm2 = config["model_type"] == "lfm2"
    kinds = {
        "lfm2": gguf.MODEL_ARCH.LFM2,
        "qwen3_next": gguf.MODEL_ARCH.QWEN3NEXT,
        "qwen3_5_text": gguf.MODEL_ARCH.QWEN35,
        "qwen3_5_moe_text": gguf.MODEL_ARCH.QWEN35MOE,
    }
    architecture = kinds[config["model_type"]]
    num_layers = config["num_hidden_layers"]
    rope = config.get("rope_parameters") or config
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    writer.add_name(path.parent.name)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(num_layers)
    writer.add_head_count(config["num_attention_heads"])
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    if is_lfm2:
        attends = [f"model.layers.{layer}.self_attn.q_proj.weight" in weights for layer in range(num_layers)]
        writer.add_head_count_kv([config["num_key_value_heads"] * attending for attending in attends])
        writer.add_feed_forward_length(weights["model.layers.0.feed_forward.w1.weight"].shape[0])
        writer.add_layer_norm_rms_eps(config["norm_eps"])
        writer.add_shortconv_l_cache(config["conv_L_cache"])
    else:
        writer.add_head_count_kv(config["num_key_value_heads"])
        if "intermediate_size" in config:
            writer.add_feed_forward_length(config["intermediate_size"])
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
        writer.add_rope_dimension_count(int(config["head_dim"] * rope["partial_rotary_factor"]))
        writer.add_ssm_conv_kernel(config.get("linear_conv_kernel_dim", 4))
        writer.add_ssm_state_size(config["linear_key_head_dim"])
        writer.add_ssm_group_count(config["linear_num_key_heads"])
        writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
        writer.add_ssm_inner_size(config["linear_value_head_dim"] * config["linear_num_value_heads"])
        if any(".experts." in name for name in weights):
            writer.add_expert_count(config["num_experts"])
            writer.add_expert_used_count(config["num_experts_per_tok"])
            writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
            writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    names = gguf.get_tensor_name_map(architecture, num_layers)
    dense_names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN35, num_layers)  # for feed-forwards without experts
    for name, weight in _with_stacked_experts(weights, config).items():
        for converted_name, converted in _as_converted(name, weight, config):
            found = (m.get_name(converted_name, try_suffixes=(".weight", ".bias")) for m in (names, dense_names))
            writer.add_tensor(next(filter(None, found), converted_name), np.ascontiguousarray(converted))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _with_stacked_experts(weights: Weights, config: dict[str, Any]) -> Weights:
    """Stack all experts of a layer in one tensor for each projection."""
    found = {name: weight for name, weight in weights.items() if ".experts." not in name}
    for name in (n for n in weights if ".experts.0." in n):
        each = [weights[name.replace(".experts.0.", f".experts.{i}.")] for i in range(config["num_experts"])]
        found[name.replace(".experts.0.", ".experts.")] = np.stack(each)
    return found


def _as_converted(
    name: str, weight: NDArray[np.float32], config: dict[str, Any]
) -> list[tuple[str, NDArray[np.float32]]]:
    """Convert one tensor as the converter's `modify_tensors` does, under Hugging Face's names if it keeps them."""
    if "conv" in name and weight.ndim == 3:
        weight = weight[:, 0]
    if config["model_type"] == "lfm2":
        return [(name, weight)]
    if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        weight = weight + 1
    k_heads, v_heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    k_dim, v_dim, share = config["linear_key_head_dim"], config["linear_value_head_dim"], v_heads // k_heads
    all_k = k_heads * k_dim
    if name.endswith("in_proj_qkvz.weight"):
        by_head = weight.reshape(k_heads, -1, weight.shape[1])
        parts = np.split(by_head, [k_dim, 2 * k_dim, 2 * k_dim + share * v_dim], axis=1)
        q, k, v, z = (part.reshape(-1, weight.shape[1]) for part in parts)
        block = f"blk.{name.split('.')[2]}"
        return [(f"{block}.attn_qkv.weight", np.concatenate([q, k, v])), (f"{block}.attn_gate.weight", z)]
    if config["model_type"] in ("qwen3_5_text", "qwen3_5_moe_text") and ".linear_attn." in name:

        def tiled(part: NDArray[np.float32], head_dim: int) -> NDArray[np.float32]:
            return part.reshape(k_heads, share, head_dim, -1).swapaxes(0, 1).reshape(part.shape)

        if "in_proj_qkv" in name or "conv1d" in name:
            weight = np.concatenate([weight[: 2 * all_k], tiled(weight[2 * all_k :], v_dim)])
        elif "in_proj_z" in name:
            weight = tiled(weight, v_dim)
        elif "out_proj" in name:
            weight = tiled(weight.T, v_dim).T
        elif "norm" not in name:
            weight = tiled(weight, 1)
    if name.endswith("A_log"):
        weight = -np.exp(weight)
    return [(name.replace(".dt_bias", ".dt_proj.bias"), weight)]
