"""Apertus: the Llama family with a norm of single heads, and a feed-forward without a gate whose activation is xIELU.

Source: Swiss AI, Apertus (2025), section 2.1; Hugging Face's `ApertusForCausalLM`.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from chunkrt.graph import ops
from chunkrt.graph.decoders.config import DecoderConfig
from chunkrt.graph.decoders.llama import Attention, Body, CausalDecoder, Layer, LayerNames, activate, head_norm
from chunkrt.graph.modules import Float32, Module, Parameter
from chunkrt.graph.parallel import ColumnParallelLinear, RowParallelLinear

DEFAULTS = {
    "hidden_act": "xielu",
    "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 12e6,
        "factor": 8.0,
        "original_max_position_embeddings": 8192,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
}
_NAMES = LayerNames(before_mixer="attention_layernorm", before_mlp="feedforward_layernorm")


def apertus(config: DecoderConfig) -> Module:
    """Build a decoder whose layers attend to all earlier tokens."""
    config.refuse(sliding_window=config.sliding_window > 0)
    rope, has_bias = config.rotary_tables(), config.flag("attention_bias")

    def layer() -> Layer:
        attention = Attention(config, rope, norm=head_norm(config), bias=(has_bias, has_bias))
        return Layer(config, attention, XieluFeedForward(config), names=_NAMES)

    return CausalDecoder(config, Body(config, rope, [layer() for _ in range(config.num_layers)]))


class XieluFeedForward(Module):
    """Feed-forward down(activation(up(x))), over a rank's columns of up. Each layer has its parameters of xIELU."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        hidden, width, ranks = config.hidden_size, config.intermediate_size, config.ranks
        self.up_proj = ColumnParallelLinear(hidden, width, ranks)
        self.down_proj = RowParallelLinear(width, hidden, ranks)
        self.act_fn = Xielu() if config.activation == "xielu" else None
        self._activation = config.activation

    def forward(self, hidden: ir.Value) -> ir.Value:
        up = self.up_proj(hidden)
        return self.down_proj(activate(up, self._activation) if self.act_fn is None else self.act_fn(up))


class Xielu(Module):
    """The activation xIELU. The checkpoint holds the arguments of softplus in place of its factors. It runs on the CPU
    unless placed.
    """

    def declare(self) -> None:
        shapes: dict[str, tuple[int, ...]] = {"alpha_p": (1,), "alpha_n": (1,), "beta": (), "eps": ()}
        tensors = {f"{self.path}.{name}": shape for name, shape in shapes.items()}
        self.factors = Parameter(shape=(4,), checkpoint_tensors=tensors, combine=_factors)

    def forward(self, value: ir.Value) -> ir.Value:
        return ops.xielu(value, self.factors.value(), name="output")


def _factors(alpha_p: Float32, alpha_n: Float32, beta: Float32, eps: Float32) -> Float32:
    """Return a_p, a_n, b and e of `ops.xielu`."""
    positive, negative = (np.logaddexp(0, alpha.astype(np.float64))[0] for alpha in (alpha_p, alpha_n))
    return np.array([positive, float(beta) + negative, beta, eps], np.float32)
