"""SmolLM3: the Llama family with layers without RoPE, by default every fourth.

Layers without RoPE may have a sliding window. Source: Yang et al., Rope to Nope and Back Again (2025); Hugging Face's
`SmolLM3ForCausalLM`.
"""

from __future__ import annotations

from chunkrt.errors import ModelError
from chunkrt.graph.decoders.config import DecoderConfig
from chunkrt.graph.decoders.llama import Attention, Body, CausalDecoder, FeedForward, Layer
from chunkrt.graph.modules import Module
from chunkrt.graph.rope import unrotated_tables

DEFAULTS = {
    "num_key_value_heads": 4,
    "rope_theta": 2e6,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
}


def smollm3(config: DecoderConfig) -> Module:
    """Build the decoder; `no_rope_layers` holds 1 for a layer with RoPE and 0 for a layer without it."""
    interval = config.count("no_rope_layer_interval", 4)
    by_rule = [int((index + 1) % interval != 0) for index in range(config.num_layers)]
    rotates = config.layer_indices("no_rope_layers") or by_rule
    if len(rotates) < config.num_layers or not set(rotates) <= {0, 1}:
        raise ModelError(
            f"{config.where}: no_rope_layers is {rotates!r:.80}, expected 0 or 1 for each of {config.num_layers} layers"
        )
    rope, no_rope = config.rotary_tables(), unrotated_tables(config.context_length)
    has_bias = config.flag("attention_bias")

    def layer(has_rope: int, slides: bool) -> Layer:
        attention = Attention(
            config,
            rope if has_rope else no_rope,
            bias=(has_bias, has_bias),
            window=config.sliding_window if slides else 0,
        )
        return Layer(config, attention, FeedForward(config, bias=config.flag("mlp_bias")))

    slides = config.sliding_layers(lambda index: not rotates[index])
    layers = [layer(*kinds) for kinds in zip(rotates, slides, strict=False)]
    return CausalDecoder(config, Body(config, rope, layers, other_ropes={"no_rope": no_rope}))
