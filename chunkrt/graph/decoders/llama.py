"""The Llama family (SmolLM2, Llama 2 and 3, TinyLlama), Mistral, whose layers may have a sliding window, and the parts
that other families take from Llama: attention, the gated feed-forward, the stack of layers, the LM head.

Pre-norm blocks of grouped-query attention with RoPE and a SwiGLU feed-forward; the LM head may share the embedding's
table. Source: Touvron et al., LLaMA (2023), section 2.2; Hugging Face's `LlamaForCausalLM`, `MistralForCausalLM`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from chunkrt.errors import UnsupportedModelError
from chunkrt.graph import ops
from chunkrt.graph.decoders.config import DecoderConfig
from chunkrt.graph.modules import Embedding, HeadNorm, LearnedPositions, Module, Parameter, RMSNorm
from chunkrt.graph.ops import current_trace
from chunkrt.graph.parallel import (
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
    VocabParallelHead,
)
from chunkrt.graph.rope import RotaryTables


class Attention(Module):
    """Grouped-query self-attention with RoPE, over a rank's heads.

    Args:
        rotary: module of the rotary tables, shared by layers.
        qkv: the projection to q | k | v; by default that of the checkpoint's q_proj, k_proj and v_proj.
        norm: norm of single heads of q and k before RoPE.
        output: the projection of the heads' results; by default the checkpoint's o_proj.
        scale: factor of the scores; by default head_dim^-1/2.
        soft_cap: bound of the scores' magnitude; 0 for none. See `ops.cached_attention`.
        has_sinks: whether the checkpoint has a sink for each head, the tensor "sinks".
        window: number of keys that a row sees, its own included; 0 for all earlier keys.
        keeps_all: see `ops.cached_attention`.
        caches_of: attention of an earlier layer, whose caches this layer reads instead of its own.
    """

    def __init__(
        self,
        config: DecoderConfig,
        rotary: RotaryTables,
        *,
        qkv: LinearBase | None = None,
        norm: HeadNorm | None = None,
        output: LinearBase | None = None,
        bias: tuple[bool, bool] = (False, False),
        scale: float | None = None,
        soft_cap: float = 0.0,
        has_sinks: bool = False,
        window: int = 0,
        keeps_all: bool = False,
        caches_of: Attention | None = None,
    ) -> None:
        super().__init__()
        heads = config.heads
        self.qkv_proj = qkv or QKVParallelLinear(config.hidden_size, heads, bias=bias[0])
        self.qk_norm = norm
        self.o_proj = output or output_projection(config, bias=bias[1])
        self._heads, self._rotary = heads, (rotary,)
        self._scale, self.window = config.head_dim**-0.5 if scale is None else scale, window
        self._soft_cap, self._has_sinks = soft_cap, has_sinks
        self._keeps_all, self._caches_of = keeps_all, (caches_of,) if caches_of else ()

    def declare(self) -> None:
        if self._has_sinks:
            query = self._heads.query
            self.sinks = Parameter(
                shape=(query.length,),
                checkpoint_tensors={f"{self.path}.sinks": (query.size,)},
                combine=query.take,
                axes=(query,),
            )

    def attend(self, hidden: ir.Value) -> ir.Value:
        """Return the heads' results, before the output projection."""
        heads, (rotary,) = self._heads, self._rotary
        qkv = self.qkv_proj(hidden)
        return ops.cached_attention(
            qkv if self.qk_norm is None else self.qk_norm(qkv),
            rotary.cos.value(),
            rotary.sin.value(),
            num_heads=heads.num_heads,
            num_kv_heads=heads.num_kv_heads,
            head_dim=heads.head_dim,
            scale=self._scale,
            soft_cap=self._soft_cap,
            sinks=self.sinks.value() if self._has_sinks else None,
            window=self.window,
            long_context_from=rotary.long_context_from,
            dual_chunks=rotary.dual_chunks,
            keeps_all=self._keeps_all,
            caches_of=self._caches_of[0].path if self._caches_of else "",
        )

    def forward(self, hidden: ir.Value) -> ir.Value:
        return self.o_proj(self.attend(hidden))


