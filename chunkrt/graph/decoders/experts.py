"""Mixtures of experts: a router picks a few feed-forwards for each row, and a shared feed-forward may take every row.

Source: Shazeer et al., The Sparsely-Gated Mixture-of-Experts Layer (2017); DeepSeek-AI, DeepSeek-V3 (2024), section
2.1.2, for the bias that only selects; Hugging Face's `Qwen3NextSparseMoeBlock`, `Lfm2MoeSparseMoeBlock`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from chunkrt.errors import ModelError
from chunkrt.graph import ops
from chunkrt.graph.decoders.config import DecoderConfig
from chunkrt.graph.decoders.llama import FeedForward
from chunkrt.graph.modules import Float32, Module, Parameter, Share

MOST_EXPERTS = 4096


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """Sizes and rules of a mixture, and the names of its parts in the checkpoint.

    Attributes:
        width: width of each expert between its gate and down.
        norm_topk_prob, use_sigmoid, norm_epsilon, swiglu_alpha, swiglu_limit, uses_gelu, num_groups, top_groups,
        best_of_group: see `ops.routed_experts`.
        factor: factor of the sum of the routed experts.
        expert_factors: name of the tensor with a factor of each expert's result; empty if there is none.
        router: name of the router's linear.
        has_biases: whether the router and all parts of the experts have biases.
        selection_bias: name of the tensor that is added to scores to pick experts; empty if there is none.
        bias_rank: number of axes of that tensor, which are of length 1 except the last.
        parts: names of each expert's gate, up and down.
        stacks: names of the tensors, siblings of the experts, in which a checkpoint may store all gates and ups, and
            all downs.
        are_stacks_by_columns: whether these tensors have an expert's outputs as columns, and those of gate and up
            alternate; otherwise outputs are rows, first those of gate. Their biases are tensors of their own.
    """

    num_experts: int
    top_k: int
    width: int
    norm_topk_prob: bool = True
    use_sigmoid: bool = False
    norm_epsilon: float = 0.0
    swiglu_alpha: float = 1.0
    swiglu_limit: float = 0.0
    uses_gelu: bool = False
    num_groups: int = 1
    top_groups: int = 1
    best_of_group: int = 1
    factor: float = 1.0
    expert_factors: str = ""
    router: str = "gate"
    has_biases: bool = False
    selection_bias: str = ""
    bias_rank: int = 1
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    stacks: tuple[str, str] = ("experts.gate_up_proj", "experts.down_proj")
    are_stacks_by_columns: bool = False

    @staticmethod
    def of(config: DecoderConfig) -> Mixture:
        """Read the keys that most families have."""
        return Mixture(
            num_experts=config.count("num_experts"),
            top_k=config.count("num_experts_per_tok"),
            width=config.count("moe_intermediate_size"),
            norm_topk_prob=config.flag("norm_topk_prob", True),
        )


class SparseMixture(Module):
    """The routed experts, plus the shared expert, which may be multiplied by the sigmoid of a gate. Router and gate run
    on the CPU.

    Args:
        mixture: by default that of `Mixture.of`.
        shared: the shared expert.
        shared_name: the shared expert's name in the checkpoint.
        has_shared_gate: whether the shared expert has a gate, which has the same name with "_gate".

    Raises:
        ModelError: see `Experts`.
        UnsupportedModelError: the experts have an activation other than SiLU.
    """

    def __init__(
        self,
        config: DecoderConfig,
        mixture: Mixture | None = None,
        *,
        shared: Module | None = None,
        shared_name: str = "shared_expert",
        has_shared_gate: bool = False,
    ) -> None:
        super().__init__()
        mixture = mixture or Mixture.of(config)
        config.refuse(hidden_act=config.activation != "silu")
        self.experts = Experts(config, mixture)
        self.gate = RouterGate(
            config.hidden_size, mixture.num_experts, name=mixture.router, has_bias=mixture.has_biases
        )
        if shared is not None:
            setattr(self, shared_name, shared)
        if has_shared_gate:
            self.shared_expert_gate = RouterGate(config.hidden_size, 1, name=f"{shared_name}_gate")
        self._shared_name = shared_name if shared is not None else ""
        self._has_shared_gate = has_shared_gate

    def forward(self, hidden: ir.Value) -> ir.Value:
        if self._has_shared_gate:
            shared = getattr(self, self._shared_name)(hidden)
            routed = self.experts(hidden, self.gate(hidden))
            with_gate = ops.mul(shared, ops.sigmoid(self.shared_expert_gate(hidden)), name="gated_shared")
            return ops.add(routed, with_gate, name="output")
        routed = self.experts(hidden, self.gate(hidden))
        if not self._shared_name:
            return routed
        # The sum follows the shared expert's last linear, so that backends fuse the two in chunks and in decoding.
        return ops.add(routed, getattr(self, self._shared_name)(hidden), name="output")


def gated_mixture(config: DecoderConfig) -> SparseMixture:
    """Return a mixture whose shared expert has a gate, and a width of its own."""
    shared = FeedForward(replace(config, intermediate_size=config.count("shared_expert_intermediate_size")))
    return SparseMixture(config, shared=shared, has_shared_gate=True)


def routed_mixture(config: DecoderConfig) -> Mixture:
    """Read the keys that DeepSeek's families have."""
    return Mixture(
        num_experts=config.count("n_routed_experts"),
        top_k=config.count("num_experts_per_tok"),
        width=config.count("moe_intermediate_size"),
        norm_topk_prob=False,
        factor=config.number("routed_scaling_factor", 1.0),
    )


