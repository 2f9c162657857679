"""Mixtures of experts: a router picks a few feed-forwards for each row, and a shared feed-forward takes every row.

Source: Hugging Face's `Qwen3NextSparseMoeBlock`; Shazeer et al., The Sparsely-Gated Mixture-of-Experts Layer (2017).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx_ir as ir

from chunkrt.errors import ModelError
from chunkrt.graph import ops
from chunkrt.graph.decoders.config import DecoderConfig
from chunkrt.graph.decoders.llama import FeedForward
from chunkrt.graph.modules import Float32, Module, Parameter

MOST_EXPERTS = 4096


class SparseMixture(Module):
    """The routed experts, plus the shared expert times the sigmoid of its gate. Router and gate run on the CPU."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        num_experts = config.count("num_experts")
        if num_experts > MOST_EXPERTS:
            raise ModelError(f"{config.where}: num_experts is {num_experts}; expected at most {MOST_EXPERTS}")
        self.gate = RouterGate(config.hidden_size, num_experts)
        self.experts = Experts(config, num_experts)
        shared_size = config.count("shared_expert_intermediate_size")
        self.shared_expert = FeedForward(replace(config, intermediate_size=shared_size))
        self.shared_expert_gate = RouterGate(config.hidden_size, 1)

    def forward(self, hidden: ir.Value) -> ir.Value:
        shared = self.shared_expert(hidden)
        routed = self.experts(hidden, self.gate(hidden))
        with_gate = ops.mul(shared, ops.sigmoid(self.shared_expert_gate(hidden)), name="gated_shared")
        return ops.add(routed, with_gate, name="output")


class RouterGate(Module):
    """The product hidden @ weight, in float32 under every scheme. It runs on the CPU unless placed."""

    def __init__(self, width: int, num_columns: int) -> None:
        super().__init__()
        self.device = "cpu"
        self.shape: tuple[int, ...] = (num_columns, width)

    def declare(self) -> None:
        self.weight = Parameter(
            shape=self.shape[::-1],
            checkpoint_tensors={f"{self.path}.weight": self.shape},
            combine=lambda weight: weight.T,
        )

    def forward(self, hidden: ir.Value) -> ir.Value:
        return ops.float_linear(hidden, self.weight.value(), name="output")


class Experts(Module):
    """The routed feed-forwards. They run on the CPU unless placed.

    Raises:
        ModelError: the router would pick more experts than the model has.
    """

    def __init__(self, config: DecoderConfig, num_experts: int) -> None:
        super().__init__()
        self.device = "cpu"
        self._sizes = (num_experts, config.hidden_size, config.count("moe_intermediate_size"))
        self._top_k = config.count("num_experts_per_tok")
        self._norm_topk_prob = config.flag("norm_topk_prob", True)
        if self._top_k > num_experts:
            raise ModelError(f"{config.where}: cannot pick {self._top_k} of {num_experts} experts")

    def declare(self) -> None:
        num_experts, width, inner = self._sizes
        paths = [f"{self.path}.{expert}" for expert in range(num_experts)]
        self.gate_up = Parameter(
            shape=(num_experts, width, 2 * inner),
            checkpoint_tensors={f"{p}.{part}_proj.weight": (inner, width) for p in paths for part in ("gate", "up")},
            combine=self._gates_and_ups,
        )
        self.down = Parameter(
            shape=(num_experts, inner, width),
            checkpoint_tensors={f"{path}.down_proj.weight": (width, inner) for path in paths},
            combine=lambda *tensors: np.stack([tensor.T for tensor in tensors]),
        )

    def _gates_and_ups(self, *tensors: Float32) -> Float32:
        pairs = zip(tensors[::2], tensors[1::2], strict=True)
        return np.stack([np.concatenate(pair).T for pair in pairs])

    def forward(self, hidden: ir.Value, router_logits: ir.Value) -> ir.Value:
        return ops.routed_experts(
            hidden,
            router_logits,
            self.gate_up.value(),
            self.down.value(),
            top_k=self._top_k,
            norm_topk_prob=self._norm_topk_prob,
        )
