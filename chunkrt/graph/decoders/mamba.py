"""Mamba-2 alone (`mamba2`) and with occasional attention (`bamba`), and its mixer, which other hybrid families take
from here.

The mixer projects each row to z | x | B | C | dt. A causal convolution with SiLU mixes x, B and C with the rows before,
a state for each head remembers x by B and is read by C, and a norm follows the gate SiLU(z). Source: Dao and Gu,
Transformers are SSMs (2024), sections 5 to 7; Hugging Face's `Mamba2ForCausalLM`, `BambaForCausalLM`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx_ir as ir

from chunkrt.errors import ModelError
from chunkrt.graph import ops
from chunkrt.graph.decoders.config import DecoderConfig, check_size
from chunkrt.graph.decoders.llama import Attention, Body, CausalDecoder, FeedForward, Layer, LayerNames, norm
from chunkrt.graph.modules import Constant, DepthwiseWeights, Float32, Module, Parameter, Share
from chunkrt.graph.parallel import (
    ColumnParallelLinear,
    ColumnShareLinear,
    LinearBase,
    RowParallelLinear,
    share_heads,
)

DEFAULTS = {
    "layer_norm_epsilon": 1e-5,
    "max_position_embeddings": 2**20,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "intermediate_size": 1,
    "num_heads": 128,
    "head_dim": 64,
    "state_size": 128,
}
"""A state has no longest context; the number is that of llama.cpp's converter. No layer attends or has a
feed-forward."""
BAMBA_DEFAULTS = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 262144}
_BAMBA_NAMES = LayerNames(before_mlp="pre_ff_layernorm", mlp="feed_forward")


def mamba2(config: DecoderConfig) -> Module:
    """Build a decoder whose layers consist of a norm and a mixer."""
    config.refuse(hidden_act=config.activation != "silu")
    sizes = MambaSizes(
        num_heads=config.count("num_heads"),
        head_dim=config.count("head_dim"),
        num_groups=config.count("n_groups", 8),
        state_dim=config.count("state_size"),
        taps=config.count("conv_kernel", 4),
    ).checked(config, config.count("expand", 2) * config.hidden_size)
    has_bias = config.flag("use_bias")

    def mixer() -> Mamba2Mixer:
        return Mamba2Mixer(
            config,
            sizes,
            bias=(has_bias, has_bias),
            conv_bias=config.flag("use_conv_bias", True),
            limits=step_limits(config),
        )

    return norms_and_mixers(config, [mixer() for _ in range(config.num_layers)])


def bamba(config: DecoderConfig) -> Module:
    """Build a decoder; the layers `attn_layer_indices` attend, with RoPE on half of every head."""
    config = replace(config, raw={**config.raw, "partial_rotary_factor": 0.5})
    config.refuse(hidden_act=config.activation != "silu")
    rope, attention_layers = config.rotary_tables(may_be_partial=True), config.layer_indices("attn_layer_indices")
    has_bias = config.flag("attention_bias")

    def layer(index: int) -> Layer:
        mlp = FeedForward(config, bias=config.flag("mlp_bias"))
        if index in attention_layers:
            return Layer(config, Attention(config, rope, bias=(has_bias, has_bias)), mlp, names=_BAMBA_NAMES)
        return Layer(config, hybrid_mixer(config), mlp, names=replace(_BAMBA_NAMES, mixer="mamba"))

    layers = [layer(index) for index in range(config.num_layers)]
    return CausalDecoder(config, Body(config, rope, layers, norm_name="final_layernorm"))


def hybrid_mixer(config: DecoderConfig) -> Mamba2Mixer:
    """Return a mixer under the keys of Bamba's config, which Granite's hybrids have too."""
    has_bias = config.flag("mamba_proj_bias")
    return Mamba2Mixer(
        config,
        MambaSizes.of_hybrid(config),
        bias=(has_bias, has_bias),
        conv_bias=config.flag("mamba_conv_bias", True),
        limits=step_limits(config),
        output_factor=config.residual_factor,
    )


def norms_and_mixers(config: DecoderConfig, mixers: Sequence[Module]) -> Module:
    """Return a decoder with one mixer in each layer, under the names of Mamba's checkpoints."""
    layers = [MixerLayer(config, mixer) for mixer in mixers]
    return CausalDecoder(config, Body(config, None, layers, norm_name="norm_f", embedding_name="embeddings"))


