"""GGUF files of families with Mamba-2, in the form of llama.cpp's converter.

Source: llama.cpp's conversion/mamba.py (Mamba2Model), falcon_h1.py, granite.py (GraniteHybridModel) and nemotron.py
(NemotronHModel).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Weights = dict[str, NDArray[Any]]
ARCHITECTURES = {
    "falcon_h1": "falcon-h1",
    "granitemoehybrid": "granitehybrid",
    "mamba": "mamba",
    "mamba2": "mamba2",
    "nemotron_h": "nemotron_h",
}


def write_gguf(path: Path, known: Any, weights: Weights) -> None:
    """Write the weights of a checkpoint with the config `known`. Linears keep their type, other tensors are float32."""
    import gguf

    family, num_layers = known.model_type, known.num_hidden_layers
    name = ARCHITECTURES[family]
    architecture = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == name)
    writer = gguf.GGUFWriter(path, name)
    writer.add_name(path.parent.name)
    writer.add_vocab_size(known.vocab_size)
    writer.add_embedding_length(known.hidden_size)
    writer.add_block_count(num_layers)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    {"mamba": _add_mamba, "mamba2": _add_mamba2, "falcon_h1": _add_falcon_h1, "granitemoehybrid": _add_granite}.get(
        family, _add_nemotron
    )(writer, known)
    names = gguf.get_tensor_name_map(architecture, num_layers)
    for tensor, stored in _converted(weights, known):
        found = names.get_name(tensor, try_suffixes=(".weight", ".bias")) or tensor
        is_linear = stored.ndim > 1 and not any(part in found for part in ("ssm_conv", "ssm_a", "ssm_d", "ssm_norm"))
        writer.add_tensor(found, np.ascontiguousarray(stored if is_linear else stored.astype(np.float32)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_sizes(writer: Any, inner: int, heads: int, groups: int, state: int, taps: int) -> None:
    writer.add_ssm_conv_kernel(taps)
    writer.add_ssm_inner_size(inner)
    writer.add_ssm_state_size(state)
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_group_count(groups)


def _add_hybrid_sizes(writer: Any, known: Any) -> None:
    inner = known.mamba_n_heads * known.mamba_d_head
    _add_sizes(writer, inner, known.mamba_n_heads, known.mamba_n_groups, known.mamba_d_state, known.mamba_d_conv)


def _add_mamba(writer: Any, known: Any) -> None:
    writer.add_context_length(2**20)
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_ssm_conv_kernel(known.conv_kernel)
    writer.add_ssm_inner_size(known.intermediate_size)
    writer.add_ssm_state_size(known.state_size)
    writer.add_ssm_time_step_rank(known.time_step_rank)
    writer.add_layer_norm_rms_eps(known.layer_norm_epsilon)
    writer.add_ssm_dt_b_c_rms(False)


def _add_mamba2(writer: Any, known: Any) -> None:
    writer.add_context_length(2**20)
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    inner = known.num_heads * known.head_dim
    _add_sizes(writer, inner, known.num_heads, known.n_groups, known.state_size, known.conv_kernel)
    writer.add_layer_norm_rms_eps(known.layer_norm_epsilon)


def _add_attention(writer: Any, known: Any) -> None:
    writer.add_context_length(known.max_position_embeddings)
    writer.add_head_count(known.num_attention_heads)


def _add_falcon_h1(writer: Any, known: Any) -> None:
    _add_attention(writer, known)
    _add_hybrid_sizes(writer, known)
    writer.add_feed_forward_length(known.intermediate_size)
    writer.add_head_count_kv(known.num_key_value_heads)
    writer.add_layer_norm_rms_eps(known.rms_norm_eps)
    head_dim = known.hidden_size // known.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_freq_base(known.rope_parameters["rope_theta"])


def _add_granite(writer: Any, known: Any) -> None:
    _add_attention(writer, known)
    _add_hybrid_sizes(writer, known)
    has_experts = known.num_local_experts > 0
    writer.add_feed_forward_length(known.intermediate_size if has_experts else known.shared_intermediate_size)
    writer.add_head_count_kv([known.num_key_value_heads * (kind == "full_attention") for kind in known.layer_types])
    writer.add_layer_norm_rms_eps(known.rms_norm_eps)
    writer.add_rope_scaling_finetuned(False)
    writer.add_embedding_scale(known.embedding_multiplier)
    writer.add_residual_scale(known.residual_multiplier)
    writer.add_logit_scale(known.logits_scaling)
    writer.add_attention_scale(known.attention_multiplier)
    if has_experts:
        writer.add_expert_count(known.num_local_experts)
        writer.add_expert_used_count(known.num_experts_per_tok)
        writer.add_expert_shared_feed_forward_length(known.shared_intermediate_size)


def _add_nemotron(writer: Any, known: Any) -> None:
    _add_attention(writer, known)
    inner = known.mamba_num_heads * known.mamba_head_dim
    _add_sizes(writer, inner, known.mamba_num_heads, known.n_groups, known.ssm_state_size, known.conv_kernel)
    kinds = known.layers_block_type
    writer.add_feed_forward_length([known.intermediate_size * (kind == "mlp") for kind in kinds])
    writer.add_head_count_kv([known.num_key_value_heads * (kind == "full_attention") for kind in kinds])
    writer.add_layer_norm_rms_eps(known.layer_norm_epsilon)
    writer.add_key_length(known.head_dim)
    writer.add_value_length(known.head_dim)
    writer.add_rope_scaling_finetuned(False)


def _converted(weights: Weights, known: Any) -> list[tuple[str, NDArray[Any]]]:
    """Return names, as gguf's table knows them or complete, and tensors, as `modify_tensors` yields them."""
    found = []
    for name, weight in weights.items():
        layer = name.split(".")[2] if ".layers." in name else ""
        if known.model_type == "falcon_h1":
            weight = weight * _falcon_factors(name, weight, known)
        if known.model_type != "falcon_h1":
            weight = _permuted(name, weight, known)
        if name.endswith(".dt_bias"):
            found.append((f"blk.{layer}.ssm_dt.bias", weight))
        elif name.endswith(".A_log") and known.model_type == "mamba":
            found.append((f"blk.{layer}.ssm_a", -np.exp(weight.astype(np.float32))))
        elif name.endswith(".D") and known.model_type == "mamba":
            found.append((f"blk.{layer}.ssm_d", weight))
        elif name.endswith(".A_log"):
            found.append((f"blk.{layer}.ssm_a", -np.exp(weight.astype(np.float32))[:, None]))
        elif name.endswith(".D"):
            found.append((f"blk.{layer}.ssm_d", weight[:, None]))
        elif name.endswith((".mamba.norm.weight", ".mixer.norm.weight")):
            groups = getattr(known, "mamba_n_groups", None) or known.n_groups
            found.append((name, weight.reshape(groups, -1)))
        elif "input_linear" in name:
            where = "shexp" if known.num_local_experts else ""
            suffix = "exps" if "block_sparse" in name else where
            for part, half in zip(("gate", "up"), np.split(weight, 2, axis=-2), strict=True):
                found.append((f"blk.{layer}.ffn_{part}{'_' * bool(suffix)}{suffix}.weight", half))
        elif name.endswith("shared_mlp.output_linear.weight") and not known.num_local_experts:
            found.append((f"blk.{layer}.ffn_down.weight", weight))
        else:
            found.append((name, weight[:, 0] if weight.ndim == 3 and "conv1d" in name else weight))
    return found


