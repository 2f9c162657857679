"""Multi-head latent attention: DeepSeek-V2 and V3 (Moonlight), GLM-4.7-Flash, MiniCPM3 and Youtu-LLM.

A linear compresses each row to a latent, from which keys and values of all heads are made; a second one makes columns
with RoPE that the keys of all heads share. chunkrt expands latents before they are cached, so that attention is that of
other families: a head's columns are first those with RoPE, then those without, and values are padded with zeros to the
same number. Source: DeepSeek-AI, DeepSeek-V2 (2024), section 2.1; Hugging Face's `DeepseekV3ForCausalLM`,
`MiniCPM3ForCausalLM`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import log

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from chunkrt.graph import ops
from chunkrt.graph.decoders.config import DUAL_CHUNKS, DecoderConfig
from chunkrt.graph.decoders.experts import in_groups, routed_mixture, sigmoid_mixture, with_shared_experts
from chunkrt.graph.decoders.llama import Body, CausalDecoder, FeedForward, Layer
from chunkrt.graph.decoders.minicpm import with_factors
from chunkrt.graph.modules import Constant, Module, RMSNorm, Share
from chunkrt.graph.parallel import ColumnShareLinear, LinearBase, ReplicatedLinear, RowParallelLinear, share_heads
from chunkrt.graph.rope import RotaryTables

_SIZES = {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
V2_DEFAULTS = {
    **_SIZES,
    "num_key_value_heads": None,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "moe_intermediate_size": 1407,
    "first_k_dense_replace": 0,
    "topk_method": "greedy",
}
V3_DEFAULTS = {
    **_SIZES,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "moe_intermediate_size": 2048,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 3,
    "routed_scaling_factor": 2.5,
    "rope_interleave": True,
}
GLM_DEFAULTS = {
    **_SIZES,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "moe_intermediate_size": 1536,
    "num_experts_per_tok": 4,
    "routed_scaling_factor": 1.8,
    "rms_norm_eps": 1e-5,
    "rope_interleave": True,
}
MINICPM3_DEFAULTS = {
    "kv_lora_rank": 256,
    "q_lora_rank": 768,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 64,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-5,
    "scale_emb": 12,
    "scale_depth": 1.4,
    "dim_model_base": 256,
}
YOUTU_DEFAULTS = {**_SIZES, "tie_word_embeddings": True, "rope_interleave": True}

LATENT_EPSILON = 1e-6
"""Epsilon of the norms of latents, which Transformers does not take from the config."""


def deepseek_v2(config: DecoderConfig) -> Module:
    """Build a decoder whose routers use softmax scores."""
    method = config.raw.get("topk_method")
    config.refuse(
        topk_method=method not in ("greedy", "group_limited_greedy"),
        norm_topk_prob=config.flag("norm_topk_prob"),
        mlp_bias=config.flag("mlp_bias"),
    )
    mixture = routed_mixture(config)
    if method == "group_limited_greedy":
        mixture = in_groups(config, mixture, best_of_group=1)
    first = config.count("first_k_dense_replace", least=0)
    return _decoder(
        config,
        lambda index: with_shared_experts(config, mixture) if index >= first else FeedForward(config),
        is_interleaved=True,
    )


def deepseek_v3(config: DecoderConfig) -> Module:
    """Build a decoder whose routers use sigmoid scores and a bias that selects experts."""
    first = config.count("first_k_dense_replace", least=0)
    return _with_sigmoid(config, lambda index: index >= first)


def glm4_moe_lite(config: DecoderConfig) -> Module:
    """Build a decoder like DeepSeek-V3's, in which `mlp_layer_types` selects the layers with experts."""
    kinds = config.raw.get("mlp_layer_types") or ["dense", *["sparse"] * (config.num_layers - 1)]
    types = replace(config, raw={**config.raw, "layer_types": kinds}).layer_types((), ("dense", "sparse"))
    return _with_sigmoid(config, lambda index: types[index] == "sparse")


def minicpm3(config: DecoderConfig) -> Module:
    """Build a decoder with MiniCPM's factors."""
    v_head_dim = config.raw.get("v_head_dim") or config.hidden_size // config.num_heads
    config = replace(with_factors(config), raw={**config.raw, "v_head_dim": v_head_dim})
    scale = config.number("scale_emb")
    return _decoder(config, lambda index: FeedForward(config), is_interleaved=False, embedding_scale=scale)


