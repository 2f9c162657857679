"""gpt-oss: attention with sinks and biases, windows on every other layer, and experts with biases and a clamped SwiGLU.

Source: OpenAI, gpt-oss-120b & gpt-oss-20b Model Card (2025), section 2; Hugging Face's `GptOssForCausalLM`.
"""

from __future__ import annotations

from dataclasses import replace

from chunkrt.graph.decoders.config import DecoderConfig
from chunkrt.graph.decoders.experts import Mixture, SparseMixture
from chunkrt.graph.decoders.llama import Attention, Body, CausalDecoder, Layer
from chunkrt.graph.modules import Module

DEFAULTS = {
    "num_hidden_layers": 36,
    "num_local_experts": 128,
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "head_dim": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "sliding_window": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
    "num_experts_per_tok": 4,
    "attention_bias": True,
}
YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""RoPE's scaling in configs without one."""


def gpt_oss(config: DecoderConfig) -> Module:
    """Build the decoder; `layer_types` selects the layers with a window, by default every other one."""
    if not (config.raw.get("rope_parameters") or config.raw.get("rope_scaling")):
        config = replace(config, raw={**config.raw, "rope_scaling": YARN})
    rope, has_bias = config.rotary_tables(), config.flag("attention_bias")
    mixture = Mixture(
        num_experts=config.count("num_local_experts"),
        top_k=config.count("num_experts_per_tok"),
        width=config.intermediate_size,
        swiglu_alpha=config.number("swiglu_alpha", 1.702),
        swiglu_limit=config.number("swiglu_limit", 7.0),
        router="router",
        has_biases=True,
        are_stacks_by_columns=True,
    )

    def layer(is_sliding: bool) -> Layer:
        window = config.sliding_window if is_sliding else 0
        attention = Attention(config, rope, bias=(has_bias, has_bias), has_sinks=True, window=window)
        return Layer(config, attention, SparseMixture(config, mixture))

    slides = config.sliding_layers(lambda index: index % 2 == 0)
    return CausalDecoder(config, Body(config, rope, [layer(is_sliding) for is_sliding in slides]))
