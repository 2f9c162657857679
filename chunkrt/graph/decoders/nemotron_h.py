"""Nemotron-H: one mixer in each layer, which is Mamba-2, attention without RoPE, or a feed-forward with squared ReLU.

Source: NVIDIA, Nemotron-H (2025), section 2; Hugging Face's `NemotronHForCausalLM`.
"""

from __future__ import annotations

import onnx_ir as ir

from chunkrt.errors import ModelError
from chunkrt.graph import ops
from chunkrt.graph.decoders.config import DecoderConfig
from chunkrt.graph.decoders.llama import Attention, Body, CausalDecoder
from chunkrt.graph.decoders.mamba import Mamba2Mixer, MambaSizes, MixerLayer
from chunkrt.graph.modules import Module
from chunkrt.graph.parallel import ColumnParallelLinear, RowParallelLinear
from chunkrt.graph.rope import RotaryTables, unrotated_tables

DEFAULTS = {
    "layer_norm_epsilon": 1e-5,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 21504,
    "max_position_embeddings": 4096,
}
LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
"""Kinds of layers by their letters in `hybrid_override_pattern`."""
KINDS = ("mamba", "linear_attention", "attention", "full_attention", "mlp")
LEAST_STEP = 1e-3


def nemotron_h(config: DecoderConfig) -> Module:
    """Build a decoder; `layers_block_type` or `hybrid_override_pattern` states the kind of each layer."""
    raw = config.raw
    config.refuse(
        mlp_hidden_act=raw.get("mlp_hidden_act", "relu2") != "relu2",
        mamba_hidden_act=raw.get("mamba_hidden_act", "silu") != "silu",
        sliding_window=config.sliding_window > 0,
    )
    rope = unrotated_tables(config.context_length)
    kinds = config.layer_types(_kinds(config), KINDS)
    layers = [MixerLayer(config, _mixer(config, kind, rope)) for kind in kinds]
    return CausalDecoder(config, Body(config, rope, layers, norm_name="norm_f", embedding_name="embeddings"))


def _kinds(config: DecoderConfig) -> list[str]:
    if (kinds := config.raw.get("layers_block_type")) is not None:
        return list(kinds)
    pattern = config.raw.get("hybrid_override_pattern")
    if not isinstance(pattern, str) or not set(pattern) <= LETTERS.keys():
        raise ModelError(f"{config.where}: hybrid_override_pattern is {pattern!r}, expected letters of M, *, - and E")
    return [LETTERS[letter] for letter in pattern]


def _mixer(config: DecoderConfig, kind: str, rope: RotaryTables) -> Module:
    if kind == "mlp":
        return SquaredFeedForward(config)
    return _mamba(config) if kind in ("mamba", "linear_attention") else Attention(config, rope)


def _mamba(config: DecoderConfig) -> Mamba2Mixer:
    """Return Mamba-2, whose steps have a lower limit alone. Transformers applies this limit to prompts, and not to
    single tokens; here it applies to all.
    """
    num_heads, head_dim = config.count("mamba_num_heads", 128), config.count("mamba_head_dim", 64)
    sizes = MambaSizes(
        num_heads=num_heads,
        head_dim=head_dim,
        num_groups=config.count("n_groups", 8),
        state_dim=config.count("ssm_state_size", 128),
        taps=config.count("conv_kernel", 4),
    ).checked(config, num_heads * head_dim)
    has_bias, least = config.flag("use_bias"), config.number("time_step_min", LEAST_STEP)
    return Mamba2Mixer(
        config,
        sizes,
        bias=(has_bias, has_bias),
        conv_bias=config.flag("use_conv_bias", True),
        limits=(least, float("inf")),
    )


class SquaredFeedForward(Module):
    """Feed-forward down(max(up(x), 0)^2), over a rank's columns of up."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        hidden, width, has_bias = config.hidden_size, config.intermediate_size, config.flag("mlp_bias")
        self.up_proj = ColumnParallelLinear(hidden, width, config.ranks, bias=has_bias)
        self.down_proj = RowParallelLinear(width, hidden, config.ranks, bias=has_bias)

    def forward(self, hidden: ir.Value) -> ir.Value:
        positive = ops.relu(self.up_proj(hidden))
        return self.down_proj(ops.mul(positive, positive, name="squared"))
