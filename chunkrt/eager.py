"""Eager evaluation of a decoder's modules on NumPy arrays, with hooks.

    tree = eager.load("model.gguf")
    state = tree.state(64)
    hidden = tree.model.embed_tokens(token_ids)
    hidden = tree.model.layers[0](hidden, state=state)

A call traces one module, as the compiler does with the complete tree, and evaluates its operators by the reference
backend in float32, with the checkpoint's weights and without a scheme. Values have the same names as in a plan.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import ArrayLike, NDArray

from chunkrt.backends.function_executable import read_only
from chunkrt.compile.calibrate import run_node
from chunkrt.compile.compiler import plan_checkpoint
from chunkrt.engine.resolve import find_checkpoint
from chunkrt.errors import ConfigError
from chunkrt.files import no_progress
from chunkrt.graph.modules import Module
from chunkrt.graph.ops import Trace
from chunkrt.graph.partition import Planned, plan_node
from chunkrt.graph.plan import Node, Plan, resolve

Float32 = NDArray[np.float32]
Array = NDArray[Any]
Hook = Callable[[str, Array], Array | None]
"""A function that receives the name and the array of a value, and returns an array to use instead, or None."""

DEFAULT_CONTEXT_LENGTH = 4096


class State:
    """The caches and recurrent states of a decoder for one sequence, which calls update in place.

    Attributes:
        position: position of the first row of the next call. A call leaves it unchanged, since several modules compute
            the same tokens; `advance` moves it.
        num_positions: number of tokens of the complete sequence.
        tensors: float32 arrays by the names that they have in a plan; all zero at first.
    """

    def __init__(self, plan: Plan, num_positions: int) -> None:
        self._plan = plan
        if not 1 <= num_positions <= plan.context_length:
            raise ConfigError(f"the state has {num_positions} positions, expected 1 to {plan.context_length}")
        self.position, self.num_positions = 0, num_positions
        sizes = {"P": num_positions, "W": num_positions}
        kept = {name: tensor.shape for name, tensor in plan.tensors.items() if tensor.kind == "state"}
        self.tensors: dict[str, Float32] = {n: np.zeros(resolve(shape, sizes), np.float32) for n, shape in kept.items()}

    def belongs_to(self, plan: Plan) -> bool:
        """Return True if the state was made for a plan."""
        return self._plan is plan

    def advance(self, num_tokens: int) -> None:
        """Move the position past tokens that all modules have computed."""
        self.position += num_tokens


class EagerModule:
    """A module of a decoder that is called on arrays. Attributes with modules, and lists of them, are those of the
    decoder's tree.
    """

    def __init__(self, tree: Tree, module: Module) -> None:
        self._tree, self._module = tree, module

    def __repr__(self) -> str:
        return f"{type(self._module).__name__}({self.path or 'decoder'!r})"

    def __getattr__(self, name: str) -> Any:
        """Return a module below this one, or a list of modules."""
        found = None if name.startswith("_") else vars(self._module).get(name)
        if isinstance(found, Module):
            return EagerModule(self._tree, found)
        if isinstance(found, list) and found and all(isinstance(each, Module) for each in found):
            return [EagerModule(self._tree, each) for each in found]
        names = sorted({child.partition(".")[0] for child, _ in self._module.children()})
        raise AttributeError(f"{self!r} has no module {name!r}; there are: {', '.join(names) or 'none'}")

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *{child.partition(".")[0] for child, _ in self._module.children()}]

    @property
    def path(self) -> str:
        """Path of the module in the tree; empty for the decoder."""
        return self._module.path

    def __call__(self, *inputs: ArrayLike, state: State | None = None) -> Any:
        """Compute the module.

        Args:
            inputs: float arrays [T, N], or whole numbers [T], as the module's `forward` takes them.
            state: the sequence's state, if the module or one below it reads positions or keeps a state.

        Returns:
            The result as float32 array, or a tuple of arrays.

        Raises:
            ConfigError: the arrays do not fit the module, a state is missing, or its positions are exceeded. After an
                error, also of a hook, the state is as before the call.
        """
        return self._tree.evaluate(self._module, [_array(each) for each in inputs], state)


class Tree(EagerModule):
    """A decoder whose modules are called on arrays. The decoder itself takes token ids [T] and the indices of the rows
    that get logits.

    Attributes:
        plan: the plan of the complete decoder, which names all values.
    """

    def __init__(self, planned: Planned) -> None:
        super().__init__(self, planned.decoder)
        self.plan, self._planned = planned.plan, planned
        self._hooks: list[tuple[str, Hook]] = []
        self._weights: dict[str, Float32] = {}

    def state(self, num_positions: int) -> State:
        """Return an empty state for a sequence of up to `num_positions` tokens."""
        return State(self.plan, num_positions)

    def modules(self) -> list[str]:
        """Return the paths of all modules."""
        return list(self._by_path)

    def module(self, path: str) -> EagerModule:
        """Return a module by its path. Raises ConfigError if there is none."""
        if path not in self._by_path:
            raise ConfigError(f"the decoder has no module {path!r}; `modules()` lists them")
        return EagerModule(self, self._by_path[path])

    @cached_property
    def _by_path(self) -> dict[str, Module]:
        return {module.path: module for module in self._planned.decoder.modules()}

    @contextmanager
    def hook(self, pattern: str, function: Hook) -> Iterator[None]:
        """Call a function with every computed value whose name matches a pattern, e.g. "*.mlp.down_proj.output".

        Args:
            function: called with the name and the array, which is read-only. It returns None, or an array of the same
                shape that all later operators read instead.

        Raises:
            ConfigError: the pattern matches no value of the plan.
        """
        names = (name for name, tensor in self.plan.tensors.items() if tensor.kind == "value")
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(f"the hook's pattern {pattern!r} matches no value; `plan.tensors` has the names")
        self._hooks.append((pattern, function))
        try:
            yield
        finally:
            self._hooks.remove((pattern, function))

    def evaluate(self, module: Module, inputs: Sequence[Array], state: State | None) -> Any:
        """Compute a module of the tree; see `EagerModule.__call__`."""
        if len(rows := {len(array) for index, array in enumerate(inputs) if array.ndim == 2 or not index}) > 1:
            raise ConfigError(f"the inputs have {' and '.join(map(str, sorted(rows)))} rows, expected the same number")
        record = Trace()
        for name, kept in self.plan.tensors.items():
            if kept.kind == "state":  # a module may read the cache of a module that is not called
                record.inputs[name] = _value(name, ir.DataType.FLOAT, kept.shape)
        given = {f"given.{index}": array for index, array in enumerate(inputs)}
        with record.open():
            try:
                result = module(
                    *(_value(name, _type_of(array), ("T", *array.shape[1:])) for name, array in given.items())
                )
            except (ValueError, TypeError) as error:
                shapes = ", ".join(f"{array.dtype} {list(array.shape)}" for array in inputs) or "no arrays"
                raise ConfigError(f"{module.path or 'the decoder'} cannot be called with {shapes}: {error}") from error
        updates = {new.name or "" for _, new in record.state_updates}
        nodes = [plan_node(node, updates) for node in record.nodes]
        results = result if isinstance(result, tuple) else (result,)
        read = {name for node in nodes for name in node.inputs} | {each.name or "" for each in results}
        values: dict[str, Any] = {
            "": None,
            **given,
            **{name: self._weight(name) for name in record.weights if name in read},
        }
        values |= self._positions(module, read, state, len(inputs[0]) if inputs else 0)
        before = {name: tensor.copy() for name, tensor in state.tensors.items() if name in values} if state else {}
        try:
            for node in nodes:
                self._compute(node, values)
        except BaseException:
            for name, tensor in before.items():
                values[name][:] = tensor
            raise
        arrays = tuple(np.array(values[each.name or ""]) for each in results)
        return arrays if isinstance(result, tuple) else arrays[0]

    def _compute(self, node: Node, values: dict[str, Any]) -> None:
        """Add the outputs of a node to the values."""
        try:
            made = run_node(node, values)
        except (ValueError, IndexError) as error:
            raise ConfigError(f"{node.name} cannot be computed from these arrays: {error}") from error
        for name, array in zip(node.outputs, made if isinstance(made, tuple) else (made,), strict=True):
            values[name] = self._hooked(name, read_only(array))

    def _weight(self, name: str) -> Float32:
        if name not in self._weights:
            self._weights[name] = read_only(self._planned.load(name))
        return self._weights[name]

    def _positions(self, module: Module, read: set[str], state: State | None, num_tokens: int) -> dict[str, Array]:
        """Return the state's tensors and the positions, if a module reads them."""
        kept = {name for name in read if name in self.plan.tensors and self.plan.tensors[name].kind == "state"}
        if not kept and not read & {"position", "rope_position"}:
            return {}
        if state is None:
            raise ConfigError(
                f"{module.path or 'the decoder'} keeps a state or reads positions; pass state=tree.state(n)"
            )
        if not state.belongs_to(self.plan):
            raise ConfigError("the state was made by another tree; make one with this tree's state()")
        if state.position + num_tokens > state.num_positions:
            raise ConfigError(
                f"{num_tokens} tokens at position {state.position} exceed the {state.num_positions} positions of the "
                "state; make a longer one"
            )
        rope_position = state.position + self.plan.rope_offset(state.num_positions)
        positions = {"position": np.array([state.position]), "rope_position": np.array([rope_position])}
        return {**positions, **{name: state.tensors[name] for name in kept}}

    def _hooked(self, name: str, array: Array) -> Array:
        for pattern, function in list(self._hooks):
            if fnmatchcase(name, pattern) and (changed := function(name, array)) is not None:
                changed = np.ascontiguousarray(changed, np.float32)
                if changed.shape != array.shape:
                    raise ConfigError(
                        f"the hook on {name} returns the shape {list(changed.shape)}, expected {list(array.shape)}"
                    )
                array = read_only(changed)
        return array


