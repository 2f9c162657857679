"""Merging of linears with the same input, such as gate and up, into one linear."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from chunkrt.graph.plan import DOMAIN
from chunkrt.onnx.importing.draft import Draft, Weight, groups_of, producer, width
from chunkrt.onnx.importing.onnx_source import Derived


@dataclass(frozen=True, kw_only=True)
class Projection:
    """Some columns of a linear's result.

    Attributes:
        product: the linear's MatMul.
        bias: the weight that is added; None without a bias.
        value: the linear's result.
        columns: the selected columns.
    """

    product: ir.Node
    bias: ir.Value | None
    value: ir.Value
    columns: NDArray[np.int64]


def find_projection(draft: Draft, value: ir.Value | None) -> Projection | None:
    """Return the linear, or the columns of it, that make a value; None if the value comes from another operator."""
    if value is None or (columns := width(draft, value)) is None:
        return None
    chosen = np.arange(columns)
    while (part := producer(value, "Columns", DOMAIN)) is not None:
        start, stop = (int(part.attributes[name].value) for name in ("start", "stop"))
        of_group = (width(draft, part.inputs[0]) or 0) // groups_of(part)
        group, column = np.divmod(chosen, stop - start)
        chosen, value = group * of_group + start + column, part.inputs[0]
    assert value is not None
    total, bias = value, None
    add = producer(value, "Add")
    if add is not None and add.inputs[1] in draft.weights:
        value, bias = add.inputs[0], add.inputs[1]
    product = producer(value, "MatMul")
    if product is None or product.inputs[1] not in draft.weights:
        return None
    return Projection(product=product, bias=bias, value=total, columns=chosen)


def merge(draft: Draft, before: ir.Node, parts: Sequence[Projection]) -> ir.Value | None:
    """Return one linear whose columns are those of all parts, in their order; None if the parts do not share an input.

    If an existing linear has exactly these columns, it is returned.
    """
    first = parts[0]
    if any(part.product.inputs[0] is not first.product.inputs[0] for part in parts):
        return None
    columns = np.concatenate([part.columns for part in parts])
    whole = width(draft, first.value)
    if all(part.value is first.value for part in parts) and np.array_equal(columns, np.arange(whole or 0)):
        return first.value
    values = list(dict.fromkeys(part.value for part in parts))
    of_value = {part.value: part for part in parts}
    offsets = dict(zip(values, np.cumsum([0, *(width(draft, value) or 0 for value in values)]).tolist(), strict=False))
    rows = np.concatenate([part.columns + offsets[part.value] for part in parts])
    is_whole = np.array_equal(rows, np.arange(sum(width(draft, value) or 0 for value in values)))
    picked = None if is_whole else rows
    tensors = [name for value in values for name in _weight(draft, of_value[value].product.inputs[1]).tensors]
    if any(_weight(draft, of_value[value].product.inputs[1]).rows is not None for value in values):
        return None
    weight = draft.add_weight(Weight(tensors=tuple(tensors), layout="linear", rows=picked))
    (output,) = draft.insert(before, "MatMul", [first.product.inputs[0], weight])
    if any(part.bias is not None for part in parts):
        names = tuple(name for value in values for name in _bias(draft, of_value[value]))
        bias = draft.add_weight(Weight(tensors=names, layout="as it is", rows=picked))
        (output,) = draft.insert(before, "Add", [output, bias])
    return output


def _weight(draft: Draft, value: ir.Value | None) -> Weight:
    assert value is not None
    return draft.weights[value]


def _bias(draft: Draft, part: Projection) -> tuple[str, ...]:
    """Return a part's bias; zeros if the part has no bias but other parts have one."""
    if part.bias is not None:
        return draft.weights[part.bias].tensors
    columns = width(draft, part.value) or 0
    zeros = Derived((columns,), "F32", lambda: np.zeros(columns, np.float32))
    return (draft.source.add(f"{part.product.name}.no_bias", zeros),)


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
