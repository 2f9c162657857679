"""Gemma 3, text only: norms before and after attention and feed-forward, and windows on five of six layers.

Layers with a window have their own RoPE tables. Norms multiply by 1 + w, embeddings are multiplied by sqrt(H).
Source: Gemma Team, Gemma 3 Technical Report (2025), section 2; Hugging Face's `Gemma3ForCausalLM`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from chunkrt.errors import ModelError, UnsupportedModelError
from chunkrt.graph import ops
from chunkrt.graph.decoders.config import DecoderConfig
from chunkrt.graph.decoders.llama import Attention, Body, CausalDecoder, FeedForward, head_norm, norm
from chunkrt.graph.modules import Constant, Module
from chunkrt.graph.rope import RotaryTables, inverse_frequencies

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


def gemma3(config: DecoderConfig) -> Module:
    """Build the decoder; `layer_types` selects the layers with a window, by default all except every sixth."""
    refused = ("attn_logit_softcapping", "use_bidirectional_attention")
    config.refuse(**{key: bool(config.raw.get(key)) for key in refused})
    return GemmaDecoder(config, GemmaBody(config))


class GemmaBody(Body):
    """The stack of layers, with separate rotary tables for layers with a window."""

    def __init__(self, config: DecoderConfig) -> None:
        pattern = config.count("sliding_window_pattern", 6)
        rope, local_rope = _tables(config)
        layers = [
            GemmaLayer(config, local_rope, config.sliding_window) if slides else GemmaLayer(config, rope, 0)
            for slides in config.sliding_layers(lambda layer: (layer + 1) % pattern != 0)
        ]
        super().__init__(config, rope, layers, embedding_scale=config.hidden_size**0.5)
        self.local_rope = local_rope


class GemmaLayer(Module):
    """Attention and feed-forward; each has a norm before and after it, and is added to the residual stream."""

    def __init__(self, config: DecoderConfig, rope: RotaryTables, window: int) -> None:
        super().__init__()
        has_bias, scale = config.flag("attention_bias"), config.number("query_pre_attn_scalar") ** -0.5
        self.input_layernorm = norm(config)
        self.self_attn = Attention(
            config, rope, norm=head_norm(config), bias=(has_bias, has_bias), scale=scale, window=window
        )
        self.post_attention_layernorm = norm(config)
        self.pre_feedforward_layernorm = norm(config)
        self.mlp = FeedForward(config)
        self.post_feedforward_layernorm = norm(config)

    def forward(self, hidden: ir.Value) -> ir.Value:
        attended = self.post_attention_layernorm(self.self_attn(self.input_layernorm(hidden)))
        hidden = ops.add(hidden, attended, name="attention_residual")
        fed_forward = self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(hidden)))
        return ops.add(hidden, fed_forward, name="output")


class GemmaDecoder(CausalDecoder):
    """A causal decoder whose logits lie between -cap and cap if the config has a cap."""

    def __init__(self, config: DecoderConfig, body: GemmaBody) -> None:
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
    sections = config.raw.get("rope_parameters") or {}
    kinds = ("full_attention", "sliding_attention")
    if not isinstance(sections, Mapping) or not sections.keys() <= set(kinds):
        raise UnsupportedModelError(
            f"{config.where}: rope_parameters = {sections!r}, expected a section for {kinds}", feature="rope_parameters"
        )
    if wrong := [section for section in sections.values() if not isinstance(section, Mapping | None)]:
        raise ModelError(f"{config.where}: rope_parameters has {wrong[0]!r}, expected a table of numbers")
    scaling = config.raw.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping):
        raise ModelError(f"{config.where}: rope_scaling is {scaling!r}, expected a table of numbers")
    factor = config.raw.get("partial_rotary_factor")
    partial = {} if factor is None else {"partial_rotary_factor": factor}
    full = {"rope_theta": config.number("rope_theta"), **partial, **scaling}
    sliding = {"rope_theta": config.number("rope_local_base_freq"), **partial}

    def tables(parameters: Mapping[str, Any], kind: str) -> RotaryTables:
        chosen = {"rope_parameters": {**parameters, **(sections.get(kind) or {})}}
        return RotaryTables(inverse_frequencies(chosen, config.head_dim, may_be_partial=False), config.context_length)

    return tables(full, "full_attention"), tables(sliding, "sliding_attention")
