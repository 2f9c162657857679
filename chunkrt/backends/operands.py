"""Weights of an engine as operators in NumPy take them: the reference's, and functions of plug-ins."""

from __future__ import annotations

from typing import Any

from chunkrt.backends.registry import REFERENCE, operators
from chunkrt.engine_directory.store import INPUT_STEP_SUFFIX, OUTPUT_STEP_SUFFIX, WeightStore
from chunkrt.engine_directory.weights import StoredWeight, stored_weights
from chunkrt.graph.plan import Plan, Subgraph
from chunkrt.quant.arithmetic import DynamicWeight, Integers, quantize_rows, right_operand
from chunkrt.quant.grid import LinearGrids
from chunkrt.quant.scheme import Scheme

operators.register("quantize", REFERENCE)(quantize_rows)


def constants(subgraph: Subgraph, plan: Plan, scheme: Scheme, weights: WeightStore) -> dict[str, Any]:
    """The weights of a subgraph by name, as functions take them.

    Under "float" all are arrays. Otherwise the weight of a linear is a `QuantizedWeight`, that of routed experts a list
    of them.
    """
    stored = stored_weights(plan, scheme)
    return {name: _constant(stored[name], scheme, weights) for name in subgraph.weights}


def _constant(stored: StoredWeight, scheme: Scheme, weights: WeightStore) -> Any:
    name = stored.tensor.name
    if stored.storage == "experts":
        return [DynamicWeight(*one) for one in zip(*weights.experts(name), strict=True)]
    if stored.storage == "blocks":
        return right_operand(weights.blocks(name), name, scheme, None)
    if stored.storage in ("float32", "float16"):
        return weights.array(name)
    grids = None
    if scheme.is_static:
        output_step = None if scheme.has_float_output(name) else weights.array(name + OUTPUT_STEP_SUFFIX)
        grids = LinearGrids(input_step=weights.array(name + INPUT_STEP_SUFFIX), output_step=output_step)
    return right_operand(Integers(*weights.linear(name)), name, scheme, grids)
