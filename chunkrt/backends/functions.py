"""Running operators that are functions, the reference's or a plug-in's, one after another."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from chunkrt.backends.base import Array
from chunkrt.backends.registry import qualified
from chunkrt.errors import BackendError, ChunkrtError
from chunkrt.graph.plan import Dimension, Node, Tensor

Operator = Callable[..., Any]
"""Takes the node's inputs in order and its attributes by name, and returns its output or a tuple of outputs."""


class FunctionExecutable:
    """Evaluates functions one after another, whoever wrote them.

    Args:
        name: of the subgraph, for errors.
        steps: what each node's function is called with, and the function.
        constants: the weights by name.
        tensors: the plan's, for the shapes that results must have.
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
        values: dict[str, Any] = {"": None, **self._constants, **inputs}
        for node, function in self._steps:
            try:
                results = function(*(values[name] for name in node.inputs), **node.attributes)
                results = results if isinstance(results, tuple) else (results,)
                values.update(zip(node.outputs, results, strict=True))
            except ChunkrtError:
                raise
            except Exception as error:  # a plug-in's function may raise anything
                reason = f"failed: {type(error).__name__}: {error}"
                raise BackendError(self._failure(node, function, reason)) from error
            for name in node.outputs:
                found, expected = np.shape(values[name]), self._tensors[name].shape
                if not _fits(found, expected):
                    reason = f"gave {name!r} of shape {list(found)}, expected {list(expected)}"
                    raise BackendError(self._failure(node, function, reason))
        for name, buffer in outputs.items():
            if np.shape(values[name]) != buffer.shape:
                shape = list(np.shape(values[name]))
                raise BackendError(f"{self._name}: {name!r} has shape {shape}, expected {list(buffer.shape)}")
            buffer[...] = values[name]

    def _failure(self, node: Node, function: Operator, reason: str) -> str:
        what = qualified(node.domain, node.op)
        return f"{self._name}, node {node.name!r}: {what} by {function_name(function)} {reason}"


def _fits(found: tuple[int, ...], expected: tuple[Dimension, ...]) -> bool:
    """Whether an array's shape is a tensor's, whatever its symbols stand for."""
    is_as_long = len(found) == len(expected)
    return is_as_long and all(isinstance(e, str) or e == f for f, e in zip(found, expected, strict=True))


def function_name(function: Operator) -> str:
    """Where a function is written: "chunkrt.backends.reference.rotate_half"."""
    while isinstance(function, partial):
        function = function.func
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', type(function).__name__)}"
