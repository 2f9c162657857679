"""Tracing: a decoder's module tree is run once and recorded as an ONNX graph.

While a trace is open, every operator of `graph/ops.py` appends a node to it. Nodes and values are named after the
module
that made them ("model.layers.0.mlp.down_proj.output"), so the graph is readable in Netron. A node's metadata state the
device of its module, so partitioning does not need the modules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import onnx_ir as ir

from chunkrt.errors import ChunkrtError, ModelError
from chunkrt.graph.operators import OPERATOR_NAMES, check_node, require
from chunkrt.graph.plan import DOMAIN, Attribute, Device

OPSET = 23
"""Opset of traced graphs: the first with RMSNormalization, RotaryEmbedding and Attention."""
IR_VERSION = 10
DEVICE_KEY = "chunkrt.device"
"""Metadata key of a node's device; a node without the key is placed by rule."""
MODULE_KEY = "chunkrt.module"
STATE_KEY = "chunkrt.state"
"""Mark of a graph input that persists from chunk to chunk."""
CONTEXT_KEY = "chunkrt.context_length"
LONG_CONTEXT_KEY = "chunkrt.long_context_from"
NO_HEAD_KEY = "chunkrt.no_head"
"""Metadata keys: the number of positions that the graph can distinguish, the number of tokens above which it uses its
long rotary tables, and the mark of a decoder without an LM head.
"""
ROTARY_KEY = "chunkrt.rotary"
"""Mark of a weight that is a rotary table made by chunkrt; see `Tensor.rotary`."""
ALONE_KEY = "chunkrt.alone"
"""Mark of a node that becomes a separate subgraph, with its name."""

_current: ContextVar[Trace] = ContextVar("trace")


def current_trace() -> Trace:
    """Return the trace to which operators append nodes. Raises LookupError outside of `Trace.open`."""
    return _current.get()


class Trace:
    """One graph under construction.

    `state_updates` pairs every cache input with the output that holds its new content. `failed_in` is the path of the
    innermost module whose forward raised an exception; None if none did.
    """

    def __init__(self) -> None:
        self.nodes: list[ir.Node] = []
        self.inputs: dict[str, ir.Value] = {}
        self.weights: dict[str, ir.Value] = {}
        self.state_updates: list[tuple[ir.Value, ir.Value]] = []
        self.metadata: dict[str, str] = {}
        self.failed_in: str | None = None
        self._scopes: list[tuple[str, Device | None]] = [("", None)]
        self._names: set[str] = set()

    @contextmanager
    def open(self) -> Iterator[Trace]:
        """Make this the current trace."""
        token = _current.set(self)
        try:
            yield self
        finally:
            _current.reset(token)

    @contextmanager
    def scope(self, path: str, device: Device | None) -> Iterator[None]:
        """Name the nodes added in this context after a module, and place them on the device of the module or of its
        nearest placed ancestor.
        """
        self._scopes.append((path, device or self._scopes[-1][1]))
        try:
            yield
        except Exception:
            self.failed_in = path if self.failed_in is None else self.failed_in
            raise
        finally:
            self._scopes.pop()

    def node(
        self,
        op: str,
        inputs: Sequence[ir.Value | None],
        outputs: Sequence[tuple[str, tuple[int | str, ...]]],
        *,
        attributes: Mapping[str, int | float | str],
        domain: str = "",
    ) -> list[ir.Value]:
        """Append a node with float32 outputs, given as (name within the module, shape).

        Raises:
            ValueError: the shapes do not fit the operator, or the name of an output already exists.
        """
        path, device = self._scopes[-1]
        try:
            is_foreign = domain not in ("", DOMAIN)
            require(
                not (is_foreign and op in OPERATOR_NAMES),
                f"chunkrt has its own {op}; rename that of {domain}",
            )
            check_node(
                domain,
                op,
                attributes,
                [_type_of(value) if value is not None else None for value in inputs],
                outputs[0][1],
            )
        except ValueError as error:
            raise ValueError(f"operator {op} {outputs[0][0]!r}: {error}") from error
        values = [_value(self._unique(name), ir.DataType.FLOAT, shape) for name, shape in outputs]
        metadata = {DEVICE_KEY: device} if device else {}
        node = ir.Node(
            domain,
            op,
            inputs,
            [attribute(name, value) for name, value in attributes.items()],
            outputs=values,
            name=values[0].name,
            metadata_props={**metadata, MODULE_KEY: path},
        )
        self.nodes.append(node)
        return values

    def input(self, name: str, shape: tuple[int | str, ...]) -> ir.Value:
        """Return an int64 input of the graph; the same name returns the same value."""
        if name not in self.inputs:
            self.inputs[name] = _value(name, ir.DataType.INT64, shape)
        return self.inputs[name]

    def position(self) -> ir.Value:
        """Return the graph input that holds the position of row 0: int64 [1]."""
        return self.input("position", (1,))

    def rope_position(self) -> ir.Value:
        """Return the graph input that holds the index of row 0 in the concatenated rotary tables: int64 [1]."""
        return self.input("rope_position", (1,))

    def weight(self, name: str, shape: tuple[int, ...]) -> ir.Value:
        """Add a float32 weight by its full name; its values are loaded later, from the checkpoint."""
        if name not in self.weights:
            self.weights[name] = _value(name, ir.DataType.FLOAT, shape)
        return self.weights[name]

    def state(self, name: str, shape: tuple[int | str, ...]) -> ir.Value:
        """Add a tensor that persists to the module being traced: a cache, or a recurrent state."""
        full_name = self._unique(name)
        self.inputs[full_name] = _value(full_name, ir.DataType.FLOAT, shape)
        self.inputs[full_name].metadata_props[STATE_KEY] = "1"
        return self.inputs[full_name]

    def update_state(self, old: ir.Value, new: ir.Value) -> None:
        """Record that `new` is the updated content of the state `old`."""
        self.state_updates.append((old, new))

    def set_context(self, length: int, long_from: int | None) -> None:
        """Record the number of positions that the decoder can distinguish; see `Plan`."""
        known = int(self.metadata.get(CONTEXT_KEY, length))
        self.metadata[CONTEXT_KEY] = str(min(known, length))
        if long_from is not None:
            self.metadata[LONG_CONTEXT_KEY] = str(long_from)

    def leave_out_head(self) -> None:
        """Record that the logits are not valid; see `Plan.has_head`."""
        self.metadata[NO_HEAD_KEY] = "1"

    def _unique(self, name: str) -> str:
        path = self._scopes[-1][0]
        full = f"{path}.{name}" if path else name
        if full in self._names:
            raise ValueError(f"two values are named {full!r}; give the second operator another name")
        self._names.add(full)
        return full


