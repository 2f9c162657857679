"""Attention over a cache of fixed length: the form of `CachedAttention` in a fixed window.

Attention covers the last T of the cache's M slots. A layer with its own sliding window reads only the slots that one of
the rows can see. Row r of W is at slot M - W + r. With keys cached before RoPE, the slot determines the position; with
keys cached after RoPE, the input "position_ids" states it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import onnx_ir as ir

from chunkrt.graph.plan import Node
from chunkrt.onnx.exporting.emitter import BOOL, FLOAT, Emitter
from chunkrt.onnx.exporting.export_settings import WindowSettings
from chunkrt.onnx.exporting.lowerings import finish

MASKED = -1e9
"""Term added to the scores of slots that a row does not see. It is finite, so every row has a finite largest score."""

WINDOW_SUFFIX = ".window"
"""Suffix of a rotary table's name if the model holds only some of its rows."""


class WindowAttention:
    """Emitter of attention layers; masks and tables that several layers share are emitted once.

    Args:
        table_rows: the rows of each rotary table that a sequence of the fixed length needs.
    """

    def __init__(self, e: Emitter, settings: WindowSettings, table_rows: slice) -> None:
        self._e, self._settings, self._table_rows = e, settings, table_rows
        self._visible: dict[int, ir.Value] = {}

    def layer(self, node: Node, past: Sequence[ir.Value]) -> Sequence[ir.Value]:
        """Add a layer, and return the new keys and values."""
        e, s, (out,) = self._e, self._settings, node.outputs
        heads, kv_heads, dim = (cast(int, node.attributes[k]) for k in ("num_heads", "num_kv_heads", "head_dim"))
        window, scale = cast(int, node.attributes["window"]), cast(float, node.attributes["scale"])
        span = min(s.sequence, window + s.window - 1) if window else s.sequence
        qkv = e.read(node.inputs[0], e.dtype)
        parts = e.split(qkv, [n * dim for n in (heads, kv_heads, kv_heads)], [f"{out}/{n}" for n in ("q", "k", "v")])
        q, k, v = (_by_head(e, part, n, dim) for part, n in zip(parts, (heads, kv_heads, kv_heads), strict=True))
        q = self._rotated(node, q, s.window)
        if s.keys == "post-rope":
            k = self._rotated(node, k, s.window)
        present_key = self._shifted(past[0], k, f"{out}/present_key")
        present_value = self._shifted(past[1], v, f"{out}/present_value")
        keys, values = self._last(present_key, span), self._last(present_value, span)
        if s.keys == "pre-rope":
            keys = self._rotated(node, keys, span)
        is_plain = not node.attributes.get("soft_cap") and not any(node.inputs[7:8])
        if e.opset >= 23 and is_plain:
            attributes: dict[str, Any] = {"scale": scale, "softmax_precision": int(FLOAT)}
            attended = e.op(
                "Attention", q, keys, values, self._sees(window, span), name=f"{out}/attended", **attributes
            )
        else:
            attended = self._attend(q, keys, values, node, self._added(window, span))
        by_row = e.op("Transpose", attended, name=f"{out}/by_row", perm=[0, 2, 1, 3])
        e.reshape(by_row, 0, 0, heads * dim, name=out)
        return [present_key, present_value]

    def _shifted(self, past: ir.Value, new: ir.Value, name: str) -> ir.Value:
        """Drop the oldest W slots, except sinks, and append the window's rows."""
        window, context, sinks = self._settings.window, self._settings.context, self._settings.sinks
        if sinks:
            parts = [self._e.op("Gather", past, self._sink_slots(), name=f"{name}/sinks", axis=2)]
            if sinks + window < context:
                parts.append(self._e.cut(past, sinks + window, context, axis=2, name=f"{name}/kept"))
            return self._e.op("Concat", *parts, new, name=name, axis=2)
        if window == context:
            return self._e.op("Identity", new, name=name)
        kept = self._e.cut(past, window, context, axis=2, name=f"{name}/kept")
        return self._e.op("Concat", kept, new, name=name, axis=2)

    def _sink_slots(self) -> ir.Value:
        """Return the past slots [sinks] that come first in the new cache.

        They are W slots further, as without sinks, while the caches have W empty slots. From then on they are the first
        slots that hold tokens, so W slots after the sinks are dropped, or fewer if some slots are empty.
        """
        e, s = self._e, self._settings

        def make(name: str) -> ir.Value:
            empty = e.op("Sub", e.ints(s.context), e.read("past_length"), name=f"{name}/empty")
            moved = e.op("Min", empty, e.ints(s.window), name=f"{name}/moved")
            return e.op("Add", e.ints(*range(s.sinks)), moved, name=name)

        return e.shared("sink_slots", make)

    def _last(self, present: ir.Value, span: int) -> ir.Value:
        context = self._settings.context
        if span == context:
            return present
        return self._e.cut(present, context - span, context, axis=2, name=f"{present.name}/seen")

    def _sees(self, window: int, span: int) -> ir.Value:
        """Return the mask of the last `span` slots, [W, span] or [B, 1, W, span]: True if a row sees a slot.

        A row of padding sees itself, so that its softmax is defined.
        """
        if window not in self._visible:
            e, s, name = self._e, self._settings, f"visible.{window}" if window else "visible"
            slots = np.arange(span)
            rows = np.arange(span - s.window, span)[:, None]
            causal = (slots <= rows) & (slots > rows - (window or span + s.window))
            mask = e.cast(e.read("attention_mask"), BOOL)
            if span < s.sequence:
                mask = e.cut(mask, s.sequence - span, s.sequence, axis=1, name=f"{name}/mask")
            if s.batch > 1:
                mask = e.op("Unsqueeze", mask, e.ints(1, 2), name=f"{name}/mask_of_rows")
            before = e.op("And", e.constant(f"{name}/causal", causal), mask, name=f"{name}/before")
            visible = e.op("Or", before, e.constant(f"{name}/itself", slots == rows), name=name)
            self._visible[window] = visible
        return self._visible[window]

    def _added(self, window: int, span: int) -> ir.Value:
        """Return the mask as terms that are added to scores."""
        e, visible = self._e, self._sees(window, span)
        return e.shared(
            f"{visible.name}/added",
            lambda name: e.op("Where", visible, e.number(0.0), e.number(MASKED), name=name, dtype=FLOAT),
        )

    def _rotated(self, node: Node, x: ir.Value, num_rows: int) -> ir.Value:
        """Rotate x [1, heads, rows, D] (rotate-half) for the last `num_rows` positions."""
        cos, sin = (self._table(name, num_rows) for name in node.inputs[3:5])
        return rotate(self._e, x, cos, sin, cast(int, node.attributes["rotary_dim"]), node)

    def _table(self, weight: str, num_rows: int) -> ir.Value:
        """Return cos or sin [1 or B, num_rows, rotary_dim / 2] of the last positions."""
        e, s, name = self._e, self._settings, f"{weight}{WINDOW_SUFFIX}"
        first = self._table_rows.start
        if s.keys == "post-rope":
            table = e.table(name, weight, self._table_rows, e.dtype)
            return e.shared(
                f"{name}.rows", lambda name: e.op("Gather", table, e.read("position_ids"), name=name, axis=0)
            )
        rows = slice(first + s.sequence - num_rows, first + s.sequence)
        table = e.table(f"{name}.{num_rows}", weight, rows, e.dtype)
        one = e.shared(f"{name}.{num_rows}.batch", lambda name: e.op("Unsqueeze", table, e.ints(0), name=name))
        if s.batch == 1 or e.opset < 23:
            return one
        return e.shared(f"{one.name}.all", lambda name: e.op("Expand", one, e.ints(s.batch, 1, 1), name=name))

    def _attend(self, q: ir.Value, k: ir.Value, v: ir.Value, node: Node, added: ir.Value) -> ir.Value:
        """Compute softmax(scale q k^T + added) v, with the node's soft cap and sinks. Query heads that share a key head
        are stacked into one product.
        """
        e, (out,), window = self._e, node.outputs, self._settings.window
        heads, kv_heads, dim = (cast(int, node.attributes[key]) for key in ("num_heads", "num_kv_heads", "head_dim"))
        shared = heads // kv_heads
        scaled = e.op("Mul", q, e.number(cast(float, node.attributes["scale"]), e.dtype), name=f"{out}/q_scaled")
        grouped = e.reshape(scaled, 0, kv_heads, shared * window, dim, name=f"{out}/q_grouped")
        columns = e.op("Transpose", k, name=f"{out}/k_columns", perm=[0, 1, 3, 2])
        products = e.cast(e.op("MatMul", grouped, columns, name=f"{out}/products"), FLOAT)
        scores = e.reshape(products, 0, heads, window, -1, name=f"{out}/scores")
        if soft_cap := cast(float, node.attributes.get("soft_cap", 0.0)):
            shares = e.op("Mul", scores, e.number(1 / soft_cap), name=f"{out}/shares_of_cap")
            scores = e.op("Mul", e.op("Tanh", shares, name=f"{out}/bounded"), e.number(soft_cap), name=f"{out}/capped")
        masked = e.op("Add", scores, added, name=f"{out}/masked")
        if any(node.inputs[7:8]):
            weights = self._weights_beside_sinks(masked, e.read(node.inputs[7], FLOAT), out)
        else:
            weights = finish(e, "Softmax", masked, dtype=e.dtype, name=f"{out}/weights", axis=-1)
        by_group = e.reshape(weights, 0, kv_heads, shared * window, -1, name=f"{out}/weights_grouped")
        summed = e.op("MatMul", by_group, v, name=f"{out}/summed")
        return e.reshape(summed, 0, heads, window, dim, name=f"{out}/attended")

    def _weights_beside_sinks(self, scores: ir.Value, sinks: ir.Value, out: str) -> ir.Value:
        """Return the softmax over scores [1, heads, rows, slots] and one more score of each head, without the share of
        that score.
        """
        e = self._e
        column = e.op("Unsqueeze", sinks, e.ints(0, 2, 3), name=f"{out}/sink_column")
        of_rows = e.op("Expand", column, e.ints(self._settings.batch, 1, self._settings.window, 1), name=f"{out}/sinks")
        all_scores = e.op("Concat", scores, of_rows, name=f"{out}/scores_and_sinks", axis=-1)
        shares = e.op("Softmax", all_scores, name=f"{out}/shares", axis=-1)
        return e.cast(e.cut(shares, 0, -1, axis=3, name=f"{out}/weights"), e.dtype)


