"""The last step: a graph of the vocabulary becomes a tree of modules, as `graph/decoders` builds one.

So an imported decoder is placed, traced, cut and loaded like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import onnx_ir as ir

from chunkrt.graph import ops
from chunkrt.graph.modules import Float32, Module, Parameter
from chunkrt.graph.plan import Device
from chunkrt.graph.tracing import current_trace
from chunkrt.onnx_import.draft import DOMAIN, Draft, float_attribute, int_attribute
from chunkrt.onnx_import.names import Place
from chunkrt.onnx_import.widths import width

ON_CPU = ("embed_tokens", "lm_head", "soft_cap", "qk_norm")
"""Modules that chunkrt's decoders put there unless they are placed."""


WEIGHTS = {
    ("Add", 1): ("", "bias"),
    ("LinearAttention", 3): ("conv", "weight"),
    ("LinearAttention", 4): ("conv", "bias"),
}
"""Where an operator's constants are kept, by its input: the module below its own, and the attribute. Others are the
weight of its own."""


class ImportedModule(Module):
    """A place in the tree; its parts are added by name."""

    def __init__(self) -> None:
        super().__init__()
        self._parts: dict[str, ImportedModule] = {}

    def children(self) -> Iterator[tuple[str, Module]]:
        """See `Module.children`."""
        yield from self._parts.items()

    def part(self, path: str) -> ImportedModule:
        """The module at a path below this one, made if it is not there."""
        module = self
        for name in path.split(".") if path else ():
            if name not in module._parts:
                module._parts[name] = ImportedModule()
                if name in ON_CPU:
                    module._parts[name].to("cpu")
            module = module._parts[name]
        return module


class ImportedDecoder(ImportedModule):
    """Token ids [T] to logits [R, vocab], as an exported graph has it.

    Args:
        draft: its graph is of the vocabulary.
        places: of all its nodes.

    Raises:
        UnsupportedModelError: an operator that is not of the vocabulary.
    """

    def __init__(self, draft: Draft, places: Mapping[ir.Node, Place], logit_rows: ir.Value) -> None:
        super().__init__()
        self._draft, self._places, self._logit_rows = draft, places, logit_rows
        self._weights: dict[tuple[ir.Node, int], Parameter] = {}
        self._rope: dict[tuple[str, ...], Sequence[Parameter]] = {}
        if unknown := [node for node in draft.graph if (node.domain, node.op_type) not in OPERATORS]:
            of_tokens = [n for n in unknown if not draft.evaluator.is_positional(n.outputs[0].name or "")]
            raise draft.unsupported((of_tokens or unknown)[0], "no pass understands it where it stands")
        for node in draft.graph:
            self._add_weights(node)
        self.named()

    def _add_weights(self, node: ir.Node) -> None:
        module = self.part(self._places[node].path)
        if node.op_type == "CachedAttention":
            self._add_tables(node)
            return
        for index, value in enumerate(node.inputs):
            if value is None or value not in self._draft.weights:
                continue
            parameter = self._draft.weights[value].parameter(self._draft.source)
            if parameter.shape == (1,):
                parameter = _spread(parameter, width(self._draft, node.inputs[0]) or 1)
            path, name = WEIGHTS.get((node.op_type, index), ("", "weight"))
            setattr(module.part(path), name, parameter)
            self._weights[node, index] = parameter

    def _add_tables(self, node: ir.Node) -> None:
        """Rotary tables, once for all layers that share them."""
        weights = [self._draft.weights[value] for value in node.inputs[1:3] if value is not None]
        key = tuple(name for weight in weights for name in weight.tensors)
        if key not in self._rope:
            module = self.part("model").part(self._table_name(node))
            module.cos, module.sin = tables = [w.parameter(self._draft.source) for w in weights]  # type: ignore[attr-defined]
            self._rope[key] = tables
        self._weights |= {(node, 1 + i): table for i, table in enumerate(self._rope[key])}

    def _table_name(self, node: ir.Node) -> str:
        """As Gemma has it: "local_rope" are those of layers with a window, where others have tables of their own."""
        windows = {int_attribute(other, "window") for other in self._draft.graph if other.op_type == node.op_type}
        name = "local_rope" if int_attribute(node, "window") and 0 in windows else "rope"
        taken = dict(self.part("model").children())
        return next(n for n in (name, *(f"{name}_{i}" for i in range(2, 1000))) if n not in taken)

    def forward(self, token_ids: ir.Value, logit_rows: ir.Value) -> ir.Value:
        """Trace the graph's nodes in order."""
        inputs = {v: token_ids for v in self._draft.graph.inputs if v.name == self._draft.signature.tokens}
        values: dict[ir.Value, ir.Value] = {**inputs, self._logit_rows: logit_rows}
        for node in self._draft.graph:
            path, names = self._places[node]
            with self._scope(path):
                operands = [
                    self._weights[node, i].value() if (node, i) in self._weights else values.get(v) if v else None
                    for i, v in enumerate(node.inputs)
                ]
                results = OPERATORS[node.domain, node.op_type](node, operands, names)
            values.update(zip(node.outputs, results, strict=False))
        return values[self._draft.logits]

    def _scope(self, path: str) -> AbstractContextManager[None]:
        """A module's scope, on its own device or on that of the nearest around it."""
        device: Device | None = None
        module: ImportedModule = self
        for name in ["", *path.split(".")] if path else [""]:
            module = module._parts[name] if name else module
            device = module.device or device
        return current_trace().scope(path, device)


