"""Removal of nodes that change no value: Identity, Dropout, and casts between types of floats."""

from __future__ import annotations

import onnx_ir as ir

from chunkrt.onnx.importing.draft import Draft

FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE)


def drop_identities(draft: Draft) -> None:
    """Remove nodes that change no value.

    Requires: the graph as it was read. Ensures: no such node is between values that depend on tokens.

    Casts between float types are removed because chunkrt computes in float32 between linears, regardless of the
    exporter's
    types.
    """
    for node in list(draft.graph):
        read = node.inputs[0] if node.inputs else None
        if read is None or draft.evaluator.is_positional(read.name or "") or node.domain:
            continue
        if node.op_type in ("Identity", "Dropout") or _is_float_cast(node):
            draft.replace(node.outputs[0], read)


def _is_float_cast(node: ir.Node) -> bool:
    return node.op_type == "Cast" and ir.DataType(int(node.attributes["to"].value)) in FLOATS
