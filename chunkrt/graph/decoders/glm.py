"""GLM-4 and GLM-Edge (`glm`), GLM-4-0414 (`glm4`), ERNIE 4.5 and Helium: the Llama family with interleaved RoPE.

GLM rotates half of every head and stores gate and up as one tensor; GLM-4-0414 also has norms behind attention and
feed-forward. Source: Hugging Face's `GlmForCausalLM`, `Glm4ForCausalLM`, `Ernie4_5ForCausalLM`, `HeliumForCausalLM`.
"""

from __future__ import annotations

from chunkrt.graph.decoders.config import DecoderConfig
from chunkrt.graph.decoders.llama import (
    NORMS_BEFORE,
    Attention,
    Body,
    CausalDecoder,
    FeedForward,
    Layer,
    LayerNames,
)
from chunkrt.graph.modules import Module
from chunkrt.graph.parallel import MergedColumnParallelLinear, QKVParallelLinear

DEFAULTS = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rms_norm_eps": 1.5625e-7,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
}
ERNIE_DEFAULTS = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "tie_word_embeddings": True,
}
HELIUM_DEFAULTS = {"num_key_value_heads": 20, "head_dim": 128, "rms_norm_eps": 1e-8, "rope_theta": 1e5}
GLM4_NAMES = LayerNames(after_mixer="post_self_attn_layernorm", after_mlp="post_mlp_layernorm")


def glm(config: DecoderConfig) -> Module:
    """Build a decoder with norms before attention and feed-forward."""
    return _glm(config, NORMS_BEFORE)


def glm4(config: DecoderConfig) -> Module:
    """Build a decoder with norms before and behind attention and feed-forward."""
    return _glm(config, GLM4_NAMES)


def ernie4_5(config: DecoderConfig) -> Module:
    """Build a decoder in which either all linears of the layers have a bias, or none."""
    has_bias = config.flag("use_bias")
    return _interleaved(config, (has_bias, has_bias), mlp_bias=has_bias)


def helium(config: DecoderConfig) -> Module:
    """Build a decoder without a bias of the output projection."""
    return _interleaved(config, (config.flag("attention_bias"), False), mlp_bias=config.flag("mlp_bias"))


def _interleaved(config: DecoderConfig, bias: tuple[bool, bool], *, mlp_bias: bool) -> Module:
    rope = config.rotary_tables()

    def layer() -> Layer:
        qkv = QKVParallelLinear(config.hidden_size, config.heads, bias=bias[0], interleaved=rope.rotary_dim)
        attention = Attention(config, rope, qkv=qkv, bias=bias)
        return Layer(config, attention, FeedForward(config, bias=mlp_bias))

    return CausalDecoder(config, Body(config, rope, [layer() for _ in range(config.num_layers)]))


def _glm(config: DecoderConfig, names: LayerNames) -> Module:
    rope = config.rotary_tables(may_be_partial=True)
    hidden, inner = config.hidden_size, config.intermediate_size
    has_bias = config.flag("attention_bias")

    def layer() -> Layer:
        qkv = QKVParallelLinear(hidden, config.heads, bias=has_bias, interleaved=rope.rotary_dim)
        parts = {"gate_proj": inner, "up_proj": inner}
        gate_up = MergedColumnParallelLinear(hidden, parts, config.ranks, stored_in="gate_up_proj")
        return Layer(config, Attention(config, rope, qkv=qkv), FeedForward(config, gate_up=gate_up), names=names)

    return CausalDecoder(config, Body(config, rope, [layer() for _ in range(config.num_layers)]))
