"""Qwen3-Next and Qwen3.5, dense or with experts: three layers of the gated delta rule, then one of gated attention.

The results of attention's heads are multiplied by a gate, RoPE rotates a quarter of their dimensions, and norms
multiply by 1 + w. Source: Yang et al., Gated Delta Networks (2024); Hugging Face's `Qwen3NextForCausalLM`,
`Qwen3_5ForCausalLM`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from chunkrt.errors import ModelError
from chunkrt.graph import ops
from chunkrt.graph.decoders.config import DecoderConfig, check_size
from chunkrt.graph.decoders.experts import gated_mixture, has_experts
from chunkrt.graph.decoders.llama import Attention, Body, CausalDecoder, FeedForward, Layer, LayerNames, head_norm
from chunkrt.graph.modules import DepthwiseWeights, Float32, HeadNorm, Module, Parameter, Share
from chunkrt.graph.parallel import ColumnShareLinear, RowParallelLinear, share_heads
from chunkrt.graph.rope import RotaryTables

DEFAULTS = {"head_dim": 256, "partial_rotary_factor": 0.25, "norm_offset": 1}
MOE_DEFAULTS = {
    **DEFAULTS,
    "num_key_value_heads": 2,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}


def qwen3_next(config: DecoderConfig) -> Module:
    """Build a decoder whose checkpoint interleaves the projections of the delta rule, key head by key head."""
    return _decoder(config, has_grouped_projections=True)


def qwen3_5(config: DecoderConfig) -> Module:
    """Build a decoder whose checkpoint stores the projections of the delta rule as separate tensors."""
    return _decoder(config, has_grouped_projections=False)


def _decoder(config: DecoderConfig, *, has_grouped_projections: bool) -> Module:
    interval = config.count("full_attention_interval", 4)
    default = ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(config.num_layers)]
    kinds = config.layer_types(default, ("linear_attention", "full_attention"))
    rope = config.rotary_tables(may_be_partial=True)
    sizes = DeltaSizes.of(config)
    layers: list[Module] = []
    for index, kind in enumerate(kinds):
        mlp = gated_mixture(config) if has_experts(config, index) else FeedForward(config)
        if kind == "full_attention":
            layers.append(Layer(config, GatedAttention(config, rope), mlp))
        else:
            rule = GatedDeltaRule(config, sizes, is_grouped=has_grouped_projections)
            layers.append(Layer(config, rule, mlp, names=LayerNames(mixer="linear_attn")))
    return CausalDecoder(config, Body(config, rope, layers))


@dataclass(frozen=True, kw_only=True)
class DeltaSizes:
    """Sizes of the delta rule: `k_heads` key and query heads, shared by `v_heads` value heads, and taps of the
    convolution.
    """

    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    taps: int

    @staticmethod
    def of(config: DecoderConfig) -> DeltaSizes:
        """Read the sizes from the config. Raises ModelError if value heads cannot share key heads evenly."""
        sizes = DeltaSizes(
            k_heads=config.count("linear_num_key_heads", 16),
            v_heads=config.count("linear_num_value_heads", 32),
            k_dim=config.count("linear_key_head_dim", 128),
            v_dim=config.count("linear_value_head_dim", 128),
            taps=config.count("linear_conv_kernel_dim", 4),
        )
        check_size(sizes.all_k, config.where, "linear_num_key_heads * linear_key_head_dim")
        check_size(sizes.all_v, config.where, "linear_num_value_heads * linear_value_head_dim")
        if sizes.v_heads % sizes.k_heads:
            raise ModelError(
                f"{config.where}: {sizes.v_heads} value heads of linear attention cannot share {sizes.k_heads} key "
                "heads evenly"
            )
        return sizes

    @property
    def all_k(self) -> int:
        """Number of columns of all keys."""
        return self.k_heads * self.k_dim

    @property
    def all_v(self) -> int:
        """Number of columns of all values."""
        return self.v_heads * self.v_dim


class GatedDeltaRule(Module):
    """The gated delta rule with projections, gates and a norm of its heads' results, over a rank's heads. Key heads are
    distributed like the key/value heads of attention, and value heads like query heads.

    Args:
        is_grouped: whether the checkpoint stores the rows of q, k, v and z by key head in one tensor (unless its config
            states that z is a separate tensor), and the rows of b and a in another tensor.
    """

    def __init__(self, config: DecoderConfig, sizes: DeltaSizes, *, is_grouped: bool) -> None:
        super().__init__()
        hidden, all_k, all_v, v_heads = config.hidden_size, sizes.all_k, sizes.all_v, sizes.v_heads
        shared = v_heads // sizes.k_heads
        heads = share_heads(v_heads, sizes.k_heads, sizes.v_dim, config.ranks)
        k, v, of_v = heads.key.spread(sizes.k_dim), heads.q_columns, heads.query
        if is_grouped and not config.flag("has_qkv_and_z_apart"):
            widths = [sizes.k_dim, sizes.k_dim, shared * sizes.v_dim, shared * sizes.v_dim]
            total, qkvz = 2 * all_k + 2 * all_v, _by_kind(sizes.k_heads, widths)
            parts = [share.through(rows, total) for share, rows in zip((k, k, v, v), qkvz, strict=True)]
            self.qkv_proj = ColumnShareLinear(hidden, {"in_proj_qkvz": total}, Share.together(parts[:3]))
            self.z_proj = ColumnShareLinear(hidden, {"in_proj_qkvz": total}, parts[3])
        else:
            self.qkv_proj = ColumnShareLinear(hidden, {"in_proj_qkv": 2 * all_k + all_v}, Share.joined([k, k, v]))
            self.z_proj = ColumnShareLinear(hidden, {"in_proj_z": all_v}, v)
        if is_grouped:
            parts = [of_v.through(rows, 2 * v_heads) for rows in _by_kind(sizes.k_heads, [shared, shared])]
            self.ba_proj = ColumnShareLinear(hidden, {"in_proj_ba": 2 * v_heads}, Share.together(parts))
        else:
            both = {"in_proj_b": v_heads, "in_proj_a": v_heads}
            self.ba_proj = ColumnShareLinear(hidden, both, Share.joined([of_v, of_v]))
        self.step = UpdateStep()
        self.decay = Decay(of_v)
        self.conv1d = DepthwiseWeights(2 * all_k + all_v, sizes.taps, share=Share.joined([k, k, v]))
        self.head_norm = HeadNorm({"norm": heads.num_heads}, sizes.v_dim, config.rms_norm_eps)
        self.out_proj = RowParallelLinear(all_v, hidden, config.ranks, depth=v)
        self._sizes, self._heads = sizes, heads

    def forward(self, hidden: ir.Value) -> ir.Value:
        qkv, z = self.qkv_proj(hidden), self.z_proj(hidden)
        b, a = ops.split_columns(self.ba_proj(hidden), names=["b", "a"])
        attended = ops.linear_attention(
            qkv,
            self.decay(a),
            self.step(b),
            self.conv1d.weight.value(),
            attn_type="gated_delta_rule",
            num_k_heads=self._heads.num_kv_heads,
            num_v_heads=self._heads.num_heads,
            head_k_dim=self._sizes.k_dim,
            head_v_dim=self._sizes.v_dim,
            use_qk_l2norm=True,
        )
        return self.out_proj(ops.mul(self.head_norm(attended), ops.silu(z), name="gated"))


class Decay(Module):
    """Logarithm of the state's decay, -exp(A_log) * softplus(a + dt_bias), for a rank's heads. It runs on the CPU
    unless placed.
    """

    def __init__(self, heads: Share) -> None:
        super().__init__()
        self.device = "cpu"
        self._heads = heads

    def declare(self) -> None:
        self.dt_bias = self._of("dt_bias", lambda bias: bias)
        self.rate = self._of("A_log", _negative_exp)

    def _of(self, name: str, combine: Callable[[Float32], Float32]) -> Parameter:
        heads = self._heads
        return Parameter(
            shape=(heads.length,),
            checkpoint_tensors={self.sibling(name): (heads.size,)},
            combine=lambda values: heads.take(combine(values)),
            axes=(heads,),
        )

    def forward(self, a: ir.Value) -> ir.Value:
        return ops.mul(ops.softplus(ops.add(a, self.dt_bias.value(), name="biased")), self.rate.value(), name="output")


def _negative_exp(a_log: Float32) -> Float32:
    rate: Float32 = -np.exp(a_log)
    return rate


class UpdateStep(Module):
    """Step sigmoid(b): the fraction of the state's error that an update corrects. It runs on the CPU unless placed."""

    def __init__(self) -> None:
        super().__init__()
        self.device = "cpu"

    def forward(self, b: ir.Value) -> ir.Value:
        return ops.sigmoid(b, name="output")


