"""MiniCPM 1, 2, 4 and 4.1: the Llama family with factors of embeddings, residuals and logits.

The factors of residuals and logits are part of the loaded weights. Source: Hu et al., MiniCPM (2024), section 3;
OpenBMB's `modeling_minicpm.py`.
"""

from __future__ import annotations

from dataclasses import replace

from chunkrt.graph.decoders.config import DecoderConfig
from chunkrt.graph.decoders.llama import Attention, Body, CausalDecoder, FeedForward, Layer
from chunkrt.graph.modules import Module

DEFAULTS = {"tie_word_embeddings": True, "scale_emb": 1, "scale_depth": 1, "dim_model_base": 1}


def with_factors(config: DecoderConfig) -> DecoderConfig:
    """Return a config with MiniCPM's factors of residual branches and logits."""
    return replace(
        config,
        residual_factor=config.number("scale_depth") / config.num_layers**0.5,
        logit_factor=config.number("dim_model_base") / config.hidden_size,
    )


def minicpm(config: DecoderConfig) -> Module:
    """Build a decoder whose layers attend to all earlier tokens."""
    config.refuse(**{key: bool(config.raw.get(key)) for key in ("sparse_config", "num_experts")})
    config = with_factors(config)
    rope, has_bias = config.rotary_tables(), config.flag("attention_bias")

    def layer() -> Layer:
        return Layer(config, Attention(config, rope, bias=(has_bias, has_bias)), FeedForward(config))

    layers = [layer() for _ in range(config.num_layers)]
    return CausalDecoder(config, Body(config, rope, layers, embedding_scale=config.number("scale_emb")))
