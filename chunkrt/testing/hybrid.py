"""A decoder with all kinds of layers that Llama lacks. No model has this structure, but a backend may have to run each
of these layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from chunkrt.graph.decoders.config import DecoderConfig
from chunkrt.graph.decoders.experts import SparseMixture
from chunkrt.graph.decoders.lfm2 import ShortConvolution
from chunkrt.graph.decoders.llama import Attention, Body, CausalDecoder, FeedForward, Layer, head_norm
from chunkrt.graph.decoders.qwen3_next import DeltaSizes, GatedDeltaRule
from chunkrt.graph.modules import Module
from chunkrt.graph.rope import RotaryTables
from chunkrt.testing.decoder import CONFIG

HYBRID_CONFIG: Mapping[str, Any] = {
    **CONFIG,
    "num_hidden_layers": 3,
    "conv_bias": True,
    "conv_L_cache": 3,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
    "linear_conv_kernel_dim": 4,
    "sliding_window": 7,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 22,
    "shared_expert_intermediate_size": 18,
}
"""Sizes that are as small and uneven as those of the Llama decoder; the window is longer than one chunk."""


def hybrid(config: DecoderConfig) -> Module:
    """Return a decoder with a short convolution, a gated delta rule with a mixture of experts, and windowed attention
    with head norms.
    """
    rope = RotaryTables(config.inverse_frequencies, config.context_length)
    delta_rule = GatedDeltaRule(config, DeltaSizes.of(config), is_grouped=False)
    attention = Attention(config, rope, norm=head_norm(config), window=config.sliding_window)
    layers = [
        Layer(config, ShortConvolution(config), FeedForward(config)),
        Layer(config, delta_rule, SparseMixture(config)),
        Layer(config, attention, FeedForward(config)),
    ]
    return CausalDecoder(config, Body(config, rope, layers))
