"""The result of an import: a decoder as a list of steps over a tree of modules.

It has the form of decoders that `graph/decoders` builds from a config, so it is placed, traced, partitioned and loaded
like any other decoder.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import onnx_ir as ir

from chunkrt.graph import ops
from chunkrt.graph.modules import Module, Parameter
from chunkrt.graph.ops import current_trace
from chunkrt.graph.plan import DOMAIN, Attribute, Device

ON_CPU = ("embed_tokens", "lm_head", "soft_cap", "qk_norm", "head_norm", "decay", "step")
"""Last parts of the paths of modules that chunkrt's decoders place on the CPU by default."""


class RecordedOperator(NamedTuple):
    """One operator, by keys of values.

    Attributes:
        operator: domain and name, from `OPERATORS`.
        inputs: keys of the inputs; None for an absent input, and for a state, which tracing creates.
        path: path of the operator's module.
        names: names of the outputs in the module.
    """

    operator: tuple[str, str]
    attributes: Mapping[str, Attribute]
    inputs: Sequence[Hashable | None]
    outputs: Sequence[Hashable]
    path: str
    names: Sequence[str]


class ImportedModule(Module):
    """A module of the tree; its children are added by name."""

    def __init__(self) -> None:
        super().__init__()
        self._parts: dict[str, ImportedModule] = {}

    def children(self) -> Iterator[tuple[str, Module]]:
        """See `Module.children`."""
        yield from self._parts.items()

    def part(self, path: str) -> ImportedModule:
        """Return the module at a path below this module; it is created if it does not exist."""
        module = self
        for name in path.split(".") if path else ():
            if name not in module._parts:
                module._parts[name] = ImportedModule()
            module = module._parts[name]
        return module


class ReplayedDecoder(ImportedModule):
    """Decoder that computes logits [R, vocab] from token ids [T], step by step.

    Args:
        tokens, rows, logits: keys of the inputs and of the output.
    """

    def __init__(self, tokens: Hashable, rows: Hashable, logits: Hashable) -> None:
        super().__init__()
        self._tokens, self._rows, self._logits = tokens, rows, logits
        self._steps: list[RecordedOperator] = []
        self._weights: dict[Hashable, Parameter] = {}

    def add_step(self, step: RecordedOperator) -> None:
        """Append a step."""
        self.part(step.path)
        self._steps.append(step)

    def add_weight(self, key: Hashable, path: str, attribute: str, parameter: Parameter) -> None:
        """Add a constant value, which is an attribute of the module at a path."""
        setattr(self.part(path), attribute, parameter)
        self._weights[key] = parameter

    def forward(self, token_ids: ir.Value, logit_rows: ir.Value) -> ir.Value:
        """Trace the steps in order."""
        values: dict[Hashable, ir.Value] = {self._tokens: token_ids, self._rows: logit_rows}
        for step in self._steps:
            with self._scope(step.path):
                operands = [
                    self._weights[key].value() if key in self._weights else values.get(key) for key in step.inputs
                ]
                results = OPERATORS[step.operator](step.attributes, operands, step.names)
            values.update(zip(step.outputs, results, strict=False))
        return values[self._logits]

    def _scope(self, path: str) -> AbstractContextManager[None]:
        """Enter a module's scope, on the device of the module or of its nearest placed ancestor."""
        device: Device | None = self.device
        module: ImportedModule = self
        for name in path.split(".") if path else ():
            module = module._parts[name]
            device = module.device or device
        return current_trace().scope(path, device)


Attributes = Mapping[str, Any]
Operands = Sequence[Any]
"""Return the traced values of inputs; None for an absent input, and for a state, which tracing creates."""

Names = Sequence[str]


Operator = Callable[[Attributes, Operands, Names], Sequence[ir.Value]]


def _attention(attributes: Attributes, operands: Operands, names: Names) -> list[ir.Value]:
    qkv, cos, sin = operands[:3]
    attended = ops.cached_attention(
        qkv,
        cos,
        sin,
        num_heads=attributes["num_heads"],
        num_kv_heads=attributes["num_kv_heads"],
        head_dim=attributes["head_dim"],
        scale=attributes["scale"],
        window=attributes["window"],
        long_context_from=attributes.get("long_context_from"),
        name=names[0],
    )
    return [attended]


def _linear_attention(attributes: Attributes, operands: Operands, names: Names) -> list[ir.Value]:
    attended = ops.linear_attention(
        *operands[:5],
        attn_type=attributes["attn_type"],
        num_k_heads=attributes["num_k_heads"],
        num_v_heads=attributes["num_v_heads"],
        head_k_dim=attributes["head_k_dim"],
        head_v_dim=attributes["head_v_dim"],
        use_qk_l2norm=bool(attributes.get("use_qk_l2norm", 0)),
        name=names[0],
    )
    return [attended]


def _experts(attributes: Attributes, operands: Operands, names: Names) -> list[ir.Value]:
    top_k, is_normed = attributes["top_k"], bool(attributes["norm_topk_prob"])
    return [ops.routed_experts(*operands, top_k=top_k, norm_topk_prob=is_normed, name=names[0])]


def _plain(operator: Callable[..., ir.Value]) -> Operator:
    """Return a tracer of an operator without attributes."""
    return lambda attributes, operands, names: [operator(*operands, name=names[0])]


def _normalising(operator: Callable[..., ir.Value]) -> Operator:
    return lambda attributes, operands, names: [operator(*operands, epsilon=attributes["epsilon"], name=names[0])]


OPERATORS: dict[tuple[str, str], Operator] = {
    ("", "Gather"): _plain(ops.gather_rows),
    ("", "MatMul"): _plain(ops.matmul),
    ("", "Add"): _plain(ops.add),
    ("", "Mul"): _plain(ops.mul),
    ("", "Sigmoid"): _plain(ops.sigmoid),
    ("", "Softplus"): _plain(ops.softplus),
    ("", "Tanh"): _plain(ops.tanh),
    ("", "Gelu"): _plain(ops.gelu_tanh),
    ("", "Split"): lambda attributes, operands, names: ops.split_columns(*operands, names=names),
    ("", "RMSNormalization"): _normalising(ops.rms_normalization),
    (DOMAIN, "HeadNorm"): _normalising(ops.head_norm),
    (DOMAIN, "CachedAttention"): _attention,
    (DOMAIN, "LinearAttention"): _linear_attention,
    (DOMAIN, "FloatLinear"): _plain(ops.float_linear),
    (DOMAIN, "RoutedExperts"): _experts,
}
"""Functions that trace the operators of the vocabulary, by domain and name."""
