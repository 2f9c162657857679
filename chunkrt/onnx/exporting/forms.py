"""The forms of an export; docs/onnx.md describes the contract.

In the fixed-window form every shape is static, and caches are inputs and outputs. The dynamic form takes any number of
rows after any number of positions, with the names that ONNX Runtime GenAI expects. Its attention is ONNX Runtime's own
`GroupQueryAttention`, which rotates queries and keys and caches rotated keys.

For an NPU's compiler, the static subgraphs of the plan are separate models with a fixed number of rows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass, ShapeInferencePass

from chunkrt.backends.onnx.lowering import missing_expansion
from chunkrt.backends.registry import qualified
from chunkrt.errors import ConfigError, UnsupportedModelError, cause_of
from chunkrt.files import remove
from chunkrt.graph.linear_attention import LINEAR_ATTENTION_OP
from chunkrt.graph.modules import Embedding
from chunkrt.graph.partition import Planned
from chunkrt.graph.plan import (
    ATTENTION_OPS,
    DOMAIN,
    POSITIONS_OP,
    Node,
    Plan,
    Subgraph,
    Tensor,
    linear_weights,
    reads_shared_cache,
    resolve,
)
from chunkrt.graph.rope import RotaryTables
from chunkrt.onnx.exporting.emitter import CONTRIB_DOMAIN, FLOAT, INT64, Emitter
from chunkrt.onnx.exporting.export_settings import DynamicSettings, Settings, SubgraphSettings, WindowSettings
from chunkrt.onnx.exporting.integer_weights import check_integer_weights
from chunkrt.onnx.exporting.lowerings import LOWERINGS
from chunkrt.onnx.exporting.save import check_output, save_model
from chunkrt.onnx.exporting.window_attention import WindowAttention
from chunkrt.onnx.exporting.window_expansions import WindowExpansions, emit_expanded, has_state, is_expanded
from chunkrt.onnx.exporting.window_linear_attention import LINEAR_ATTENTION_FORMS, WindowLinearAttention

PLAN_KEY, SETTINGS_KEY, ROPE_KEY = "chunkrt.plan", "chunkrt.export", "chunkrt.rope"
"""Keys of a model's metadata: the plan, the export's settings, and the rotary tables' frequencies."""

_STATES = {"key_cache": "key", "value_cache": "value"}

Dimensions = Sequence[int | str]
EmitLayer = Callable[[Node, Sequence[ir.Value]], Sequence[ir.Value]]
"""A function that adds a layer with state, and maps its old states to the new states."""


def make_emitter(planned: Planned, settings: Settings, rows: Dimensions) -> Emitter:
    """Make an emitter for a checkpoint's weights; an LM head that is tied to the embedding shares its table.

    Raises UnsupportedModelError if the checkpoint has no LM head, or weights that the settings do not cover.
    """
    if not planned.plan.has_head:
        raise UnsupportedModelError(
            f"{planned.source.path.name} has no LM head, and embedding models cannot be exported"
        )
    shapes = {name: tensor.shape for name, tensor in planned.plan.tensors.items()}
    tied = tied_weights(planned)
    check_integer_weights(planned, settings.weights, tied)
    return Emitter(
        opset=settings.opset,
        dtype=settings.tensor_type,
        shapes=shapes,
        load=planned.load,
        tied=tied,
        weights=settings.weights,
        linears=linear_weights(planned.plan),
        rows=rows,
    )


def has(plan: Plan, *ops: str) -> bool:
    """Return whether the plan has one of these operators."""
    return any(node.op in ops for subgraph in plan.subgraphs for node in subgraph.nodes)


