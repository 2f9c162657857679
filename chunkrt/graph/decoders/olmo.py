"""OLMo 2 and 3: norms behind attention and feed-forward alone, and norms of all heads of q and of k at once.

OLMo 3 has a sliding window in three of four layers. Source: OLMo Team, 2 OLMo 2 Furious (2025), section 3; Hugging
Face's `Olmo2ForCausalLM`, `Olmo3ForCausalLM`.
"""

from __future__ import annotations

from chunkrt.errors import UnsupportedModelError
from chunkrt.graph.decoders.config import DecoderConfig
from chunkrt.graph.decoders.llama import NORMS_BEHIND, Attention, Body, CausalDecoder, FeedForward, Layer
from chunkrt.graph.modules import Module
from chunkrt.graph.parallel import WideNorm
from chunkrt.graph.rope import RotaryTables

DEFAULTS = {"rms_norm_eps": 1e-5}
THETA = 5e5
OLMO3_DEFAULTS = {**DEFAULTS, "sliding_window": 4096}


def olmo2(config: DecoderConfig) -> Module:
    """Build a decoder whose layers attend to all earlier tokens."""
    rope = config.rotary_tables()
    layers = [_layer(config, rope, 0) for _ in range(config.num_layers)]
    return CausalDecoder(config, Body(config, rope, layers))


def olmo3(config: DecoderConfig) -> Module:
    """Build a decoder; `layer_types` selects the layers with a window, by default all except every fourth. A scaling
    rule applies to the layers without a window.
    """
    full = {"rope_theta": config.number("rope_theta", THETA), **config.rope_scaling()}
    ropes = config.rotary_tables_by_kind({"full_attention": full, "sliding_attention": {"rope_theta": THETA}})
    rope, local_rope = ropes["full_attention"], ropes["sliding_attention"]
    layers = [
        _layer(config, local_rope, config.sliding_window) if slides else _layer(config, rope, 0)
        for slides in config.sliding_layers(lambda index: (index + 1) % 4 != 0)
    ]
    return CausalDecoder(config, Body(config, rope, layers, other_ropes={"local_rope": local_rope}))


def wide_attention(config: DecoderConfig, rope: RotaryTables, window: int = 0) -> Attention:
    """Return attention with one norm over all heads of q, and one over all heads of k.

    Raises:
        UnsupportedModelError: q and k have different numbers of heads.
    """
    if config.num_heads != config.num_kv_heads:
        raise UnsupportedModelError(
            f"{config.where}: num_key_value_heads = {config.num_kv_heads} is not supported in this family; its norms "
            f"need as many heads of k as of q, {config.num_heads}",
            feature="num_key_value_heads",
        )
    has_bias = config.flag("attention_bias")
    norm = WideNorm(config.heads, config.rms_norm_eps, config.ranks)
    return Attention(config, rope, norm=norm, bias=(has_bias, has_bias), window=window)


def _layer(config: DecoderConfig, rope: RotaryTables, window: int) -> Layer:
    return Layer(config, wide_attention(config, rope, window), FeedForward(config), names=NORMS_BEHIND)
