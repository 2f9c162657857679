"""Decoders with learned positions in place of RoPE: GPT-2, GPT-BigCode (StarCoder) and OPT.

Layer norms have a mean and a bias, and the feed-forward has no gate. Source: Radford et al., Language Models are
Unsupervised Multitask Learners (2019), section 2.3; Zhang et al., OPT (2022); Hugging Face's `GPT2LMHeadModel`,
`GPTBigCodeForCausalLM`, `OPTForCausalLM`.
"""

from __future__ import annotations

from dataclasses import replace

import onnx_ir as ir

from chunkrt.graph import ops
from chunkrt.graph.decoders.config import DecoderConfig
from chunkrt.graph.decoders.llama import (
    Attention,
    Body,
    CausalDecoder,
    Layer,
    LayerNames,
    activate,
    output_projection,
)
from chunkrt.graph.modules import Embedding, LayerNorm, LearnedPositions, Module
from chunkrt.graph.parallel import (
    ColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from chunkrt.graph.rope import RotaryTables, unrotated_tables

DEFAULTS = {
    "hidden_act": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}
BIGCODE_DEFAULTS = {**DEFAULTS, "hidden_act": "gelu_pytorch_tanh", "multi_query": True}
OPT_DEFAULTS = {
    "hidden_act": "relu",
    "intermediate_size": 3072,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
_NAMES = LayerNames(before_mixer="ln_1", mixer="attn", before_mlp="ln_2")
OPT_UNUSED_POSITIONS = 2
"""Rows of OPT's table of positions before that of the first token (`OPTLearnedPositionalEmbedding.offset`)."""


def gpt2(config: DecoderConfig) -> Module:
    """Build a decoder whose scores may be divided by the number of the layer."""
    by_layer = config.flag("scale_attn_by_inverse_layer_idx")
    return _gpt(config, [1 / (index + 1) if by_layer else 1.0 for index in range(config.num_layers)])


def gpt_bigcode(config: DecoderConfig) -> Module:
    """Build a decoder whose query heads share one key head."""
    config.refuse(multi_query=not config.flag("multi_query"))
    config = replace(config, num_kv_heads=1)
    return _gpt(config, [1.0] * config.num_layers)


def _gpt(config: DecoderConfig, factors: list[float]) -> Module:
    """Return a decoder; `factors` multiply the scores of each layer."""
    config.refuse(add_cross_attention=config.flag("add_cross_attention"))
    rope, hidden = unrotated_tables(config.context_length), config.hidden_size
    scale = config.head_dim**-0.5 if config.flag("scale_attn_weights", True) else 1.0

    def layer(factor: float) -> Layer:
        qkv = QKVParallelLinear(hidden, config.heads, bias=True, stored_in="c_attn")
        output = output_projection(config, "c_proj", bias=True)
        attention = Attention(config, rope, qkv=qkv, output=output, scale=factor * scale)
        return Layer(config, attention, PlainFeedForward(config), names=_NAMES, make_norm=layer_norm)

    layers = [layer(factor) for factor in factors]
    positions = LearnedPositions(config.context_length, hidden)
    return CausalDecoder(config, Body(config, rope, layers, make_norm=layer_norm, positions=positions))


def layer_norm(config: DecoderConfig) -> LayerNorm:
    """Return a norm of the residual stream."""
    return LayerNorm(config.hidden_size, config.rms_norm_eps)


class PlainFeedForward(Module):
    """Feed-forward down(activation(up(x))), over a rank's columns of up."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        hidden, width, ranks = config.hidden_size, config.intermediate_size, config.ranks
        self.c_fc = ColumnParallelLinear(hidden, width, ranks, bias=True)
        self.c_proj = RowParallelLinear(width, hidden, ranks, bias=True)
        self._activation = config.activation

    def forward(self, hidden: ir.Value) -> ir.Value:
        return self.c_proj(activate(self.c_fc(hidden), self._activation))


def opt(config: DecoderConfig) -> Module:
    """Build a decoder; if the embeddings are narrower than the residual stream, linears connect the two."""
    config.refuse(
        layer_norm_elementwise_affine=not config.flag("layer_norm_elementwise_affine", True),
        _remove_final_layer_norm=config.flag("_remove_final_layer_norm"),
    )
    width = config.count("word_embed_proj_dim", config.hidden_size)
    return CausalDecoder(replace(config, hidden_size=width), OptBody(config, width))


class OptBody(Module):
    """Embedding, positions, layers and final norm. `width` is the number of columns of the embeddings."""

    def __init__(self, config: DecoderConfig, width: int) -> None:
        super().__init__()
        hidden, context = config.hidden_size, config.context_length
        self.embed_tokens = Embedding(config.vocab_size, width, ranks=config.ranks)
        self.embed_positions = LearnedPositions(context, hidden, num_unused=OPT_UNUSED_POSITIONS)
        self.rope = unrotated_tables(context)
        self.layers = [OptLayer(config, self.rope) for _ in range(config.num_layers)]
        self.project_in = ReplicatedLinear(width, hidden) if width != hidden else None
        self.project_out = ReplicatedLinear(hidden, width) if width != hidden else None
        self.final_layer_norm = layer_norm(config) if _norms_first(config) else None

    def forward(self, token_ids: ir.Value) -> ir.Value:
        hidden = self.embed_tokens(token_ids)
        hidden = self.embed_positions(hidden if self.project_in is None else self.project_in(hidden))
        for layer in self.layers:
            hidden = layer(hidden)
        if self.final_layer_norm is not None:
            hidden = self.final_layer_norm(hidden)
        return hidden if self.project_out is None else self.project_out(hidden)


class OptLayer(Module):
    """Attention and feed-forward, each with a norm before it, or behind its sum with the residual stream."""

    def __init__(self, config: DecoderConfig, rope: RotaryTables) -> None:
        super().__init__()
        hidden, width, ranks = config.hidden_size, config.intermediate_size, config.ranks
        has_bias = config.flag("enable_bias", True)
        output = output_projection(config, "out_proj", bias=has_bias)
        self.self_attn = Attention(config, rope, output=output, bias=(has_bias, has_bias))
        self.self_attn_layer_norm, self.final_layer_norm = layer_norm(config), layer_norm(config)
        self.fc1 = ColumnParallelLinear(hidden, width, ranks, bias=has_bias)
        self.fc2 = RowParallelLinear(width, hidden, ranks, bias=has_bias)
        self._norms_first, self._activation = _norms_first(config), config.activation

    def forward(self, hidden: ir.Value) -> ir.Value:
        first = self._norms_first
        attended = self.self_attn(self.self_attn_layer_norm(hidden) if first else hidden)
        hidden = ops.add(hidden, attended, name="attention_residual")
        hidden = hidden if first else self.self_attn_layer_norm(hidden)
        widened = self.fc1(self.final_layer_norm(hidden) if first else hidden)
        narrowed = self.fc2(activate(widened, self._activation))
        hidden = ops.add(hidden, narrowed, name="output" if first else "feed_forward_residual")
        return hidden if first else self.final_layer_norm(hidden)


def _norms_first(config: DecoderConfig) -> bool:
    return config.flag("do_layer_norm_before", True)
