"""Falcon-H1: attention and Mamba-2 side by side in every layer, on the same normalised input.

The factors of embeddings, projections, scores, activations and logits are part of the loaded weights and of the scores'
scale. Source: Falcon LLM Team, Falcon-H1 (2025); Hugging Face's `FalconH1ForCausalLM`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import onnx_ir as ir

from chunkrt.errors import ModelError
from chunkrt.graph import ops
from chunkrt.graph.decoders.config import DecoderConfig
from chunkrt.graph.decoders.llama import Attention, Body, CausalDecoder, FeedForward, norm
from chunkrt.graph.decoders.mamba import Mamba2Mixer, MambaSizes, step_limits
from chunkrt.graph.modules import Module
from chunkrt.graph.parallel import MergedColumnParallelLinear, RowParallelLinear
from chunkrt.graph.rope import RotaryTables

DEFAULTS = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 8192}


def falcon_h1(config: DecoderConfig) -> Module:
    """Build a decoder whose layers all have both mixers."""
    config.refuse(hidden_act=config.activation != "silu")
    config = replace(config, logit_factor=config.number("lm_head_multiplier", 1.0))
    rope = config.rotary_tables()
    layers = [FalconH1Layer(config, rope) for _ in range(config.num_layers)]
    scale = config.number("embedding_multiplier", 1.0)
    return CausalDecoder(config, Body(config, rope, layers, embedding_scale=scale, norm_name="final_layernorm"))


class FalconH1Layer(Module):
    """The sum of Mamba-2 and attention, and a feed-forward; each half is added to the residual stream.

    The projections of both mixers come first, so that both states are in one subgraph.
    """

    def __init__(self, config: DecoderConfig, rope: RotaryTables) -> None:
        super().__init__()
        self.input_layernorm = norm(config)
        self.mamba = _mixer(config)
        self.self_attn = _attention(config, rope)
        self.pre_ff_layernorm = norm(config)
        self.feed_forward = _feed_forward(config)

    def forward(self, hidden: ir.Value) -> ir.Value:
        normed = self.input_layernorm(hidden)
        with self.mamba.scope():
            projected = self.mamba.project(normed)
        with self.self_attn.scope():
            attended = self.self_attn.attend(normed)
        with self.mamba.scope():
            remembered = self.mamba.mix(*projected)
        mixed = ops.add(self.mamba.out_proj(remembered), self.self_attn.o_proj(attended), name="mixed")
        hidden = ops.add(hidden, mixed, name="attention_residual")
        return ops.add(hidden, self.feed_forward(self.pre_ff_layernorm(hidden)), name="output")


def _mixer(config: DecoderConfig) -> Mamba2Mixer:
    inner = config.count("mamba_d_ssm", 1024) if config.raw.get("mamba_d_ssm", 0) is not None else None
    return Mamba2Mixer(
        config,
        MambaSizes.of_hybrid(config, inner),
        bias=(config.flag("mamba_proj_bias"), config.flag("projectors_bias")),
        conv_bias=config.flag("mamba_conv_bias", True),
        limits=step_limits(config),
        has_norm=config.flag("mamba_rms_norm"),
        gates_first=not config.flag("mamba_norm_before_gate", True),
        input_factor=config.number("ssm_in_multiplier", 1.0),
        factors=_factors(config, "ssm_multipliers", 5),
        output_factor=config.number("ssm_out_multiplier", 1.0),
    )


def _attention(config: DecoderConfig, rope: RotaryTables) -> Attention:
    """Return attention. The input's factor is in the scores twice, and once in the values."""
    given, has_bias = config.number("attention_in_multiplier", 1.0), config.flag("attention_bias")
    config.refuse(attention_bias=has_bias and given != 1)
    return Attention(
        replace(config, residual_factor=given * config.number("attention_out_multiplier", 1.0)),
        rope,
        bias=(has_bias, has_bias),
        scale=given**2 * config.number("key_multiplier", 1.0) * config.head_dim**-0.5,
    )


def _feed_forward(config: DecoderConfig) -> FeedForward:
    hidden, inner, has_bias = config.hidden_size, config.intermediate_size, config.flag("mlp_bias")
    gate, down = _factors(config, "mlp_multipliers", 2)
    gate_up = MergedColumnParallelLinear(
        hidden,
        {"gate_proj": inner, "up_proj": inner},
        config.ranks,
        bias=has_bias,
        factor=np.repeat(np.array([gate, 1], np.float32), inner),
    )
    return FeedForward(
        config, gate_up=gate_up, down=RowParallelLinear(inner, hidden, config.ranks, bias=has_bias, factor=down)
    )


def _factors(config: DecoderConfig, key: str, length: int) -> Sequence[float]:
    """Return a list of factors, by default 1. Raises ModelError if it is not such a list."""
    factors = config.raw.get(key)
    if factors is None:
        return [1.0] * length
    is_list = isinstance(factors, list | tuple) and len(factors) == length
    if not is_list or any(isinstance(f, bool) or not isinstance(f, int | float) or not f > 0 for f in factors):
        raise ModelError(f"{config.where}: {key} is {factors!r}, expected {length} positive numbers")
    return [float(factor) for factor in factors]