def emit_decoder(
    e: Emitter,
    plan: Plan,
    layer: EmitLayer,
    describe: Callable[[Tensor], tuple[ir.DataType, Dimensions, Dimensions]],
    *,
    last_only: bool = False,
    cached: bool = True,
) -> None:
    """Add all of a plan's nodes, its state as inputs and outputs, and its logits.

    Args:
        layer: adds nodes with state.
        describe: returns the type of a state, and its shapes as an input and as an output.
        last_only: whether only the last row gets logits.
        cached: whether the states are inputs and outputs; without that, each run begins with zeros.

    Raises:
        UnsupportedModelError: an operator has no form for export.
    """
    if refusal := _shared_cache_refusal(plan):
        raise UnsupportedModelError(f"{plan.family} cannot be exported: {refusal}; run it with chunkrt itself")
    names = state_names(plan)
    states = {
        tensor.name: (e.input if cached else e.zeros)(f"past_key_values.{names[tensor.name]}", dtype, past)
        for tensor in plan.state_tensors
        for dtype, past, _ in [describe(tensor)]
    }
    new: dict[str, ir.Value] = {}
    for node in (node for subgraph in plan.subgraphs for node in subgraph.nodes):
        mine = [name for name in node.inputs if name in states]
        if mine:
            new |= zip(mine, layer(node, [states[name] for name in mine]), strict=True)
        elif last_only and _selects_rows(node):
            e.cut(e.read(node.inputs[0]), -1, np.iinfo(np.int32).max, axis=1, name=node.outputs[0])
            e.rows = [e.rows[0], 1]
        else:
            emit_node(e, plan, node)
    e.output(e.read(plan.output, e.dtype), "logits", [*e.rows, plan.vocab_size])
    for tensor in plan.state_tensors if cached else ():
        _, _, present = describe(tensor)
        e.output(new[tensor.name], f"present.{names[tensor.name]}", present)


def emit_node(e: Emitter, plan: Plan, node: Node) -> None:
    """Add a node without state. Raises UnsupportedModelError if its operator has no form for export."""
    if _selects_rows(node):
        e.alias(node.outputs[0], e.read(node.inputs[0]))  # all rows get logits
    elif node.op == POSITIONS_OP:
        _emit_positions(e, node)
    elif (node.domain, node.op) in LOWERINGS:
        LOWERINGS[node.domain, node.op](e, node)
    elif is_expanded(node):
        emit_expanded(e, plan, node)
    else:
        raise UnsupportedModelError(_lack(plan, node))


def _emit_positions(e: Emitter, node: Node) -> None:
    """Add rows of a table of learned positions, at the input "position_ids"."""
    hidden, table, _ = node.inputs
    (out,) = node.outputs
    rows = e.op("Gather", e.read(table, FLOAT), e.read("position_ids"), name=f"{out}/rows", axis=0)
    total = e.op("Add", e.read(hidden, FLOAT), rows, name=f"{out}/float")
    e.alias(out, e.cast(total, e.dtype))


def _selects_rows(node: Node) -> bool:
    """Return whether a node selects the rows that get logits."""
    return node.op == "Gather" and node.inputs[1] == "logit_rows"


def window_refusal(plan: Plan) -> str:
    """Return the reason why a decoder cannot be exported with a fixed window; empty if it can."""
    if not plan.has_head:
        return "it has no LM head"
    if refusal := _shared_cache_refusal(plan):
        return refusal
    nodes = (node for subgraph in plan.subgraphs for node in subgraph.nodes)
    return next((lack for node in nodes if (lack := _lack(plan, node))), "")


def _lack(plan: Plan, node: Node) -> str:
    """Return the reason why a node cannot be exported with a fixed window; empty if it can."""
    if node.op == LINEAR_ATTENTION_OP:
        kind = str(node.attributes["attn_type"])
        is_known = kind in LINEAR_ATTENTION_FORMS or is_expanded(node)
        return "" if is_known else f"linear attention of the kind {kind!r} has no ONNX form of fixed length"
    if node.op in (*ATTENTION_OPS, POSITIONS_OP) or (node.domain, node.op) in LOWERINGS:
        return ""
    if not is_expanded(node):
        remedy = "; register it with an expansion" if node.domain not in ("", DOMAIN) else ""
        return f"{node.name} is a {qualified(node.domain, node.op)}, which has no ONNX form{remedy}"
    if fault := missing_expansion(node):
        return fault
    tensors = [plan.tensors[name] for name in node.inputs if name]
    odd = [t.name for t in tensors if t.name in plan.inputs or (t.kind == "state" and {"P", "W"} & set(t.shape))]
    return f"{node.name} reads {odd[0]}, which the expansion of an operator cannot take in an export" if odd else ""


