"""Gemma 1, 2 and 3, text only: the Llama family with GeGLU; norms multiply by 1 + w, embeddings are multiplied by
sqrt(H).

Gemma 2 and 3 also have norms behind attention and feed-forward, and windows on every other layer, or on five of six.
Gemma 2 caps scores and logits; Gemma 3 normalises heads, and layers with a window have their own RoPE tables.
Source: Gemma Team, Gemma (2024), section 2; Gemma 2 (2024), section 2; Gemma 3 Technical Report (2025), section 2;
Hugging Face's `GemmaForCausalLM`, `Gemma2ForCausalLM`, `Gemma3ForCausalLM`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
    "num_key_value_heads": 16,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "norm_offset": 1,
    "has_legacy_gelu": True,
}
_SANDWICH_DEFAULTS = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
    "norm_offset": 1,
}
GEMMA2_DEFAULTS = {
    **_SANDWICH_DEFAULTS,
    "vocab_size": 256000,
    "max_position_embeddings": 8192,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
GEMMA3_DEFAULTS = {
    **_SANDWICH_DEFAULTS,
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
}

SANDWICH_NORMS = LayerNames(
    after_mixer="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)


def gemma(config: DecoderConfig) -> Module:
    """Build a decoder of Gemma 1, whose layers attend to all earlier tokens."""
    _refuse_bidirectional(config)
    rope, has_bias = config.rotary_tables(), config.flag("attention_bias")

    def layer() -> Layer:
        return Layer(config, Attention(config, rope, bias=(has_bias, has_bias)), FeedForward(config))

    return _decoder(config, rope, [layer() for _ in range(config.num_layers)])


def gemma2(config: DecoderConfig) -> Module:
    """Build a decoder of Gemma 2; `layer_types` selects the layers with a window, by default every other one."""
    _refuse_bidirectional(config)
    rope = config.rotary_tables()
    slides = config.sliding_layers(lambda index: index % 2 == 0)
    return _decoder(config, rope, [_sandwich_layer(config, rope, is_sliding) for is_sliding in slides])


def gemma3(config: DecoderConfig) -> Module:
    """Build a decoder of Gemma 3; `layer_types` selects the layers with a window, by default all except every
    sixth.
    """
    _refuse_bidirectional(config)
    pattern = config.count("sliding_window_pattern", 6)
    rope, local_rope = _tables(config)
    slides = config.sliding_layers(lambda index: (index + 1) % pattern != 0)
    layers = [
        _sandwich_layer(config, local_rope if is_sliding else rope, is_sliding, norm=head_norm(config))
        for is_sliding in slides
    ]
    return _decoder(config, rope, layers, other_ropes={"local_rope": local_rope})


class GemmaDecoder(CausalDecoder):
    """A causal decoder whose logits lie between -cap and cap if the config has a cap."""

    def __init__(self, config: DecoderConfig, body: Body) -> None:
        super().__init__(config, body)
        cap = _cap(config, "final_logit_softcapping")
        self.soft_cap = SoftCap(self.lm_head.num_columns, cap) if cap else None

    def logits(self, hidden: ir.Value) -> ir.Value:
        if self.soft_cap is None:
            return super().logits(hidden)
        with self.lm_head.scope():
            part = self.lm_head.part(hidden)
        capped = self.soft_cap(part)
        with self.lm_head.scope():
            return self.lm_head.gather(capped)


class SoftCap(Module):
    """Soft cap of logits: cap * tanh(logits / cap). It runs on the CPU unless placed."""

    def __init__(self, width: int, cap: float) -> None:
        super().__init__()
        self.device = "cpu"
        self.cap, self.inverse = (Constant(np.full(width, factor, np.float32)) for factor in (cap, 1 / cap))

    def forward(self, logits: ir.Value) -> ir.Value:
        bounded = ops.tanh(ops.mul(logits, self.inverse(), name="scaled"), name="bounded")
        return ops.mul(bounded, self.cap(), name="output")


def _refuse_bidirectional(config: DecoderConfig) -> None:
    config.refuse(use_bidirectional_attention=bool(config.raw.get("use_bidirectional_attention")))


def _sandwich_layer(config: DecoderConfig, rope: RotaryTables, is_sliding: bool, **options: Any) -> Layer:
    has_bias = config.flag("attention_bias")
    attention = Attention(
        config,
        rope,
        bias=(has_bias, has_bias),
        scale=config.number("query_pre_attn_scalar") ** -0.5,
        soft_cap=_cap(config, "attn_logit_softcapping"),
        window=config.sliding_window if is_sliding else 0,
        **options,
    )
    return Layer(config, attention, FeedForward(config), names=SANDWICH_NORMS)


def _decoder(config: DecoderConfig, rope: RotaryTables, layers: Sequence[Layer], **options: Any) -> Module:
    return GemmaDecoder(config, Body(config, rope, layers, embedding_scale=config.hidden_size**0.5, **options))


def _cap(config: DecoderConfig, key: str) -> float:
    """Return a cap; 0 if the config has none."""
    return 0.0 if config.raw.get(key) is None else config.number(key)


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
