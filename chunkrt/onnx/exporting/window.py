"""The fixed-window form: every shape is static, caches are inputs and outputs. docs/onnx.md describes the contract."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from chunkrt.graph.linear_attention import LINEAR_ATTENTION_OP
from chunkrt.graph.partition import Planned
from chunkrt.graph.plan import ATTENTION_OPS, Node, Tensor, resolve
from chunkrt.onnx.exporting.attention import WindowAttention
from chunkrt.onnx.exporting.decoder import check_length, emit_decoder, has, make_emitter, metadata, with_shapes
from chunkrt.onnx.exporting.emitter import FLOAT, INT64
from chunkrt.onnx.exporting.linear_attention import WindowLinearAttention
from chunkrt.onnx.exporting.settings import WindowSettings


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
