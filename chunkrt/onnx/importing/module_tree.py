"""Conversion of a graph of the vocabulary to a tree of modules: the last step of an import."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from chunkrt.graph.modules import Float32, Parameter
from chunkrt.onnx.importing.draft import Draft, int_attribute, width
from chunkrt.onnx.importing.names import ModuleNames
from chunkrt.onnx.importing.recorded_decoder import ON_CPU, OPERATORS, RecordedOperator, ReplayedDecoder

WEIGHTS = {
    ("Add", 1): ("", "bias"),
    ("LinearAttention", 3): ("conv", "weight"),
    ("LinearAttention", 4): ("conv", "bias"),
}
"""For operators with several constants, by input: the name of the module below the operator's own module, and the
attribute. Other constants are the weight of the operator's own module.
"""

OF_DELTA_RULE = {
    ("LinearAttention", 3): ("conv1d", "weight"),
    ("LinearAttention", 4): ("conv1d", "bias"),
}
OF_DECAY = {("Add", 1): ("", "dt_bias"), ("Mul", 1): ("", "rate")}
"""Like `WEIGHTS`, for the modules of the gated delta rule."""


def build_tree(draft: Draft, places: Mapping[ir.Node, ModuleNames], logit_rows: ir.Value) -> ReplayedDecoder:
    """Build the decoder of a draft.

    Args:
        places: module and names of outputs for each node of the draft's graph.

    Raises:
        UnsupportedModelError: an operator, or its use, is not in the vocabulary.
    """
    if unknown := [node for node in draft.graph if (node.domain, node.op_type) not in OPERATORS]:
        of_tokens = [n for n in unknown if not draft.evaluator.is_positional(n.outputs[0].name or "")]
        raise draft.unsupported((of_tokens or unknown)[0], "no pass recognises it in this position")
    for node in draft.graph:
        _check_use(draft, node, logit_rows)
    (tokens,) = (value for value in draft.graph.inputs if value.name == draft.signature.tokens)
    decoder = ReplayedDecoder(tokens, logit_rows, draft.logits)
    tables = _Tables(draft, decoder)
    for node in draft.graph:
        path, names = places[node]
        if node.op_type == "CachedAttention":
            tables.add(node)
        else:
            _add_weights(draft, decoder, node, path)
        attributes = {name: a.value for name, a in node.attributes.items()}
        decoder.add_step(
            RecordedOperator((node.domain, node.op_type), attributes, node.inputs, node.outputs, path, names)
        )
    decoder.named()
    for module in decoder.modules():
        if module.path.rpartition(".")[2] in ON_CPU:
            module.to("cpu")
    return decoder


def _check_use(draft: Draft, node: ir.Node, logit_rows: ir.Value) -> None:
    """Refuse a foreign node whose operator has the name of one of the vocabulary, but other operands or another
    meaning.
    """
    known = {*draft.weights, logit_rows, None}
    inputs = {draft.signature.tokens, *draft.signature.states}
    for value in (v for v in node.inputs if v not in known and v is not None and v.name not in inputs):
        if value.producer() is None or draft.evaluator.is_positional(value.name or ""):
            raise draft.unsupported(node, f"its operand {value.name!r} is neither made of tokens nor a weight here")
    wanted = {
        "Gather": node.inputs[0] in draft.weights or node.inputs[-1] is logit_rows,
        "Gelu": "approximate" in node.attributes and node.attributes["approximate"].value == "tanh",
        "MatMul": node.inputs[-1] in draft.weights,
        "Split": int_attribute(node, "axis") == -1 and len(node.inputs) == 1,
    }
    if not wanted.get(node.op_type, True):
        raise draft.unsupported(node, "this use of the operator is not supported")


def _add_weights(draft: Draft, decoder: ReplayedDecoder, node: ir.Node, path: str) -> None:
    for index, value in enumerate(node.inputs):
        if value is None or value not in draft.weights:
            continue
        parameter = draft.weights[value].parameter(draft.source)
        if parameter.shape == (1,):
            parameter = _spread(parameter, width(draft, node.inputs[0]) or 1)
        below, attribute = _kept(path).get((node.op_type, index), ("", "weight"))
        decoder.add_weight(value, f"{path}.{below}" if below else path, attribute, parameter)


def _kept(path: str) -> Mapping[tuple[str, int], tuple[str, str]]:
    """Return `WEIGHTS` for the module at a path."""
    last = path.rpartition(".")[2]
    return WEIGHTS | {"linear_attn": OF_DELTA_RULE, "decay": OF_DECAY}.get(last, {})


class _Tables:
    """Name rotary tables once for all layers that share them."""

    def __init__(self, draft: Draft, decoder: ReplayedDecoder) -> None:
        self._draft, self._decoder = draft, decoder
        self._known: dict[tuple[str, ...], str] = {}

    def add(self, node: ir.Node) -> None:
        """Name the tables of one attention node."""
        values = [value for value in node.inputs[1:3] if value is not None]
        weights = [self._draft.weights[value] for value in values]
        key = tuple(name for weight in weights for name in weight.tensors)
        path = self._known.setdefault(key, f"model.{self._name(node)}")
        for value, attribute, weight in zip(values, ("cos", "sin"), weights, strict=True):
            parameter = vars(self._decoder.part(path)).get(attribute) or weight.parameter(self._draft.source)
            self._decoder.add_weight(value, path, attribute, parameter)

    def _name(self, node: ir.Node) -> str:
        """Use Gemma's names: "local_rope" for layers with a window if the other layers have different tables."""
        windows = {int_attribute(other, "window") for other in self._draft.graph if other.op_type == node.op_type}
        name = "local_rope" if int_attribute(node, "window") and 0 in windows else "rope"
        taken = {path.rpartition(".")[2] for path in self._known.values()}
        return next(n for n in (name, *(f"{name}_{i}" for i in range(2, 1000))) if n not in taken)


def _spread(parameter: Parameter, columns: int) -> Parameter:
    """Expand one number to every column."""

    def combine(*tensors: Float32) -> Float32:
        return np.broadcast_to(parameter.combine(*tensors), columns)

    return Parameter(shape=(columns,), checkpoint_tensors=parameter.checkpoint_tensors, combine=combine)
