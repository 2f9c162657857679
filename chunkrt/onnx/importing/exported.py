"""Decoders that `chunkrt export` wrote, with the plan in the file's metadata and weights under the plan's names.

A fixed window has caches that shift and masks as inputs, so its graph does not define a decoder of any length. The plan
from the metadata is therefore used and checked: the decoder that is made from it must yield the same plan, and
`comparison.py` compares it with the file's own graph.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from math import isfinite
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from chunkrt.errors import ChunkrtError, ModelError, UnsupportedModelError
from chunkrt.graph.modules import Parameter
from chunkrt.graph.operators import is_dynamic
from chunkrt.graph.ops import trace
from chunkrt.graph.partition import partition
from chunkrt.graph.plan import ATTENTION_OPS, Node, Plan, resolve
from chunkrt.graph.rope import RotaryTable
from chunkrt.graph.rotary_tables import FUNCTIONS
from chunkrt.onnx.importing.constants import stored
from chunkrt.onnx.importing.draft import Draft, Weight
from chunkrt.onnx.importing.onnx_source import transposed
from chunkrt.onnx.importing.recorded_decoder import OPERATORS, RecordedOperator, ReplayedDecoder

PLAN_KEY, ROPE_KEY, SETTINGS_KEY = "chunkrt.plan", "chunkrt.rope", "chunkrt.export"

MAX_TABLE = 2**28
"""Largest number of elements of a rotary table."""


def metadata_of(proto: onnx.ModelProto) -> dict[str, str]:
    """Return a model's metadata; chunkrt's exports have their plan there, under `PLAN_KEY`."""
    return {entry.key: entry.value for entry in proto.metadata_props}


def export_settings(proto: onnx.ModelProto) -> Mapping[str, Any]:
    """Return the settings of a model's export; empty if another tool wrote the model. The settings of a fixed window
    include its sizes.

    Raises:
        ModelError: the settings are invalid.
    """
    try:
        settings = json.loads(metadata_of(proto).get(SETTINGS_KEY, "{}"))
        if settings.get("form") == "window" and not all(int(settings[key]) > 0 for key in ("sequence", "context")):
            found = f"sequence is {settings['sequence']} and context is {settings['context']}"
            raise ValueError(f"{found}, expected numbers above 0")
        return dict(settings)
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise ModelError(f"the metadata {SETTINGS_KEY!r} is damaged ({error}); export the model again") from error


def refuse_other_exports(proto: onnx.ModelProto, name: str) -> None:
    """Raise UnsupportedModelError if chunkrt wrote the model in a form that cannot be imported, or ModelError if the
    settings are invalid.
    """
    settings = export_settings(proto)
    forms = {
        f"--weights {settings.get('weights')}": settings.get("weights", "float") != "float",
        f"--batch {settings.get('batch')}": settings.get("batch", 1) != 1,
        "--no-cache": not settings.get("cache", True),
    }
    for option in (option for option, is_used in forms.items() if is_used):
        raise UnsupportedModelError(f"{name} was exported with {option}; use the checkpoint")


def replay_plan(draft: Draft) -> ReplayedDecoder:
    """Build the decoder of an exported plan.

    Raises:
        ModelError: the plan is damaged, or does not match the file's weights.
        UnsupportedModelError: the file lacks the frequencies that extend its rotary tables.
    """
    try:
        plan = Plan.from_json(draft.model.metadata_props[PLAN_KEY])
        draft.source.architecture = plan.family
        decoder = _decoder(draft, plan)
        found = partition(trace(decoder), family=plan.family)
    except UnsupportedModelError:
        raise
    except ChunkrtError as error:
        raise ModelError(f"{draft.where}: the plan that it was exported from is damaged: {error}") from error
    except (KeyError, ValueError, TypeError, AssertionError, AttributeError, IndexError) as error:
        raise ModelError(
            f"{draft.where}: the plan that it was exported from is damaged ({type(error).__name__}: {error})"
        ) from error
    if found.to_json() != plan.to_json():
        raise ModelError(f"{draft.where}: the plan that it was exported from contradicts itself; export it again")
    return decoder


def _decoder(draft: Draft, plan: Plan) -> ReplayedDecoder:
    decoder = ReplayedDecoder("input_ids", "logit_rows", plan.output)
    devices: dict[str, str] = {}
    for subgraph in plan.subgraphs:
        for node in subgraph.nodes:
            if (node.domain, node.op) not in OPERATORS:
                raise ModelError(
                    f"node {node.name!r} has the unknown operator {node.op!r} of the domain {node.domain!r}"
                )
            path = node.name.rpartition(".")[0]
            is_elsewhere = subgraph.device != ("cpu" if is_dynamic(node.domain, node.op) else "npu")
            if is_elsewhere or devices.get(path):
                devices[path] = subgraph.device
            decoder.add_step(_step(node, path, plan))
    linears = {node.inputs[1] for s in plan.subgraphs for node in s.nodes if node.op in ("MatMul", "FloatLinear")}
    tables = _tables(draft, plan)
    for tensor in plan.tensors.values():
        if tensor.kind == "weight":
            path, _, attribute = tensor.name.rpartition(".")
            shape = resolve(tensor.shape, {})
            parameter = tables.get(tensor.name) or _weight(draft, tensor.name, shape, is_linear=tensor.name in linears)
            decoder.add_weight(tensor.name, path, attribute, parameter)
    decoder.named()
    for module in decoder.modules():
        if device := devices.get(module.path):
            module.device = "cpu" if device == "cpu" else "npu"
    return decoder


def _step(node: Node, path: str, plan: Plan) -> RecordedOperator:
    names = [name.removeprefix(f"{path}.") if path else name for name in node.outputs]
    attributes, inputs = dict(node.attributes), [name or None for name in node.inputs]
    if node.op in ATTENTION_OPS:
        qkv, position, rope_position, cos, sin, *others = inputs
        if plan.long_context_from is not None and rope_position != position:
            attributes["long_context_from"] = plan.long_context_from
        inputs = [qkv, cos, sin, *([sinks] if (sinks := next(iter(others[2:]), None)) else [])]
    return RecordedOperator((node.domain, node.op), attributes, inputs, node.outputs, path, names)


def _weight(draft: Draft, name: str, shape: tuple[int, ...], *, is_linear: bool) -> Parameter:
    """Return a weight by its name in the plan; the weight of a tied LM head is a Transpose of the embedding."""
    value = draft.graph.initializers.get(name)
    if value is None:
        value = next((v for node in draft.graph for v in node.outputs if v.name == name), None)
    if value is None or name not in draft.evaluator.constants:
        raise ModelError(f"the file has no weight {name}")
    tensor = stored(draft, value)
    if tensor.shape != shape:
        raise ModelError(f"the weight {name} is {list(tensor.shape)}, the plan has {list(shape)}")
    kept = draft.keep(name, transposed(tensor) if is_linear else tensor)
    return Weight(tensors=(kept,), layout="linear" if is_linear else "as it is").parameter(draft.source)


def _tables(draft: Draft, plan: Plan) -> dict[str, Parameter]:
    """Return rotary tables by name, made from the frequencies in the file."""
    found: dict[str, Parameter] = {}
    known = json.loads(draft.model.metadata_props.get(ROPE_KEY, "{}"))
    nodes = [node for s in plan.subgraphs for node in s.nodes if node.op in ATTENTION_OPS]
    if unknown := {node.inputs[3].rpartition(".")[0] for node in nodes} - known.keys():
        raise UnsupportedModelError(
            f"{draft.where} has rows of {min(unknown)} without its frequencies, because it was "
            "exported from an ONNX decoder; import that one"
        )
    for path, rope in known.items():
        frequencies, magnitude = _checked(rope)
        for suffix in FUNCTIONS:
            shape = resolve(plan.tensors[f"{path}.{suffix}"].shape, {})
            rows = plan.context_length * len(frequencies)
            if shape != (rows, frequencies.shape[1]) or rows * frequencies.shape[1] > MAX_TABLE:
                raise ModelError(f"the table {path}.{suffix} is {list(shape)}, of {rows} positions")
            recipe = np.hstack([np.full((len(frequencies), 1), magnitude), frequencies])
            table = RotaryTable(
                shape=shape, checkpoint_tensors={}, make_recipe=partial(np.copy, recipe), function=suffix
            )
            is_marked = bool(plan.tensors[f"{path}.{suffix}"].rotary)  # older exports do not have the field
            found[f"{path}.{suffix}"] = table if is_marked else _as_weight(table, draft)
    return found


def _as_weight(table: RotaryTable, draft: Draft) -> Parameter:
    """Return a rotary table as an ordinary weight."""
    return Parameter(shape=table.shape, checkpoint_tensors={}, combine=partial(table.load, draft.source))


def _checked(rope: Mapping[str, Any]) -> tuple[NDArray[np.float64], float]:
    frequencies, magnitude = np.array(rope["frequencies"], np.float64), float(rope["magnitude"])
    if frequencies.ndim != 2 or not frequencies.size or not np.isfinite(frequencies).all() or not isfinite(magnitude):
        raise ModelError("its rotary frequencies are not numbers")
    return frequencies, magnitude
