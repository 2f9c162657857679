"""Qwen2-MoE, Qwen3-MoE, OLMoE, ERNIE 4.5 with experts and GLM-4.5: the attention of dense families, and mixtures.

Source: Hugging Face's `Qwen2MoeForCausalLM`, `Qwen3MoeForCausalLM`, `OlmoeForCausalLM`, `Ernie4_5_MoeForCausalLM`,
`Glm4MoeForCausalLM`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from chunkrt.graph.decoders.config import DecoderConfig
from chunkrt.graph.decoders.experts import (
    Mixture,
    SparseMixture,
    gated_mixture,
    has_experts,
    sigmoid_mixture,
    with_shared_experts,
)
from chunkrt.graph.decoders.llama import Attention, Body, CausalDecoder, FeedForward, Layer, head_norm
from chunkrt.graph.decoders.olmo import wide_attention
from chunkrt.graph.modules import Module
from chunkrt.graph.parallel import QKVParallelLinear
from chunkrt.graph.rope import RotaryTables

QWEN2_DEFAULTS = {
    "num_key_value_heads": 16,
    "sliding_window": 4096,
    "use_sliding_window": False,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "norm_topk_prob": False,
}
QWEN3_DEFAULTS = {
    "num_key_value_heads": 4,
    "sliding_window": 4096,
    "use_sliding_window": False,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": False,
}
OLMOE_DEFAULTS = {"rms_norm_eps": 1e-5, "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False}
ERNIE_DEFAULTS = {
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "tie_word_embeddings": True,
    "moe_num_experts": 64,
    "moe_k": 6,
    "moe_intermediate_size": 1536,
    "moe_num_shared_experts": 2,
}
GLM_DEFAULTS = {
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "partial_rotary_factor": 0.5,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "moe_intermediate_size": 1408,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 1,
}
LEAST_SUM = 1e-6
"""Largest accepted lower bound of the sum of the picked experts' scores, which a softmax over a few experts exceeds."""


def qwen2_moe(config: DecoderConfig) -> Module:
    """Build a decoder whose shared experts have gates. If windows are enabled, every other layer has one, up to the
    layer `max_window_layers`.
    """
    rope, has_bias = config.rotary_tables(), config.flag("qkv_bias", True)
    last = config.count("max_window_layers", 28, least=0) if config.sliding_window else 0
    slides = config.sliding_layers(lambda index: index % 2 == 0 and index < last)

    def layer(index: int) -> Layer:
        window = config.sliding_window if slides[index] else 0
        attention = Attention(config, rope, bias=(has_bias, False), window=window)
        mlp = gated_mixture(config) if has_experts(config, index) else FeedForward(config)
        return Layer(config, attention, mlp)

    return _decoder(config, rope, [layer(index) for index in range(config.num_layers)])


def qwen3_moe(config: DecoderConfig) -> Module:
    """Build a decoder without shared experts, whose layers all have a sliding window if windows are enabled."""
    rope, has_bias = config.rotary_tables(), config.flag("attention_bias")

    def layer(index: int) -> Layer:
        attention = Attention(
            config, rope, norm=head_norm(config), bias=(has_bias, has_bias), window=config.sliding_window
        )
        return Layer(config, attention, SparseMixture(config) if has_experts(config, index) else FeedForward(config))

    return _decoder(config, rope, [layer(index) for index in range(config.num_layers)])


def olmoe(config: DecoderConfig) -> Module:
    """Build a decoder with OLMo's norms of q and k, and experts in every layer."""
    config.refuse(clip_qkv=config.raw.get("clip_qkv") is not None, sliding_window=config.sliding_window > 0)
    rope = config.rotary_tables()
    mixture = Mixture(
        num_experts=config.count("num_experts"),
        top_k=config.count("num_experts_per_tok"),
        width=config.intermediate_size,
        norm_topk_prob=config.flag("norm_topk_prob"),
    )
    layers = [
        Layer(config, wide_attention(config, rope), SparseMixture(config, mixture)) for _ in range(config.num_layers)
    ]
    return _decoder(config, rope, layers)


def ernie4_5_moe(config: DecoderConfig) -> Module:
    """Build a decoder with interleaved RoPE, a bias that selects experts, and shared experts without a gate."""
    config.refuse(use_bias=config.flag("use_bias"), moe_norm_min=config.number("moe_norm_min", 1e-12) > LEAST_SUM)
    rope = config.rotary_tables()
    first, step = config.count("moe_layer_start_index", 1, least=0), config.count("moe_layer_interval", 1)
    end = config.raw.get("moe_layer_end_index", -1)
    last = config.num_layers - 1 if end in (-1, None) else config.count("moe_layer_end_index", least=0)
    width, num_shared = config.count("moe_intermediate_size"), config.count("moe_num_shared_experts", least=0)
    mixture = Mixture(
        num_experts=config.count("moe_num_experts"),
        top_k=config.count("moe_k"),
        width=width,
        selection_bias="moe_statics.e_score_correction_bias",
        bias_rank=2,
    )

    def mlp(index: int) -> Module:
        if (index + 1) % step or not first <= index <= last:
            return FeedForward(config)
        if not num_shared:
            return SparseMixture(config, mixture)
        shared = FeedForward(replace(config, intermediate_size=width * num_shared))
        return SparseMixture(config, mixture, shared=shared, shared_name="shared_experts")

    def layer(index: int) -> Layer:
        qkv = QKVParallelLinear(config.hidden_size, config.heads, interleaved=rope.rotary_dim)
        return Layer(config, Attention(config, rope, qkv=qkv), mlp(index))

    return _decoder(config, rope, [layer(index) for index in range(config.num_layers)])


def glm4_moe(config: DecoderConfig) -> Module:
    """Build a decoder that rotates half of every head, with DeepSeek-V3's experts after the first layers."""
    rope, has_bias = config.rotary_tables(may_be_partial=True), config.flag("attention_bias")
    first, mixture = config.count("first_k_dense_replace", least=0), sigmoid_mixture(config)

    def layer(index: int) -> Layer:
        norm = head_norm(config) if config.flag("use_qk_norm") else None
        mlp = FeedForward(config) if index < first else with_shared_experts(config, mixture)
        return Layer(config, Attention(config, rope, norm=norm, bias=(has_bias, False)), mlp)

    return _decoder(config, rope, [layer(index) for index in range(config.num_layers)])


def _decoder(config: DecoderConfig, rope: RotaryTables, layers: Sequence[Module]) -> Module:
    return CausalDecoder(config, Body(config, rope, layers))
