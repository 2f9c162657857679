"""Merging of the linears gate and up into one linear, whose result is split."""

from __future__ import annotations

import onnx_ir as ir

from chunkrt.onnx.importing.draft import Draft, producer
from chunkrt.onnx.importing.projections import Projection, find_projection, merge


def merge_gates(draft: Draft) -> None:
    """Merge gate and up into one linear.

    Requires: linears, columns and activations are converted. Ensures: in Mul(activation(gate), up), gate and up are the
    halves of one linear, by Split.
    """
    for node in list(draft.graph):
        if (node.domain, node.op_type) != ("", "Mul") or node.graph is None:
            continue
        for active, up_value in (node.inputs, node.inputs[::-1]):
            gate_value = _activated(active)
            gate, up = find_projection(draft, gate_value), find_projection(draft, up_value)
            if gate is not None and up is not None and gate_value is not None and up_value is not None:
                _merge(draft, (gate, gate_value), (up, up_value))
                if active is node.inputs[1]:  # chunkrt writes the activation first
                    node.replace_input_with(1, node.inputs[0])
                    node.replace_input_with(0, active)
                break


def _activated(value: ir.Value | None) -> ir.Value | None:
    """Return the input of an activation."""
    if (gelu := producer(value, "Gelu")) is not None:
        return gelu.inputs[0]
    product = producer(value, "Mul")
    if product is None:
        return None
    for x, squashed in (product.inputs, product.inputs[::-1]):
        sigmoid = producer(squashed, "Sigmoid")
        if sigmoid is not None and sigmoid.inputs[0] is x:
            return x
    return None


def _merge(draft: Draft, gate: tuple[Projection, ir.Value], up: tuple[Projection, ir.Value]) -> None:
    before = gate[1].producer()
    assert before is not None
    if len(gate[0].columns) != len(up[0].columns):
        return
    # the split goes to the place of the gate: only the product of gate and up reads up before
    if (merged := merge(draft, before, [gate[0], up[0]])) is None:
        return
    halves = draft.insert(before, "Split", [merged], num_outputs=2, axis=-1)
    draft.replace(gate[1], halves[0])
    draft.replace(up[1], halves[1])