class FeedForward(Module):
    """Gated feed-forward down(activation(gate(x)) * up(x)), over a rank's columns of gate and up."""

    def __init__(
        self,
        config: DecoderConfig,
        *,
        gate_up: LinearBase | None = None,
        down: LinearBase | None = None,
        bias: bool = False,
    ) -> None:
        super().__init__()
        hidden, width, ranks = config.hidden_size, config.intermediate_size, config.ranks
        parts = {"gate_proj": width, "up_proj": width}
        self.gate_up_proj = gate_up or MergedColumnParallelLinear(hidden, parts, ranks, bias=bias)
        self.down_proj = down or RowParallelLinear(width, hidden, ranks, bias=bias, factor=config.residual_factor)
        self._activation = config.activation
        self._threshold = config.number("hidden_act_param", 0.01) if config.activation == "fatrelu" else 0.0

    def forward(self, hidden: ir.Value) -> ir.Value:
        gate, up = ops.split_columns(self.gate_up_proj(hidden), names=["gate", "up"])
        if self._activation == "fatrelu":
            active = ops.thresholded_relu(gate, self._threshold)
        else:
            active = activate(gate, self._activation)
        return self.down_proj(ops.mul(active, up, name="gated"))


def activate(gate: ir.Value, activation: str) -> ir.Value:
    """Return the activation of a gate; see `DecoderConfig.activation`.

    Raises:
        UnsupportedModelError: the activation has parameters, which only other families read.
    """
    if activation in ("fatrelu", "xielu"):
        raise UnsupportedModelError(
            f"the activation {activation} is not supported in this family", feature="hidden_act"
        )
    functions = {"gelu": ops.gelu, "gelu_tanh": ops.gelu_tanh, "quick_gelu": ops.quick_gelu, "relu": ops.relu}
    return functions.get(activation, ops.silu)(gate)


def output_projection(config: DecoderConfig, name: str = "", *, bias: bool = False) -> RowParallelLinear:
    """Return the projection of the results of a rank's heads. `name` is the checkpoint's name, if it differs from the
    module's.
    """
    columns, hidden = config.heads.q_columns, config.hidden_size
    outputs = {name: hidden} if name else hidden
    return RowParallelLinear(
        columns.size, outputs, config.ranks, depth=columns, bias=bias, factor=config.residual_factor
    )


def norm(config: DecoderConfig) -> RMSNorm:
    """Return a norm of the residual stream."""
    return RMSNorm(config.hidden_size, config.rms_norm_eps, offset=config.norm_offset)


def head_norm(config: DecoderConfig) -> HeadNorm:
    """Return the norm of single heads that many families have: the checkpoint's q_norm and k_norm."""
    parts = {"q_norm": config.heads.num_heads, "k_norm": config.heads.num_kv_heads}
    return HeadNorm(parts, config.head_dim, config.rms_norm_eps, offset=config.norm_offset)


@dataclass(frozen=True, kw_only=True)
class LayerNames:
    """Names of a layer's parts in the checkpoint. A family lacks a norm whose name is empty."""

    before_mixer: str = "input_layernorm"
    mixer: str = "self_attn"
    after_mixer: str = ""
    before_mlp: str = "post_attention_layernorm"
    mlp: str = "mlp"
    after_mlp: str = ""


NORMS_BEFORE = LayerNames()
"""Names in families that normalise the inputs of attention and feed-forward: most families."""
NORMS_BEHIND = LayerNames(
    before_mixer="",
    after_mixer="post_attention_layernorm",
    before_mlp="",
    after_mlp="post_feedforward_layernorm",
)
"""Names in families that normalise the results of attention and feed-forward, and not their inputs."""


class Layer(Module):
    """Attention and feed-forward, each with norms before or behind it; their results are added to the residual stream.

    `mixer` is attention or the family's replacement for attention. `make_norm` makes a norm of the residual stream.
    `residuals` names the two sums in the plan.
    """

    residuals = ("attention_residual", "output")

    def __init__(
        self,
        config: DecoderConfig,
        mixer: Module,
        mlp: Module,
        *,
        names: LayerNames = NORMS_BEFORE,
        make_norm: Callable[[DecoderConfig], Module] = norm,
    ) -> None:
        super().__init__()
        halves = (
            {names.before_mixer: make_norm(config), names.mixer: mixer, names.after_mixer: make_norm(config)},
            {names.before_mlp: make_norm(config), names.mlp: mlp, names.after_mlp: make_norm(config)},
        )
        for half in halves:
            half.pop("", None)
            for name, part in half.items():
                setattr(self, name, part)
        self._halves = [tuple(half) for half in halves]

    def forward(self, hidden: ir.Value) -> ir.Value:
        for names, residual in zip(self._halves, self.residuals, strict=True):
            hidden = ops.add(hidden, self.apply(names, hidden), name=residual)
        return hidden

    def apply(self, names: Sequence[str], hidden: ir.Value) -> ir.Value:
        """Apply parts of the layer, by name, one after another."""
        for name in names:
            hidden = getattr(self, name)(hidden)
        return hidden