def _falcon_factors(name: str, weight: NDArray[Any], known: Any) -> NDArray[np.float32]:
    """Return the factors that the converter multiplies with a tensor's rows."""
    given, one = known.attention_in_multiplier, np.float32(1)
    if ".in_proj." in name:
        inner, states = known.mamba_n_heads * known.mamba_d_head, known.mamba_n_groups * known.mamba_d_state
        widths = [inner, inner, states, states, known.mamba_n_heads]
        rows = np.repeat(np.float32(known.ssm_multipliers) * np.float32(known.ssm_in_multiplier), widths)
        return rows.reshape(-1, *[1] * (weight.ndim - 1))
    factors = {
        "down_proj": known.mlp_multipliers[1],
        "gate_proj": known.mlp_multipliers[0],
        "k_proj": known.key_multiplier * given,
        "q_proj": given,
        "v_proj": given,
        "o_proj": known.attention_out_multiplier,
        "out_proj": known.ssm_out_multiplier,
        "lm_head": known.lm_head_multiplier,
        "embed_tokens": known.embedding_multiplier,
    }
    return next((np.float32(factor) for part, factor in factors.items() if f"{part}." in name), one)


def _permuted(name: str, weight: NDArray[Any], known: Any) -> NDArray[Any]:
    """Return rows of q and k in the order of interleaved RoPE."""
    for projection, key in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
        if f".{projection}." in name:
            count = getattr(known, key)
            return weight.reshape(count, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
    return weight
