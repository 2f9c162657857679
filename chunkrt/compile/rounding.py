"""Rounding of all linears of 4 bits with compensation (`quant/compensated.py`), from the first to the last.

The inputs of a linear are those of the decoder whose earlier linears are rounded already, so a linear also corrects
errors that it receives. Only the weights and values of one subgraph are in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chunkrt.checkpoints.source import BlockTensor
from chunkrt.compile.calibrate import (
    WINDOW_LENGTH,
    Float32,
    first_values,
    live_after,
    run_node,
    values_beside,
)
from chunkrt.compile.calibration_tokens import TokenIds
from chunkrt.files import Count
from chunkrt.graph.plan import Node, Plan
from chunkrt.quant.arithmetic import Integers, quantize_linear
from chunkrt.quant.compensated import round_in_blocks, round_to_blocks
from chunkrt.quant.scheme import Scheme

Rounded = Integers | BlockTensor


def round_linears(
    plan: Plan,
    scheme: Scheme,
    names: Collection[str],
    load: Callable[[str], Float32],
    token_ids: TokenIds,
    *,
    progress: Count = lambda done, total: None,
) -> dict[str, Rounded]:
    """Round linears to 4 bits.

    Args:
        plan: the decoder, without shadows.
        names: plan names of the weights to round; all of them have 4 bits.
        load: returns a weight's float32 values by its plan name, folded according to the calibration.
        token_ids: the calibration text, int64 [n]; cut into windows.
        progress: called with (subgraphs done, total).

    Returns:
        The rounded weights, by plan name.
    """
    length = min(WINDOW_LENGTH, plan.context_length)
    parts = [token_ids[start : start + length] for start in range(0, token_ids.size, length)]
    live: list[Mapping[str, Any]] = [first_values(part, np.arange(part.size)) for part in parts]
    found = dict[str, Rounded]()
    for index, subgraph in enumerate(plan.subgraphs):
        progress(index, len(plan.subgraphs))
        weights = {name: load(name) for name in subgraph.weights}
        values = [{**before, **weights, **values_beside(plan, index, len(before["input_ids"]))} for before in live]
        for node in subgraph.nodes:
            name = node.inputs[1] if node.op == "MatMul" else ""
            if name in names:
                found[name] = _round(node, weights[name], scheme, values)
                weight = _values_of(found[name])
                results: list[Any] = [each[node.inputs[0]] @ weight for each in values]
            else:
                results = [run_node(node, each) for each in values]
            for each, result in zip(values, results, strict=True):
                outputs = result if isinstance(result, tuple) else (result,)
                each.update(zip(node.outputs, outputs, strict=True))
        later = live_after(plan, index)
        live = [{name: value for name, value in each.items() if name in later} for each in values]
    progress(len(plan.subgraphs), len(plan.subgraphs))
    return found


def _round(node: Node, weight: Float32, scheme: Scheme, values: list[dict[str, Any]]) -> Rounded:
    name, depth = node.inputs[1], len(weight)
    nearest = quantize_linear(weight, scheme.storage_of(name), name=name)  # it reports values that are not finite
    products: NDArray[np.float64] = np.zeros((depth, depth))
    for each in values:
        rows = each[node.inputs[0]].astype(np.float64)
        products += rows.T @ rows
    if not np.isfinite(products).all():
        return nearest
    return round_to_blocks(weight, products) if isinstance(nearest, BlockTensor) else round_in_blocks(weight, products)


def _values_of(rounded: Rounded) -> Float32:
    if isinstance(rounded, BlockTensor):
        return rounded.dequantise().T
    values: Float32 = (rounded.values * rounded.scale).astype(np.float32)
    return values
