"""Gemma 1: the Llama family with GeGLU; norms multiply by 1 + w, embeddings are multiplied by sqrt(H).

Source: Gemma Team, Gemma (2024), section 2; Hugging Face's `GemmaForCausalLM`.
"""

from __future__ import annotations

from chunkrt.graph.decoders.config import DecoderConfig
from chunkrt.graph.decoders.llama import Attention, Body, CausalDecoder, FeedForward, Layer
from chunkrt.graph.modules import Module

DEFAULTS = {
    "num_key_value_heads": 16,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "norm_offset": 1,
    "has_legacy_gelu": True,
}


def gemma(config: DecoderConfig) -> Module:
    """Build a decoder whose layers attend to all earlier tokens."""
    config.refuse(use_bidirectional_attention=bool(config.raw.get("use_bidirectional_attention")))
    rope, has_bias = config.rotary_tables(), config.flag("attention_bias")

    def layer() -> Layer:
        return Layer(config, Attention(config, rope, bias=(has_bias, has_bias)), FeedForward(config))

    layers = [layer() for _ in range(config.num_layers)]
    return CausalDecoder(config, Body(config, rope, layers, embedding_scale=config.hidden_size**0.5))
