"""Granite 3 and 4, dense or with experts: the Llama family with factors of embeddings, scores, residuals and logits.

The factors of residuals and logits are part of the loaded weights. Source: Hugging Face's `GraniteForCausalLM`,
`GraniteMoeForCausalLM`, `GraniteMoeSharedForCausalLM`, `GraniteMoeHybridForCausalLM`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import onnx_ir as ir

from chunkrt.graph import ops
from chunkrt.graph.decoders.config import DecoderConfig
from chunkrt.graph.decoders.experts import Mixture, SparseMixture
from chunkrt.graph.decoders.llama import Attention, Body, CausalDecoder, FeedForward, Layer, LayerNames, norm
from chunkrt.graph.decoders.mamba import hybrid_mixer
from chunkrt.graph.modules import Module
from chunkrt.graph.parallel import MergedColumnParallelLinear, RowParallelLinear
from chunkrt.graph.rope import RotaryTables, unrotated_tables

MOE_DEFAULTS = {"num_local_experts": 8, "num_experts_per_tok": 2}
HYBRID_DEFAULTS = {**MOE_DEFAULTS, "shared_intermediate_size": 1024}
ATTENTION, MAMBA = ("attention", "full_attention"), ("mamba", "linear_attention")
HYBRID_NAMES = LayerNames(mlp="shared_mlp")


def granite(config: DecoderConfig) -> Module:
    """Build a decoder whose layers attend to all earlier tokens."""
    config = with_factors(config)
    rope, bias = config.rotary_tables(), config.flag("mlp_bias")
    layers = [Layer(config, attention(config, rope), FeedForward(config, bias=bias)) for _ in range(config.num_layers)]
    return decoder(config, rope, layers)


def granite_moe(config: DecoderConfig) -> Module:
    """Build a decoder whose layers have experts and, by `shared_intermediate_size`, a shared one without a gate."""
    config = with_factors(config)
    rope = config.rotary_tables()
    layers = [GraniteMoeLayer(config, rope) for _ in range(config.num_layers)]
    return decoder(config, rope, layers)


def granite_hybrid(config: DecoderConfig) -> Module:
    """Build a decoder whose layers attend or have Mamba-2. Without experts, the shared expert is the feed-forward."""
    config = with_factors(config)
    default = config.raw.get("layers_block_type") or ["mamba"] * config.num_layers
    kinds = config.layer_types(default, (*ATTENTION, *MAMBA))
    has_rope = config.raw.get("position_embedding_type") == "rope"
    rope = config.rotary_tables() if has_rope else unrotated_tables(config.context_length)
    if config.count("num_local_experts", least=0):
        return decoder(config, rope, [GraniteMoeLayer(config, rope, kind) for kind in kinds])

    def layer(kind: str) -> Layer:
        mixer, name = _mixer(config, rope, kind)
        return Layer(config, mixer, shared_expert(config), names=replace(HYBRID_NAMES, mixer=name))

    return decoder(config, rope, [layer(kind) for kind in kinds])


def _mixer(config: DecoderConfig, rope: RotaryTables, kind: str) -> tuple[Module, str]:
    """Return a layer's mixer and its name in the checkpoint."""
    return (hybrid_mixer(config), "mamba") if kind in MAMBA else (attention(config, rope), "self_attn")


class GraniteMoeLayer(Module):
    """Attention or Mamba-2, and the sum of routed experts and of the shared expert, if the config states its width."""

    def __init__(self, config: DecoderConfig, rope: RotaryTables, kind: str = "attention") -> None:
        mixture = Mixture(
            num_experts=config.count("num_local_experts"),
            top_k=config.count("num_experts_per_tok"),
            width=config.intermediate_size,
            router="router.layer",
            stacks=("input_linear.weight", "output_linear.weight"),
        )
        super().__init__()
        self.input_layernorm = norm(config)
        mixer, self._mixer = _mixer(config, rope, kind)
        setattr(self, self._mixer, mixer)
        self.post_attention_layernorm = norm(config)
        self.block_sparse_moe = SparseMixture(config, mixture)
        has_shared = config.count("shared_intermediate_size", 0, least=0) > 0
        self.shared_mlp = shared_expert(config) if has_shared else None

    def forward(self, hidden: ir.Value) -> ir.Value:
        mixer = getattr(self, self._mixer)
        hidden = ops.add(hidden, mixer(self.input_layernorm(hidden)), name="attention_residual")
        normed = self.post_attention_layernorm(hidden)
        mixed = self.block_sparse_moe(normed)
        if self.shared_mlp is not None:
            mixed = ops.add(mixed, self.shared_mlp(normed), name="mixed")
        return ops.add(hidden, mixed, name="output")


def with_factors(config: DecoderConfig) -> DecoderConfig:
    """Return a config with the factors of residuals and logits."""
    return replace(
        config,
        residual_factor=config.number("residual_multiplier", 1.0),
        logit_factor=1 / config.number("logits_scaling", 1.0),
    )


def attention(config: DecoderConfig, rope: RotaryTables) -> Attention:
    """Return attention whose scores have the config's factor in place of head_dim^-1/2."""
    has_bias = config.flag("attention_bias")
    return Attention(config, rope, bias=(has_bias, has_bias), scale=config.number("attention_multiplier", 1.0))


def shared_expert(config: DecoderConfig) -> FeedForward:
    """Return the gated feed-forward of width `shared_intermediate_size`. Its gate and up are one tensor, unless the
    config states that they are separate.
    """
    hidden, inner = config.hidden_size, config.count("shared_intermediate_size")
    parts, stored_in = {"gate_proj": inner, "up_proj": inner}, "input_linear"
    if config.flag("has_gate_and_up_apart"):
        stored_in = ""
    gate_up = MergedColumnParallelLinear(hidden, parts, config.ranks, stored_in=stored_in)
    down = RowParallelLinear(inner, {"output_linear": hidden}, config.ranks, factor=config.residual_factor)
    return FeedForward(config, gate_up=gate_up, down=down)


def decoder(config: DecoderConfig, rope: RotaryTables, layers: Sequence[Module]) -> Module:
    """Return a decoder whose embeddings have the config's factor."""
    scale = config.number("embedding_multiplier", 1.0)
    return CausalDecoder(config, Body(config, rope, layers, embedding_scale=scale))
