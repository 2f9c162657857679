"""Execution of operators that are implemented as Python functions, by the reference or by plug-ins.

The functions take the weights of an engine in the form that suits NumPy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from chunkrt.backends.base import Array
from chunkrt.backends.registry import REFERENCE, Implementation, operators, qualified
from chunkrt.engine_directory.store import INPUT_STEP_SUFFIX, OUTPUT_STEP_SUFFIX, WeightStore
from chunkrt.engine_directory.weights import StoredWeight, stored_weights
from chunkrt.errors import BackendError, ChunkrtError, CompileError
from chunkrt.graph.plan import Node, Plan, Subgraph, Tensor, resolve
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


Operator = Callable[..., Any]
"""A function that takes the node's inputs in order and its attributes by name, and returns one output or a tuple."""


class FunctionExecutable:
    """Executable that calls the function of each node, one after another.

    Args:
        name: the subgraph's name, for errors.
        steps: pairs of a function and the node that determines its arguments.
        constants: the weights by name.
        tensors: the plan's tensors, with the shapes and types that results must have.
    """

    fixed_length: int | None = None

    def __init__(
        self,
        name: str,
        steps: Sequence[tuple[Node, Operator]],
        constants: Mapping[str, Any],
        tensors: Mapping[str, Tensor],
    ) -> None:
        self._name = name
        self._tensors = tensors
        self._steps = steps
        self._constants = constants

    def run(self, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> None:
        """See `Executable.run`."""
        sizes = {
            symbol: size
            for name, array in (*inputs.items(), *outputs.items())
            for symbol, size in zip(self._tensors[name].shape, array.shape, strict=True)
            if isinstance(symbol, str)
        }
        values: dict[str, Any] = {"": None, **self._constants}
        for name, array in inputs.items():
            values[name] = array if self._tensors[name].kind == "state" else read_only(array)
        for node, function in self._steps:
            try:
                results = function(*(values[name] for name in node.inputs), **node.attributes)
                results = results if isinstance(results, tuple) else (results,)
                for name, result in zip(node.outputs, results, strict=True):
                    values[name] = _checked(result, self._tensors[name], sizes)
            except ChunkrtError:
                raise
            except Exception as error:  # a plug-in's function may raise any exception
                reason = f"{type(error).__name__}: {error}"
                raise BackendError(self._failure(node, function, reason)) from error
        for name, buffer in outputs.items():
            buffer[...] = values[name]

    def _failure(self, node: Node, function: Operator, reason: str) -> str:
        what = qualified(node.domain, node.op)
        return f"{self._name}, node {node.name!r}: {what} by {function_name(function)} failed: {reason}"


def _checked(result: Any, tensor: Tensor, sizes: Mapping[str, int]) -> Array:
    """Return a function's result as a C-contiguous array of the plan's type. Raises ValueError or TypeError if its
    shape or type differs from the plan.
    """
    array = np.asarray(result)
    expected = resolve(tensor.shape, sizes)
    if array.shape != expected:
        raise ValueError(f"it returned {tensor.name!r} of shape {list(array.shape)}, expected {list(expected)}")
    if not np.can_cast(array.dtype, tensor.dtype, "same_kind"):
        raise TypeError(f"it returned {tensor.name!r} of type {array.dtype}, expected {tensor.dtype}")
    return read_only(np.ascontiguousarray(array, tensor.dtype))


def read_only(array: Array) -> Array:
    """Return a read-only view of a value, because several functions read it."""
    view = array.view()
    view.flags.writeable = False
    return view


def function_name(function: Operator) -> str:
    """Return a function's module and name, e.g. "chunkrt.backends.reference.rotate_half"."""
    while isinstance(function, partial):
        function = function.func
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', type(function).__name__)}"
