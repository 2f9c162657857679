"""Emission of ONNX nodes at a given opset; this module alone handles the differences between opsets.

Values are found by name. Values of the plan keep their names. If an operator is lowered to several nodes, they are
named after its result: "model.norm.output/mean".
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, TypeVar

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.passes.common import InlinePass

from chunkrt.backends.onnx.functions import expansions
from chunkrt.errors import QuantizationError
from chunkrt.graph.ops import attribute
from chunkrt.graph.plan import Attribute, Dimension, Node, resolve

IR_VERSIONS = {14: 7, 18: 8, 21: 10, 23: 10}
"""Versions of ONNX's file format by opset, for the opsets that models can be exported at."""

CONTRIB_DOMAIN = "com.microsoft"

FLOAT, FLOAT16, INT64, BOOL = ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.INT64, ir.DataType.BOOL

LARGEST_FLOAT16 = 65504.0

Load = Callable[[str], NDArray[np.float32]]
Weights = Literal["float", "int8", "int4"]
T = TypeVar("T")


class Emitter:
    """One ONNX graph under construction.

    Args:
        opset: one of IR_VERSIONS.
        dtype: data type of linears and their weights.
        shapes: shapes of the plan's tensors by name.
        load: returns a weight's values; called when the model is written.
        tied: weights that are the transpose of another.
        weights: storage of the weights of `linears`.
        linears: names of the weights of linear layers.
        rows: the first dimensions of the plan's values, needed for operators without shape inference.
    """

    def __init__(
        self,
        *,
        opset: int,
        dtype: ir.DataType,
        shapes: Mapping[str, tuple[Dimension, ...]],
        load: Load,
        tied: Mapping[str, str],
        weights: Weights = "float",
        linears: Collection[str] = (),
        rows: Sequence[int | str] = (),
    ) -> None:
        self.opset, self.dtype, self.weights, self.rows = opset, dtype, weights, rows
        self.load = load
        self.nodes: list[ir.Node] = []
        self.inputs: list[ir.Value] = []
        self.outputs: list[ir.Value] = []
        self.initializers: dict[str, ir.Value] = {}
        self._values: dict[str, ir.Value] = {}
        self._casts: dict[tuple[str, ir.DataType], ir.Value] = {}
        self._shapes, self.tied, self._linears = shapes, tied, linears
        self._last: tuple[str, Any] = ("", None)
        self._called: set[tuple[str, str, str]] = set()

    def shared(self, name: str, make: Callable[[str], ir.Value]) -> ir.Value:
        """Return a value that several layers read, and make it at its first use."""
        return self._values[name] if name in self._values else make(name)

    def width(self, name: str) -> int:
        """Return the number of columns of a value or a weight of the plan."""
        (width,) = resolve(self._shapes[name][-1:], {})
        return width

    def depth(self, name: str) -> int:
        """Return the number of rows of a weight of the plan."""
        (depth,) = resolve(self._shapes[name][:1], {})
        return depth

    def has_integers(self, name: str) -> bool:
        """Return whether integers store a linear's weight, or an embedding's table that is a linear's weight."""
        return self.weights != "float" and (name in self._linears or name in self.tied.values())

    def remembered(self, name: str, make: Callable[[], T]) -> T:
        """Return a result by name, and make it unless it is that of the last call."""
        if self._last[0] != name:
            self._last = ("", None)  # memory never holds two
            self._last = (name, make())
        found: T = self._last[1]
        return found

    def stored(self, name: str, dtype: ir.DataType, shape: Sequence[int], make: Callable[[], Any]) -> ir.Value:
        """Return a tensor that is made when the model is written; the same name returns the same value."""
        if name not in self._values:
            self._add_initializer(name, dtype, shape, make)
        return self._values[name]

    def input(self, name: str, dtype: ir.DataType, shape: Sequence[int | str]) -> ir.Value:
        """Add an input to the graph."""
        value = self._new(name, dtype, shape)
        self.inputs.append(value)
        return value

    def zeros(self, name: str, dtype: ir.DataType, shape: Sequence[int | str]) -> ir.Value:
        """Add zeros of a static shape, which take no space in the file."""
        sizes = [size for size in shape if isinstance(size, int)]
        return self.cast(self.op("ConstantOfShape", self.ints(*sizes), name=name, dtype=FLOAT), dtype)

    def output(self, value: ir.Value, name: str, shape: Sequence[int | str]) -> None:
        """Make a value an output of the graph, under a new name."""
        self._values.pop(value.name or "", None)
        value.name, value.shape = name, ir.Shape(shape)
        self._values[name] = value
        self.outputs.append(value)

    def read(self, name: str, dtype: ir.DataType | None = None) -> ir.Value:
        """Return a value or a weight of the plan as `dtype`. Without `dtype`, a value keeps its type and a weight has
        the type of linears.
        """
        if name not in self._values:
            if name in self.tied:
                return self.op("Transpose", self.read(self.tied[name], dtype), name=name, perm=[1, 0])
            self._add_weight(name, dtype or self.dtype)
        value = self._values[name]
        return value if dtype is None else self.cast(value, dtype)

    def alias(self, name: str, value: ir.Value) -> None:
        """Add another name for a value."""
        self._values[name] = value

    def cast(self, value: ir.Value, dtype: ir.DataType) -> ir.Value:
        """Return the value in another type; all readers share one Cast."""
        if value.dtype == dtype:
            return value
        key = (value.name or "", dtype)
        if key not in self._casts:
            self._casts[key] = self.op(
                "Cast", value, name=f"{value.name}/{dtype.name.lower()}", dtype=dtype, to=int(dtype)
            )
        return self._casts[key]

    def op(
        self,
        op: str,
        *inputs: ir.Value | None,
        name: str,
        dtype: ir.DataType | None = None,
        domain: str = "",
        **attributes: Attribute,
    ) -> ir.Value:
        """Add a node with one output, which has the node's name and, by default, the first input's type."""
        (output,) = self.ops(op, *inputs, names=[name], dtype=dtype, domain=domain, **attributes)
        return output

    def ops(
        self,
        op: str,
        *inputs: ir.Value | None,
        names: Sequence[str],
        dtype: ir.DataType | None = None,
        domain: str = "",
        **attributes: Attribute,
    ) -> Sequence[ir.Value]:
        """Add a node with several outputs."""
        dtype = dtype or next(value.dtype for value in inputs if value is not None)
        outputs = [self._new(name, dtype) for name in names]
        given = [attribute(name, value) for name, value in attributes.items()]
        self.nodes.append(ir.Node(domain, op, inputs, given, outputs=outputs, name=names[0]))
        return outputs

    def call(
        self,
        node: Node,
        overload: str,
        inputs: Sequence[ir.Value | None],
        names: Sequence[str],
        nodes: list[ir.Node],
    ) -> Sequence[ir.Value]:
        """Add a call of the function that defines a node of the plan to `nodes`: those of the graph, or of a body. The
        model inlines the function.
        """
        outputs = [ir.Value(name=name, type=ir.TensorType(FLOAT)) for name in names]
        given = [attribute(name, value) for name, value in node.attributes.items()]
        nodes.append(ir.Node(node.domain, node.op, inputs, given, overload=overload, outputs=outputs, name=names[0]))
        self._called.add((node.op, overload, node.domain))
        return outputs

    def scan(self, body: ir.Graph, inputs: Sequence[ir.Value], names: Sequence[str]) -> Sequence[ir.Value]:
        """Run a body for each row: its inputs are the states, then a row of each other input; its outputs are the new
        states, then a row of the result. The results are float32.
        """
        outputs = [self._new(name, FLOAT) for name in names]
        num_scanned = len(inputs) - (len(names) - 1)
        given = [ir.AttrGraph("body", body), ir.AttrInt64("num_scan_inputs", num_scanned)]
        self.nodes.append(ir.Node("", "Scan", inputs, given, outputs=outputs, name=names[-1]))
        return outputs

    def split(self, value: ir.Value, sizes: Sequence[int], names: Sequence[str]) -> Sequence[ir.Value]:
        """Split the last axis into parts of these sizes."""
        return self.ops("Split", value, self.ints(*sizes), names=names, axis=-1)

    def cut(self, value: ir.Value, start: int, end: int, *, axis: int, name: str) -> ir.Value:
        """Slice elements start .. end - 1 of an axis."""
        return self.op("Slice", value, self.ints(start), self.ints(end), self.ints(axis), name=name)

    def reshape(self, value: ir.Value, *shape: int, name: str) -> ir.Value:
        """Reshape a value; as in ONNX, 0 keeps a size and -1 infers it."""
        return self.op("Reshape", value, self.ints(*shape), name=name)

    def reduce_mean(self, value: ir.Value, *, name: str) -> ir.Value:
        """Average over the last axis, which keeps size 1. The operator takes its axes as an input since opset 18."""
        if self.opset < 18:
            return self.op("ReduceMean", value, name=name, axes=[-1], keepdims=1)
        return self.op("ReduceMean", value, self.ints(-1), name=name, keepdims=1)

    def reduce_sum(self, value: ir.Value, axis: int, *, name: str, keepdims: bool = True) -> ir.Value:
        """Sum over an axis. The operator takes its axes as an input since opset 13."""
        return self.op("ReduceSum", value, self.ints(axis), name=name, keepdims=int(keepdims))

    def ints(self, *numbers: int) -> ir.Value:
        """Return a constant int64 [n]."""
        return self.constant("ints." + "_".join(map(str, numbers)), np.array(numbers, np.int64))

    def number(self, value: float, dtype: ir.DataType = FLOAT) -> ir.Value:
        """Return a constant scalar."""
        return self.constant(f"number.{value!r}.{dtype.name.lower()}", np.array(value, dtype.numpy()))

    def constant(self, name: str, array: NDArray[Any]) -> ir.Value:
        """Return a constant; the same name returns the same value."""
        if name not in self._values:
            value = self._new(name, ir.DataType.from_numpy(array.dtype), array.shape)
            value.const_value = ir.tensor(array, name=name)
            self.initializers[name] = value
        return self._values[name]

    def table(self, name: str, weight: str, rows: slice, dtype: ir.DataType) -> ir.Value:
        """Return some rows of a plan's weight as a constant [rows, columns]; the same name returns the same value."""
        if name not in self._values:
            shape = (rows.stop - rows.start, *resolve(self._shapes[weight][1:], {}))
            self._add_initializer(name, dtype, shape, lambda: self.load(weight)[rows])
        return self._values[name]

    def model(self, *, metadata: Mapping[str, str], name: str) -> ir.Model:
        """Build a model from all added nodes."""
        imports = {"": self.opset}
        if any(node.domain == CONTRIB_DOMAIN for node in self.nodes):
            imports[CONTRIB_DOMAIN] = 1
        graph = ir.Graph(self.inputs, self.outputs, nodes=self.nodes, opset_imports=imports.copy(), name=name)
        for key, value in self.initializers.items():
            graph.initializers[key] = value
        model = ir.Model(
            graph,
            ir_version=IR_VERSIONS[self.opset],
            producer_name="chunkrt",
            functions=expansions(self._called),
            metadata_props=dict(metadata),
        )
        if self._called:
            InlinePass()(model)
            for domain in graph.opset_imports.keys() - imports.keys():
                del graph.opset_imports[domain]
        return model

    def _add_weight(self, name: str, dtype: ir.DataType) -> None:
        self._add_initializer(name, dtype, resolve(self._shapes[name], {}), lambda: self.load(name))

    def _add_initializer(self, name: str, dtype: ir.DataType, shape: Sequence[int], load: Callable[[], Any]) -> None:
        value = self._new(name, dtype, shape)
        value.const_value = ir.LazyTensor(
            lambda: ir.tensor(stored_as(load(), dtype, name), name=name), dtype, ir.Shape(shape), name=name
        )
        self.initializers[name] = value

    def _new(self, name: str, dtype: ir.DataType | None, shape: Collection[int | str] | None = None) -> ir.Value:
        assert name not in self._values, name
        assert dtype is not None, name
        value = ir.Value(name=name, type=ir.TensorType(dtype), shape=None if shape is None else ir.Shape(shape))
        self._values[name] = value
        return value


def stored_as(array: NDArray[np.float32], dtype: ir.DataType, name: str) -> NDArray[Any]:
    """Return the array, contiguous, in the type in which it is written.

    Raises:
        QuantizationError: a value exceeds float16.
    """
    largest = max(float(array.max()), -float(array.min())) if dtype == FLOAT16 else 0.0
    if largest > LARGEST_FLOAT16:
        raise QuantizationError(
            f"{name} holds {largest:g}, which exceeds float16's {LARGEST_FLOAT16:g}; use --dtype fp32"
        )
    return np.ascontiguousarray(array, dtype=dtype.numpy())
