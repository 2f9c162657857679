"""Constants of a foreign graph: weights, which stay in their file, and small numbers that passes need."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from chunkrt.errors import ModelError
from chunkrt.onnx.importing.draft import Draft, int_attribute
from chunkrt.onnx.importing.onnx_source import Derived, FloatTensor, OnnxWeight, dequantised_tensor, transposed

MAX_COMPUTED = 2**28
"""Largest number of elements of a weight that results from arithmetic and is not read on demand."""


def is_constant(draft: Draft, value: ir.Value | None) -> bool:
    """Return whether a value of the foreign graph is independent of all inputs."""
    return value is not None and (value.name or "") in draft.evaluator.constants


def numbers(draft: Draft, value: ir.Value) -> NDArray[Any]:
    """Return a constant's values, of any type; for shapes, axes and the like."""
    if value.const_value is not None:
        return np.asarray(value.const_value.numpy())
    return draft.evaluator.constant(value.name or "")


def scalar(draft: Draft, value: ir.Value | None) -> float | None:
    """Return the value of a constant that consists of one number, else None."""
    if value is None or not is_constant(draft, value):
        return None
    if value.const_value is not None and value.const_value.size != 1:
        return None
    found = numbers(draft, value)
    return float(found.reshape(())) if found.size == 1 else None


def stored(draft: Draft, value: ir.Value) -> OnnxWeight:
    """Return a constant of floats as a tensor that is read on demand.

    Requires: `is_constant`. A change of type, a transposition and a dequantisation of the file's tensor are done on
    demand. ONNX Runtime computes any other arithmetic beforehand.
    """
    node = value.producer()
    if (node is None or node.op_type == "Constant") and (tensor := raw(value)) is not None:
        return FloatTensor(tensor)
    assert node is not None, value.name
    read = node.inputs[0] if node.inputs else None
    if node.domain == "" and read is not None:
        if node.op_type in ("Cast", "Identity"):
            return stored(draft, read)
        if node.op_type == "Transpose":
            under = stored(draft, read)
            if len(under.shape) == 2:
                perm = node.attributes.get("perm")
                is_same = perm is not None and tuple(perm.value) == (0, 1)
                return under if is_same else transposed(under)
    if node.op_type == "DequantizeLinear" and node.domain in ("", "com.microsoft"):
        operands = [operand.const_value for operand in node.inputs if operand is not None]
        if len(operands) >= 2 and operands[0] is not None and operands[1] is not None:
            return dequantised_tensor(
                operands[0],
                operands[1],
                operands[2] if len(operands) > 2 else None,
                axis=int_attribute(node, "axis", 1),
                block_size=int_attribute(node, "block_size"),
                where=f"{draft.where}: node {node.name!r}",
            )
    return _computed(draft, value)


def raw(value: ir.Value) -> ir.TensorProtocol | None:
    """Return the tensor of an initializer or of a Constant node, ignoring reshapes."""
    if value.const_value is not None:
        return value.const_value
    node = value.producer()
    if node is not None and node.op_type == "Reshape" and node.inputs[0] is not None:
        return raw(node.inputs[0])
    if node is not None and node.op_type == "Constant" and "value" in node.attributes:
        return node.attributes["value"].as_tensor()
    return None


def _computed(draft: Draft, value: ir.Value) -> OnnxWeight:
    values = draft.evaluator.constant(value.name or "")
    if values.size > MAX_COMPUTED:
        raise ModelError(f"{draft.where}: the constant {value.name!r} has {values.size} elements, too many to compute")
    array = values.astype(np.float32)
    return Derived(array.shape, "F32", lambda: array)


def row(draft: Draft, value: ir.Value) -> str | None:
    """Return a constant vector [N] (possibly with leading axes of size 1) in the source, else None."""
    if not is_constant(draft, value):
        return None
    tensor = stored(draft, value)
    if not tensor.shape or any(size != 1 for size in tensor.shape[:-1]):
        return None
    if len(tensor.shape) == 1:
        return draft.keep(value.name or "", tensor)
    flat = Derived(tensor.shape[-1:], tensor.stored_as, lambda: tensor.read().reshape(-1))
    return draft.keep(value.name or "", flat)