def _shared_cache_refusal(plan: Plan) -> str:
    """Return the reason why layers that read the caches of other layers cannot be exported; empty without them."""
    readers = [node.name for s in plan.subgraphs for node in s.nodes if reads_shared_cache(node)]
    return f"{readers[0]} reads the KV cache of another layer, which has no ONNX form" if readers else ""


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


def without_dual_chunks(planned: Planned, option: str, length: int) -> Planned:
    """Return a checkpoint whose context ends where dual chunk attention begins to change results. Raise
    UnsupportedModelError if the length exceeds that context.
    """
    plan, most = planned.plan, planned.plan.plain_context
    if not plan.rope_period:
        return planned
    if length > most:
        raise UnsupportedModelError(
            f"{option} is {length}, but in contexts of more than {most} tokens {plan.family} has dual chunk attention, "
            f"which has no ONNX form; choose at most {most}"
        )
    return replace(planned, plan=replace(plan.within(most), context_length=most))


def tied_weights(planned: Planned) -> dict[str, str]:
    """Return the weights that are the transpose of the embedding's table."""
    tables = [m.weight for m in planned.decoder.modules() if isinstance(m, Embedding) and m.scale == 1]
    return {
        parameter.name: table.name
        for table in tables
        for parameter in planned.decoder.parameters()
        if parameter is not table
        and np.all(np.equal(getattr(parameter, "factor", 1), 1))
        and parameter.checkpoint_tensors.keys() == table.checkpoint_tensors.keys()
        and parameter.shape == table.shape[::-1]
    }


def window_model(planned: Planned, settings: WindowSettings) -> ir.Model:
    """Build a decoder that runs `settings.window` rows at a time; its weights are read when it is written.

    Raises:
        ConfigError: the sequence is longer than the model's context.
        UnsupportedModelError: an operator of the model has no form of fixed length.
    """
    check_length(planned.plan, "--sequence", settings.sequence)
    planned = without_dual_chunks(planned, "--sequence", settings.sequence)
    plan, window, batch = planned.plan, settings.window, settings.batch
    if has(plan, POSITIONS_OP) and settings.keys != "post-rope":
        raise ConfigError(
            f"{plan.family} has learned positions, which the slot in the cache does not determine; use --keys post-rope"
        )
    e = make_emitter(planned, settings, [batch, window])
    e.input("input_ids", INT64, [batch, window])
    is_token = e.input("attention_mask", INT64, [batch, settings.sequence])
    if settings.keys == "post-rope" and has(plan, *ATTENTION_OPS):
        e.input("position_ids", INT64, [batch, window])
    if settings.sinks and has(plan, *ATTENTION_OPS):
        e.input("past_length", INT64, [1])
    first_row = plan.rope_offset(settings.sequence)
    attention = WindowAttention(e, settings, slice(first_row, first_row + plan.context_length))
    linear_attention = WindowLinearAttention(e, window, is_token, settings.sequence)
    expansions = WindowExpansions(e, plan, window, is_token, settings.sequence)

    def layer(node: Node, states: Sequence[ir.Value]) -> Sequence[ir.Value]:
        if node.op in ATTENTION_OPS:
            return attention.layer(node, states)
        if node.attributes.get("attn_type") in LINEAR_ATTENTION_FORMS:
            return linear_attention.layer(node, states)
        if lack := _lack(plan, node):
            raise UnsupportedModelError(lack)
        return expansions.layer(node, states)

    def describe(state: Tensor) -> tuple[ir.DataType, list[int], list[int]]:
        is_cache = bool({"P", "W"} & set(state.shape))
        shape = [batch, *resolve(state.shape, {"P": settings.context, "W": settings.context})]
        return e.dtype if is_cache else FLOAT, shape, shape

    emit_decoder(e, plan, layer, describe, last_only=settings.logits == "last", cached=settings.cache)
    model = e.model(metadata=metadata(planned, settings), name=plan.family)
    return with_shapes(model if settings.cache else RemoveUnusedNodesPass()(model).model)


