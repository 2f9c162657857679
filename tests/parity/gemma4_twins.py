"""Checkpoints of Gemma 4 in the form of llama.cpp's converter (conversion/gemma.py: `Gemma4Model`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

Weights = dict[str, NDArray[Any]]


def write_gguf(path: Path, known: Any, weights: Weights) -> None:
    """Write the weights of a decoder, given its config with defaults; linears keep their type, norms are float32."""
    num_layers, slides = known.num_hidden_layers, [kind == "sliding_attention" for kind in known.layer_types]
    own = known.num_kv_shared_layers
    of_layers = [known.per_layer_config[layer] for layer in range(num_layers)]
    full, sliding = (next(each for each, s in zip(of_layers, slides, strict=True) if s == kind) for kind in (0, 1))
    writer = gguf.GGUFWriter(path, "gemma4")
    writer.add_name(path.parent.name)
    writer.add_vocab_size(known.vocab_size)
    writer.add_context_length(known.max_position_embeddings)
    writer.add_embedding_length(known.hidden_size)
    writer.add_block_count(num_layers)
    width = known.intermediate_size
    if known.use_double_wide_mlp:
        writer.add_feed_forward_length([width if i < num_layers - own else 2 * width for i in range(num_layers)])
    else:
        writer.add_feed_forward_length(width)
    writer.add_head_count(known.num_attention_heads)
    if full.num_key_value_heads == sliding.num_key_value_heads:
        writer.add_head_count_kv(full.num_key_value_heads)
    else:
        writer.add_head_count_kv([each.num_key_value_heads for each in of_layers])
    writer.add_layer_norm_rms_eps(known.rms_norm_eps)
    writer.add_key_length(full.head_dim)
    writer.add_value_length(full.head_dim)
    writer.add_key_length_swa(sliding.head_dim)
    writer.add_value_length_swa(sliding.head_dim)
    writer.add_sliding_window(known.sliding_window)
    writer.add_sliding_window_pattern(slides)
    writer.add_shared_kv_layers(own)
    writer.add_embedding_length_per_layer_input(known.hidden_size_per_layer_input or 0)
    if known.final_logit_softcapping:
        writer.add_final_logit_softcapping(known.final_logit_softcapping)
    if known.enable_moe_block:
        writer.add_expert_count(known.num_experts)
        writer.add_expert_used_count(known.top_k_experts)
        writer.add_expert_feed_forward_length(known.moe_intermediate_size)
    ropes = known.rope_parameters
    writer.add_rope_freq_base(ropes["full_attention"]["rope_theta"])
    writer.add_rope_freq_base_swa(ropes["sliding_attention"]["rope_theta"])
    writer.add_rope_dimension_count(full.head_dim)
    writer.add_rope_dimension_count_swa(sliding.head_dim)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    num_rotated = int(full.head_dim * ropes["full_attention"]["partial_rotary_factor"] / 2)
    divisors = np.float32([1.0] * num_rotated + [1e30] * (full.head_dim // 2 - num_rotated))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA4, num_layers)
    writer.add_tensor("rope_freqs.weight", divisors)
    for name, weight in weights.items():
        stored = weight if weight.ndim > 1 else weight.astype(np.float32)
        writer.add_tensor(_stored_name(name, names), np.ascontiguousarray(stored))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _stored_name(name: str, names: Any) -> str:
    layer = name.split(".")[2]
    if name.endswith("router.scale"):
        return f"blk.{layer}.ffn_gate_inp.scale"
    if name.endswith("per_expert_scale"):
        return f"blk.{layer}.ffn_down_exps.scale"
    if name.endswith("layer_scalar") or ".experts." in name:
        name += ".weight"
    found: str = names.get_name(name, try_suffixes=(".weight", ".bias"))
    return found