def _spread(parameter: Parameter, columns: int) -> Parameter:
    """One number for every column."""

    def combine(*tensors: Float32) -> Float32:
        return np.broadcast_to(parameter.combine(*tensors), columns)

    return Parameter(shape=(columns,), checkpoint_tensors=parameter.checkpoint_tensors, combine=combine)


Operands = Sequence[Any]
"""Traced values; None where an input is absent, or is a state, which tracing makes anew."""

Names = Sequence[str]


def _attention(node: ir.Node, operands: Operands, names: Names) -> list[ir.Value]:
    qkv, cos, sin = operands[:3]
    attended = ops.cached_attention(
        qkv,
        cos,
        sin,
        num_heads=int_attribute(node, "num_heads"),
        num_kv_heads=int_attribute(node, "num_kv_heads"),
        head_dim=int_attribute(node, "head_dim"),
        scale=float_attribute(node, "scale"),
        window=int_attribute(node, "window"),
        name=names[0],
    )
    return [attended]


def _linear_attention(node: ir.Node, operands: Operands, names: Names) -> list[ir.Value]:
    attended = ops.linear_attention(
        *operands[:5],
        attn_type=str(node.attributes["attn_type"].value),
        num_k_heads=int_attribute(node, "num_k_heads"),
        num_v_heads=int_attribute(node, "num_v_heads"),
        head_k_dim=int_attribute(node, "head_k_dim"),
        head_v_dim=int_attribute(node, "head_v_dim"),
        name=names[0],
    )
    return [attended]


def _epsilon(node: ir.Node) -> float:
    return float_attribute(node, "epsilon")


OPERATORS: dict[tuple[str, str], Callable[[ir.Node, Operands, Names], Sequence[ir.Value]]] = {
    ("", "Gather"): lambda node, x, names: [ops.gather_rows(*x, name=names[0])],
    ("", "MatMul"): lambda node, x, names: [ops.matmul(*x, name=names[0])],
    ("", "Add"): lambda node, x, names: [ops.add(*x, name=names[0])],
    ("", "Mul"): lambda node, x, names: [ops.mul(*x, name=names[0])],
    ("", "Sigmoid"): lambda node, x, names: [ops.sigmoid(*x, name=names[0])],
    ("", "Tanh"): lambda node, x, names: [ops.tanh(*x, name=names[0])],
    ("", "Gelu"): lambda node, x, names: [ops.gelu_tanh(*x, name=names[0])],
    ("", "Split"): lambda node, x, names: ops.split_columns(*x, names=names),
    ("", "RMSNormalization"): lambda node, x, names: [
        ops.rms_normalization(*x, epsilon=_epsilon(node), name=names[0])
    ],
    (DOMAIN, "HeadNorm"): lambda node, x, names: [ops.head_norm(*x, epsilon=_epsilon(node), name=names[0])],
    (DOMAIN, "CachedAttention"): _attention,
    (DOMAIN, "LinearAttention"): _linear_attention,
}
"""The vocabulary, and how each of it is traced."""
