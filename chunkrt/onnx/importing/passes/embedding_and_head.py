"""Conversion of the token look-up, and selection of the requested rows before the LM head.

The look-up is a Gather from a constant table, and the factor by which a family multiplies the result. com.microsoft's
GatherBlockQuantized is a Gather from a table in blocks of few bits.
"""

from __future__ import annotations

import onnx_ir as ir

from chunkrt.onnx.importing.constants import is_constant, raw, stored
from chunkrt.onnx.importing.draft import CONTRIB, Draft, Weight, input_of, int_attribute
from chunkrt.onnx.importing.onnx_source import shape_of
from chunkrt.onnx.importing.passes.linears import packed_matrix


def raise_embedding(draft: Draft) -> None:
    """Replace the token look-up by Gather.

    Requires: constants of Mul are weights. Ensures: the embedding is Gather(w, input_ids) with w [V, H] among
    `draft.weights`; w includes the factor of a Mul by one number after it.
    """
    for node in list(draft.graph):
        tokens = input_of(node, 1)
        if tokens is None or tokens.name != draft.signature.tokens:
            continue
        if (node.domain, node.op_type) == ("", "Gather"):
            name = _table(draft, node)
        elif (node.domain, node.op_type) == (CONTRIB, "GatherBlockQuantized"):
            name = _packed_table(draft, node)
        else:
            continue
        scale, result = 1.0, node.outputs[0]
        users = [user for user, _ in result.uses()]
        if len(users) == 1 and users[0].op_type == "Mul" and (factor := users[0].inputs[1]) in draft.weights:
            assert factor is not None
            if draft.shape(factor) == (1,):
                scale = float(draft.source.read(draft.weights[factor].tensors[0])[0])
                result = users[0].outputs[0]
        weight = Weight(tensors=(name,), layout="as it is", scale=scale)
        (output,) = draft.insert(node, "Gather", [draft.add_weight(weight), tokens])
        draft.replace(result, output)


def _table(draft: Draft, node: ir.Node) -> str:
    table = node.inputs[0]
    if table is None or not is_constant(draft, table) or int_attribute(node, "axis"):
        raise draft.unsupported(node, "tokens are looked up in a table that is not constant, or not by its rows")
    tensor = stored(draft, table)
    if len(tensor.shape) != 2:
        raise draft.unsupported(node, f"its table has the shape {list(tensor.shape)}, expected one row a token")
    return draft.keep(table.name or "", tensor)


def _packed_table(draft: Draft, node: ir.Node) -> str:
    table, scales = node.inputs[0], input_of(node, 2)
    axes = int_attribute(node, "gather_axis"), int_attribute(node, "quantize_axis", 1)
    packed, steps = (None if value is None else raw(value) for value in (table, scales))
    if packed is None or steps is None or packed.dtype != ir.DataType.UINT8 or axes != (0, 1) or len(steps.shape) != 2:
        raise draft.unsupported(node, "its table is not an initializer of bytes in blocks along each row")
    rows, groups = shape_of(steps)
    bits, block_size = int_attribute(node, "bits", 4), int_attribute(node, "block_size", 128)
    columns = packed.size * 8 // (max(bits, 1) * max(rows, 1))
    if groups != -(-columns // max(block_size, 1)):
        raise draft.unsupported(node, f"its table has {columns} columns and {groups} blocks of {block_size}")
    return packed_matrix(draft, node, [table, scales, input_of(node, 3)], (rows, columns))


ROWWISE = ("Add", "Mul", "Tanh")
"""Operators that may follow the LM head, for a bias or a soft cap; they compute row by row."""


def pick_rows(draft: Draft) -> ir.Value:
    """Insert the selection of the requested rows before the LM head.

    Requires: linears are converted. Ensures: the LM head reads Gather(hidden, logit_rows).

    Returns:
        The input logit_rows.

    Raises:
        UnsupportedModelError: the logits are not the result of a linear.
    """
    rows = ir.Value(name="logit_rows")
    node = draft.logits.producer()
    while node is not None and not node.domain and node.op_type in ROWWISE:
        node = node.inputs[0].producer() if node.inputs[0] is not None else None
    if node is None or node.op_type != "MatMul" or node.inputs[1] not in draft.weights:
        if node is None:
            node = next(iter(draft.graph))
        raise draft.unsupported(node, "the logits are not the result of a linear layer over the last hidden rows")
    (picked,) = draft.insert(node, "Gather", [node.inputs[0], rows])
    node.replace_input_with(0, picked)
    return rows
