"""Selection of the requested rows before the LM head."""

from __future__ import annotations

import onnx_ir as ir

from chunkrt.onnx.importing.draft import Draft

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
