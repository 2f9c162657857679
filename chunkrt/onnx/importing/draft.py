"""A foreign decoder while passes convert it to chunkrt's operators.

Passes replace nodes that they recognise by nodes of a small vocabulary, which `recorded_decoder.py` converts to
modules, and keep all other nodes. Values of the vocabulary are rows [T, N], where the exporter has [batch, T, N].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from chunkrt.errors import UnsupportedModelError
from chunkrt.graph.modules import Float32, Parameter, Share
from chunkrt.graph.ops import attribute
from chunkrt.graph.parallel import LinearWeight
from chunkrt.graph.plan import DOMAIN, Attribute
from chunkrt.onnx.importing.evaluation import Evaluator
from chunkrt.onnx.importing.masks import Masks
from chunkrt.onnx.importing.onnx_source import OnnxSource, OnnxWeight
from chunkrt.onnx.importing.regions import Regions
from chunkrt.onnx.importing.signature import Signature

CONTRIB = "com.microsoft"

Layout = Literal["linear", "as it is", "heads"]


@dataclass(frozen=True, kw_only=True)
class Weight:
    """Definition of a constant of the graph by concatenated tensors of the source.

    Attributes:
        layout: "linear" makes [in, out] from tensors [out, in]; "as it is" joins tensors along their first axis;
            "heads"
            repeats each vector as `repeats` states, which makes [heads, head_dim].
        rows: the selected rows of the joined tensors; None for all.
        scale: factor of all values.
    """

    tensors: tuple[str, ...]
    layout: Layout
    rows: NDArray[np.int64] | None = None
    repeats: tuple[int, ...] = ()
    scale: float = 1.0

    def shape(self, source: OnnxSource) -> tuple[int, ...]:
        """Return the shape of the weight in the graph."""
        shapes = [source.info(name).shape for name in self.tensors]
        if self.layout == "heads":
            return sum(self.repeats), shapes[0][0]
        first = sum(shape[0] for shape in shapes) if self.rows is None else len(self.rows)
        return (shapes[0][1], first) if self.layout == "linear" else (first, *shapes[0][1:])

    def parameter(self, source: OnnxSource) -> Parameter:
        """Return a parameter that loads the weight."""

        def combine(*tensors: Float32) -> Float32:
            if self.layout == "heads":
                return np.repeat(np.stack(tensors), self.repeats, axis=0)
            whole = tensors[0] if len(tensors) == 1 else np.concatenate(tensors)
            whole = whole if self.rows is None else whole[self.rows]
            whole = whole if self.scale == 1 else whole * np.float32(self.scale)
            return whole.T if self.layout == "linear" else whole

        tensors, shape = {name: source.info(name).shape for name in self.tensors}, self.shape(source)
        if self.layout != "linear":
            return Parameter(shape=shape, checkpoint_tensors=tensors, combine=combine)
        num_rows = sum(rows for rows, _ in tensors.values())
        rows = Share.whole(num_rows) if self.rows is None else Share.of(num_rows, self.rows)
        return LinearWeight(
            shape=shape, checkpoint_tensors=tensors, combine=combine, rows=rows, depth=Share.whole(shape[0])
        )


@dataclass
class Draft:
    """The graph under conversion, with its properties.

    Attributes:
        logits_index: index of the logits among the graph's outputs.
        weights: the source of each constant that nodes of the vocabulary read.
    """

    where: str
    model: ir.Model
    evaluator: Evaluator
    source: OnnxSource
    logits_index: int
    weights: dict[ir.Value, Weight] = field(default_factory=dict)
    _kept: dict[tuple[str, bool], str] = field(default_factory=dict)

    @cached_property
    def masks(self) -> Masks:
        """The masks of the foreign graph."""
        return Masks(self.evaluator)

    @cached_property
    def regions(self) -> Regions:
        """Parts of the foreign graph that can be run on chosen values."""
        return Regions(self.evaluator)

    @property
    def signature(self) -> Signature:
        """Names of the foreign graph's inputs and outputs."""
        return self.evaluator.signature

    @property
    def graph(self) -> ir.Graph:
        """The graph, which passes change in place."""
        return self.model.graph

    @property
    def logits(self) -> ir.Value:
        """Output of the LM head."""
        return self.graph.outputs[self.logits_index]

    def add_weight(self, weight: Weight) -> ir.Value:
        """Add a constant to the graph."""
        value = ir.Value()
        self.weights[value] = weight
        return value

    def keep(self, name: str, tensor: OnnxWeight, *, is_transposed: bool = False) -> str:
        """Put a tensor into the source, once for each value of the foreign graph, and return its name in the source."""
        key = name, is_transposed
        if key not in self._kept:
            self._kept[key] = self.source.add(name, tensor)
        return self._kept[key]

    def shape(self, weight: ir.Value) -> tuple[int, ...]:
        """Return the shape of a constant that is in `weights`."""
        return self.weights[weight].shape(self.source)

    def insert(
        self,
        before: ir.Node,
        op: str,
        inputs: Sequence[ir.Value | None],
        *,
        domain: str = "",
        num_outputs: int = 1,
        **attributes: Attribute,
    ) -> Sequence[ir.Value]:
        """Insert a node of the vocabulary before another node, and return its outputs."""
        of_node = [attribute(name, value) for name, value in attributes.items()]
        node = ir.Node(domain, op, inputs, of_node, num_outputs=num_outputs, name=before.name)
        self.graph.insert_before(before, node)
        return node.outputs

    def replace(self, old: ir.Value, new: ir.Value) -> None:
        """Make all readers of a value read another value."""
        old.replace_all_uses_with(new, replace_graph_outputs=True)

    def prune(self) -> None:
        """Remove nodes on which the logits do not depend: a pass of the import.

        Requires: nothing. Ensures: the only outputs are the logits, and they depend on every node.
        """
        logits = self.logits
        self.graph.outputs[:] = [logits]
        self.logits_index = 0
        for node in reversed(list(self.graph)):
            if not any(output.uses() or output is logits for output in node.outputs):
                self.graph.remove(node, safe=True)

    def unsupported(self, node: ir.Node, reason: str) -> UnsupportedModelError:
        """Return an error that names a node, its operator and the operator's domain."""
        return UnsupportedModelError(
            f"{self.where}: node {node.name!r}, an operator {node.op_type} of the domain "
            f"{node.domain or 'ai.onnx'}, cannot be imported: {reason}"
        )


