"""Preparing weights: from checkpoint tensors to what an engine stores under a scheme, one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chunkrt.errors import QuantizationError
from chunkrt.graph.plan import Plan, Tensor
from chunkrt.quant.scheme import Scheme
from chunkrt.weights.layout import pack, packed_shape
from chunkrt.weights.store import SCALE_SUFFIX, Entry, WeightWriter

Float32 = NDArray[np.float32]
ORDER = {"int8": 0, "float32": 1, "float16": 2}
COLUMNS_AT_ONCE = 1024
"""Output channels quantised together: bounds the temporary copies of a large head."""


def quantize_weight(weight: Float32, *, name: str = "weight") -> tuple[NDArray[np.int8], Float32]:
    """Symmetric int8 per output channel.

    Args:
        weight: float32 [K, N], as in `X @ W`; any strides.

    Returns:
        int8 [K, N] in [-127, 127] and float32 scales [N]: weight ~ q * scale, scale = max|column| / 127, ties to
        even. A column of zeros has scale 0.

    Raises:
        QuantizationError: a weight is infinite or not a number.
    """
    depth, columns = weight.shape
    quantized = np.empty((depth, columns), np.int8)
    scale = np.empty(columns, np.float32)
    for begin in range(0, columns, COLUMNS_AT_ONCE):
        part = weight[:, begin : begin + COLUMNS_AT_ONCE]
        limit = np.abs(part).max(axis=0)
        if not np.isfinite(limit).all():
            raise QuantizationError(f"{name} holds values that are not finite; the checkpoint is damaged")
        part_scale = (limit / np.float32(127)).astype(np.float32)
        divisor = np.where(part_scale > 0, part_scale, np.float32(1))
        quantized[:, begin : begin + COLUMNS_AT_ONCE] = np.rint(part / divisor).clip(-127, 127)
        scale[begin : begin + COLUMNS_AT_ONCE] = part_scale
    return quantized, scale


def linear_weights(plan: Plan) -> set[str]:
    """The right operands of every MatMul with a weight: what a scheme quantises."""
    return {
        node.inputs[1]
        for subgraph in plan.subgraphs
        for node in subgraph.nodes
        if node.op == "MatMul" and plan.tensors[node.inputs[1]].kind == "weight"
    }


def write_weights(
    plan: Plan,
    scheme: Scheme,
    load: Callable[[str], Float32],
    path: Path,
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Load every weight of the plan, quantise what the scheme says, and write the store.

    Args:
        load: a weight's values by its plan name; called once a weight, results are dropped at once.
        path: written in full or not at all is the caller's business (write aside, rename).
        progress: told (weights done, weights in all).

    Raises:
        ModelError, QuantizationError: as `load` and `quantize_weight`.
    """
    stored = stored_entries(plan, scheme)
    # Packed weights need 64-byte alignment, float32 4-byte: the wider they must be aligned, the earlier they come.
    entries = {name: stored[name] for name in sorted(stored, key=lambda name: ORDER[stored[name][0].dtype])}
    scales: list[Float32] = []
    with path.open("wb") as file:
        writer = WeightWriter(file, _scales_last(entries))
        for done, (name, parts) in enumerate(entries.items()):
            progress(done, len(entries))
            values = load(name)
            if len(parts) > 1:
                quantized, scale = quantize_weight(values, name=name)
                scales.append(scale)
                writer.write(pack(quantized))
            else:
                writer.write(_as_dtype(values, parts[0].dtype, name=name))
        for scale in scales:
            writer.write(scale)
    progress(len(entries), len(entries))


def _as_dtype(values: Float32, dtype: str, *, name: str) -> NDArray[np.floating[Any]]:
    with np.errstate(over="ignore"):
        converted = values.astype(dtype, copy=False)
    if np.isinf(converted).any():
        raise QuantizationError(f"{name} holds values too large for {dtype}; use the scheme 'float'")
    return converted


def embedding_tables(plan: Plan) -> set[str]:
    """Weights that a Gather picks rows from; stored in float16 where linears are int8."""
    return {
        node.inputs[0]
        for subgraph in plan.subgraphs
        for node in subgraph.nodes
        if node.op == "Gather" and plan.tensors[node.inputs[0]].kind == "weight"
    }


def stored_entries(plan: Plan, scheme: Scheme) -> dict[str, list[Entry]]:
    """How a scheme stores each weight of a plan: one array, and for a quantised linear its scales."""
    is_int8 = scheme.weight_bits == 8
    linears = linear_weights(plan) if is_int8 else set()
    tables = embedding_tables(plan) if is_int8 else set()
    return {t.name: _entries(t, linears, tables) for t in plan.tensors.values() if t.kind == "weight"}


def _entries(tensor: Tensor, linears: set[str], tables: set[str]) -> list[Entry]:
    shape = tuple(int(d) for d in tensor.shape)
    if tensor.name in linears:
        packed, columns = packed_shape(shape[0], shape[1]), (shape[1],)
        return [
            Entry(name=tensor.name, dtype="int8", shape=packed, logical_shape=shape),
            Entry(name=tensor.name + SCALE_SUFFIX, dtype="float32", shape=columns, logical_shape=columns),
        ]
    dtype = "float16" if tensor.name in tables else "float32"
    return [Entry(name=tensor.name, dtype=dtype, shape=shape, logical_shape=shape)]


def _scales_last(entries: Mapping[str, list[Entry]]) -> list[Entry]:
    return [e[0] for e in entries.values()] + [e[1] for e in entries.values() if len(e) > 1]
