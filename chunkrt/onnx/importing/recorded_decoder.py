"""The result of an import: a decoder as a list of steps over a tree of modules, to which a graph of the vocabulary is
converted.

It has the form of decoders that `graph/decoders` builds from a config, so it is placed, traced, partitioned and loaded
like any other decoder.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from chunkrt.graph import ops
from chunkrt.graph.modules import Float32, Module, Parameter
from chunkrt.graph.operators import EXPERT_GROUPS
from chunkrt.graph.ops import current_trace
from chunkrt.graph.plan import DOMAIN, Attribute, Device
from chunkrt.onnx.importing.draft import Draft, int_attribute, width
from chunkrt.onnx.importing.names import ModuleNames

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
        soft_cap=attributes.get("soft_cap", 0.0),
        sinks=operands[3] if len(operands) > 3 else None,
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
    mixed = ops.routed_experts(
        *operands,
        top_k=attributes["top_k"],
        norm_topk_prob=bool(attributes["norm_topk_prob"]),
        use_sigmoid=bool(attributes.get("use_sigmoid", 0)),
        norm_epsilon=attributes.get("norm_epsilon", 0.0),
        swiglu_alpha=attributes.get("swiglu_alpha", 1.0),
        swiglu_limit=attributes.get("swiglu_limit", 0.0),
        uses_gelu=bool(attributes.get("uses_gelu", 0)),
        **{name: attributes.get(name, 1) for name in EXPERT_GROUPS},
        name=names[0],
    )
    return [mixed]


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
    ("", "Relu"): _plain(ops.relu),
    ("", "Sigmoid"): _plain(ops.sigmoid),
    ("", "Softplus"): _plain(ops.softplus),
    ("", "Tanh"): _plain(ops.tanh),
    ("", "Gelu"): _plain(ops.gelu_tanh),
    ("", "Concat"): lambda attributes, operands, names: [ops.concat(operands, name=names[0])],
    ("", "Split"): lambda attributes, operands, names: ops.split_columns(*operands, names=names),
    ("", "RMSNormalization"): _normalising(ops.rms_normalization),
    (DOMAIN, "HeadNorm"): _normalising(ops.head_norm),
    (DOMAIN, "CachedAttention"): _attention,
    (DOMAIN, "LinearAttention"): _linear_attention,
    (DOMAIN, "FloatLinear"): _plain(ops.float_linear),
    (DOMAIN, "RoutedExperts"): _experts,
}
"""Functions that trace the operators of the vocabulary, by domain and name."""


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
