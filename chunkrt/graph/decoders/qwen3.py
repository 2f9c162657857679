"""Qwen3: heads of q and k are normalised before RoPE, and their total width may differ from the hidden size.

Source: Yang et al., Qwen3 Technical Report (2025), section 2; Hugging Face's `Qwen3ForCausalLM`.
"""

from __future__ import annotations

from chunkrt.graph.decoders.config import DecoderConfig
from chunkrt.graph.decoders.llama import Attention, Body, CausalDecoder, FeedForward, Layer, head_norm
from chunkrt.graph.decoders.qwen2 import windows
from chunkrt.graph.modules import Module

DEFAULTS = {"head_dim": 128, "sliding_window": 4096}


def qwen3(config: DecoderConfig) -> Module:
    """Build a decoder whose layers attend to all earlier tokens, unless the config enables sliding windows."""
    rope = config.rotary_tables()
    has_bias = config.flag("attention_bias")

    def layer(window: int) -> Layer:
        norm = head_norm(config)
        attention = Attention(config, rope, norm=norm, bias=(has_bias, has_bias), window=window)
        return Layer(config, attention, FeedForward(config))

    return CausalDecoder(config, Body(config, rope, [layer(window) for window in windows(config)]))