def producer(value: ir.Value | None, op: str, domain: str = "") -> ir.Node | None:
    """Return the node that makes a value, if it has the given operator; otherwise None."""
    node = None if value is None else value.producer()
    return node if node is not None and (node.domain, node.op_type) == (domain, op) else None


def int_attribute(node: ir.Node, name: str, default: int = 0) -> int:
    """Return the value of a whole-number attribute."""
    found = node.attributes.get(name)
    return default if found is None else int(found.value)


def float_attribute(node: ir.Node, name: str, default: float = 0.0) -> float:
    """Return the value of a numeric attribute."""
    found = node.attributes.get(name)
    return default if found is None else float(found.value)


def input_of(node: ir.Node, index: int) -> ir.Value | None:
    """Return an input, or None if it is absent."""
    return node.inputs[index] if index < len(node.inputs) else None


SAME = {
    ("", "Add"),
    ("", "Mul"),
    ("", "Relu"),
    ("", "Sigmoid"),
    ("", "Gelu"),
    ("", "Tanh"),
    ("", "RMSNormalization"),
    (DOMAIN, "HeadNorm"),
}
"""Operators of the vocabulary whose result is as wide as their first operand."""


def groups_of(columns: ir.Node) -> int:
    """Return the number of equal groups of a row, from each of which a Columns node takes the same columns."""
    return int(columns.attributes["groups"].value)


def width(draft: Draft, value: ir.Value | None) -> int | None:
    """Return the number of columns of a value that an operator of the vocabulary made; None for other values."""
    while value is not None and (node := value.producer()) is not None:
        kind = node.domain, node.op_type
        if kind == ("", "MatMul") and node.inputs[1] in draft.weights:
            return draft.shape(node.inputs[1])[1]
        if kind == ("", "Gather") and node.inputs[0] in draft.weights:
            return draft.shape(node.inputs[0])[1]
        if kind == (DOMAIN, "Columns"):
            return groups_of(node) * (int(node.attributes["stop"].value) - int(node.attributes["start"].value))
        if kind == (DOMAIN, "CachedAttention"):
            return int(node.attributes["num_heads"].value) * int(node.attributes["head_dim"].value)
        if kind == (DOMAIN, "LinearAttention"):
            return int(node.attributes["num_v_heads"].value) * int(node.attributes["head_v_dim"].value)
        if kind not in SAME:
            return None
        value = node.inputs[0]
    return None
