"""Operators of plug-ins, and kinds of linear attention without a closed form, in an export: the expansion into standard
ONNX, inlined.

An operator without state computes each row by itself, so its expansion takes all rows at once. An operator with state
runs in a Scan, whose body is the expansion for one row. Rows of padding leave the states unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from chunkrt.backends.onnx.functions import has_expansion
from chunkrt.backends.onnx.plan_models import overload
from chunkrt.errors import ConfigError
from chunkrt.graph.linear_attention import LINEAR_ATTENTION_OP
from chunkrt.graph.ops import OPSET
from chunkrt.graph.plan import DOMAIN, Node, Plan, resolve
from chunkrt.onnx.exporting.emitter import BOOL, FLOAT, Emitter

_CONV_BIAS = 4
"""Index of an input of linear attention that expansions need, although nodes may lack it."""

States = Sequence[ir.Value]


def is_expanded(node: Node) -> bool:
    """Return whether an expansion of a plug-in's operator, or of a kind of linear attention, defines a node."""
    is_possible = node.op in (LINEAR_ATTENTION_OP, "SelectiveScan") or node.domain not in ("", DOMAIN)
    return is_possible and has_expansion(node.domain, node.op, overload(node))


def has_state(plan: Plan, node: Node) -> bool:
    """Return whether a node reads a state."""
    return any(plan.tensors[name].kind == "state" for name in node.inputs if name)


def emit_expanded(e: Emitter, plan: Plan, node: Node) -> None:
    """Add an operator without state, for all rows at once. Raises ConfigError if the opset is not the expansion's."""
    inputs = [_read(e, plan, name) for name in node.inputs]
    results = _call(e, node, inputs, [f"{name}/expanded" for name in node.outputs], e.nodes)
    for name, rows in zip(node.outputs, results, strict=True):
        e.alias(name, e.cast(e.op("Unsqueeze", rows, e.ints(0), name=f"{name}/float"), e.dtype))


class WindowExpansions:
    """Emitter of operators with state over `window` rows, the first of which may be padding.

    Args:
        is_token: int64 [1, T] for the complete sequence, 0 for padding.
    """

    def __init__(self, e: Emitter, plan: Plan, window: int, is_token: ir.Value, sequence: int) -> None:
        self._e, self._plan, self._window, self._mask, self._sequence = e, plan, window, is_token, sequence

    def layer(self, node: Node, states: States) -> States:
        """Add an operator, and return the new states [1, ...]. Raises ConfigError as `emit_expanded` does."""
        e, (out,), tensors = self._e, node.outputs, self._plan.tensors
        nodes: list[ir.Node] = []
        given, rows, befores = list[ir.Value | None](), dict[ir.Value, ir.Value](), list[ir.Value]()
        for name in node.inputs:
            value = _read(e, self._plan, name) if not name or tensors[name].kind != "state" else None
            if name and tensors[name].kind == "state":
                value = _value(f"{out}/before.{len(befores)}", FLOAT, resolve(tensors[name].shape, {}))
                befores.append(value)
            elif value is not None and tensors[name].kind == "value":
                row = _value(f"{out}/row.{len(rows)}", FLOAT, resolve(tensors[name].shape[1:], {}))
                rows[row] = value
                value = _add(nodes, "Unsqueeze", [row, e.ints(0)], f"{row.name}/of_one")
            given.append(value)
        if node.op == LINEAR_ATTENTION_OP and given[_CONV_BIAS] is None:
            given[_CONV_BIAS] = e.constant("no_bias", np.zeros(1, np.float32))
        names = [f"{out}/of_one", *(f"{out}/after.{i}" for i in range(len(befores)))]
        result, *afters = _call(e, node, given, names, nodes)
        token = _value(f"{out}/is_token", BOOL, ())
        kept = [
            _add(nodes, "Where", [token, after, before], f"{before.name}/kept")
            for before, after in zip(befores, afters, strict=True)
        ]
        flat = _add(nodes, "Squeeze", [result, e.ints(0)], f"{out}/flat")
        body = ir.Graph([*befores, token, *rows], [*kept, flat], nodes=nodes, name=f"{out}/body")
        old = [e.op("Squeeze", state, e.ints(0), name=f"{out}/old.{i}") for i, state in enumerate(states)]
        *new, results = e.scan(
            body,
            [*old, self._is_token(), *rows.values()],
            [*(f"{out}/end.{i}" for i in range(len(old))), f"{out}/rows"],
        )
        e.alias(out, e.cast(e.op("Unsqueeze", results, e.ints(0), name=f"{out}/float"), e.dtype))
        return [e.op("Unsqueeze", state, e.ints(0), name=f"{out}/new.{i}") for i, state in enumerate(new)]

    def _is_token(self) -> ir.Value:
        """Return whether each row is a token, bool [W]."""
        e, start, end = self._e, self._sequence - self._window, self._sequence

        def make(name: str) -> ir.Value:
            rows = e.cut(self._mask, start, end, axis=1, name=f"{name}.ints")
            return e.cast(e.op("Squeeze", rows, e.ints(0), name=name), BOOL)

        return e.cast(e.shared("is_token.rows", make), BOOL)


def _read(e: Emitter, plan: Plan, name: str) -> ir.Value | None:
    """Return an input in float32; a value without the export's first axis, [W, columns]."""
    if not name:
        return None
    value = e.read(name, FLOAT)
    if plan.tensors[name].kind != "value":
        return value
    return e.shared(f"{name}/rows", lambda rows: e.op("Squeeze", value, e.ints(0), name=rows))


def _call(
    e: Emitter, node: Node, inputs: Sequence[ir.Value | None], names: Sequence[str], nodes: list[ir.Node]
) -> Sequence[ir.Value]:
    if e.opset != OPSET:
        raise ConfigError(f"the expansion of {node.domain}::{node.op} is in opset {OPSET}; use --opset {OPSET}")
    batch = e.rows[0] if e.rows else 1
    if isinstance(batch, int) and batch > 1:
        raise ConfigError(f"the expansion of {node.domain}::{node.op} computes one sequence; omit --batch")
    return e.call(node, overload(node), inputs, names, nodes)


def _value(name: str, dtype: ir.DataType, shape: Sequence[int]) -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))


def _add(nodes: list[ir.Node], op: str, inputs: Sequence[ir.Value], name: str) -> ir.Value:
    value = ir.Value(name=name, type=ir.TensorType(FLOAT))
    nodes.append(ir.Node("", op, inputs, outputs=[value], name=name))
    return value
