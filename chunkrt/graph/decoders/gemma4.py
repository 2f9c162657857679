"""Gemma 4, text only: Gemma 3 with wider heads in layers without a window, and norms of v.

The last layers may read the caches of the last earlier layer of their kind, keys and values may be projected alike,
layers may take inputs of their own (`per_layer.py`) and have experts in addition to the feed-forward. Source: Hugging
Face's `Gemma4ForCausalLM`, `Gemma4UnifiedForCausalLM`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import onnx_ir as ir

from chunkrt.errors import ModelError, UnsupportedModelError
from chunkrt.graph import ops
from chunkrt.graph.decoders.config import DecoderConfig
from chunkrt.graph.decoders.experts import Experts, Mixture, RouterGate
from chunkrt.graph.decoders.gemma import SANDWICH_NORMS, GemmaDecoder
from chunkrt.graph.decoders.llama import Attention, FeedForward, norm
from chunkrt.graph.decoders.per_layer import BodyWithInputs, LayerWithInput
from chunkrt.graph.modules import HeadNorm, Module, Parameter, RMSNorm
from chunkrt.graph.parallel import Projections, QKVParallelLinear

DEFAULTS = {
    "vocab_size": 262144,
    "vocab_size_per_layer_input": 262144,
    "hidden_size": 2304,
    "hidden_size_per_layer_input": 256,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "sliding_window": 512,
    "tie_word_embeddings": True,
}
UNIFIED_DEFAULTS = DEFAULTS | {
    "hidden_size_per_layer_input": 0,
    "max_position_embeddings": 262144,
    "sliding_window": 1024,
}
KINDS = ("full_attention", "sliding_attention")
ROPES: dict[str, dict[str, Any]] = {
    "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}


def gemma4(config: DecoderConfig) -> Module:
    """Build the decoder; `layer_types` selects the layers with a window, by default all except every sixth."""
    config.refuse(
        attention_bias=config.flag("attention_bias"),
        use_bidirectional_attention=config.raw.get("use_bidirectional_attention") == "all",
    )
    slides = [*config.sliding_layers(lambda index: (index + 1) % 6 != 0)[:-1], False]  # as Transformers has it
    num_own = config.num_layers - config.count("num_kv_shared_layers", 0, least=0)
    if not set(slides) <= set(slides[: max(0, num_own)]):
        raise ModelError(
            f"{config.where}: num_kv_shared_layers is {config.num_layers - num_own}, so no layer fills "
            "the caches that one of them reads"
        )
    sizes = [_of_kind(config, kind, slides) for kind in KINDS]
    base = {kind: {} for kind in KINDS} if config.raw.get("rope_parameters") else ROPES
    ropes = [of_kind.rotary_tables_by_kind(base)[kind] for of_kind, kind in zip(sizes, KINDS, strict=True)]
    attention: list[Attention] = []
    for index, has_window in enumerate(slides):
        owner = max(i for i in range(num_own) if slides[i] == has_window)
        is_alike = not has_window and config.flag("attention_k_eq_v")
        made = _attention(
            sizes[has_window],
            "q" if index >= num_own else "qk" if is_alike else "qkv",
            rotary=ropes[has_window],
            window=config.sliding_window if has_window else 0,
            keeps_all=index == owner and has_window in slides[num_own:],
            caches_of=attention[owner] if index >= num_own else None,
        )
        attention.append(made)
    has_wide = config.flag("use_double_wide_mlp")
    widths = [config.intermediate_size * (1 + (has_wide and i >= num_own)) for i in range(config.num_layers)]
    layers = [Gemma4Layer(replace(config, intermediate_size=w), a) for w, a in zip(widths, attention, strict=True)]
    scale, others = config.hidden_size**0.5, {"local_rope": ropes[1]}
    return GemmaDecoder(config, BodyWithInputs(config, ropes[0], layers, embedding_scale=scale, other_ropes=others))


def _of_kind(config: DecoderConfig, kind: str, slides: Sequence[bool]) -> DecoderConfig:
    """Return the config of a kind of layers; those without a window may have another number and size of heads."""
    own: dict[str, Any] = {"head_dim": config.head_dim, "num_key_value_heads": config.num_kv_heads}
    if (by_layer := config.raw.get("per_layer_config")) is None:
        found = [own]
        if kind == "full_attention":
            kv_heads = config.count("num_global_key_value_heads", config.num_kv_heads)
            kv_heads = kv_heads if config.flag("attention_k_eq_v") else config.num_kv_heads
            found = [{"head_dim": config.count("global_head_dim"), "num_key_value_heads": kv_heads}]
    else:
        try:
            layers = [str(index) for index, has_window in enumerate(slides) if KINDS[has_window] == kind]
            found = [own | by_layer.get(index, {}) for index in layers] or [own]
        except (AttributeError, TypeError) as error:
            raise ModelError(f"{config.where}: per_layer_config is {by_layer!r:.60}, expected tables") from error
    if any(sizes.keys() != own.keys() or sizes != found[0] for sizes in found):
        raise UnsupportedModelError(
            f"{config.where}: per_layer_config has keys other than {', '.join(own)}, or layers of the kind {kind} "
            "differ in them",
            feature="per_layer_config",
        )
    checked = replace(config, raw={**config.raw, **found[0]})
    head_dim, kv_heads = checked.count("head_dim"), checked.count("num_key_value_heads")
    if config.num_heads % kv_heads or head_dim % 2:
        raise ModelError(f"{config.where}: {config.num_heads} heads cannot share {kv_heads} KV heads of {head_dim}")
    return replace(config, head_dim=head_dim, num_kv_heads=kv_heads)


def _attention(config: DecoderConfig, stored: Projections, **options: Any) -> Attention:
    heads, has_own = config.heads, stored != "q"
    parts = {"q_norm": heads.num_heads} | ({"k_norm": heads.num_kv_heads} if has_own else {})
    plain = heads.num_kv_heads if has_own else 0
    normed = HeadNorm(parts, config.head_dim, config.rms_norm_eps, num_plain=plain)
    unused = () if has_own else ("k_proj.weight", "v_proj.weight", "k_norm.weight")
    qkv = QKVParallelLinear(config.hidden_size, heads, stored=stored, replaces=unused)
    return Attention(config, qkv=qkv, norm=normed, scale=1.0, **options)


class Gemma4Layer(LayerWithInput):
    """A layer whose output is multiplied by a factor; it may have experts in addition to the feed-forward."""

    input_residual = "input_residual"

    def __init__(self, config: DecoderConfig, attention: Attention) -> None:
        super().__init__(config, attention, FeedForward(config), names=SANDWICH_NORMS)
        self._hidden_size = config.hidden_size
        self._has_experts = config.flag("enable_moe_block")
        if self._has_experts:
            config.refuse(hidden_activation=config.activation not in ("gelu_tanh", "silu"))
            mixture = Mixture(
                num_experts=config.count("num_experts"),
                top_k=config.count("top_k_experts"),
                width=config.count("moe_intermediate_size"),
                uses_gelu=config.activation == "gelu_tanh",
                expert_factors="router.per_expert_scale",
            )
            self.experts, self.router = Experts(config, mixture), Router(config, mixture.num_experts)
            self.post_feedforward_layernorm_1, self.post_feedforward_layernorm_2 = norm(config), norm(config)
            self.pre_feedforward_layernorm_2 = norm(config)

    def forward(self, hidden: ir.Value, *inputs: ir.Value) -> ir.Value:
        return ops.mul(super().forward(hidden, *inputs), self.layer_scalar.value(), name="output")

    def declare(self) -> None:
        size, tensors = self._hidden_size, dict[str, tuple[int, ...]]({f"{self.path}.layer_scalar": (1,)})
        self.layer_scalar = Parameter(shape=(size,), checkpoint_tensors=tensors, combine=lambda one: one.repeat(size))

    def apply(self, names: Sequence[str], hidden: ir.Value) -> ir.Value:
        if not self._has_experts or "mlp" not in names:
            return super().apply(names, hidden)
        *inner, after = names
        dense = self.post_feedforward_layernorm_1(super().apply(inner, hidden))
        routed = self.experts(self.pre_feedforward_layernorm_2(hidden), self.router(hidden))
        both = ops.add(dense, self.post_feedforward_layernorm_2(routed), name="dense_and_routed")
        return super().apply([after], both)


class Router(Module):
    """The logits of the experts, from a norm of the residual stream. It runs on the CPU unless placed."""

    def __init__(self, config: DecoderConfig, num_experts: int) -> None:
        super().__init__()
        self.scaled_norm = RouterNorm(config.hidden_size, config.rms_norm_eps)
        self.proj = RouterGate(config.hidden_size, num_experts, name="proj")
        self.device = "cpu"

    def forward(self, hidden: ir.Value) -> ir.Value:
        return self.proj(self.scaled_norm(hidden))


class RouterNorm(RMSNorm):
    """A norm whose weight is the checkpoint's `scale`, divided by the square root of the width."""

    def declare(self) -> None:
        shape, factor = (self.width,), self.width**-0.5
        tensors: dict[str, tuple[int, ...]] = {self.sibling("scale"): shape}
        self.weight = Parameter(shape=shape, checkpoint_tensors=tensors, combine=lambda scale: scale * factor)