def trace(decoder: Callable[[ir.Value, ir.Value], ir.Value], *, title: str = "decoder") -> ir.Model:
    """Record a decoder as an ONNX graph.

    Args:
        decoder: module that is called once with "input_ids" int64 [T] and "logit_rows" int64 [R]; it returns logits [R,
            vocab].
        title: noun phrase for the decoder in errors, without an article.

    Returns:
        A model with inputs input_ids, logit_rows, position and the state of every layer; outputs logits and the updated
        state. Weights are initializers without values, which come from the checkpoint.

    Raises:
        ModelError: a forward raised an exception, or passed shapes to an operator that do not fit it.
    """
    record = Trace()
    try:
        with record.open():
            logits = decoder(record.input("input_ids", ("T",)), record.input("logit_rows", ("R",)))
    except ChunkrtError:
        raise
    except Exception as error:  # a plug-in's forward may raise any exception
        module = f"module {record.failed_in!r}, " if record.failed_in else ""
        what = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
        raise ModelError(f"the {title} cannot be traced: {module}{what}; correct its forward, or the config") from error
    graph = ir.Graph(
        list(record.inputs.values()),
        [logits, *(new for _, new in record.state_updates)],
        nodes=record.nodes,
        initializers=(),
        opset_imports={"": OPSET, "chunkrt": 1},
        name="decoder",
        metadata_props=record.metadata,
    )
    for weight in record.weights.values():
        graph.initializers[weight.name or ""] = weight
    return ir.Model(graph, ir_version=IR_VERSION, producer_name="chunkrt")


def _type_of(value: ir.Value) -> tuple[str, tuple[int | str, ...]]:
    """Return the name of a value's data type, and its shape."""
    assert value.shape is not None
    name = "int64" if value.dtype == ir.DataType.INT64 else "float32"
    return name, tuple(d if isinstance(d, int) else str(d.value) for d in value.shape)


def _value(name: str, dtype: ir.DataType, shape: Sequence[int | str]) -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))


def attribute(name: str, value: Attribute) -> ir.Attr:
    """Convert a plan's attribute to ONNX."""
    if isinstance(value, int):
        return ir.AttrInt64(name, value)
    if isinstance(value, float):
        return ir.AttrFloat32(name, value)
    if isinstance(value, str):
        return ir.AttrString(name, value)
    is_int = all(isinstance(v, int) for v in value)
    return ir.AttrInt64s(name, [int(v) for v in value]) if is_int else ir.AttrFloat32s(name, value)
