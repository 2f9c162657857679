"""Granite 3 and dense Granite 4: the Llama family with factors of embeddings, scores, residuals and logits.

The factors of residuals and logits are part of the loaded weights. Source: Hugging Face's `GraniteForCausalLM`,
`GraniteMoeHybridForCausalLM`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from chunkrt.graph.decoders.config import DecoderConfig
from chunkrt.graph.decoders.llama import Attention, Body, CausalDecoder, FeedForward, Layer, LayerNames
from chunkrt.graph.modules import Module
from chunkrt.graph.parallel import MergedColumnParallelLinear, RowParallelLinear
from chunkrt.graph.rope import RotaryTables, unrotated_tables

HYBRID_DEFAULTS = {"num_local_experts": 8, "shared_intermediate_size": 1024}
HYBRID_NAMES = LayerNames(mlp="shared_mlp")


def granite(config: DecoderConfig) -> Module:
    """Build a decoder whose layers attend to all earlier tokens."""
    config = with_factors(config)
    rope, bias = config.rotary_tables(), config.flag("mlp_bias")
    layers = [Layer(config, attention(config, rope), FeedForward(config, bias=bias)) for _ in range(config.num_layers)]
    return decoder(config, rope, layers)


def granite_hybrid(config: DecoderConfig) -> Module:
    """Build a dense decoder: all layers attend, and the shared expert is the feed-forward."""
    config = with_factors(replace(config, intermediate_size=config.count("shared_intermediate_size")))
    config.refuse(num_local_experts=config.count("num_local_experts", least=0) > 0)
    default = config.raw.get("layers_block_type") or ["mamba"] * config.num_layers
    kinds = config.layer_types(default, ("attention", "full_attention"))
    has_rope = config.raw.get("position_embedding_type") == "rope"
    rope = config.rotary_tables() if has_rope else unrotated_tables(config.context_length)
    layers = [Layer(config, attention(config, rope), fused_feed_forward(config), names=HYBRID_NAMES) for _ in kinds]
    return decoder(config, rope, layers)


def with_factors(config: DecoderConfig) -> DecoderConfig:
    """Return a config with the factors of residuals and logits."""
    return replace(
        config,
        residual_factor=config.number("residual_multiplier", 1.0),
        logit_factor=1 / config.number("logits_scaling", 1.0),
    )


def attention(config: DecoderConfig, rope: RotaryTables) -> Attention:
    """Return attention whose scores have the config's factor in place of head_dim^-1/2."""
    has_bias = config.flag("attention_bias")
    return Attention(config, rope, bias=(has_bias, has_bias), scale=config.number("attention_multiplier", 1.0))


def fused_feed_forward(config: DecoderConfig) -> FeedForward:
    """Return the gated feed-forward whose gate and up are one tensor, `input_linear`."""
    hidden, inner = config.hidden_size, config.intermediate_size
    gate_up = MergedColumnParallelLinear(
        hidden, {"gate_proj": inner, "up_proj": inner}, config.ranks, stored_in="input_linear"
    )
    down = RowParallelLinear(inner, {"output_linear": hidden}, config.ranks, factor=config.residual_factor)
    return FeedForward(config, gate_up=gate_up, down=down)


def decoder(config: DecoderConfig, rope: RotaryTables, layers: Sequence[Module]) -> Module:
    """Return a decoder whose embeddings have the config's factor."""
    scale = config.number("embedding_multiplier", 1.0)
    return CausalDecoder(config, Body(config, rope, layers, embedding_scale=scale))
