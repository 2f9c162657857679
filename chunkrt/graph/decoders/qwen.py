"""Qwen2, Qwen2.5 and Qwen3: the Llama family with biases on q, k and v, or with normalised heads of q and k.

Later layers may have a sliding window. In Qwen3 the heads' total width may differ from the hidden size. Source: Yang et
al., Qwen2 Technical Report (2024), section 2.2; Qwen3 Technical Report (2025), section 2; Hugging Face's
`Qwen2ForCausalLM`, `Qwen3ForCausalLM`.
"""

from __future__ import annotations

from chunkrt.graph.decoders.config import DecoderConfig
from chunkrt.graph.decoders.llama import Attention, Body, CausalDecoder, FeedForward, Layer, head_norm
from chunkrt.graph.modules import Module

DEFAULTS = {"sliding_window": 4096}
QWEN3_DEFAULTS = {**DEFAULTS, "head_dim": 128}


def qwen2(config: DecoderConfig) -> Module:
    """Build a decoder whose layers attend to all earlier tokens, unless the config enables sliding windows."""
    rope = config.rotary_tables()

    def layer(window: int) -> Layer:
        return Layer(config, Attention(config, rope, bias=(True, False), window=window), FeedForward(config))

    return CausalDecoder(config, Body(config, rope, [layer(window) for window in windows(config)]))


def qwen3(config: DecoderConfig) -> Module:
    """Build a decoder whose layers attend to all earlier tokens, unless the config enables sliding windows."""
    rope = config.rotary_tables()
    has_bias = config.flag("attention_bias")

    def layer(window: int) -> Layer:
        norm = head_norm(config)
        attention = Attention(config, rope, norm=norm, bias=(has_bias, has_bias), window=window)
        return Layer(config, attention, FeedForward(config))

    return CausalDecoder(config, Body(config, rope, [layer(window) for window in windows(config)]))


def windows(config: DecoderConfig) -> list[int]:
    """Return the number of keys that each layer sees; 0 for all.

    Windows are off unless `use_sliding_window` is set. They then apply from the layer `max_window_layers` on."""
    if not config.flag("use_sliding_window"):
        return [0] * config.num_layers
    first = config.count("max_window_layers", 28, least=0)
    return [config.sliding_window if slides else 0 for slides in config.sliding_layers(lambda layer: layer >= first)]