def sigmoid_mixture(config: DecoderConfig) -> Mixture:
    """Return DeepSeek-V3's mixture: sigmoid scores, a bias that selects experts, and groups of experts."""
    mixture = replace(
        routed_mixture(config),
        use_sigmoid=True,
        norm_topk_prob=config.flag("norm_topk_prob", True),
        norm_epsilon=1e-20,
        selection_bias="gate.e_score_correction_bias",
    )
    return in_groups(config, mixture, best_of_group=2)


def in_groups(config: DecoderConfig, mixture: Mixture, *, best_of_group: int) -> Mixture:
    """Return a mixture with the groups that `n_group` and `topk_group` state; see `ops.routed_experts`.

    Raises:
        ModelError: the experts cannot form these groups, or the open groups have fewer experts than a row needs.
    """
    groups = config.count("n_group", 1)
    top = min(config.count("topk_group", 1), groups)
    if top == groups:
        return mixture
    size = mixture.num_experts // groups
    if mixture.num_experts % groups or size < best_of_group:
        raise ModelError(
            f"{config.where}: {mixture.num_experts} experts cannot form n_group = {groups} groups of at least "
            f"{best_of_group}"
        )
    if mixture.top_k > top * size:
        raise ModelError(
            f"{config.where}: cannot pick {mixture.top_k} of the {top * size} experts of topk_group = {top} groups"
        )
    return replace(mixture, num_groups=groups, top_groups=top, best_of_group=best_of_group)


def with_shared_experts(config: DecoderConfig, mixture: Mixture) -> SparseMixture:
    """Return a mixture and DeepSeek's shared experts, which have no gate."""
    width = mixture.width * config.count("n_shared_experts")
    shared = FeedForward(replace(config, intermediate_size=width))
    return SparseMixture(config, mixture, shared=shared, shared_name="shared_experts")


def has_experts(config: DecoderConfig, index: int) -> bool:
    """Return whether a layer has experts, by the keys of Qwen's families."""
    is_sparse = (index + 1) % config.count("decoder_sparse_step", 1) == 0
    return is_sparse and bool(config.raw.get("num_experts")) and index not in config.layer_indices("mlp_only_layers")