class GatedAttention(Attention):
    """Attention whose results are multiplied by the sigmoid of a gate.

    The columns of q_proj are q | gate, head by head.
    """

    def __init__(self, config: DecoderConfig, rope: RotaryTables) -> None:
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        q_and_gate = {"q_proj": 2 * heads * dim}
        parts = {**q_and_gate, "k_proj": kv_heads * dim, "v_proj": kv_heads * dim}
        columns, kv = config.heads.q_columns, config.heads.kv_columns
        q, gate = (columns.through(rows, 2 * heads * dim) for rows in _by_kind(heads, [dim, dim]))
        has_bias = config.flag("attention_bias")
        qkv = ColumnShareLinear(config.hidden_size, parts, Share.joined([q, kv, kv]), bias=has_bias)
        super().__init__(config, rope, qkv=qkv, norm=head_norm(config), bias=(has_bias, has_bias))
        self.gate_proj = ColumnShareLinear(config.hidden_size, q_and_gate, gate, bias=has_bias)

    def forward(self, hidden: ir.Value) -> ir.Value:
        gate = self.gate_proj(hidden)
        return self.o_proj(ops.mul(self.attend(hidden), ops.sigmoid(gate), name="gated"))


def _by_kind(num_groups: int, widths: Sequence[int]) -> list[NDArray[np.int64]]:
    """Return the indices of each kind's rows in a tensor that stores rows by group, and within each group by kind."""
    rows = np.arange(num_groups * sum(widths)).reshape(num_groups, -1)
    return [part.ravel() for part in np.split(rows, np.cumsum(widths)[:-1], axis=1)]