HEAD_STEP = 16
"""Divisor of the number of a head's dimensions in GroupQueryAttention."""

INT32 = ir.DataType.INT32
BATCH, ROWS, PAST, TOTAL = "batch_size", "sequence_length", "past_sequence_length", "total_sequence_length"


def dynamic_model(planned: Planned, settings: DynamicSettings) -> ir.Model:
    """Build a decoder with caches that grow; its weights are read when it is written.

    Raises:
        ConfigError: the context is longer than the model's.
        UnsupportedModelError: the model has layers that the dynamic form does not support.
    """
    check_length(planned.plan, "--context", settings.context)
    planned = without_dual_chunks(planned, "--context", settings.context)
    plan = planned.plan
    if has(plan, POSITIONS_OP):
        raise UnsupportedModelError(
            f"{plan.family} has learned positions, which the dynamic form does not support; export a fixed window with "
            "--keys post-rope"
        )
    if has(plan, LINEAR_ATTENTION_OP):
        raise UnsupportedModelError(
            f"{plan.family} has layers of linear attention, which the dynamic form does not support; export a fixed "
            "window"
        )
    nodes = [node for subgraph in plan.subgraphs for node in subgraph.nodes]
    attention = [node for node in nodes if node.op in ATTENTION_OPS]
    if recurrent := [node for node in nodes if node not in attention and has_state(plan, node)]:
        raise UnsupportedModelError(
            f"{recurrent[0].name} is a {qualified(recurrent[0].domain, recurrent[0].op)} with state, which the dynamic "
            "form does not support; export a fixed window"
        )
    if uneven_dims := [dim for node in attention if cast(int, dim := node.attributes["head_dim"]) % HEAD_STEP]:
        raise UnsupportedModelError(
            f"its heads have {uneven_dims[0]} dimensions; ONNX Runtime's GroupQueryAttention supports multiples of "
            f"{HEAD_STEP}; export a fixed window"
        )
    rotated = [cast(int, node.attributes["rotary_dim"]) for node in attention if _rotates(planned, node)]
    if uneven := [dim for dim in rotated if dim % HEAD_STEP]:
        raise UnsupportedModelError(
            f"its RoPE rotates {uneven[0]} dimensions of each head; ONNX Runtime's GroupQueryAttention supports "
            f"multiples of {HEAD_STEP}; export a fixed window"
        )
    e = make_emitter(planned.within(settings.context), settings, [BATCH, ROWS])
    e.input("input_ids", INT64, [BATCH, ROWS])
    mask = e.input("attention_mask", INT64, [BATCH, TOTAL])
    lengths = e.reduce_sum(mask, 1, name="num_tokens", keepdims=False)
    last = e.cast(e.op("Sub", lengths, e.ints(1), name="last_position"), INT32)
    shape = e.op("Shape", mask, name="mask_shape", dtype=INT64)
    one = e.constant("number.1", np.array(1, np.int64))
    total = e.cast(e.op("Gather", shape, one, name=TOTAL, axis=0), INT32)
    first_row = plan.rope_offset(settings.context)
    rows = slice(first_row, first_row + settings.context)

    def layer(node: Node, past: Sequence[ir.Value]) -> Sequence[ir.Value]:
        return _attention(e, node, past, (last, total), rows if _rotates(planned, node) else None)

    def describe(state: Tensor) -> tuple[ir.DataType, list[int | str], list[int | str]]:
        heads, dim = resolve((state.shape[0], state.shape[2]), {})
        return e.dtype, [BATCH, heads, PAST, dim], [BATCH, heads, TOTAL, dim]

    emit_decoder(e, plan, layer, describe)
    return e.model(metadata=metadata(planned, settings), name=plan.family)