class RouterGate(Module):
    """The product hidden @ weight, plus a bias if there is one, in float32 under every scheme. It runs on the CPU
    unless placed.

    `name` is the checkpoint's name of the module with weight and bias, a sibling of this module.
    """

    def __init__(self, width: int, num_columns: int, *, name: str, has_bias: bool = False) -> None:
        super().__init__()
        self.device = "cpu"
        self.shape: tuple[int, ...] = (num_columns, width)
        self._name, self._has_bias = name, has_bias

    def declare(self) -> None:
        stored = self.sibling(self._name)
        self.weight = Parameter(
            shape=self.shape[::-1], checkpoint_tensors={f"{stored}.weight": self.shape}, combine=lambda weight: weight.T
        )
        if self._has_bias:
            shape = self.shape[:1]
            self.bias = Parameter(shape=shape, checkpoint_tensors={f"{stored}.bias": shape}, combine=lambda bias: bias)

    def forward(self, hidden: ir.Value) -> ir.Value:
        if not self._has_bias:
            return ops.float_linear(hidden, self.weight.value(), name="output")
        product = ops.float_linear(hidden, self.weight.value(), name="product")
        return ops.add(product, self.bias.value(), name="output")


class Experts(Module):
    """The routed feed-forwards. They run on the CPU unless placed.

    A rank has a slice of the columns of every expert, with columns of zeros if necessary, and the results, which are
    floats under every scheme, are summed over ranks.

    Raises:
        ModelError: there are too many experts, or the router would pick more than there are.
    """

    def __init__(self, config: DecoderConfig, mixture: Mixture) -> None:
        super().__init__()
        num_experts = mixture.num_experts
        if num_experts > MOST_EXPERTS:
            raise ModelError(f"{config.where}: num_experts is {num_experts}; expected at most {MOST_EXPERTS}")
        if mixture.top_k > num_experts:
            raise ModelError(f"{config.where}: cannot pick {mixture.top_k} of {num_experts} experts")
        self.device = "cpu"
        self._hidden_size, self._mixture = config.hidden_size, mixture
        self._has_stacks = config.has_stacked_experts
        self._factor = np.float32(config.residual_factor * mixture.factor)
        self._ranks = config.ranks
        self._inner = Share.even(mixture.width, self._ranks)

    def declare(self) -> None:
        mixture, width = self._mixture, self._hidden_size
        num_experts, inner = mixture.num_experts, mixture.width
        gate_ups: dict[str, tuple[int, ...]] = {}
        downs: dict[str, tuple[int, ...]] = {}
        if self._has_stacks:
            shapes = ((num_experts, 2 * inner, width), (num_experts, width, inner))
            for tensors, name, shape in zip((gate_ups, downs), mixture.stacks, shapes, strict=True):
                by_columns = (shape[0], shape[2], shape[1])
                tensors[self.sibling(name)] = by_columns if mixture.are_stacks_by_columns else shape
        else:
            gate, up, down = mixture.parts
            for path in (f"{self.path}.{expert}" for expert in range(num_experts)):
                gate_ups |= {f"{path}.{part}.weight": (inner, width) for part in (gate, up)}
                downs[f"{path}.{down}.weight"] = (width, inner)
        if mixture.expert_factors:
            downs[self.sibling(mixture.expert_factors)] = (num_experts,)
        self.gate_up = Parameter(
            shape=(num_experts, width, 2 * self._inner.length),
            checkpoint_tensors=gate_ups,
            combine=self._gates_and_ups,
            axes=(None, None, self._both()),
        )
        self.down = Parameter(
            shape=(num_experts, self._inner.length, width),
            checkpoint_tensors=downs,
            combine=self._downs,
            axes=(None, self._inner, None),
        )
        if mixture.has_biases:
            self.gate_up_bias, self.down_bias = self._biases()
        if mixture.selection_bias:
            self.selection_bias = Parameter(
                shape=(num_experts,),
                checkpoint_tensors={
                    self.sibling(mixture.selection_bias): (1,) * (mixture.bias_rank - 1) + (num_experts,)
                },
                combine=lambda bias: bias.reshape(num_experts),
            )

    def _biases(self) -> tuple[Parameter, Parameter]:
        """Return the biases of gates and ups, and those of downs."""
        mixture, width = self._mixture, self._hidden_size
        num_experts, inner = mixture.num_experts, mixture.width
        gate_ups: dict[str, tuple[int, ...]]
        downs: dict[str, tuple[int, ...]]
        if self._has_stacks:
            gate_up_name, down_name = (f"{self.sibling(name)}_bias" for name in mixture.stacks)
            gate_ups, downs = {gate_up_name: (num_experts, 2 * inner)}, {down_name: (num_experts, width)}
        else:
            gate, up, down = mixture.parts
            paths = [f"{self.path}.{expert}" for expert in range(num_experts)]
            gate_ups = {f"{path}.{part}.bias": (inner,) for path in paths for part in (gate, up)}
            downs = {f"{path}.{down}.bias": (width,) for path in paths}

        def both(*tensors: Float32) -> Float32:
            if not self._has_stacks:
                biases = np.stack(tensors).reshape(num_experts, -1)
            else:
                biases = _apart(tensors[0]) if mixture.are_stacks_by_columns else tensors[0]
            return self._both().take(biases, axis=1)

        # A bias is added once, so that the other ranks have zeros.
        once = np.full((self._ranks.size, width), width)
        once[0] = np.arange(width)
        added = Share(width, once, self._ranks.rank)

        def of_downs(*tensors: Float32) -> Float32:
            return added.take((tensors[0] if self._has_stacks else np.stack(tensors)) * self._factor, axis=1)

        return (
            Parameter(
                shape=(num_experts, 2 * self._inner.length),
                checkpoint_tensors=gate_ups,
                combine=both,
                axes=(None, self._both()),
            ),
            Parameter(shape=(num_experts, width), checkpoint_tensors=downs, combine=of_downs, axes=(None, added)),
        )

    def _both(self) -> Share:
        """The rank's columns of gate, and then those of up."""
        return Share.joined([self._inner, self._inner])

    def _gates_and_ups(self, *tensors: Float32) -> Float32:
        if self._has_stacks:
            is_by_columns = self._mixture.are_stacks_by_columns
            stacks = _apart(tensors[0]) if is_by_columns else tensors[0].swapaxes(1, 2)
            return self._both().take(stacks, axis=2)
        pairs = zip(tensors[::2], tensors[1::2], strict=True)
        return np.stack([np.concatenate([self._inner.take(part) for part in pair]).T for pair in pairs])

    def _downs(self, *tensors: Float32) -> Float32:
        factors: Float32 | np.float32 = self._factor
        if self._mixture.expert_factors:
            *tensors_of_experts, of_experts = tensors
            tensors = tuple(tensors_of_experts)
            factors = self._factor * of_experts[:, None, None]
        downs = tensors[0] if self._has_stacks else np.stack(tensors)
        if not (self._has_stacks and self._mixture.are_stacks_by_columns):
            downs = downs.swapaxes(1, 2)
        downs = self._inner.take(downs, axis=1)
        return downs if np.all(factors == 1) else downs * factors

    def forward(self, hidden: ir.Value, router_logits: ir.Value) -> ir.Value:
        mixture = self._mixture
        is_split = not self._ranks.are_alone
        routed = ops.routed_experts(
            hidden,
            router_logits,
            self.gate_up.value(),
            self.down.value(),
            self.selection_bias.value() if mixture.selection_bias else None,
            self.gate_up_bias.value() if mixture.has_biases else None,
            self.down_bias.value() if mixture.has_biases else None,
            top_k=mixture.top_k,
            norm_topk_prob=mixture.norm_topk_prob,
            use_sigmoid=mixture.use_sigmoid,
            norm_epsilon=mixture.norm_epsilon,
            swiglu_alpha=mixture.swiglu_alpha,
            swiglu_limit=mixture.swiglu_limit,
            uses_gelu=mixture.uses_gelu,
            num_groups=mixture.num_groups,
            top_groups=mixture.top_groups,
            best_of_group=mixture.best_of_group,
            name="partial" if is_split else "experts",
        )
        return ops.all_reduce(routed, name="experts") if is_split else routed


def _apart(alternating: Float32) -> Float32:
    """Return the columns of gate and then those of up, which alternate in the last axis."""
    return np.concatenate([alternating[..., ::2], alternating[..., 1::2]], axis=-1)
