"""Weights of an engine in the form that NumPy operators take, those of the reference and those of plug-ins."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from chunkrt.backends.registry import REFERENCE, Implementation, operators
from chunkrt.engine_directory.store import INPUT_STEP_SUFFIX, OUTPUT_STEP_SUFFIX, WeightStore
from chunkrt.engine_directory.weights import StoredWeight, stored_weights
from chunkrt.errors import CompileError
from chunkrt.graph.plan import Node, Plan, Subgraph
from chunkrt.quant.arithmetic import DynamicWeight, Integers, quantize_rows, right_operand
from chunkrt.quant.grid import LinearGrids
from chunkrt.quant.scheme import Scheme

Prepare = Callable[[str, Any], Any]
"""Function that takes a weight's name and the weight, and returns the form that an operator's function needs."""

operators.register("quantize", REFERENCE)(quantize_rows)


def constants(subgraph: Subgraph, plan: Plan, scheme: Scheme, weights: WeightStore) -> dict[str, Any]:
    """Return the weights of a subgraph by name, in the form that functions take.

    Under "float" all weights are arrays. Under other schemes the weight of a linear is a `QuantizedWeight`, and the
    weight of routed experts is a list of `QuantizedWeight` objects.
    """
    stored = stored_weights(plan, scheme)
    return {name: _constant(stored[name], scheme, weights) for name in subgraph.weights}


def _constant(stored: StoredWeight, scheme: Scheme, weights: WeightStore) -> Any:
    name = stored.tensor.name
    if stored.storage == "experts":
        return [DynamicWeight(*one) for one in zip(*weights.experts(name), strict=True)]
    if stored.storage == "blocks":
        return right_operand(weights.blocks(name), name, scheme, None)
    if stored.storage in ("float32", "float16", "rotary"):
        return weights.array(name)
    grids = None
    if scheme.is_static:
        output_step = None if scheme.has_float_output(name) else weights.array(name + OUTPUT_STEP_SUFFIX)
        grids = LinearGrids(input_step=weights.array(name + INPUT_STEP_SUFFIX), output_step=output_step)
    return right_operand(Integers(*weights.linear(name)), name, scheme, grids)


def prepare_weight(implementation: Implementation, name: str, weight: Any) -> Any:
    """Return the result of an implementation's `prepare` for a weight. Raises CompileError if it fails."""
    assert implementation.prepare is not None
    try:
        return implementation.prepare(weight)
    except Exception as error:  # a plug-in's function may raise any exception
        raise CompileError(
            f"{implementation.origin} cannot prepare {name} for {implementation.operator!r}: {type(error).__name__}: "
            f"{error}; repair it or use `ops='-{implementation.operator}'`"
        ) from error


def prepared(
    wanted: Sequence[tuple[Node, Prepare | None]], weights: Mapping[str, Any]
) -> tuple[list[Node], dict[str, Any]]:
    """Return the nodes and their weights: prepared weights have new names, other weights are unchanged."""
    nodes: list[Node] = []
    found: dict[str, Any] = {}
    for node, prepare in wanted:
        names = {name: name for name in node.inputs if name in weights}
        if prepare:
            names = {name: f"{name}, prepared for {node.name}" for name in names}
        for name, read in names.items():
            found[read] = prepare(name, weights[name]) if prepare else weights[name]
        nodes.append(replace(node, inputs=tuple(names.get(name, name) for name in node.inputs)))
    return nodes, found
