"""Phi-3, 3.5 and Phi-4-mini: the Llama family with two merged tensors in the checkpoint: q, k and v, and gate and up.

RoPE may rotate only a part of every head, and may be stretched for long contexts. Layers may have a sliding window.
Source: Abdin et al., Phi-3 Technical Report (2024), section 2; Hugging Face's `Phi3ForCausalLM`.
"""

from __future__ import annotations

from chunkrt.graph.decoders.config import DecoderConfig
from chunkrt.graph.decoders.llama import Attention, Body, CausalDecoder, FeedForward, Layer
from chunkrt.graph.modules import Module
from chunkrt.graph.parallel import MergedColumnParallelLinear, QKVParallelLinear
from chunkrt.graph.rope import RotaryTables, longrope_tables, rope_parameters

DEFAULTS = {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096}
LONGROPE = ("longrope", "su", "yarn")
"""Names of the longrope rule in configs of this family."""


def phi3(config: DecoderConfig) -> Module:
    """Build a decoder whose layers all have a sliding window, if the config states one."""
    rope = _tables(config)
    hidden, inner = config.hidden_size, config.intermediate_size

    def layer() -> Layer:
        qkv = QKVParallelLinear(hidden, config.heads, stored_in="qkv_proj")
        parts = {"gate_proj": inner, "up_proj": inner}
        gate_up = MergedColumnParallelLinear(hidden, parts, config.ranks, stored_in="gate_up_proj")
        attention = Attention(config, rope, qkv=qkv, window=config.sliding_window)
        return Layer(config, attention, FeedForward(config, gate_up=gate_up))

    return CausalDecoder(config, Body(config, rope, [layer() for _ in range(config.num_layers)]))


def _tables(config: DecoderConfig) -> RotaryTables:
    if rope_parameters(config.raw)["rope_type"] in LONGROPE:
        return longrope_tables(config.raw, config.head_dim, config.context_length)
    return config.rotary_tables(may_be_partial=True)
