"""Eager evaluation of a decoder's modules on NumPy arrays, with hooks.

    tree = eager.load("model.gguf")
    state = tree.state(64)
    hidden = tree.model.embed_tokens(token_ids)
    hidden = tree.model.layers[0](hidden, state=state)

A call traces one module, as the compiler does with the complete tree, and computes its operators. The reference does so
one by one in float32, with the checkpoint's weights and without a scheme. Another backend compiles the module under a
scheme, as an engine compiles a subgraph. Values have the same names as in a plan.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import groupby
from typing import Any, cast

import numpy as np
import onnx_ir as ir
from numpy.typing import ArrayLike, NDArray

from chunkrt.backends.base import Executable
from chunkrt.backends.dispatch import Dispatcher, registered_operators
from chunkrt.backends.function_executable import read_only
from chunkrt.backends.registry import REFERENCE
from chunkrt.backends.switches import Switches
from chunkrt.compile.calibrate import run_node
from chunkrt.compile.compiler import plan_checkpoint
from chunkrt.engine.options import EngineOptions
from chunkrt.engine.resolve import engine_folder, find_checkpoint
from chunkrt.engine.roles import check_runs, open_backends
from chunkrt.engine_directory.manifest import open_weights, read_manifest
from chunkrt.errors import BackendError, ConfigError, PartitionError, unknown_name
from chunkrt.files import no_progress
from chunkrt.graph.modules import Module, ModuleView
from chunkrt.graph.operators import is_dynamic
from chunkrt.graph.ops import Trace
from chunkrt.graph.partition import Planned, plan_node
from chunkrt.graph.plan import Node, Plan, Rows, Subgraph, Tensor, read_only_caches, resolve
from chunkrt.graph.uses import uses

Float32 = NDArray[np.float32]
Array = NDArray[Any]
Hook = Callable[[str, Array], Array | None]
"""A function that receives the name and the array of a value, and returns an array to use instead, or None."""

BACKENDS = (REFERENCE, "native", "onnxrt")
DEFAULT_CONTEXT_LENGTH = 4096
MIN_ROWS = 32
"""Smallest number of rows that compiled modules are prepared for; one that gets more is compiled again."""


class State:
    """The caches and recurrent states of a decoder for one sequence, which calls update in place.

    Attributes:
        position: position of the first row of the next call. A call leaves it unchanged, since several modules compute
            the same tokens; `advance` moves it.
        num_positions: number of tokens of the complete sequence.
        tensors: float32 arrays by the names that they have in a plan; all zero at first.
    """

    def __init__(self, plan: Plan, num_positions: int, most: int) -> None:
        self._plan = plan
        if not 1 <= num_positions <= most:
            raise ConfigError(f"the state has {num_positions} positions, expected 1 to {most} (`context_length`)")
        self.position, self.num_positions = 0, num_positions
        sizes = {"P": num_positions, "W": num_positions}
        kept = {name: tensor.shape for name, tensor in plan.tensors.items() if tensor.kind == "state"}
        self.tensors: dict[str, Float32] = {n: np.zeros(resolve(shape, sizes), np.float32) for n, shape in kept.items()}

    def belongs_to(self, plan: Plan) -> bool:
        """Return True if the state was made for a plan."""
        return self._plan is plan

    def advance(self, num_tokens: int) -> None:
        """Move the position past tokens that all modules have computed. Raise ConfigError if the state does not hold
        so many.
        """
        left = self.num_positions - self.position
        if not isinstance(num_tokens, int | np.integer) or not 0 <= num_tokens <= left:
            raise ConfigError(
                f"the state cannot advance by {num_tokens!r} tokens, expected a whole number, 0 to {left}"
            )
        self.position += int(num_tokens)


@dataclass(frozen=True, kw_only=True)
class _Part:
    """A compiled part of a module, whose outputs have `rows` rows."""

    nodes: Sequence[Node]
    executable: Executable
    inputs: Sequence[str]
    shapes: Mapping[str, tuple[int, ...]]
    """Shapes of a row of each output."""
    num_rows: int

    def run(self, values: Mapping[str, Any]) -> dict[str, Float32]:
        """Return the outputs by name."""
        outputs = {name: np.empty((self.num_rows, *shape), np.float32) for name, shape in self.shapes.items()}
        self.executable.run({name: values[name] for name in self.inputs}, outputs)
        return outputs


class _ModuleCompiler:
    """Compiler of traced modules for one backend and scheme. Compiled modules are kept.

    Args:
        plan: the plan of the complete decoder.

    Raises:
        ConfigError, ModelError, PartitionError: see `load`.
    """

    def __init__(self, model: str, plan: Plan, backend: str, scheme: str | None) -> None:
        options = EngineOptions(npu=backend, scheme=scheme)
        folder = engine_folder(model, options, no_progress)
        manifest = read_manifest(folder)
        try:
            check_runs(plan, manifest.scheme, options)
        except PartitionError as error:
            raise PartitionError(str(error).replace("`npu=", "`backend=")) from error
        self._plan, self._scheme = plan, manifest.scheme
        self._weights = open_weights(folder).with_tables(plan)
        self._backend = open_backends(manifest, folder, options, "float32")[1]
        self._compiled: dict[tuple[object, ...], tuple[int, list[tuple[Subgraph, Executable]]]] = {}

    def parts(
        self, nodes: Sequence[Node], results: Sequence[str], given: Mapping[str, Array], hooked: Sequence[str]
    ) -> Iterator[_Part]:
        """Return the compiled parts of a module, in execution order.

        Args:
            results: values that the module returns.
            given: arrays that the module is called with.
            hooked: values that hooks see; the module is then cut into its operators.

        Raises:
            ConfigError: a hooked value is computed inside of an operator.
        """
        lengths = [len(array) for array in given.values()] or [1]
        rows = {"T": lengths[0], "R": lengths[-1]}  # only the decoder itself takes the rows that get logits
        shapes = tuple(array.shape[1:] for array in given.values())
        key = (tuple(node.name for node in nodes), shapes, bool(hooked))
        most, compiled = self._compiled.get(key, (0, []))
        if most < max(rows.values()):
            most = max(*rows.values(), MIN_ROWS)
            compiled = self._compile(nodes, results, given, most, cuts=bool(hooked))
            self._compiled[key] = most, compiled
        visible = {name for subgraph, _ in compiled for name in subgraph.outputs}
        if inside := [name for name in hooked if name not in visible]:
            raise ConfigError(
                f"a hook is on {inside[0]}, which {self._backend.name} computes inside of an operator; "
                "use the reference"
            )
        for subgraph, executable in compiled:
            yield _Part(
                nodes=subgraph.nodes,
                executable=executable,
                inputs=(*subgraph.inputs, *subgraph.all_state),
                shapes={name: self._row_shape(name) for name in subgraph.outputs},
                num_rows=rows[subgraph.rows],
            )

    def _row_shape(self, name: str) -> tuple[int, ...]:
        return tuple(int(size) for size in self._plan.tensors[name].shape[1:])

    def _compile(
        self, nodes: Sequence[Node], results: Sequence[str], given: Mapping[str, Array], most: int, *, cuts: bool
    ) -> list[tuple[Subgraph, Executable]]:
        tensors = self._plan.tensors
        has_all_rows = any(tensors[node.outputs[0]].shape[0] == "T" for node in nodes)
        added = {
            name: Tensor(
                name=name,
                dtype="int64" if array.dtype == np.int64 else "float32",
                shape=("T" if has_all_rows and (index == 0 or array.ndim > 1) else "R", *array.shape[1:]),
            )
            for index, (name, array) in enumerate(given.items())
        }
        plan = replace(self._plan, tensors={**tensors, **added})
        whole = self._subgraph("module", nodes, nodes, results, tensors)
        groups = [list(use.nodes) for use in uses(whole, plan)] if cuts else _by_rows(nodes, tensors)
        parts = tuple(
            self._subgraph(f"module.{index}", group, nodes, results, tensors) for index, group in enumerate(groups)
        )
        plan = replace(plan, subgraphs=parts)
        dispatcher = Dispatcher(plan, self._scheme, registered_operators(), Switches.parse(None))
        return [(part, dispatcher.compile(part, self._backend, most, self._weights)) for part in parts]

    def _subgraph(
        self,
        name: str,
        nodes: Sequence[Node],
        of_module: Sequence[Node],
        results: Sequence[str],
        tensors: Mapping[str, Tensor],
    ) -> Subgraph:
        """Return some nodes of a module as a subgraph."""
        made = [output for node in nodes for output in node.outputs]
        read = dict.fromkeys(value for node in nodes for value in node.inputs if value and value not in made)
        kinds = {value: tensors[value].kind if value in tensors else "value" for value in read}
        others = {value for node in of_module if node not in nodes for value in node.inputs}
        shared = read_only_caches(nodes)
        return Subgraph(
            name=name,
            device="cpu",
            is_static=not any(is_dynamic(node.domain, node.op) for node in nodes),
            rows=cast(Rows, tensors[nodes[0].outputs[0]].shape[0]),
            nodes=tuple(nodes),
            inputs=tuple(value for value in read if kinds[value] == "value"),
            outputs=tuple(value for value in made if value in others or value in results),
            weights=tuple(value for value in read if kinds[value] == "weight"),
            state=tuple(value for value in read if kinds[value] == "state" and value not in shared),
            shared_state=tuple(value for value in read if kinds[value] == "state" and value in shared),
        )


def _by_rows(nodes: Sequence[Node], tensors: Mapping[str, Tensor]) -> list[list[Node]]:
    """Return adjacent nodes whose outputs have equally many rows."""
    return [list(group) for _, group in groupby(nodes, key=lambda node: tensors[node.outputs[0]].shape[0])]


class EagerModule(ModuleView):
    """A module of a decoder that is called on arrays. Attributes with modules, and lists of them, are those of the
    decoder's tree.
    """

    def __init__(self, tree: Tree, module: Module) -> None:
        super().__init__(module)
        self._tree = tree

    def _view(self, module: Module) -> EagerModule:
        return EagerModule(self._tree, module)

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

    def __init__(self, planned: Planned, context_length: int, compiler: _ModuleCompiler | None = None) -> None:
        super().__init__(self, planned.decoder)
        self._context_length = context_length
        self.plan, self._planned, self._compiler = planned.plan, planned, compiler
        self._hooks: list[tuple[str, Hook]] = []
        self._weights: dict[str, Float32] = {}

    def state(self, num_positions: int) -> State:
        """Return an empty state for a sequence of up to `num_positions` tokens."""
        return State(self.plan, num_positions, self._context_length)

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
        if not callable(function):
            raise ConfigError(f"the hook is {function!r}, expected a function of a name and an array")
        names = (name for name, tensor in self.plan.tensors.items() if tensor.kind == "value")
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(f"the hook's pattern {pattern!r} matches no value; `tree.plan.tensors` has the names")
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
        names = [each.name or "" for each in results]
        read = {name for node in nodes for name in node.inputs} | {*names}
        values: dict[str, Any] = {"": None, **given}
        values |= self._positions(module, read, state, len(inputs[0]) if inputs else 0)
        before = {name: tensor.copy() for name, tensor in state.tensors.items() if name in values} if state else {}
        try:
            if self._compiler is None:
                values |= {name: self._weight(name) for name in record.weights if name in read}
                for node in nodes:
                    self._compute(node, values)
            else:
                self._compute_compiled(self._compiler, nodes, names, values, given)
        except BaseException:
            for name, tensor in before.items():
                values[name][:] = tensor
            raise
        arrays = tuple(np.array(values[name]) for name in names)
        return arrays if isinstance(result, tuple) else arrays[0]

    def _compute_compiled(
        self,
        compiler: _ModuleCompiler,
        nodes: Sequence[Node],
        results: Sequence[str],
        values: dict[str, Any],
        given: Mapping[str, Array],
    ) -> None:
        """Add the outputs of compiled nodes to the values; hooks get the values between operators."""
        computed = [name for node in nodes for name in node.outputs]
        hooked = [name for name in computed if any(fnmatchcase(name, pattern) for pattern, _ in self._hooks)]
        for part in compiler.parts(nodes, results, given, hooked):
            try:
                outputs = part.run(values)
            except (BackendError, ValueError, IndexError) as error:
                raise ConfigError(f"{part.nodes[0].name} cannot be computed from these arrays: {error}") from error
            for name, array in outputs.items():
                values[name] = self._hooked(name, read_only(array))

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
        if not isinstance(state, State) or not state.belongs_to(self.plan):
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
                if not isinstance(changed, np.ndarray) or changed.dtype.kind not in "fiub":
                    raise ConfigError(f"the hook on {name} returns {changed!r:.40}, expected an array of numbers")
                changed = np.ascontiguousarray(changed, np.float32)
                if changed.shape != array.shape:
                    raise ConfigError(
                        f"the hook on {name} returns the shape {list(changed.shape)}, expected {list(array.shape)}"
                    )
                array = read_only(changed)
        return array


def load(
    model: str | os.PathLike[str],
    *,
    context_length: int = DEFAULT_CONTEXT_LENGTH,
    backend: str = REFERENCE,
    scheme: str | None = None,
) -> Tree:
    """Open a checkpoint for eager evaluation. Weights are read when a module first needs them, and then kept.

    Args:
        model: a catalogue name, a GGUF file, a Hugging Face folder or an ONNX decoder.
        context_length: largest number of positions of a state, at most the model's.
        backend: "reference" computes operators one by one in float32. "native" compiles the called modules for this
            CPU, and runs a decoder many times faster.
        scheme: quantisation of the compiled modules, by default the model's; not for the reference.

    Raises:
        ConfigError, ModelError: the model is unknown, damaged or unsupported.
        PartitionError: the backend does not run the scheme.
    """
    if not isinstance(context_length, int | np.integer) or isinstance(context_length, bool) or context_length < 1:
        raise ConfigError(f"context_length is {context_length!r}, expected a whole number of at least 1")
    if not isinstance(backend, str) or backend not in BACKENDS:
        raise unknown_name("backend", str(backend), BACKENDS)
    if backend == REFERENCE and scheme is not None:
        raise ConfigError(f"scheme is {scheme!r}, and the reference computes without one; choose backend='native'")
    checkpoint, _ = find_checkpoint(os.fspath(model), no_progress)
    planned = plan_checkpoint(checkpoint, {})
    context_length = min(context_length, planned.plan.context_length)
    planned = planned.within(context_length)
    compiler = None if backend == REFERENCE else _ModuleCompiler(os.fspath(model), planned.plan, backend, scheme)
    return Tree(planned, context_length, compiler)


def _array(given: ArrayLike) -> Array:
    array = np.asarray(given)
    if array.ndim and not len(array):
        raise ConfigError("an input has no rows; give at least one")
    if array.dtype.kind == "U":
        raise ConfigError("an input is text, expected token ids; encode it with a tokenizer (`Engine.tokenizer`)")
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