def youtu(config: DecoderConfig) -> Module:
    """Build a decoder without experts."""
    return _decoder(config, lambda index: FeedForward(config), is_interleaved=config.flag("rope_interleave"))


def _with_sigmoid(config: DecoderConfig, has_experts: Callable[[int], bool]) -> Module:
    mixture = sigmoid_mixture(config)
    return _decoder(
        config,
        lambda index: with_shared_experts(config, mixture) if has_experts(index) else FeedForward(config),
        is_interleaved=config.flag("rope_interleave"),
    )


def _decoder(
    config: DecoderConfig, mlp: Callable[[int], Module], *, is_interleaved: bool, embedding_scale: float = 1.0
) -> Module:
    config.refuse(num_key_value_heads=config.num_kv_heads != config.num_heads)
    config.refuse(**{DUAL_CHUNKS: config.dual_chunks() is not None})
    rope = replace(config, head_dim=config.count("qk_rope_head_dim")).rotary_tables()
    copies = KeyCopies(config)
    layers = [
        Layer(config, LatentAttention(config, rope, copies, is_interleaved=is_interleaved), mlp(index))
        for index in range(config.num_layers)
    ]
    return CausalDecoder(config, LatentBody(config, rope, layers, copies, embedding_scale=embedding_scale))


class LatentBody(Body):
    """A body whose layers share the matrix that copies the columns with RoPE."""

    def __init__(
        self,
        config: DecoderConfig,
        rope: RotaryTables,
        layers: Sequence[Module],
        copies: KeyCopies,
        *,
        embedding_scale: float,
    ) -> None:
        super().__init__(config, rope, layers, embedding_scale=embedding_scale)
        self.key_copies = copies


class LatentAttention(Module):
    """Attention over keys and values that are made from a latent of each row, over a rank's heads.

    Args:
        rotary: module of the rotary tables, shared by layers.
        copies: module of the matrix that copies the columns with RoPE, shared by layers.
        is_interleaved: whether RoPE rotates columns 2i and 2i + 1 of the checkpoint together.
    """

    def __init__(self, config: DecoderConfig, rotary: RotaryTables, copies: KeyCopies, *, is_interleaved: bool) -> None:
        super().__init__()
        hidden, bias = config.hidden_size, config.flag("attention_bias")
        heads, rope, nope = config.num_heads, config.count("qk_rope_head_dim"), config.count("qk_nope_head_dim")
        v_dim, latent = config.count("v_head_dim"), config.count("kv_lora_rank")
        own, head_dim = _heads(config)
        order = np.arange(rope).reshape(-1, 2).T.ravel() if is_interleaved else np.arange(rope)
        rows = _HeadRows(own, head_dim)
        query = rows.share(nope + rope, np.concatenate([nope + order, np.arange(nope)]))
        keys = rows.share(nope + v_dim, np.concatenate([np.full(rope, -1), np.arange(nope)]))
        values = rows.share(nope + v_dim, nope + np.arange(v_dim))

        self.q_proj = self._queries(config, query)
        compressed = {"kv_a_proj_with_mqa": latent + rope}
        self.latent_proj = ReplicatedLinear(hidden, compressed, bias=bias, rows=np.arange(latent))
        self.rope_proj = ReplicatedLinear(hidden, compressed, bias=bias, rows=latent + order)
        self.kv_a_layernorm = RMSNorm(latent, LATENT_EPSILON)
        self.kv_b_proj = ColumnShareLinear(latent, heads * (nope + v_dim), Share.together([keys, values]))
        self.heads = JoinedHeads(copies)
        self.o_proj = PaddedOutput(config, own, v_dim, head_dim)
        self._num_heads, self._head_dim, self._rotary = own.length, head_dim, (rotary,)
        self._scale = (nope + rope) ** -0.5 * _yarn_factor(config) ** 2

    def _queries(self, config: DecoderConfig, rows: Share) -> LinearBase:
        """Return the last linear of the queries, after adding those before it to the module."""
        hidden, rank = config.hidden_size, config.raw.get("q_lora_rank")
        if rank is None:
            return ColumnShareLinear(hidden, rows.size, rows)
        rank = config.count("q_lora_rank")
        self.q_a_proj = ReplicatedLinear(hidden, rank, bias=config.flag("attention_bias"))
        self.q_a_layernorm = RMSNorm(rank, LATENT_EPSILON)
        return ColumnShareLinear(rank, {"q_b_proj": rows.size}, rows)

    def forward(self, hidden: ir.Value) -> ir.Value:
        is_compressed = hasattr(self, "q_a_proj")
        query = self.q_proj(self.q_a_layernorm(self.q_a_proj(hidden)) if is_compressed else hidden)
        key_values = self.kv_b_proj(self.kv_a_layernorm(self.latent_proj(hidden)))
        qkv = self.heads(query, key_values, self.rope_proj(hidden))
        (rotary,) = self._rotary
        attended = ops.cached_attention(
            qkv,
            rotary.cos.value(),
            rotary.sin.value(),
            num_heads=self._num_heads,
            num_kv_heads=self._num_heads,
            head_dim=self._head_dim,
            scale=self._scale,
            long_context_from=rotary.long_context_from,
        )
        return self.o_proj(attended)


