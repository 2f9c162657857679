"""EXAONE 4: norms behind attention and feed-forward alone, and norms of single heads.

If the config states a window, layers without it have no RoPE. Source: LG AI Research, EXAONE 4.0 (2025), section 2;
Hugging Face's `Exaone4ForCausalLM`.
"""

from __future__ import annotations

from chunkrt.graph.decoders.config import DecoderConfig
from chunkrt.graph.decoders.llama import NORMS_BEHIND, Attention, Body, CausalDecoder, FeedForward, Layer, head_norm
from chunkrt.graph.modules import Module
from chunkrt.graph.rope import unrotated_tables

DEFAULTS = {"num_key_value_heads": 32, "rms_norm_eps": 1e-5, "sliding_window": 4096}


def exaone4(config: DecoderConfig) -> Module:
    """Build a decoder; `layer_types` selects the layers with a window, by default all except every fourth."""
    has_windows = config.raw.get("sliding_window") is not None
    is_given = bool(config.raw.get("layer_types"))
    pattern = 1 if is_given or not has_windows else config.count("sliding_window_pattern", 4)
    rope, no_rope = config.rotary_tables(), unrotated_tables(config.context_length)

    def layer(slides: bool) -> Layer:
        attention = Attention(
            config,
            rope if slides or not has_windows else no_rope,
            norm=head_norm(config),
            window=config.sliding_window if slides else 0,
        )
        return Layer(config, attention, FeedForward(config), names=NORMS_BEHIND)

    layers = [layer(slides) for slides in config.sliding_layers(lambda index: (index + 1) % pattern != 0)]
    return CausalDecoder(config, Body(config, rope, layers, other_ropes={"no_rope": no_rope}))
