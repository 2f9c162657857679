"""Both forms of an exported decoder; docs/onnx.md describes the contract.

In the fixed-window form every shape is static, and caches are inputs and outputs. The dynamic form takes any number of
rows after any number of positions, with the names that ONNX Runtime GenAI expects. Its attention is ONNX Runtime's own
`GroupQueryAttention`, which rotates queries and keys and caches rotated keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import onnx_ir as ir

from chunkrt.errors import UnsupportedModelError
from chunkrt.graph.linear_attention import LINEAR_ATTENTION_OP
from chunkrt.graph.partition import Planned
from chunkrt.graph.plan import ATTENTION_OPS, Node, Tensor, resolve
from chunkrt.onnx.exporting.attention import WindowAttention
from chunkrt.onnx.exporting.decoder import check_length, emit_decoder, has, make_emitter, metadata, with_shapes
from chunkrt.onnx.exporting.emitter import CONTRIB_DOMAIN, FLOAT, INT64, Emitter
from chunkrt.onnx.exporting.linear_attention import WindowLinearAttention
from chunkrt.onnx.exporting.settings import DynamicSettings, WindowSettings


def window_model(planned: Planned, settings: WindowSettings) -> ir.Model:
    """Build a decoder that runs `settings.window` rows at a time; its weights are read when it is written.

    Raises:
        ConfigError: the sequence is longer than the model's context.
        UnsupportedModelError: an operator of the model has no form of fixed length.
    """
    plan, window = planned.plan, settings.window
    check_length(plan, "--sequence", settings.sequence)
    e = make_emitter(planned, opset=settings.opset, dtype=settings.tensor_type)
    e.input("input_ids", INT64, [1, window])
    is_token = e.input("attention_mask", INT64, [1, settings.sequence])
    if settings.keys == "post-rope" and has(plan, *ATTENTION_OPS):
        e.input("position_ids", INT64, [1, window])
    first_row = plan.rope_offset(settings.sequence)
    attention = WindowAttention(e, settings, slice(first_row, first_row + plan.context_length))
    linear_attention = WindowLinearAttention(e, window, is_token, settings.sequence)

    def layer(node: Node, states: Sequence[ir.Value]) -> Sequence[ir.Value]:
        kind = linear_attention if node.op == LINEAR_ATTENTION_OP else attention
        return kind.layer(node, states)

    def describe(state: Tensor) -> tuple[ir.DataType, list[int], list[int]]:
        is_cache = bool({"P", "W"} & set(state.shape))
        shape = [1, *resolve(state.shape, {"P": settings.context, "W": settings.context})]
        return e.dtype if is_cache else FLOAT, shape, shape

    emit_decoder(e, plan, layer, describe, [1, window])
    return with_shapes(e.model(metadata=metadata(planned, settings), name=plan.family))


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
    plan = planned.plan
    check_length(plan, "--context", settings.context)
    if has(plan, LINEAR_ATTENTION_OP):
        raise UnsupportedModelError(
            f"{plan.family} has layers of linear attention, which the dynamic form does not support; export a fixed "
            "window"
        )
    attention = (node for subgraph in plan.subgraphs for node in subgraph.nodes if node.op in ATTENTION_OPS)
    if uneven := [dim for node in attention if cast(int, dim := node.attributes["head_dim"]) % HEAD_STEP]:
        raise UnsupportedModelError(
            f"its heads have {uneven[0]} dimensions; ONNX Runtime's GroupQueryAttention supports multiples of "
            f"{HEAD_STEP}; export a fixed window"
        )
    e = make_emitter(planned.within(settings.context), opset=settings.opset, dtype=settings.tensor_type)
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
        return _attention(e, node, past, (last, total), rows)

    def describe(state: Tensor) -> tuple[ir.DataType, list[int | str], list[int | str]]:
        heads, dim = resolve((state.shape[0], state.shape[2]), {})
        return e.dtype, [BATCH, heads, PAST, dim], [BATCH, heads, TOTAL, dim]

    emit_decoder(e, plan, layer, describe, [BATCH, ROWS])
    return e.model(metadata=metadata(planned, settings), name=plan.family)


def _attention(
    e: Emitter, node: Node, past: Sequence[ir.Value], lengths: tuple[ir.Value, ir.Value], rows: slice
) -> Sequence[ir.Value]:
    (out,) = node.outputs
    cos, sin = (e.table(name, name, rows, e.dtype) for name in node.inputs[3:5])
    _, *present = e.ops(
        "GroupQueryAttention",
        e.read(node.inputs[0], e.dtype),
        None,
        None,
        *past,
        *lengths,
        cos,
        sin,
        names=[out, f"{out}/present_key", f"{out}/present_value"],
        domain=CONTRIB_DOMAIN,
        num_heads=node.attributes["num_heads"],
        kv_num_heads=node.attributes["num_kv_heads"],
        scale=node.attributes["scale"],
        local_window_size=cast(int, node.attributes["window"]) or -1,
        do_rotary=1,
    )
    return present