class PaddedOutput(RowParallelLinear):
    """The projection of the heads' results, whose columns are those of values and, behind them, padding.

    Args:
        heads: a rank's heads.
        width: number of a head's columns in the checkpoint; `head_dim` includes the padding.
    """

    def __init__(self, config: DecoderConfig, heads: Share, width: int, head_dim: int) -> None:
        super().__init__(
            heads.size * width,
            config.hidden_size,
            config.ranks,
            depth=heads.spread(head_dim),
            bias=config.flag("attention_bias"),
            factor=config.residual_factor,
        )
        own = heads if config.ranks.sums else Share.whole(heads.size)
        self._padded = _HeadRows(own, head_dim).share(width, np.arange(width))

    def share(self) -> tuple[Share, Share]:
        columns, _ = super().share()
        return columns, self._padded


class KeyCopies(Constant):
    """The matrix that copies columns that all heads share to the keys of each head, and adds nothing to values."""

    def __init__(self, config: DecoderConfig) -> None:
        (own, head_dim), rope = _heads(config), config.count("qk_rope_head_dim")
        keys = np.zeros((rope, own.length, head_dim), np.float32)
        keys[:, :, :rope] = np.eye(rope, dtype=np.float32)[:, None]
        no_values = np.zeros((rope, own.length * head_dim), np.float32)
        super().__init__(np.concatenate([keys.reshape(rope, -1), no_values], axis=1))


def _heads(config: DecoderConfig) -> tuple[Share, int]:
    """Return a rank's heads, and the number of columns of each, padded ones included."""
    keys = config.count("qk_rope_head_dim") + config.count("qk_nope_head_dim")
    head_dim = max(keys, config.count("v_head_dim"))
    return share_heads(config.num_heads, config.num_heads, head_dim, config.ranks).query, head_dim


class JoinedHeads(Module):
    """The columns q | k | v of attention. The columns with RoPE, which all heads share, are copied to the keys of each
    head. It runs on the CPU unless placed.
    """

    def __init__(self, copies: KeyCopies) -> None:
        super().__init__()
        self.device = "cpu"
        self._copies = (copies,)

    def forward(self, query: ir.Value, key_values: ir.Value, shared: ir.Value) -> ir.Value:
        (copies,) = self._copies
        copied = ops.float_linear(shared, copies(), name="shared_keys")
        return ops.concat([query, ops.add(key_values, copied, name="keys_and_values")], name="output")


class _HeadRows:
    """Selection of a tensor's rows for each of a rank's heads, padded to `head_dim` with zeros."""

    def __init__(self, heads: Share, head_dim: int) -> None:
        self._heads, self._head_dim = heads, head_dim

    def share(self, width: int, order: NDArray[np.int64]) -> Share:
        """Return the share of a tensor with `width` rows for each head; `order` lists those of a head, and -1 is a
        row of zeros.
        """
        order = np.concatenate([order, np.full(self._head_dim - len(order), -1)])
        heads, size = self._heads.by_rank[..., None], self._heads.size * width
        is_zero = (order < 0) | (heads >= self._heads.size)
        rows = np.where(is_zero, size, heads * width + order)
        return Share(size, rows.reshape(len(rows), -1), self._heads.rank)


def _yarn_factor(config: DecoderConfig) -> float:
    """Return the factor that YaRN's `mscale_all_dim` gives to queries and keys."""
    scaling = config.raw.get("rope_parameters") or config.rope_scaling()
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    weight = scaling.get("mscale_all_dim") or 0.0
    factor = scaling.get("factor") or 1.0
    if kind == "default" or not weight or factor <= 1:
        return 1.0
    return 0.1 * weight * log(factor) + 1.0
