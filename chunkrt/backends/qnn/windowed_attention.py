"""Attention over a static window of the cache, and short convolutions, as standard operators of fixed shapes for the
NPU.

    qkv -> Split -> heads -> RoPE (rows of the tables are inputs)
    scores = q (past keys | own keys)^T + mask,   output = softmax(scores) (past values | own values)

A soft cap bounds the scores before the mask is added: cap tanh(scores / cap). A sink is one more score of each head,
and its share of the softmax is dropped.

A cache is passed with the number of slots that the node's `past_slots` states: the first positions of a full cache, or
every slot of a ring. The mask states which slots a row sees, so the order of slots does not matter. The rows' new keys
and values are outputs of the graph, which its caller writes into the state.

An int8 cache is passed as its integers, which the graph converts to float16, and their scales, which a product with a
matrix of zeros and ones repeats for the values of each group. The rows' own keys and values are not rounded.

    qkv -> Split -> before, after, x
    rows = (state | before * x),   output = after * sum over taps j of weight_j rows_(t+j)

The state of a convolution is passed as rows, [taps - 1, C]. All rows of before * x are outputs, because the next state
depends on the number of padding rows in the chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from chunkrt.backends.qnn.executable import NEW_SUFFIX, ROWS_SUFFIX, SCALES_SUFFIX, mask_name
from chunkrt.graph.plan import DOMAIN, INT8_GROUP, Node
from chunkrt.graph.static_attention import HEAD_NORM_OP, has_int8_caches, is_convolution, num_groups, static_slots


def write_out(graph: ir.Graph, nodes: Sequence[Node], rows: int) -> None:
    """Expand attention, convolutions and norms of heads for a fixed number of rows, in place.

    Requires: initializers have values. Ensures: the graph no longer contains positions, rotary tables and new states.
    Masks and rows of the tables are inputs. New rows of caches [kv_heads, rows, D] and of convolutions [rows, C] are
    outputs.
    """
    makers = {node.name: node for node in nodes}
    inputs = {value.name: value for value in graph.inputs}
    builder = _WindowedAttention(graph, inputs, rows)
    for node in list(graph):
        if node.domain != DOMAIN:
            continue
        builder.at(node)
        maker = makers[node.name or ""]
        if is_convolution(maker):
            written = builder.convolution
        else:
            written = builder.head_norm if node.op_type == HEAD_NORM_OP else builder.attention
        output, *presents = node.outputs
        made = written(maker, node)
        for present in presents:
            graph.outputs.remove(present)
        for index, wanted in enumerate(graph.outputs):
            if wanted is output:
                graph.outputs[index] = made
        ir.convenience.replace_all_uses_with(output, made)
        name, made.type = output.name, output.type
        graph.remove(node, safe=True)
        made.name = name
    for value in list(graph.inputs):
        if not value.uses():
            graph.inputs.remove(value)
    for name in [name for name, value in graph.initializers.items() if not value.uses()]:
        del graph.initializers[name]


@dataclass
class _WindowedAttention:
    """Builder of nodes in front of a node that will be replaced."""

    graph: ir.Graph
    inputs: dict[str | None, ir.Value]
    rows: int

    def at(self, node: ir.Node) -> None:
        """Insert subsequent nodes in front of this node."""
        self._old, self._count = node, 0

    def head_norm(self, node: Node, old: ir.Node) -> ir.Value:
        """Normalise the first heads of every row, and multiply each head by its own weights.

        Rows and heads share one axis: with more axes the NPU normalises wrongly if the last axis is shorter than 64.
        """
        x, weight = old.inputs
        assert x is not None
        assert x.shape is not None
        assert weight is not None
        assert weight.shape is not None
        heads, dim = weight.shape.numpy()
        columns = int(str(x.shape[-1]))
        normed, rest = self._split(x, [heads * dim, columns - heads * dim]) if columns > heads * dim else (x, None)
        by_head = self._op("Reshape", normed, self._ints(self.rows * heads, dim))
        ones = self._constant(np.ones(dim, np.float32))
        normed = self._op("RMSNormalization", by_head, ones, axis=-1, epsilon=float(str(node.attributes["epsilon"])))
        by_row = self._op("Reshape", normed, self._ints(self.rows, heads * dim))
        normed = self._op("Mul", by_row, self._op("Reshape", weight, self._ints(heads * dim)))
        return normed if rest is None else self._op("Concat", normed, rest, axis=1)

    def attention(self, node: Node, old: ir.Node) -> ir.Value:
        """Return the attention of the chunk's rows over the slots and themselves."""
        attributes: dict[str, Any] = dict(node.attributes)
        heads, kv_heads, dim = (int(attributes[name]) for name in ("num_heads", "num_kv_heads", "head_dim"))
        past, rows, group = static_slots(node), self.rows, heads // kv_heads
        qkv = old.inputs[0]
        assert qkv is not None
        key_cache, value_cache = node.inputs[5:7]
        q, k, v = self._split(qkv, [heads * dim, kv_heads * dim, kv_heads * dim])
        cos, sin = (
            self._input(name + ROWS_SUFFIX, (rows, int(attributes["rotary_dim"]) // 2)) for name in node.inputs[3:5]
        )
        q = self._rope(self._heads(q, heads, dim), cos, sin, dim, int(attributes["rotary_dim"]))
        k = self._rope(self._heads(k, kv_heads, dim), cos, sin, dim, int(attributes["rotary_dim"]))
        v = self._heads(v, kv_heads, dim)
        for name, new in ((key_cache, k), (value_cache, v)):
            self._output(new, name + NEW_SUFFIX, (kv_heads, rows, dim))
        keys, values = (
            self._op("Concat", self._past(node, name, (kv_heads, past, dim)), new, axis=1)
            for name, new in ((key_cache, k), (value_cache, v))
        )
        soft_cap = float(attributes.get("soft_cap", 0.0))
        q = self._op("Mul", q, self._constant(np.array(attributes["scale"] / (soft_cap or 1.0), np.float32)))
        q = self._op("Reshape", q, self._ints(kv_heads, group * rows, dim))
        scores = self._op("MatMul", q, self._op("Transpose", keys, perm=[0, 2, 1]))
        scores = self._op("Reshape", scores, self._ints(kv_heads, group, rows, past + rows))
        if soft_cap:
            scores = self._op("Mul", self._op("Tanh", scores), self._constant(np.array(soft_cap, np.float32)))
        mask = self._input(mask_name(node), (rows, past + rows))
        scores = self._op("Add", scores, mask)
        if sinks := next(iter(old.inputs[7:]), None):
            assert sinks.const_value is not None
            of_heads = sinks.const_value.numpy().reshape(kv_heads, group, 1, 1)
            column = self._constant(np.repeat(of_heads.astype(np.float32), rows, axis=2))
            shares = self._op("Softmax", self._op("Concat", scores, column, axis=-1), axis=-1)
            shares, _ = self._split(shares, [past + rows, 1])
        else:
            shares = self._op("Softmax", scores, axis=-1)
        shares = self._op("Reshape", shares, self._ints(kv_heads, group * rows, past + rows))
        attended = self._op("Reshape", self._op("MatMul", shares, values), self._ints(heads, rows, dim))
        by_row = self._op("Transpose", attended, perm=[1, 0, 2])
        return self._op("Reshape", by_row, self._ints(rows, heads * dim))

    def _past(self, node: Node, cache: str, shape: tuple[int, int, int]) -> ir.Value:
        """Return the slots of a cache."""
        if not has_int8_caches(node):
            return self._input(cache, shape)
        kv_heads, past, dim = shape
        stored = self._input(cache, shape, ir.DataType.INT8)
        integers = self._op("DequantizeLinear", stored, self._constant(np.ones((), np.float32)))
        scales = self._input(cache + SCALES_SUFFIX, (kv_heads, past, num_groups(dim)))
        spread = np.arange(dim) // INT8_GROUP == np.arange(num_groups(dim))[:, None]
        by_value = self._op("MatMul", scales, self._constant(spread.astype(np.float32)))
        return self._op("Mul", integers, by_value)

    def convolution(self, node: Node, old: ir.Node) -> ir.Value:
        """Return the convolution over the state's and then the chunk's rows, with a gate before and after it."""
        qkv, _, _, weight, bias = old.inputs[:5]
        assert qkv is not None
        assert weight is not None
        assert weight.const_value is not None
        taps = weight.const_value.numpy()[:, 0].T
        num_taps, channels = taps.shape
        before, after, x = self._split(qkv, [channels, channels, channels])
        gated = self._op("Mul", before, x)
        state = node.inputs[5]
        self._output(gated, state + NEW_SUFFIX, (self.rows, channels))
        seen = self._op("Concat", self._input(state, (num_taps - 1, channels)), gated, axis=0)
        parts = [
            self._op("Mul", self._rows_from(seen, tap), self._constant(np.ascontiguousarray(taps[tap : tap + 1])))
            for tap in range(num_taps)
        ]
        total = parts[0]
        for part in parts[1:]:
            total = self._op("Add", total, part)
        if node.inputs[4] and bias is not None:
            total = self._op("Add", total, bias)
        return self._op("Mul", after, total)

    def _rows_from(self, value: ir.Value, start: int) -> ir.Value:
        """Return a slice with as many rows as the chunk has."""
        return self._op("Slice", value, self._ints(start), self._ints(start + self.rows), self._ints(0))

    def _heads(self, value: ir.Value, heads: int, dim: int) -> ir.Value:
        """Reshape [rows, heads * dim] to [heads, rows, dim]."""
        by_head = self._op("Reshape", value, self._ints(self.rows, heads, dim))
        return self._op("Transpose", by_head, perm=[1, 0, 2])

    def _rope(self, x: ir.Value, cos: ir.Value, sin: ir.Value, dim: int, rotary: int) -> ir.Value:
        """Apply rotate-half RoPE to the first `rotary` columns; the other columns are unchanged."""
        half = rotary // 2
        first, second, *rest = self._split(x, [half, half, *([dim - rotary] if dim > rotary else [])])
        turned = self._op("Sub", self._op("Mul", first, cos), self._op("Mul", second, sin))
        other = self._op("Add", self._op("Mul", second, cos), self._op("Mul", first, sin))
        return self._op("Concat", turned, other, *rest, axis=-1)

    def _split(self, value: ir.Value, sizes: Sequence[int]) -> Sequence[ir.Value]:
        return self._ops("Split", [value, self._ints(*sizes)], len(sizes), axis=-1)

    def _op(self, op: str, *inputs: ir.Value, **attributes: Any) -> ir.Value:
        return self._ops(op, inputs, 1, **attributes)[0]

    def _ops(self, op: str, inputs: Sequence[ir.Value], number: int, **attributes: Any) -> Sequence[ir.Value]:
        name = self._name()
        made = [ir.AttrFloat32(k, v) if isinstance(v, float) else _integers(k, v) for k, v in attributes.items()]
        node = ir.Node("", op, inputs, made, num_outputs=number, name=name)
        for index, output in enumerate(node.outputs):
            output.name = f"{name}.{index}"
        self.graph.insert_before(self._old, node)
        return node.outputs

    def _name(self) -> str:
        self._count += 1
        return f"{self._old.name}.{self._count}"

    def _ints(self, *values: int) -> ir.Value:
        return self._constant(np.array(values, np.int64))

    def _constant(self, values: Any) -> ir.Value:
        tensor = ir.tensor(values, name=self._name())
        value = ir.Value(
            name=tensor.name,
            type=ir.TensorType(tensor.dtype),
            shape=ir.Shape(list(values.shape)),
            const_value=tensor,
        )
        self.graph.register_initializer(value)
        return value

    def _input(self, name: str, shape: Sequence[int], dtype: ir.DataType = ir.DataType.FLOAT) -> ir.Value:
        """Return an input of the graph, which all layers that need it share."""
        value = self.inputs.get(name)
        if value is None:
            value = self.inputs[name] = ir.Value(name=name)
            self.graph.inputs.append(value)
        value.type = ir.TensorType(dtype)
        value.shape = ir.Shape(list(shape))
        return value

    def _output(self, value: ir.Value, name: str, shape: Sequence[int]) -> None:
        value.name, value.shape, value.type = name, ir.Shape(list(shape)), ir.TensorType(ir.DataType.FLOAT)
        self.graph.outputs.append(value)


def _integers(name: str, value: Any) -> ir.Attr:
    return ir.AttrInt64s(name, value) if isinstance(value, list) else ir.AttrInt64(name, value)
