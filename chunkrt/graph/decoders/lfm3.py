"""LFM3: LFM2 with norms behind both halves of a layer, a gate for each head's results, and windows in some layers.

RoPE rotates half of every head in layers without a window. Source: Hugging Face's `Lfm3ForCausalLM`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir

from chunkrt.graph import ops
from chunkrt.graph.decoders import lfm2
from chunkrt.graph.decoders.config import DecoderConfig
from chunkrt.graph.decoders.llama import Attention, Body, CausalDecoder, Layer, head_norm
from chunkrt.graph.modules import Module
from chunkrt.graph.parallel import ReplicatedLinear
from chunkrt.graph.rope import RotaryTables

DEFAULTS = {
    "num_key_value_heads": 4,
    "head_dim": 128,
    "norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "conv_L_cache": 7,
    "sliding_window": 256,
}
ROPES = {
    "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
KINDS = ("conv", *ROPES)


def lfm3(config: DecoderConfig) -> Module:
    """Build the decoder; layers are "conv", "full_attention" or "sliding_attention", by `layer_types`."""
    config.refuse(rope_scaling=bool(config.raw.get("rope_scaling")))
    norms = {"after_mixer": "post_operator_norm", "after_mlp": "post_ffn_norm"}
    names = replace(lfm2.NAMES, **(norms if config.flag("use_sandwich_norm", True) else {}))
    base = ROPES
    if config.raw.get("rope_parameters"):
        base = {kind: {"rope_theta": config.number("rope_theta", 1e6)} for kind in ROPES}
    ropes = config.rotary_tables_by_kind(base)

    def layer(kind: str) -> Layer:
        if kind == "conv":
            names_here, mixer = replace(names, mixer="conv"), lfm2.ShortConvolution(config)
            return Layer(config, mixer, lfm2.feed_forward(config), names=names_here)
        window = config.sliding_window if kind == "sliding_attention" else 0
        return Layer(config, _attention(config, ropes[kind], window), lfm2.feed_forward(config), names=names)

    default = [KINDS[2 if i % 4 == 0 and i > 0 else 1 if i % 4 == 2 else 0] for i in range(config.num_layers)]
    layers = [layer(kind) for kind in config.layer_types(default, KINDS)]
    rope, local_rope = ropes["full_attention"], ropes["sliding_attention"]
    body = Body(config, rope, layers, other_ropes={"local_rope": local_rope}, norm_name="embedding_norm")
    return CausalDecoder(config, body)


def _attention(config: DecoderConfig, rope: RotaryTables, window: int) -> Attention:
    kind = HeadGatedAttention if config.flag("use_attention_gate", True) else Attention
    has_bias = config.flag("attention_bias")
    return kind(config, rope, norm=head_norm(config), bias=(has_bias, has_bias), window=window)


class HeadGatedAttention(Attention):
    """Attention whose heads' results are each multiplied by the sigmoid of one gate.

    The gate's rows are repeated for each column of a head when they are loaded.
    """

    def __init__(self, config: DecoderConfig, rope: RotaryTables, **options: Any) -> None:
        super().__init__(config, rope, **options)
        rows = np.repeat(config.heads.query.indices, config.head_dim)
        self.head_gate = ReplicatedLinear(config.hidden_size, {"gate_proj": config.num_heads}, rows=rows)

    def forward(self, hidden: ir.Value) -> ir.Value:
        gate = ops.sigmoid(self.head_gate(hidden))
        return self.o_proj(ops.mul(self.attend(hidden), gate, name="gated"))
