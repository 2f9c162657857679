"""LFM2: gated short convolutions, with occasional layers of grouped-query attention.

Every layer has a SwiGLU feed-forward, heads of q and k are normalised, and the LM head shares the embedding's table.
Source: Hugging Face's `Lfm2ForCausalLM`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import onnx_ir as ir

from chunkrt.graph import ops
from chunkrt.graph.decoders.config import DecoderConfig, check_size
from chunkrt.graph.decoders.llama import Attention, CausalDecoder, FeedForward, output_projection
from chunkrt.graph.modules import DepthwiseWeights, Embedding, HeadNorm, Module, RMSNorm
from chunkrt.graph.parallel import MergedColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from chunkrt.graph.rope import RotaryTables

DEFAULTS = {"rope_theta": 1e6, "norm_eps": 1e-5, "num_key_value_heads": 8, "tie_word_embeddings": True}


def lfm2(config: DecoderConfig) -> Module:
    """Build the decoder; layers are "conv" or "full_attention", by `layer_types` or, in older configs,
    `full_attn_idxs`."""
    config = replace(
        config,
        intermediate_size=_feed_forward_size(config),
        tie_word_embeddings=config.flag("tie_embedding", config.tie_word_embeddings),
    )
    attention_layers = config.layer_indices("full_attn_idxs") or range(config.num_layers)
    default = ["full_attention" if i in attention_layers else "conv" for i in range(config.num_layers)]
    rope = RotaryTables(config.full_inverse_frequencies, config.context_length, divisor=config.rope_divisor)
    layers = [Lfm2Layer(config, rope, kind) for kind in config.layer_types(default, ("conv", "full_attention"))]
    return CausalDecoder(config, Lfm2Body(config, rope, layers))


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


class ShortConvolution(Module):
    """Gated convolution out_proj(C * convolve(B * x)), where B, C and x are the thirds of in_proj. It is complete on
    every rank.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        has_bias = config.flag("conv_bias")
        self.in_proj = ReplicatedLinear(config.hidden_size, 3 * config.hidden_size, bias=has_bias)
        self.conv = DepthwiseWeights(config.hidden_size, config.count("conv_L_cache", 3), bias=has_bias)
        self.out_proj = ReplicatedLinear(config.hidden_size, config.hidden_size, bias=has_bias)
        self._width = config.hidden_size

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


class Lfm2Layer(Module):
    """Convolution or attention, then the feed-forward; each takes a normalised input and is added to the residual
    stream.
    """

    def __init__(self, config: DecoderConfig, rope: RotaryTables, kind: str) -> None:
        super().__init__()
        hidden, inner, epsilon = config.hidden_size, config.intermediate_size, config.rms_norm_eps
        gate_up = MergedColumnParallelLinear(hidden, {"w1": inner, "w3": inner}, config.ranks)
        down = RowParallelLinear(inner, {"w2": hidden}, config.ranks)
        self.operator_norm = RMSNorm(hidden, epsilon)
        if kind == "conv":
            self.conv = ShortConvolution(config)
        else:
            self.self_attn = _attention(config, rope)
        self.ffn_norm = RMSNorm(hidden, epsilon)
        self.feed_forward = FeedForward(config, gate_up=gate_up, down=down)
        self._is_convolution = kind == "conv"

    def forward(self, hidden: ir.Value) -> ir.Value:
        mix = self.conv if self._is_convolution else self.self_attn
        hidden = ops.add(hidden, mix(self.operator_norm(hidden)), name="operator_residual")
        return ops.add(hidden, self.feed_forward(self.ffn_norm(hidden)), name="output")


def _attention(config: DecoderConfig, rope: RotaryTables) -> Attention:
    heads = {"q_layernorm": config.heads.num_heads, "k_layernorm": config.heads.num_kv_heads}
    norm = HeadNorm(heads, config.head_dim, config.rms_norm_eps)
    return Attention(config, rope, norm=norm, output=output_projection(config, "out_proj"))


class Lfm2Body(Module):
    """Embedding, the layers, and the final norm, which has the name `embedding_norm`."""

    def __init__(self, config: DecoderConfig, rope: RotaryTables, layers: Sequence[Module]) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.rope = rope
        self.layers = list(layers)
        self.embedding_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, token_ids: ir.Value) -> ir.Value:
        hidden = self.embed_tokens(token_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.embedding_norm(hidden)
