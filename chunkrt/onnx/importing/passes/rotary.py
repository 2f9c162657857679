"""Removal of RoPE before attention, after a check of its tables and positions, because chunkrt's attention applies RoPE
itself.
"""

from __future__ import annotations

from typing import NamedTuple

import onnx_ir as ir

from chunkrt.onnx.importing.constants import is_constant, stored
from chunkrt.onnx.importing.draft import CONTRIB, Draft, Weight, float_attribute, input_of, int_attribute
from chunkrt.onnx.importing.positions import check_positions

ROTATIONS = (("", "RotaryEmbedding"), (CONTRIB, "RotaryEmbedding"), (CONTRIB, "MRotaryEmbedding"))
"""Operators that rotate. The last operator takes three positions for each token. In text these are equal, and the
operator then equals the second one.
"""


class Tables(NamedTuple):
    """Weights cos and sin [positions, rotary_dim / 2]."""

    cos: ir.Value
    sin: ir.Value


def make_tables(draft: Draft, node: ir.Node, cos: ir.Value | None, sin: ir.Value | None) -> Tables:
    """Return the tables of a node that rotates.

    Raises:
        UnsupportedModelError: the tables are not constant, or are not two matrices of the same shape.
    """
    if cos is None or sin is None or not (is_constant(draft, cos) and is_constant(draft, sin)):
        raise draft.unsupported(node, "its tables of cosines and sines are not constant")
    names = []
    for value in (cos, sin):
        tensor = stored(draft, value)
        if len(tensor.shape) != 2:
            raise draft.unsupported(node, f"its table {value.name!r} has the shape {list(tensor.shape)}")
        names.append(draft.keep(value.name or "", tensor))
    if draft.source.info(names[0]).shape != draft.source.info(names[1]).shape:
        raise draft.unsupported(node, "its tables of cosines and sines have different shapes")
    return Tables(*(draft.add_weight(Weight(tensors=(name,), layout="as it is")) for name in names))


def take_off(draft: Draft, value: ir.Value) -> tuple[ir.Value, Tables | None]:
    """Return a rotated value's input, and the tables; the value itself, and None, if it is not rotated.

    Raises:
        UnsupportedModelError: the rotation is not rotate-half RoPE, or its positions are not those of the tokens.
    """
    node = value.producer()
    if node is None or (node.domain, node.op_type) not in ROTATIONS:
        return value, None
    order = (1, 2, 3) if node.domain == CONTRIB else (3, 1, 2)
    positions, cos, sin = (input_of(node, index) for index in order)
    if int_attribute(node, "interleaved"):
        raise draft.unsupported(
            node, "it rotates adjacent columns (interleaved RoPE); only rotate-half RoPE is supported"
        )
    if positions is None:
        raise draft.unsupported(node, "it has no positions")
    if int_attribute(node, "is_packed_batching") or float_attribute(node, "scale", 1.0) != 1:
        raise draft.unsupported(node, "it packs prompts of a batch, or scales positions")
    tables = make_tables(draft, node, cos, sin)
    context, half = draft.shape(tables.cos)
    if int_attribute(node, "rotary_embedding_dim") not in (0, 2 * half):
        raise draft.unsupported(node, f"its tables have {half} columns, expected half of its rotary_embedding_dim")
    check_positions(draft, node, positions, context, streams=3 if node.op_type == "MRotaryEmbedding" else 1)
    read = node.inputs[0]
    assert read is not None
    return read, tables