class MixerLayer(Module):
    """A norm and a mixer, whose result is added to the residual stream."""

    def __init__(self, config: DecoderConfig, mixer: Module) -> None:
        super().__init__()
        self.norm = norm(config)
        self.mixer = mixer

    def forward(self, hidden: ir.Value) -> ir.Value:
        return ops.add(hidden, self.mixer(self.norm(hidden)), name="output")


@dataclass(frozen=True, kw_only=True)
class MambaSizes:
    """Sizes of a mixer: heads of x, groups of B and C that heads share, columns of B or C in a group, and taps."""

    num_heads: int
    head_dim: int
    num_groups: int
    state_dim: int
    taps: int

    @staticmethod
    def of_hybrid(config: DecoderConfig, inner: int | None = None) -> MambaSizes:
        """Read the keys that hybrid families have.

        Args:
            inner: number of columns of x; by default `mamba_expand` times the width of the residual stream.

        Raises:
            ModelError: see `checked`.
        """
        inner = inner or config.count("mamba_expand", 2) * config.hidden_size
        num_heads = config.count("mamba_n_heads", 128)
        is_given = config.raw.get("mamba_d_head") not in (None, "auto")
        return MambaSizes(
            num_heads=num_heads,
            head_dim=config.count("mamba_d_head") if is_given else max(inner // num_heads, 1),
            num_groups=config.count("mamba_n_groups", 1),
            state_dim=config.count("mamba_d_state", 256),
            taps=config.count("mamba_d_conv", 4),
        ).checked(config, inner)

    def checked(self, config: DecoderConfig, inner: int) -> MambaSizes:
        """Return the sizes. Raises ModelError if heads do not have `inner` columns, or cannot share groups evenly."""
        if self.inner != inner:
            raise ModelError(
                f"{config.where}: {self.num_heads} heads of {self.head_dim} columns in Mamba-2, expected {inner} "
                "columns in all heads"
            )
        if self.num_heads % self.num_groups:
            raise ModelError(
                f"{config.where}: {self.num_heads} heads of Mamba-2 cannot share {self.num_groups} groups evenly"
            )
        check_size(self.inner, config.where, "the width of Mamba-2's heads")
        check_size(self.all_states, config.where, "the width of Mamba-2's groups")
        return self

    @property
    def inner(self) -> int:
        """Number of columns of x, and of z."""
        return self.num_heads * self.head_dim

    @property
    def all_states(self) -> int:
        """Number of columns of B, and of C."""
        return self.num_groups * self.state_dim

    @property
    def widths(self) -> tuple[int, ...]:
        """Numbers of columns of z, x, B, C and dt, in the order of the checkpoint."""
        return (self.inner, self.inner, self.all_states, self.all_states, self.num_heads)


def step_limits(config: DecoderConfig) -> tuple[float, float]:
    """Return the config's limits of the step; Transformers saves an infinity as {"__float__": "Infinity"}.

    Raises:
        ModelError: they are not two numbers in ascending order.
    """
    stated = config.raw.get("time_step_limit")
    limits = [] if not isinstance(stated, list | tuple) else [_infinity(limit) for limit in stated]
    if stated is None:
        return 0.0, float("inf")
    if len(limits) != 2 or not all(type(limit) in (int, float) for limit in limits) or not 0 <= limits[0] < limits[1]:
        raise ModelError(f"{config.where}: time_step_limit is {stated!r}, expected two numbers in ascending order")
    return float(limits[0]), float(limits[1])


def _infinity(limit: Any) -> Any:
    return float("inf") if limit == {"__float__": "Infinity"} else limit


class Mamba2Mixer(Module):
    """Mamba-2 with its projections, gate and norm, over a rank's heads. Groups are distributed like the key/value heads
    of attention, and heads like query heads. If the heads of a group are on several ranks, a norm of this group needs
    the results of these ranks, which are gathered.

    Args:
        bias: whether the projections from and to the residual stream have a bias.
        limits: smallest and largest step.
        has_norm: whether the heads' results are normalised, group by group.
        gates_first: whether the gate is multiplied before the norm.
        input_factor: factor of the input. A bias would need another one, so that it must be 1 with a bias.
        factors: factors of the projections to z, x, B, C and dt.
        output_factor: factor of the result.

    Raises:
        UnsupportedModelError: there is a bias and an `input_factor`.
    """

    def __init__(
        self,
        config: DecoderConfig,
        sizes: MambaSizes,
        *,
        bias: tuple[bool, bool] = (False, False),
        conv_bias: bool = True,
        limits: tuple[float, float] = (0.0, float("inf")),
        has_norm: bool = True,
        gates_first: bool = True,
        input_factor: float = 1.0,
        factors: Sequence[float] = (1.0,) * 5,
        output_factor: float = 1.0,
    ) -> None:
        super().__init__()
        config.refuse(mamba_proj_bias=bias[0] and input_factor != 1)
        ranks, total, num_channels = config.ranks, sum(sizes.widths), sizes.inner + 2 * sizes.all_states
        starts = np.cumsum([0, *sizes.widths])
        factor = np.repeat(np.array(factors, np.float32) * np.float32(input_factor), sizes.widths)
        heads = share_heads(sizes.num_heads, sizes.num_groups, sizes.head_dim, ranks)
        inner, states = heads.q_columns, heads.key.spread(sizes.state_dim)
        shares = (inner, inner, states, states, heads.query)
        z, x, b, c, dt = (
            share.through(np.arange(share.size) + start, total) for share, start in zip(shares, starts, strict=False)
        )

        def projection(*parts: Share) -> ColumnShareLinear:
            rows = Share.together(parts)
            return ColumnShareLinear(config.hidden_size, {"in_proj": total}, rows, bias=bias[0], factor=factor)

        self.z_proj = projection(z)
        self.cbx_proj = projection(c, b, x)
        self.dt_proj = projection(dt)
        self.step = Step(heads.query, limits)
        self.decay = StateDecay(heads.query)
        channels = [
            share.through(np.arange(share.size) + start - sizes.inner, num_channels)
            for share, start in zip(shares[1:4], starts[1:4], strict=True)
        ]
        self.conv1d = DepthwiseWeights(num_channels, sizes.taps, bias=conv_bias, share=Share.together(channels[::-1]))
        self.skip = Skip(heads.query)
        gathers = has_norm and heads.query.length * sizes.num_groups < sizes.num_heads * heads.key.length
        self.gated = GatedNorm(
            sizes,
            config.rms_norm_eps,
            groups=Share.whole(sizes.num_groups) if gathers else heads.key,
            gathered=inner if gathers else None,
            has_norm=has_norm,
            gates_first=gates_first,
        )
        self.out_proj: LinearBase
        if gathers:
            self.out_proj = ColumnParallelLinear(
                sizes.inner, config.hidden_size, ranks, bias=bias[1], factor=output_factor, gathers=True
            )
        else:
            self.out_proj = RowParallelLinear(
                sizes.inner, config.hidden_size, ranks, depth=inner, bias=bias[1], factor=output_factor
            )
        self._sizes, self._heads = sizes, heads

    def project(self, hidden: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value]:
        """Return the columns z, C | B | x, and dt."""
        return self.z_proj(hidden), self.cbx_proj(hidden), self.dt_proj(hidden)

    def mix(self, z: ir.Value, cbx: ir.Value, dt: ir.Value) -> ir.Value:
        """Return the gated and normalised results of the heads, before the output projection."""
        step = self.step(dt)
        mixed = ops.linear_attention(
            cbx,
            self.decay(step),
            step,
            self.conv1d.weight.value(),
            self.conv1d.bias.value() if self.conv1d.has_bias else None,
            attn_type="mamba2",
            num_k_heads=self._heads.num_kv_heads,
            num_v_heads=self._heads.num_heads,
            head_k_dim=self._sizes.state_dim,
            head_v_dim=self._sizes.head_dim,
            skip=self.skip.factors.value(),
        )
        return self.gated(mixed, z)

    def forward(self, hidden: ir.Value) -> ir.Value:
        return self.out_proj(self.mix(*self.project(hidden)))


class Step(Module):
    """Step softplus(dt + dt_bias), between two limits. It runs on the CPU unless placed."""

    def __init__(self, heads: Share, limits: tuple[float, float]) -> None:
        super().__init__()
        self.device = "cpu"
        self._heads, num_heads = heads, heads.length
        least, most = limits
        self.least = Constant(np.full(num_heads, least, np.float32)) if least > 0 else None
        self.minus_least = Constant(np.full(num_heads, -least, np.float32)) if least > 0 else None
        self.minus_most = Constant(np.full(num_heads, -most, np.float32)) if most < float("inf") else None
        self.minus_one = Constant(np.full(num_heads, -1, np.float32)) if most < float("inf") else None

    def declare(self) -> None:
        self.bias = _by_heads(self, "dt_bias", self._heads)

    def forward(self, dt: ir.Value) -> ir.Value:
        step = ops.softplus(ops.add(dt, self.bias.value(), name="biased"))
        if self.least is not None and self.minus_least is not None:  # least + max(step - least, 0)
            excess = ops.relu(ops.add(step, self.minus_least(), name="above_least"), name="excess")
            step = ops.add(excess, self.least(), name="at_least")
        if self.minus_most is not None and self.minus_one is not None:  # step - max(step - most, 0)
            excess = ops.relu(ops.add(step, self.minus_most(), name="above_most"), name="too_much")
            step = ops.add(step, ops.mul(excess, self.minus_one(), name="surplus"), name="at_most")
        return step


class StateDecay(Module):
    """Logarithm of the state's decay: -exp(A_log) * step. It runs on the CPU unless placed."""

    def __init__(self, heads: Share) -> None:
        super().__init__()
        self.device = "cpu"
        self._heads = heads

    def declare(self) -> None:
        self.rate = _by_heads(self, "A_log", self._heads, _negative_exp)

    def forward(self, step: ir.Value) -> ir.Value:
        return ops.mul(step, self.rate.value(), name="output")


def _by_heads(
    module: Module, name: str, heads: Share, combine: Callable[[Float32], Float32] = lambda values: values
) -> Parameter:
    """Return a parameter with a value for each of a rank's heads, from a sibling tensor."""
    return Parameter(
        shape=(heads.length,),
        checkpoint_tensors={module.sibling(name): (heads.size,)},
        combine=lambda values: heads.take(combine(values)),
        axes=(heads,),
    )


def _negative_exp(a_log: Float32) -> Float32:
    rate: Float32 = -np.exp(a_log)
    return rate


class Skip(Module):
    """Factors D of x, one for each head, which are added to the results of the heads."""

    def __init__(self, heads: Share) -> None:
        super().__init__()
        self._heads = heads

    def declare(self) -> None:
        self.factors = _by_heads(self, "D", self._heads)


class GatedNorm(Module):
    """The heads' results times SiLU(z), and an RMSNorm of each group before or behind this product. It runs on the CPU
    unless placed.

    Args:
        groups: the rank's groups.
        gathered: the rank's columns, if those of all ranks are gathered before the norm.
    """

    def __init__(
        self,
        sizes: MambaSizes,
        epsilon: float,
        *,
        groups: Share,
        gathered: Share | None,
        has_norm: bool,
        gates_first: bool,
    ) -> None:
        super().__init__()
        self.device = "cpu"
        self._groups, self._width, self._epsilon = groups, sizes.inner // sizes.num_groups, epsilon
        self._gathered, self._has_norm, self._gates_first = gathered, has_norm, gates_first

    def declare(self) -> None:
        if self._has_norm:
            groups, width = self._groups, self._width
            self.weight = Parameter(
                shape=(groups.length, width),
                checkpoint_tensors={f"{self.sibling('norm')}.weight": (groups.size * width,)},
                combine=lambda weight: groups.take(weight.reshape(groups.size, width)),
                axes=(groups, None),
            )

    def forward(self, mixed: ir.Value, z: ir.Value) -> ir.Value:
        if not self._has_norm:
            return ops.mul(mixed, ops.silu(z), name="gated")
        if self._gates_first:
            return self._normed(ops.mul(mixed, ops.silu(z), name="gated"))
        gate = ops.silu(z)
        if self._gathered is not None:
            gate = ops.all_gather(gate, self._gathered.places(), name="gate_of_all")
        return ops.mul(self._normed(mixed), gate, name="gated")

    def _normed(self, value: ir.Value) -> ir.Value:
        if self._gathered is not None:
            value = ops.all_gather(value, self._gathered.places(), name="heads_of_all")
        return ops.head_norm(value, self.weight.value(), epsilon=self._epsilon, name="normed")
