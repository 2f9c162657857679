"""Checkpoints in the form of llama.cpp's converter: its keys, its tensor names, its order of rows.

Source: llama.cpp's convert_hf_to_gguf.py (LlamaModel, Qwen2Model, Qwen3Model, Gemma3Model, Phi3MiniModel).
"""

from __future__ import annotations

from math import log, sqrt
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

Config = dict[str, Any]
Weights = dict[str, NDArray[Any]]
ARCHITECTURES = {"gemma3_text": "gemma3", "llama": "llama", "phi3": "phi3", "qwen2": "qwen2", "qwen3": "qwen3"}


def write_gguf(path: Path, config: Config, weights: Weights) -> None:
    """Write the same weights and config. Linears keep their type, norms are float32."""
    name = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(path, name)
    _add_keys(writer, path.parent.name, config)
    {"gemma3": _add_gemma3, "phi3": _add_phi3, "llama": _add_llama}.get(name, _add_qwen)(writer, config)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    _add_tokenizer(writer, config)
    architecture = next(a for a, known in gguf.MODEL_ARCH_NAMES.items() if known == name)
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    for tensor, weight in weights.items():
        stored = weight if weight.ndim > 1 else weight.astype(np.float32)
        if name == "llama":
            stored = _permuted(tensor, stored, config)
        if name == "gemma3" and tensor.endswith("norm.weight"):
            stored = stored + 1
        writer.add_tensor(names.get_name(tensor, try_suffixes=(".weight", ".bias")), np.ascontiguousarray(stored))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_keys(writer: Any, name: str, config: Config) -> None:
    """Write the keys that every architecture has."""
    writer.add_name(name)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])


def _add_llama(writer: Any, config: Config) -> None:
    writer.add_rope_dimension_count(_head_dim(config))
    writer.add_vocab_size(config["vocab_size"])
    if config["rope_scaling"]:
        scaling = {"rope_theta": config["rope_theta"], **config["rope_scaling"]}
        writer.add_tensor("rope_freqs.weight", llama3_frequency_factors(scaling, _head_dim(config)))


def _add_qwen(writer: Any, config: Config) -> None:
    if config["model_type"] == "qwen3":
        _add_head_dim(writer, config)


def _add_gemma3(writer: Any, config: Config) -> None:
    _add_head_dim(writer, config)
    writer.add_sliding_window(config["sliding_window"])
    if config.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if config.get("rope_scaling"):
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(config["rope_scaling"]["factor"])


def _add_phi3(writer: Any, config: Config) -> None:
    context, original = config["max_position_embeddings"], config["original_max_position_embeddings"]
    writer.add_rope_scaling_orig_ctx_len(original)
    writer.add_rope_dimension_count(int(config.get("partial_rotary_factor", 1) * _head_dim(config)))
    writer.add_sliding_window(config["sliding_window"] or 0)
    if scaling := config["rope_scaling"]:
        writer.add_rope_scaling_attn_factors(sqrt(1 + log(context / original) / log(original)))
        for length in ("long", "short"):
            writer.add_tensor(f"rope_factors_{length}.weight", np.float32(scaling[f"{length}_factor"]))


def _add_head_dim(writer: Any, config: Config) -> None:
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])


def _head_dim(config: Config) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def _permuted(tensor: str, weight: NDArray[Any], config: Config) -> NDArray[Any]:
    """Return rows of q and k in the order of interleaved RoPE."""
    counts = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for projection, count in counts.items():
        if f".{projection}." in tensor:
            return weight.reshape(count, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
    return weight


def _add_tokenizer(writer: Any, config: Config) -> None:
    """Write a SentencePiece vocabulary: control tokens, a few bytes, single characters."""
    control = ["<unk>", "<s>", "</s>"]
    byte_pieces = [f"<0x{byte:02X}>" for byte in b"\t\n\r"]
    characters = ["\u2581", *map(chr, range(33, 127))]
    pieces = (control + byte_pieces + characters + [f"<unused{i}>" for i in range(128)])[: config["vocab_size"]]
    kinds = [gguf.TokenType.UNKNOWN] + [gguf.TokenType.CONTROL] * 2 + [gguf.TokenType.BYTE] * 3
    kinds += [gguf.TokenType.NORMAL] * len(characters)
    kinds += [gguf.TokenType.UNUSED] * (config["vocab_size"] - len(kinds))
    writer.add_tokenizer_model("llama")
    writer.add_token_list(pieces)
    writer.add_token_scores([-float(index) for index in range(len(pieces))])
    writer.add_token_types(kinds[: len(pieces)])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_unk_token_id(0)


def llama3_frequency_factors(scaling: Config, head_dim: int) -> NDArray[np.float32]:
    """Return the divisors of the inverse frequencies, float32 [head_dim / 2]. `scaling` has a "rope_theta"."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    wavelengths = 2 * np.pi * scaling["rope_theta"] ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = (scaling["original_max_position_embeddings"] / wavelengths - low) / (high - low)
    smooth = np.clip(smooth, 0, 1)
    return (1 / ((1 - smooth) / scaling["factor"] + smooth)).astype(np.float32)