def _attention(
    e: Emitter, node: Node, past: Sequence[ir.Value], lengths: tuple[ir.Value, ir.Value], rows: slice | None
) -> Sequence[ir.Value]:
    (out,) = node.outputs
    tables: list[ir.Value | None] = []
    if rows is not None:
        tables += [e.table(name, name, rows, e.dtype) for name in node.inputs[3:5]]
    if sinks := "".join(node.inputs[7:8]):  # behind the tables, positions and a bias of scores
        tables += [None] * (4 - len(tables)) + [e.read(sinks, e.dtype)]
    soft_cap = cast(float, node.attributes.get("soft_cap", 0.0))
    cap: dict[str, Any] = {"softcap": soft_cap} if soft_cap else {}
    _, *present = e.ops(
        "GroupQueryAttention",
        e.read(node.inputs[0], e.dtype),
        None,
        None,
        *past,
        *lengths,
        *tables,
        names=[out, f"{out}/present_key", f"{out}/present_value"],
        domain=CONTRIB_DOMAIN,
        num_heads=node.attributes["num_heads"],
        kv_num_heads=node.attributes["num_kv_heads"],
        scale=node.attributes["scale"],
        local_window_size=cast(int, node.attributes["window"]) or -1,
        do_rotary=int(rows is not None),
        **cap,
    )
    return present


def _rotates(planned: Planned, node: Node) -> bool:
    """Return whether the tables of an attention node have an angle other than 0."""
    path = node.inputs[3].rpartition(".")[0]
    tables = [m for m in planned.decoder.modules() if isinstance(m, RotaryTables) and m.path == path]
    return all(table.rotates for table in tables)


SUBGRAPH_KEY = "chunkrt.subgraph"
"""Key of a model's metadata for the name of its subgraph."""


def subgraph_model(planned: Planned, subgraph: Subgraph, settings: SubgraphSettings) -> ir.Model:
    """Build a static subgraph; its inputs and outputs [1, window, columns] have the plan's names.

    Raises:
        UnsupportedModelError: an operator has no form for export.
    """
    plan = planned.plan
    e = make_emitter(planned, settings, [1, settings.window])
    for name in subgraph.inputs:
        e.input(name, e.dtype, [1, settings.window, e.width(name)])
    for node in subgraph.nodes:
        emit_node(e, plan, node)
    later = plan.subgraphs[plan.subgraphs.index(subgraph) + 1 :]
    wanted = {plan.output, *(name for s in later for name in s.inputs)}
    for name in subgraph.outputs:
        if name in wanted:
            e.output(e.read(name, e.dtype), name, [1, settings.window, e.width(name)])
    return with_shapes(e.model(metadata={SUBGRAPH_KEY: subgraph.name}, name=subgraph.name))


def check_subgraph_outputs(planned: Planned, folder: Path) -> None:
    """Raise ConfigError if `save_static_subgraphs` could not write its files."""
    for name in _static_files(planned):
        check_output(folder / name)


def save_static_subgraphs(
    planned: Planned,
    folder: Path,
    settings: SubgraphSettings,
    *,
    external_data: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Path]:
    """Write all subgraphs or none, with names that begin with the index in the plan: "03_static.1.onnx".

    Returns:
        The paths of the files.

    Raises:
        ConfigError: a file exists already or cannot be written.
    """
    static = _static_files(planned)
    check_subgraph_outputs(planned, folder)
    aside = folder / ".subgraphs.part"
    remove(aside)
    try:
        for done, (name, subgraph) in enumerate(static.items()):
            progress(done, len(static))
            save_model(subgraph_model(planned, subgraph, settings), aside / name, external_data=external_data)
        for file in sorted(aside.iterdir()):
            file.rename(folder / file.name)
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {cause_of(error)}") from error
    finally:
        remove(aside)
    progress(len(static), len(static))
    return [folder / name for name in static]


def _static_files(planned: Planned) -> dict[str, Subgraph]:
    subgraphs = planned.plan.subgraphs
    digits = len(str(len(subgraphs)))
    return {f"{i:0{digits}}_{s.name}.onnx": s for i, s in enumerate(subgraphs) if s.is_static}
