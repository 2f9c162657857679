"""Execution of operators that are implemented as Python functions, by the reference or by plug-ins.

The functions take the weights of an engine in the form that suits NumPy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np

from chunkrt.backends.base import Array
from chunkrt.backends.registry import REFERENCE, OperatorForm, operators, qualified
from chunkrt.engine_directory.store import INPUT_STEP_SUFFIX, OUTPUT_STEP_SUFFIX, WeightStore
from chunkrt.engine_directory.weights import StoredWeight, stored_weights
from chunkrt.errors import BackendError, ChunkrtError, CompileError
from chunkrt.graph.plan import Node, Plan, Tensor, resolve
from chunkrt.graph.uses import OperatorNode
from chunkrt.quant.arithmetic import DynamicWeight, Integers, quantize_rows, right_operand
from chunkrt.quant.grid import LinearGrids
from chunkrt.quant.scheme import Scheme

operators.register("quantize", REFERENCE)(quantize_rows)


def constants(names: Iterable[str], plan: Plan, scheme: Scheme, weights: WeightStore) -> dict[str, Any]:
    """Return weights of a plan by name, in the form that functions take.

    Under "float" all weights are arrays. Under other schemes the weight of a linear is a `QuantizedWeight`, and the
    weight of routed experts is a list of `QuantizedWeight` objects.
    """
    stored = stored_weights(plan, scheme)
    return {name: _constant(stored[name], scheme, weights) for name in names}


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


class NodeObject:
    """An object of a plug-in's class for one node, which is called like a function.

    Args:
        form: the form whose class it is. The class is called with the node and the form's parts. Its method `prepare`,
            if there is one, is then called once with the node's weights, and the object gets no weights later.
        weights: returns the node's weights in the order of its inputs; None for an absent one.

    Raises:
        CompileError: the class or `prepare` fails.
    """

    def __init__(
        self,
        form: OperatorForm,
        node: OperatorNode,
        parts: Mapping[str, Callable[..., Any]],
        weights: Callable[[], Sequence[Any]],
    ) -> None:
        self.node = node
        with _reported(form, f"make {form.operator!r} for node {node.name!r}"):
            self._call: Callable[..., Any] = form.function(node, **parts)
        if form.prepares:
            stored = weights()
            with _reported(form, f"prepare the weights of {form.operator!r} for node {node.name!r}"):
                self._call.prepare(*stored)
        self.__module__, self.__qualname__ = form.module, form.function.__qualname__

    def __call__(self, *arrays: Any) -> Any:
        return self._call(*arrays)


@contextmanager
def _reported(form: OperatorForm, what: str) -> Iterator[None]:
    """Raise CompileError with the form and its package if a plug-in's class fails."""
    try:
        yield
    except ChunkrtError:
        raise
    except Exception as error:  # a plug-in's class may raise any exception
        raise CompileError(
            f"{form.origin}: form {form.name!r} cannot {what}: {type(error).__name__}: {error}; repair it or use "
            f"`ops='-{form.operator}'`"
        ) from error


Operator = Callable[..., Any]
"""A function that takes the node's inputs in order and its attributes by name, and returns one output or a tuple."""


class FunctionExecutable:
    """Executable that calls the function of each node, one after another.

    Args:
        name: the subgraph's name, for errors.
        steps: pairs of a function and the node that determines its arguments.
        constants: the weights by name.
        tensors: the plan's tensors, with the shapes and types that results must have.
        packages: the installed packages that provide functions, by the name of the node, for errors.
    """

    fixed_length: int | None = None

    def __init__(
        self,
        name: str,
        steps: Sequence[tuple[Node, Operator]],
        constants: Mapping[str, Any],
        tensors: Mapping[str, Tensor],
        packages: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._name = name
        self._packages = packages
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
                if len(results) != len(node.outputs):
                    raise ValueError(f"it returned {len(results)} outputs, expected {len(node.outputs)}")
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
        who = function_name(function, self._packages.get(node.name, ""))
        return f"{self._name}, node {node.name!r}: {what} by {who} failed: {reason}"


def _checked(result: Any, tensor: Tensor, sizes: Mapping[str, int]) -> Array:
    """Return a function's result as a C-contiguous array of the plan's type. Raises ValueError or TypeError if its
    shape or type differs from the plan.
    """
    if result is None:
        raise TypeError(f"it returned None, expected the array {tensor.name!r}")
    array = np.asarray(result)
    expected = resolve(tensor.shape, sizes)
    if array.shape != expected:
        raise ValueError(f"it returned {tensor.name!r} of shape {list(array.shape)}, expected {list(expected)}")
    if array.dtype.kind != np.dtype(tensor.dtype).kind:
        raise TypeError(f"it returned {tensor.name!r} of type {array.dtype}, expected {tensor.dtype}")
    return read_only(np.ascontiguousarray(array, tensor.dtype))


def read_only(array: Array) -> Array:
    """Return a read-only view of a value, because several functions read it."""
    view = array.view()
    view.flags.writeable = False
    return view


def function_name(function: Operator, package: str = "") -> str:
    """Return a function's module and name, e.g. "chunkrt.backends.reference.rotate_half", and then the installed
    package that provides it, if it is given: "acme_ops.norm of acme-ops".
    """
    while isinstance(function, partial):
        function = function.func
    name = f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', type(function).__name__)}"
    return f"{name} of {package}" if package else name
