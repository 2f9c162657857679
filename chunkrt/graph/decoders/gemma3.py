"""Gemma 3, text only: norms before and after attention and feed-forward, and windows on five of six layers.

Layers with a window have their own RoPE tables. Norms multiply by 1 + w, embeddings are multiplied by sqrt(H).
Source: Gemma Team, Gemma 3 Technical Report (2025), section 2; Hugging Face's `Gemma3ForCausalLM`.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from chunkrt.graph import ops
from chunkrt.graph.decoders.config import DecoderConfig
from chunkrt.graph.decoders.llama import (
    Attention,
    Body,
    CausalDecoder,
    FeedForward,
    Layer,
    LayerNames,
    head_norm,
)
from chunkrt.graph.modules import Constant, Module
from chunkrt.graph.rope import RotaryTables

DEFAULTS = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "query_pre_attn_scalar": 256,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
    "norm_offset": 1,
}


SANDWICH_NORMS = LayerNames(
    after_mixer="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)


def gemma3(config: DecoderConfig) -> Module:
    """Build the decoder; `layer_types` selects the layers with a window, by default all except every sixth."""
    refused = ("attn_logit_softcapping", "use_bidirectional_attention")
    config.refuse(**{key: bool(config.raw.get(key)) for key in refused})
    pattern = config.count("sliding_window_pattern", 6)
    has_bias, scale = config.flag("attention_bias"), config.number("query_pre_attn_scalar") ** -0.5
    rope, local_rope = _tables(config)

    def layer(slides: bool) -> Layer:
        attention = Attention(
            config,
            local_rope if slides else rope,
            norm=head_norm(config),
            bias=(has_bias, has_bias),
            scale=scale,
            window=config.sliding_window if slides else 0,
        )
        return Layer(config, attention, FeedForward(config), names=SANDWICH_NORMS)

    layers = [layer(slides) for slides in config.sliding_layers(lambda index: (index + 1) % pattern != 0)]
    ropes = {"local_rope": local_rope}
    return GemmaDecoder(config, Body(config, rope, layers, embedding_scale=config.hidden_size**0.5, other_ropes=ropes))


class GemmaDecoder(CausalDecoder):
    """A causal decoder whose logits lie between -cap and cap if the config has a cap."""

    def __init__(self, config: DecoderConfig, body: Body) -> None:
        super().__init__(config, body)
        has_cap = config.raw.get("final_logit_softcapping") is not None
        self.soft_cap = SoftCap(config.vocab_size, config.number("final_logit_softcapping")) if has_cap else None

    def forward(self, token_ids: ir.Value, logit_rows: ir.Value) -> ir.Value:
        logits = super().forward(token_ids, logit_rows)
        return logits if self.soft_cap is None else self.soft_cap(logits)


class SoftCap(Module):
    """Soft cap of logits: cap * tanh(logits / cap). It runs on the CPU unless placed."""

    def __init__(self, width: int, cap: float) -> None:
        super().__init__()
        self.device = "cpu"
        self.cap, self.inverse = (Constant(np.full(width, factor, np.float32)) for factor in (cap, 1 / cap))

    def forward(self, logits: ir.Value) -> ir.Value:
        bounded = ops.tanh(ops.mul(logits, self.inverse(), name="scaled"), name="bounded")
        return ops.mul(bounded, self.cap(), name="output")


def _tables(config: DecoderConfig) -> tuple[RotaryTables, RotaryTables]:
    """Return RoPE's parameters of layers without a window, to which a scaling rule applies, and of layers with a
    window.
    """
    factor = config.raw.get("partial_rotary_factor")
    partial = {} if factor is None else {"partial_rotary_factor": factor}
    full = {"rope_theta": config.number("rope_theta"), **partial, **config.rope_scaling()}
    sliding = {"rope_theta": config.number("rope_local_base_freq"), **partial}
    found = config.rotary_tables_by_kind({"full_attention": full, "sliding_attention": sliding})
    return found["full_attention"], found["sliding_attention"]
