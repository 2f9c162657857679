"""Mamba and FalconMamba: decoders of mixers whose decay differs for every channel and state.

The mixer projects each row to x | z. A causal convolution with SiLU mixes x with the rows before; linears of the result
give the step of each channel and the columns b and c, which all channels share. A state for each channel remembers x by
b and is read by c, and the gate SiLU(z) follows. Source: Gu and Dao, Mamba (2023), sections 3.2 to 3.4; Hugging Face's
`MambaForCausalLM`, `FalconMambaForCausalLM`.
"""

from __future__ import annotations

from math import ceil

import numpy as np
import onnx_ir as ir

from chunkrt.graph import ops
from chunkrt.graph.decoders.config import DecoderConfig, check_size
from chunkrt.graph.decoders.mamba import norms_and_mixers
from chunkrt.graph.modules import Constant, DepthwiseWeights, Indices, Module, Parameter, Share
from chunkrt.graph.parallel import ColumnParallelLinear, LinearBase, MergedColumnParallelLinear, RowParallelLinear
from chunkrt.graph.plan import Ranks

DEFAULTS = {
    "layer_norm_epsilon": 1e-5,
    "max_position_embeddings": 2**20,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 2,
    "intermediate_size": 1,
    "state_size": 16,
    "tie_word_embeddings": True,
}
"""A state has no longest context; the number is that of llama.cpp's converter. No layer attends or has a
feed-forward."""


def mamba(config: DecoderConfig) -> Module:
    """Build a decoder whose layers consist of a norm and a mixer."""
    return _decoder(config, epsilon=None)


def falcon_mamba(config: DecoderConfig) -> Module:
    """Build a decoder whose mixers normalise b, c and the compressed steps."""
    return _decoder(config, epsilon=config.number("mixer_rms_eps", 1e-6))


def _decoder(config: DecoderConfig, *, epsilon: float | None) -> Module:
    config.refuse(hidden_act=config.activation != "silu")
    return norms_and_mixers(config, [MambaMixer(config, epsilon) for _ in range(config.num_layers)])


class MambaMixer(Module):
    """Mamba's mixer, over a rank's channels.

    Args:
        epsilon: epsilon of the norms of b, c and the compressed steps; None if there are none.
    """

    def __init__(self, config: DecoderConfig, epsilon: float | None) -> None:
        super().__init__()
        hidden, ranks, state_dim = config.hidden_size, config.ranks, config.count("state_size")
        inner = config.count("expand", 2) * hidden
        check_size(inner, config.where, "the number of channels of Mamba")
        is_auto = config.raw.get("time_step_rank", "auto") == "auto"
        compressed = ceil(hidden / 16) if is_auto else config.count("time_step_rank")
        has_bias, share = config.flag("use_bias"), Share.even(inner, ranks)
        taps, has_conv_bias = config.count("conv_kernel", 4), config.flag("use_conv_bias", True)

        self.x_and_gate = MergedColumnParallelLinear(
            hidden, {"x": inner, "z": inner}, ranks, bias=has_bias, stored_in="in_proj"
        )
        self.conv1d = DepthwiseWeights(inner, taps, bias=has_conv_bias, share=share)
        outputs, last = {"x_proj": compressed + 2 * state_dim}, compressed + 2 * state_dim
        self.compressed_steps = SelectedRowsLinear(inner, outputs, ranks, rows=np.arange(compressed))
        self.bc = SelectedRowsLinear(inner, outputs, ranks, rows=np.arange(compressed, last))
        self.dt_proj = ColumnParallelLinear(compressed, inner, ranks, bias=True)
        self.scan = SelectiveScan(share, state_dim)
        self.out_proj = RowParallelLinear(inner, hidden, ranks, bias=has_bias)
        self.norm_of_steps = None if epsilon is None else Constant(np.ones(compressed, np.float32))
        self.norm_of_bc = None if epsilon is None else Constant(np.ones((2, state_dim), np.float32))
        self._channels, self._epsilon = share.length, epsilon or 0.0

    def forward(self, hidden: ir.Value) -> ir.Value:
        x, gate = ops.split_columns(self.x_and_gate(hidden), names=["x", "gate"])
        x = ops.linear_attention(
            x,
            None,
            None,
            self.conv1d.weight.value(),
            self.conv1d.bias.value() if self.conv1d.has_bias else None,
            attn_type="silu_conv",
            num_k_heads=1,
            num_v_heads=self._channels,
            head_k_dim=1,
            head_v_dim=1,
            name="convolved",
        )
        steps, bc = self.compressed_steps(x), self.bc(x)
        if self.norm_of_steps is not None and self.norm_of_bc is not None:
            steps = ops.rms_normalization(steps, self.norm_of_steps(), epsilon=self._epsilon, name="normed_steps")
            bc = ops.head_norm(bc, self.norm_of_bc(), epsilon=self._epsilon, name="normed_bc")
        read = self.scan(x, self.dt_proj(steps), bc)
        return self.out_proj(ops.mul(read, ops.silu(gate), name="gated"))


class SelectiveScan(Module):
    """The steps' softplus and the recurrence, over a rank's channels. The tensors are siblings of the module. It runs
    on the CPU unless placed.
    """

    def __init__(self, share: Share, state_dim: int) -> None:
        super().__init__()
        self.device = "cpu"
        self._share, self._state_dim = share, state_dim

    def declare(self) -> None:
        share, state_dim = self._share, self._state_dim
        self.rates = Parameter(
            shape=(state_dim, share.length),
            checkpoint_tensors={self.sibling("A_log"): (share.size, state_dim)},
            combine=lambda logarithms: share.take(-np.exp(logarithms)).T,
            axes=(None, share),
        )
        self.skip = Parameter(
            shape=(share.length,),
            checkpoint_tensors={self.sibling("D"): (share.size,)},
            combine=share.take,
            axes=(share,),
        )

    def forward(self, x: ir.Value, step: ir.Value, bc: ir.Value) -> ir.Value:
        positive = ops.softplus(step, name="steps")
        return ops.selective_scan(x, positive, bc, self.rates.value(), self.skip.value(), name="output")


class SelectedRowsLinear(RowParallelLinear):
    """A row-parallel linear of some rows of the checkpoint's tensor. If the ranks do not sum, every rank computes all
    columns.
    """

    def __init__(self, in_features: int, outputs: dict[str, int], ranks: Ranks, *, rows: Indices) -> None:
        super().__init__(in_features, outputs, ranks)
        self._rows, self._is_split = rows, ranks.are_alone or ranks.sums

    def share(self) -> tuple[Share, Share]:
        _, depth = super().share()
        rows = Share.of(sum(self.outputs.values()), self._rows)
        return rows, depth if self._is_split else Share.whole(self.in_features)

    def forward(self, hidden: ir.Value) -> ir.Value:
        if self._is_split:
            return super().forward(hidden)
        return LinearBase.forward(self, ops.all_gather(hidden, Share.even(self.in_features, self._ranks).places()))