def rotate(e: Emitter, x: ir.Value, cos: ir.Value, sin: ir.Value, rotary_dim: int, node: Node) -> ir.Value:
    """Apply RoPE to x [B, heads, rows, D] with cos and sin [B, rows, rotary_dim / 2]; later dimensions are
    unchanged.
    """
    dim, half = cast(int, node.attributes["head_dim"]), rotary_dim // 2
    name = f"{x.name}/roped"
    if e.opset >= 23:
        partial: dict[str, Any] = {} if rotary_dim == dim else {"rotary_embedding_dim": rotary_dim}
        return e.op("RotaryEmbedding", x, cos, sin, name=name, **partial)
    names = [f"{x.name}/{part}" for part in ("first", "second", "rest")]
    sizes = [half, half, dim - rotary_dim]
    first, second, *rest = e.split(x, sizes[: 2 + (rotary_dim < dim)], names[: 2 + (rotary_dim < dim)])
    cos, sin = (_over_heads(e, table) for table in (cos, sin))
    left = e.op("Mul", first, cos, name=f"{x.name}/first_cos")
    right = e.op("Mul", second, sin, name=f"{x.name}/second_sin")
    upper = e.op("Sub", left, right, name=f"{x.name}/first_roped")
    left = e.op("Mul", second, cos, name=f"{x.name}/second_cos")
    right = e.op("Mul", first, sin, name=f"{x.name}/first_sin")
    lower = e.op("Add", left, right, name=f"{x.name}/second_roped")
    return e.op("Concat", upper, lower, *rest, name=name, axis=-1)


def _over_heads(e: Emitter, table: ir.Value) -> ir.Value:
    return e.shared(f"{table.name}.by_head", lambda name: e.op("Unsqueeze", table, e.ints(1), name=name))


def _by_head(e: Emitter, rows: ir.Value, num_heads: int, dim: int) -> ir.Value:
    """Reshape [B, rows, heads * D] to [B, heads, rows, D]."""
    apart = e.reshape(rows, 0, 0, num_heads, dim, name=f"{rows.name}/apart")
    return e.op("Transpose", apart, name=f"{rows.name}/heads", perm=[0, 2, 1, 3])
