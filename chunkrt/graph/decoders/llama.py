"""The Llama family (SmolLM2, Llama 2 and 3, TinyLlama), and Mistral, whose layers may have a sliding window.

Pre-norm blocks of grouped-query attention with RoPE and a SwiGLU feed-forward; the LM head may share the embedding's
table. Source: Touvron et al., LLaMA (2023), section 2.2; Hugging Face's `LlamaForCausalLM`, `MistralForCausalLM`.
"""

from __future__ import annotations

from chunkrt.graph.decoders.config import DecoderConfig
from chunkrt.graph.decoders.parts import Attention, Body, CausalDecoder, FeedForward, Layer
from chunkrt.graph.modules import Module
from chunkrt.graph.rope import RotaryTables

MISTRAL_DEFAULTS = {"num_key_value_heads": 8, "sliding_window": 4096}


def llama(config: DecoderConfig) -> Module:
    """Build a decoder whose layers attend to all earlier tokens."""
    config.refuse(sliding_window=config.sliding_window > 0)
    return mistral(config)


def mistral(config: DecoderConfig) -> Module:
    """Build a decoder whose layers all have a sliding window, if the config states one."""
    rope = RotaryTables(config.full_inverse_frequencies, config.context_length, divisor=config.rope_divisor)
    has_bias = config.flag("attention_bias")

    def layer() -> Layer:
        attention = Attention(config, rope, bias=(has_bias, has_bias), window=config.sliding_window)
        return Layer(config, attention, FeedForward(config, bias=config.flag("mlp_bias")))

    return CausalDecoder(config, Body(config, rope, [layer() for _ in range(config.num_layers)]))