def load(model: str | os.PathLike[str], *, context_length: int = DEFAULT_CONTEXT_LENGTH) -> Tree:
    """Open a checkpoint for eager evaluation. Weights are read when a module first needs them, and then kept.

    Args:
        model: a catalogue name, a GGUF file, a Hugging Face folder or an ONNX decoder.
        context_length: largest number of positions of a state, at most the model's.

    Raises:
        ConfigError, ModelError: the model is unknown, damaged or unsupported.
    """
    if context_length < 1:
        raise ConfigError(f"context_length is {context_length}, expected at least 1")
    checkpoint, _ = find_checkpoint(os.fspath(model), no_progress)
    planned = plan_checkpoint(checkpoint, {})
    return Tree(planned.within(min(context_length, planned.plan.context_length)))


def _array(given: ArrayLike) -> Array:
    array = np.asarray(given)
    if array.dtype.kind in "iu" and array.ndim == 1:
        if array.min(initial=0) < 0:
            raise ConfigError(f"an input contains the number {array.min()}, expected 0 or more")
        return read_only(np.ascontiguousarray(array, np.int64))
    if array.dtype.kind == "f" and array.ndim == 2:
        return read_only(np.ascontiguousarray(array, np.float32))
    raise ConfigError(f"an input is {array.dtype} {list(array.shape)}, expected floats [T, N] or whole numbers [T]")


def _type_of(array: Array) -> ir.DataType:
    return ir.DataType.INT64 if array.dtype.kind == "i" else ir.DataType.FLOAT


def _value(name: str, dtype: ir.DataType, shape: Sequence[int | str]) -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))
