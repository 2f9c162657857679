"""Bamba: layers of Mamba-2 with occasional attention, whose RoPE rotates half of every head.

Source: Hugging Face's `BambaForCausalLM`.
"""

from __future__ import annotations

from dataclasses import replace

from chunkrt.graph.decoders.config import DecoderConfig
from chunkrt.graph.decoders.llama import Attention, Body, CausalDecoder, FeedForward, Layer, LayerNames
from chunkrt.graph.decoders.mamba import Mamba2Mixer, MambaSizes, step_limits
from chunkrt.graph.modules import Module

DEFAULTS = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 262144}
NAMES = LayerNames(before_mlp="pre_ff_layernorm", mlp="feed_forward")


def bamba(config: DecoderConfig) -> Module:
    """Build a decoder; the layers `attn_layer_indices` attend."""
    config = replace(config, raw={**config.raw, "partial_rotary_factor": 0.5})
    config.refuse(hidden_act=config.activation != "silu")
    rope, attention_layers = config.rotary_tables(may_be_partial=True), config.layer_indices("attn_layer_indices")
    has_bias = config.flag("attention_bias")

    def layer(index: int) -> Layer:
        mlp = FeedForward(config, bias=config.flag("mlp_bias"))
        if index in attention_layers:
            return Layer(config, Attention(config, rope, bias=(has_bias, has_bias)), mlp, names=NAMES)
        return Layer(config, hybrid_mixer(config), mlp, names=replace(NAMES, mixer="mamba"))

    layers = [layer(index) for index in range(config.num_layers)]
    return CausalDecoder(config, Body(config, rope, layers, norm_name="final_layernorm"))


def hybrid_mixer(config: DecoderConfig) -> Mamba2Mixer:
    """Return a mixer under the keys of Bamba's config, which Granite's hybrids have too."""
    has_bias = config.flag("mamba_proj_bias")
    return Mamba2Mixer(
        config,
        MambaSizes.of_hybrid(config),
        bias=(has_bias, has_bias),
        conv_bias=config.flag("mamba_conv_bias", True),
        limits=step_limits(config),
        output_factor=config.residual_factor,
    )
