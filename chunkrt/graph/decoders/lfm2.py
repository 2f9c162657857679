"""LFM2, dense or with experts: gated short convolutions, with occasional layers of grouped-query attention.

Layers have a SwiGLU feed-forward, or experts that a router picks by sigmoid scores. Heads of q and k are normalised,
and the LM head shares the embedding's table.
Source: Hugging Face's `Lfm2ForCausalLM`, `Lfm2MoeForCausalLM`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import onnx_ir as ir

from chunkrt.graph import ops
from chunkrt.graph.decoders.config import DecoderConfig, check_size
from chunkrt.graph.decoders.experts import Mixture, SparseMixture
from chunkrt.graph.decoders.llama import (
    Attention,
    Body,
    CausalDecoder,
    FeedForward,
    Layer,
    LayerNames,
    output_projection,
)
from chunkrt.graph.modules import DepthwiseWeights, HeadNorm, Module, Share
from chunkrt.graph.parallel import MergedColumnParallelLinear, RowParallelLinear
from chunkrt.graph.rope import RotaryTables

DEFAULTS = {"rope_theta": 1e6, "norm_eps": 1e-5, "num_key_value_heads": 8, "tie_word_embeddings": True}
MOE_DEFAULTS = {
    **DEFAULTS,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1792,
}
NAMES = LayerNames(before_mixer="operator_norm", before_mlp="ffn_norm", mlp="feed_forward")


def lfm2(config: DecoderConfig) -> Module:
    """Build the decoder; layers are "conv" or "full_attention", by `layer_types` or, in older configs,
    `full_attn_idxs`."""
    config = replace(config, intermediate_size=_feed_forward_size(config))
    attention_layers = config.layer_indices("full_attn_idxs") or range(config.num_layers)
    default = ["full_attention" if i in attention_layers else "conv" for i in range(config.num_layers)]
    return _decoder(config, default, lambda index: feed_forward(config))


def lfm2_moe(config: DecoderConfig) -> Module:
    """Build a decoder with experts in all layers except the first `num_dense_layers`."""
    num_dense = config.count("num_dense_layers", 2, least=0)
    mixture = replace(
        Mixture.of(config),
        use_sigmoid=True,
        norm_epsilon=1e-6,
        factor=config.number("routed_scaling_factor", 1.0),
        selection_bias="expert_bias" if config.flag("use_expert_bias", True) else "",
        parts=("w1", "w3", "w2"),
    )

    def mlp(index: int) -> Module:
        return feed_forward(config) if index < num_dense else SparseMixture(config, mixture)

    return _decoder(config, (), mlp)


def _decoder(config: DecoderConfig, default: Sequence[str], mlp: Callable[[int], Module]) -> Module:
    config = replace(config, tie_word_embeddings=config.flag("tie_embedding", config.tie_word_embeddings))
    rope = config.rotary_tables()

    def layer(index: int, kind: str) -> Layer:
        if kind == "conv":
            return Layer(config, ShortConvolution(config), mlp(index), names=replace(NAMES, mixer="conv"))
        return Layer(config, _attention(config, rope), mlp(index), names=NAMES)

    kinds = config.layer_types(default, ("conv", "full_attention"))
    layers = [layer(index, kind) for index, kind in enumerate(kinds)]
    return CausalDecoder(config, Body(config, rope, layers, norm_name="embedding_norm"))


def _feed_forward_size(config: DecoderConfig) -> int:
    """Return the width between gate and down. Older configs state the width before it is reduced to 2/3 and rounded
    up.
    """
    size = config.count("block_ff_dim", config.intermediate_size)
    if not config.flag("block_auto_adjust_ff_dim", True):
        return size
    multiple = config.count("block_multiple_of", 256)
    wanted = config.number("block_ffn_dim_multiplier", 1.0) * int(2 * size / 3)
    check_size(wanted, config.where, "the width of the feed-forward")
    return -(-int(wanted) // multiple) * multiple


def feed_forward(config: DecoderConfig) -> FeedForward:
    """Return the gated feed-forward under this family's names: w1 (gate), w3 (up) and w2 (down)."""
    hidden, inner = config.hidden_size, config.intermediate_size
    gate_up = MergedColumnParallelLinear(hidden, {"w1": inner, "w3": inner}, config.ranks)
    return FeedForward(config, gate_up=gate_up, down=RowParallelLinear(inner, {"w2": hidden}, config.ranks))


class ShortConvolution(Module):
    """Gated convolution out_proj(C * convolve(B * x)), where B, C and x are the thirds of in_proj, over a rank's
    channels.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        has_bias = config.flag("conv_bias")
        hidden, ranks = config.hidden_size, config.ranks
        channels = Share.even(hidden, ranks)
        thirds = dict.fromkeys(("b", "c", "x"), hidden)
        self.in_proj = MergedColumnParallelLinear(hidden, thirds, ranks, bias=has_bias, stored_in="in_proj")
        self.conv = DepthwiseWeights(hidden, config.count("conv_L_cache", 3), bias=has_bias, share=channels)
        self.out_proj = RowParallelLinear(hidden, hidden, ranks, depth=channels, bias=has_bias)
        self._width = channels.length

    def forward(self, hidden: ir.Value) -> ir.Value:
        mixed = ops.linear_attention(
            self.in_proj(hidden),
            None,
            None,
            self.conv.weight.value(),
            self.conv.bias.value() if self.conv.has_bias else None,
            attn_type="short_conv",
            num_k_heads=1,
            num_v_heads=1,
            head_k_dim=self._width,
            head_v_dim=self._width,
        )
        return self.out_proj(mixed)


def _attention(config: DecoderConfig, rope: RotaryTables) -> Attention:
    heads = {"q_layernorm": config.heads.num_heads, "k_layernorm": config.heads.num_kv_heads}
    norm = HeadNorm(heads, config.head_dim, config.rms_norm_eps)
    return Attention(config, rope, norm=norm, output=output_projection(config, "out_proj"))