class Body(Module):
    """Embedding, layers and final norm: the modules under "model." in Hugging Face's names.

    Args:
        rope: the rotary tables of all layers, or of one kind of layers; None if no layer attends.
        embedding_scale: factor of the embeddings.
        other_ropes: rotary tables of other kinds of layers, by the names that they get in the plan.
        norm_name: name of the final norm.
        embedding_name: name of the table of embeddings.
        make_norm: makes the final norm.
        positions: the table of learned positions, if there is one.
    """

    def __init__(
        self,
        config: DecoderConfig,
        rope: RotaryTables | None,
        layers: Sequence[Module],
        *,
        embedding_scale: float = 1.0,
        other_ropes: Mapping[str, RotaryTables] | None = None,
        norm_name: str = "norm",
        embedding_name: str = "embed_tokens",
        make_norm: Callable[[DecoderConfig], Module] = norm,
        positions: LearnedPositions | None = None,
    ) -> None:
        super().__init__()
        setattr(
            self,
            embedding_name,
            Embedding(config.vocab_size, config.hidden_size, scale=embedding_scale, ranks=config.ranks),
        )
        self.embed_positions = positions
        self.rope = rope
        for name, tables in (other_ropes or {}).items():
            setattr(self, name, tables)
        self.layers = list(layers)
        setattr(self, norm_name, make_norm(config))
        self._norm_name, self._embedding_name = norm_name, embedding_name

    def layer_inputs(self, token_ids: ir.Value, embeddings: ir.Value) -> Sequence[tuple[ir.Value, ...]]:
        """Return the values that each layer takes in addition to the residual stream; empty if no layer takes any."""
        return ()

    def forward(self, token_ids: ir.Value) -> ir.Value:
        hidden: ir.Value = getattr(self, self._embedding_name)(token_ids)
        if self.embed_positions is not None:
            hidden = self.embed_positions(hidden)
        inputs = self.layer_inputs(token_ids, hidden)
        for layer, others in zip(self.layers, inputs or [()] * len(self.layers), strict=True):
            hidden = layer(hidden, *others)
        normed: ir.Value = getattr(self, self._norm_name)(hidden)
        return normed


class CausalDecoder(Module):
    """Decoder that computes logits [R, vocab] of the requested rows from token ids [T].

    `body` maps token ids to normalised hidden rows; its `embed_tokens`, or `embeddings`, is also the LM head's table if
    they are tied.
    """

    def __init__(self, config: DecoderConfig, body: Module) -> None:
        super().__init__()
        self.model = body
        (embedding,) = (child for name, child in body.children() if name in ("embed_tokens", "embeddings"))
        self._context_length, self._embedding, self._has_head = config.context_length, (embedding,), True
        tied_to = embedding if config.tie_word_embeddings else None
        self.lm_head = VocabParallelHead(
            config.hidden_size, config.vocab_size, config.ranks, tied_to=tied_to, factor=config.logit_factor
        ).to("cpu")

    def leave_out_head(self) -> None:
        """Use the embedding's table in place of an LM head that the checkpoint lacks. Call this on a named decoder.

        The logits are then not valid (`Plan.has_head`).
        """
        self._has_head = False
        self.lm_head.tie_to(*self._embedding)

    def forward(self, token_ids: ir.Value, logit_rows: ir.Value) -> ir.Value:
        current_trace().set_context(self._context_length, None)
        if not self._has_head:
            current_trace().leave_out_head()
        return self.logits(ops.gather_rows(self.model(token_ids), logit_rows, name="last_hidden"))

    def logits(self, hidden: ir.Value) -> ir.Value:
        """Return the logits of rows of hidden states."""
        return self.lm_head(hidden)


MISTRAL_DEFAULTS = {"num_key_value_heads": 8, "sliding_window": 4096}


def llama(config: DecoderConfig) -> Module:
    """Build a decoder whose layers attend to all earlier tokens."""
    config.refuse(sliding_window=config.sliding_window > 0)
    return mistral(config)


def mistral(config: DecoderConfig) -> Module:
    """Build a decoder whose layers all have a sliding window, if the config states one."""
    rope = config.rotary_tables()
    has_bias = config.flag("attention_bias")

    def layer() -> Layer:
        attention = Attention(config, rope, bias=(has_bias, has_bias), window=config.sliding_window)
        return Layer(config, attention, FeedForward(config, bias=config.flag("mlp_bias")))

    return CausalDecoder(config, Body(config, rope, [layer() for _ in range(config.num_layers)]))
