"""Merging of linears with the same input into one linear."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from chunkrt.graph.plan import DOMAIN
from chunkrt.onnx.importing.draft import Draft, Weight, producer
from chunkrt.onnx.importing.tensors import Derived
from chunkrt.onnx.importing.widths import groups_of, width


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
