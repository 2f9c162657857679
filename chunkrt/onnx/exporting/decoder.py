"""Common parts of both export forms: names of inputs and outputs, weights, metadata."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict

import onnx_ir as ir
from onnx_ir.passes.common import ShapeInferencePass

from chunkrt.errors import ConfigError, UnsupportedModelError
from chunkrt.graph.linear_attention import LINEAR_ATTENTION_OP
from chunkrt.graph.modules import Embedding
from chunkrt.graph.partition import Planned
from chunkrt.graph.plan import ATTENTION_OPS, Node, Plan, Tensor
from chunkrt.graph.rope import RotaryTables
from chunkrt.onnx.exporting.emitter import Emitter
from chunkrt.onnx.exporting.operators import LOWERINGS
from chunkrt.onnx.exporting.settings import Settings, WindowSettings

PLAN_KEY, SETTINGS_KEY, ROPE_KEY = "chunkrt.plan", "chunkrt.export", "chunkrt.rope"
"""Keys of a model's metadata: the plan, the export's settings, and the rotary tables' frequencies."""

_STATES = {"key_cache": "key", "value_cache": "value"}

Dimensions = Sequence[int | str]
EmitLayer = Callable[[Node, Sequence[ir.Value]], Sequence[ir.Value]]
"""A function that adds a layer with state, and maps its old states to the new states."""


def make_emitter(planned: Planned, *, opset: int, dtype: ir.DataType) -> Emitter:
    """Make an emitter for a checkpoint's weights; an LM head that is tied to the embedding shares its table.

    Raises UnsupportedModelError if the checkpoint has no LM head.
    """
    if not planned.plan.has_head:
        raise UnsupportedModelError(
            f"{planned.source.path.name} has no LM head, and embedding models cannot be exported"
        )
    shapes = {name: tensor.shape for name, tensor in planned.plan.tensors.items()}
    return Emitter(opset=opset, dtype=dtype, shapes=shapes, load=planned.load, tied=_tied(planned))


def has(plan: Plan, *ops: str) -> bool:
    """Return whether the plan has one of these operators."""
    return any(node.op in ops for subgraph in plan.subgraphs for node in subgraph.nodes)


def emit_decoder(
    e: Emitter,
    plan: Plan,
    layer: EmitLayer,
    describe: Callable[[Tensor], tuple[ir.DataType, Dimensions, Dimensions]],
    rows: Dimensions,
) -> None:
    """Add all of a plan's nodes, its state as inputs and outputs, and its logits.

    Args:
        layer: adds nodes with state.
        describe: returns the type of a state, and its shapes as an input and as an output.
        rows: the first dimensions of input_ids and logits.

    Raises:
        UnsupportedModelError: an operator has no form for export.
    """
    names = state_names(plan)
    states = {
        tensor.name: e.input(f"past_key_values.{names[tensor.name]}", dtype, past)
        for tensor in plan.state_tensors
        for dtype, past, _ in [describe(tensor)]
    }
    new: dict[str, ir.Value] = {}
    for node in (node for subgraph in plan.subgraphs for node in subgraph.nodes):
        mine = [name for name in node.inputs if name in states]
        if node.op in (*ATTENTION_OPS, LINEAR_ATTENTION_OP):
            new |= zip(mine, layer(node, [states[name] for name in mine]), strict=True)
        else:
            emit_node(e, node)
    e.output(e.read(plan.output, e.dtype), "logits", [*rows, plan.vocab_size])
    for tensor in plan.state_tensors:
        _, _, present = describe(tensor)
        e.output(new[tensor.name], f"present.{names[tensor.name]}", present)


def emit_node(e: Emitter, node: Node) -> None:
    """Add a node without state. Raises UnsupportedModelError if its operator has no form for export."""
    if node.op == "Gather" and node.inputs[1] == "logit_rows":
        e.alias(node.outputs[0], e.read(node.inputs[0]))  # all rows get logits
    elif (node.domain, node.op) in LOWERINGS:
        LOWERINGS[node.domain, node.op](e, node)
    else:
        raise UnsupportedModelError(f"{node.name} is a {node.domain or 'standard'} {node.op}, which has no ONNX form")


def state_names(plan: Plan) -> dict[str, str]:
    """Map each state tensor to its name in the model's inputs and outputs, such as "3.key" or "3.conv_state".

    The number is the index of the module among those that own states, regardless of the names of the family's layers.
    """
    names: dict[str, str] = {}
    owners: dict[str, int] = {}
    for tensor in plan.state_tensors:
        owner, _, kind = tensor.name.rpartition(".")
        names[tensor.name] = f"{owners.setdefault(owner, len(owners))}.{_STATES.get(kind, kind)}"
    return names


def metadata(planned: Planned, settings: Settings) -> dict[str, str]:
    """Return the metadata of the model: the plan, the settings, and the frequencies of the rotary tables."""
    form = "window" if isinstance(settings, WindowSettings) else "dynamic"
    rope = {
        module.path: {
            "frequencies": [table.tolist() for table in module.frequencies(planned.source)],
            "magnitude": module.magnitude,
        }
        for module in planned.decoder.modules()
        if isinstance(module, RotaryTables)
    }
    plan = json.dumps(asdict(planned.plan), separators=(",", ":"))
    return {PLAN_KEY: plan, SETTINGS_KEY: json.dumps({"form": form, **asdict(settings)}), ROPE_KEY: json.dumps(rope)}


def with_shapes(model: ir.Model) -> ir.Model:
    """Return the model, with all value shapes that ONNX's shape inference finds."""
    return ShapeInferencePass(check_type=True, strict_mode=True, data_prop=True)(model).model


def check_length(plan: Plan, option: str, length: int) -> None:
    """Raise ConfigError if the length exceeds the model's context."""
    if length > plan.context_length:
        raise ConfigError(f"{option} is {length}, longer than the model's context of {plan.context_length}")


def _tied(planned: Planned) -> dict[str, str]:
    """Return the weights that are the transpose of the embedding's table."""
    tables = [m.weight for m in planned.decoder.modules() if isinstance(m, Embedding) and m.scale == 1]
    return {
        parameter.name: table.name
        for table in tables
        for parameter in planned.decoder.parameters()
        if parameter is not table
        and parameter.checkpoint_tensors.keys() == table.checkpoint_tensors.keys()
        and parameter.shape == table.shape[::-1]
    }
