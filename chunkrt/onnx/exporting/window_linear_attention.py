"""Linear attention over a window of fixed length: convolutions, and the delta rule and Mamba-2 in closed form.

All values are float32, including the state. Rows of padding do not change the state: their convolution input is zero,
their decay is 1 and their step is 0. Padding may only come before the first token, where the state is zero.

Source: Yang et al., Gated Delta Networks (2024), section 3.3, for the closed form of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import numpy as np
import onnx_ir as ir

from chunkrt.graph.plan import Node
from chunkrt.onnx.exporting.emitter import FLOAT, Emitter

States = Sequence[ir.Value]


class Decays(NamedTuple):
    """Decays of the rows of a window: the logarithm from the start, [1, heads, W, 1]; the factor from each row to each
    later one, [1, heads, W, W], 0 for earlier ones; and the factor from the start.
    """

    at_row: ir.Value
    between: ir.Value
    from_start: ir.Value


class WindowLinearAttention:
    """Emitter of layers of linear attention over `window` rows, the first of which may be padding.

    Args:
        is_token: int64 [1, T] for the complete sequence, 0 for padding.
    """

    def __init__(self, e: Emitter, window: int, is_token: ir.Value, sequence: int) -> None:
        self._e, self._window, self._mask, self._sequence = e, window, is_token, sequence

    def layer(self, node: Node, states: States) -> States:
        """Add a layer of a kind in LINEAR_ATTENTION_FORMS, and return the new states."""
        return LINEAR_ATTENTION_FORMS[cast(str, node.attributes["attn_type"])](self, node, states)

    def _short_conv(self, node: Node, states: States) -> States:
        e, (out,) = self._e, node.outputs
        width = e.width(node.inputs[0]) // 3
        names = [f"{out}/{part}" for part in ("gate_before", "gate_after", "x")]
        before, after, x = e.split(e.read(node.inputs[0], FLOAT), [width] * 3, names)
        gated = e.op("Mul", before, x, name=f"{out}/gated")
        convolved, new_state = self._convolve(node, gated, states[0])
        e.alias(out, e.cast(e.op("Mul", after, convolved, name=f"{out}/float"), e.dtype))
        return [new_state]

    def _gated_delta_rule(self, node: Node, states: States) -> States:
        e, (out,) = self._e, node.outputs
        k_dim = cast(int, node.attributes["head_k_dim"])
        q, k, v, new_conv_state = self._heads_of(node, states[0])
        q = e.op("Mul", q, e.number(k_dim**-0.5), name=f"{out}/q_scaled")
        decays, step = self._decays(node), self._step(node)

        # the values that rows write, given the state before them and each other
        k_columns = e.op("Transpose", k, name=f"{out}/k_columns", perm=[0, 1, 3, 2])
        k_stepped = e.op("Mul", k, step, name=f"{out}/k_stepped")
        recalled = e.op("Mul", k_stepped, decays.from_start, name=f"{out}/k_from_start")
        recalled = e.op("MatMul", recalled, states[1], name=f"{out}/recalled")
        missing = e.op("Sub", e.op("Mul", v, step, name=f"{out}/v_stepped"), recalled, name=f"{out}/missing")
        likeness = e.op("MatMul", k_stepped, k_columns, name=f"{out}/likeness")
        likeness = e.op("Mul", likeness, decays.between, name=f"{out}/likeness_decayed")
        written = self._solve(likeness, missing, out)

        self._finish(node, self._read(node, q, k_columns, written, decays, states[1]))
        return [new_conv_state, self._new_state(node, k, written, decays, states[1])]

    def _mamba2(self, node: Node, states: States) -> States:
        e, (out,) = self._e, node.outputs
        c, b, x, new_conv_state = self._heads_of(node, states[0])
        decays = self._decays(node)
        written = e.op("Mul", x, self._step(node), name=f"{out}/x_stepped")
        b_columns = e.op("Transpose", b, name=f"{out}/b_columns", perm=[0, 1, 3, 2])
        read = self._read(node, c, b_columns, written, decays, states[1])
        skip = e.op("Unsqueeze", e.read(node.inputs[7], FLOAT), e.ints(1, 2), name=f"{out}/skip")
        self._finish(node, e.op("Add", read, e.op("Mul", x, skip, name=f"{out}/skipped"), name=f"{out}/with_skip"))
        return [new_conv_state, self._new_state(node, b, written, decays, states[1])]

    def _heads_of(self, node: Node, conv_state: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value, ir.Value]:
        """Convolve and activate the columns q | k | v; return them as heads [1, Hv, W, d], and the new state of the
        convolution.
        """
        e, (out,) = self._e, node.outputs
        k_heads, v_heads, k_dim, v_dim = (
            cast(int, node.attributes[key]) for key in ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim")
        )
        convolved, new_conv_state = self._convolve(node, e.read(node.inputs[0], FLOAT), conv_state)
        active = e.op("Mul", convolved, e.op("Sigmoid", convolved, name=f"{out}/sigmoid"), name=f"{out}/active")
        all_k, all_v = k_heads * k_dim, v_heads * v_dim
        q, k, v = e.split(active, [all_k, all_k, all_v], [f"{out}/{part}" for part in "qkv"])
        q, k = (self._key_heads(node, part) for part in (q, k))
        return q, k, self._heads(v, v_heads, v_dim), new_conv_state

    def _decays(self, node: Node) -> Decays:
        """Return the cumulative decays of a node."""
        e, (out,), rows = self._e, node.outputs, self._window
        gate = self._of_tokens(node.inputs[1])
        decay = e.op("CumSum", gate, e.constant("number.2", np.array(2, np.int64)), name=f"{out}/decay")
        at_row = e.op("Unsqueeze", decay, e.ints(3), name=f"{out}/decay_at_row")
        at_column = e.op("Unsqueeze", decay, e.ints(2), name=f"{out}/decay_at_column")
        between = e.op("Sub", at_row, at_column, name=f"{out}/decay_between")
        lower = e.constant(f"lower.{rows}", np.tril(np.ones((rows, rows), bool)))
        never = e.number(-1e9)
        between = e.op("Where", lower, between, never, name=f"{out}/decay_to_earlier", dtype=FLOAT)
        factors = e.op("Exp", between, name=f"{out}/decay_factors")
        from_start = e.op("Exp", at_row, name=f"{out}/from_start")
        return Decays(at_row, factors, from_start)

    def _step(self, node: Node) -> ir.Value:
        """Return the step of each row, [1, heads, W, 1], 0 for padding."""
        (out,) = node.outputs
        return self._e.op("Unsqueeze", self._of_tokens(node.inputs[2]), self._e.ints(3), name=f"{out}/step")

    def _read(
        self, node: Node, q: ir.Value, k_columns: ir.Value, written: ir.Value, decays: Decays, state: ir.Value
    ) -> ir.Value:
        """Return the values that rows read from the state before the window and from the window's earlier rows."""
        e, (out,) = self._e, node.outputs
        past = e.op("Mul", q, decays.from_start, name=f"{out}/q_from_start")
        past = e.op("MatMul", past, state, name=f"{out}/from_state")
        seen = e.op("MatMul", q, k_columns, name=f"{out}/seen")
        seen = e.op("Mul", seen, decays.between, name=f"{out}/seen_decayed")
        return e.op("Add", past, e.op("MatMul", seen, written, name=f"{out}/from_rows"), name=f"{out}/read")

    def _new_state(self, node: Node, k: ir.Value, written: ir.Value, decays: Decays, state: ir.Value) -> ir.Value:
        """Return the state after the window."""
        e, (out,), rows = self._e, node.outputs, self._window
        end = e.cut(decays.at_row, rows - 1, rows, axis=2, name=f"{out}/decay_at_end")
        to_end = e.op("Exp", e.op("Sub", end, decays.at_row, name=f"{out}/decay_to_end"), name=f"{out}/to_end")
        k_to_end = e.op("Mul", k, to_end, name=f"{out}/k_to_end")
        k_to_end = e.op("Transpose", k_to_end, name=f"{out}/k_to_end_columns", perm=[0, 1, 3, 2])
        added = e.op("MatMul", k_to_end, written, name=f"{out}/added")
        kept = e.op("Mul", state, e.op("Exp", end, name=f"{out}/whole_decay"), name=f"{out}/kept")
        return e.op("Add", kept, added, name=f"{out}/new_recurrent_state")

    def _finish(self, node: Node, read: ir.Value) -> None:
        """Make the node's output from the heads' results, [1, Hv, W, dv]."""
        e, (out,) = self._e, node.outputs
        all_v = cast(int, node.attributes["num_v_heads"]) * cast(int, node.attributes["head_v_dim"])
        by_row = e.op("Transpose", read, name=f"{out}/by_row", perm=[0, 2, 1, 3])
        e.alias(out, e.cast(e.reshape(by_row, 0, 0, all_v, name=f"{out}/float"), e.dtype))

    def _convolve(self, node: Node, x: ir.Value, state: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Convolve the state and x [1, W, C] causally; also return the last inputs as the new state, [1, C, K - 1]."""
        e, (out,), rows = self._e, node.outputs, self._window
        weight = e.read(node.inputs[3], FLOAT)
        assert weight.shape is not None
        channels, _, taps = weight.shape.numpy()
        column = e.shared("is_token.column", lambda name: e.op("Unsqueeze", self._is_token(), e.ints(2), name=name))
        columns = e.op("Transpose", e.op("Mul", x, column, name=f"{out}/tokens"), name=f"{out}/columns", perm=[0, 2, 1])
        window = e.op("Concat", state, columns, name=f"{out}/window", axis=2)
        bias = [e.read(node.inputs[4], FLOAT)] if node.inputs[4] else []
        by_channel = e.op("Conv", window, weight, *bias, name=f"{out}/convolved_columns", group=channels)
        new_state = e.cut(window, rows, rows + taps - 1, axis=2, name=f"{out}/new_conv_state")
        return e.op("Transpose", by_channel, name=f"{out}/convolved", perm=[0, 2, 1]), new_state

    def _key_heads(self, node: Node, x: ir.Value) -> ir.Value:
        """Reshape queries or keys [1, W, Hk dk] to [1, Hv, W, dk], normalised to unit length if the node requires
        it."""
        e, rows = self._e, self._window
        k_heads, v_heads, dim = (cast(int, node.attributes[k]) for k in ("num_k_heads", "num_v_heads", "head_k_dim"))
        heads = self._heads(x, k_heads, dim)
        if node.attributes["use_qk_l2norm"]:
            squares = e.op("Mul", heads, heads, name=f"{x.name}/squares")
            total = e.op(
                "Add", e.reduce_sum(squares, -1, name=f"{x.name}/total"), e.number(1e-6), name=f"{x.name}/safe"
            )
            heads = e.op("Div", heads, e.op("Sqrt", total, name=f"{x.name}/length"), name=f"{x.name}/unit")
        if k_heads == v_heads:
            return heads
        shared = v_heads // k_heads
        apart = e.op("Unsqueeze", heads, e.ints(2), name=f"{x.name}/each")
        repeated = e.op("Expand", apart, e.ints(1, k_heads, shared, rows, dim), name=f"{x.name}/repeated")
        return e.reshape(repeated, 0, v_heads, rows, dim, name=f"{x.name}/shared")

    def _heads(self, x: ir.Value, num_heads: int, dim: int) -> ir.Value:
        apart = self._e.reshape(x, 0, 0, num_heads, dim, name=f"{x.name}/apart")
        return self._e.op("Transpose", apart, name=f"{x.name}/heads", perm=[0, 2, 1, 3])

    def _of_tokens(self, name: str) -> ir.Value:
        """Reshape a gate [1, W, heads] to [1, heads, W], 0 for padding."""
        e = self._e
        by_head = e.op("Transpose", e.read(name, FLOAT), name=f"{name}/by_head", perm=[0, 2, 1])
        tokens = e.shared("is_token.row", lambda name: e.op("Unsqueeze", self._is_token(), e.ints(1), name=name))
        return e.op("Mul", by_head, tokens, name=f"{name}/of_tokens")

    def _is_token(self) -> ir.Value:
        """Return 1 for each row that is a token and 0 for padding, [1, W]."""
        e, start, end = self._e, self._sequence - self._window, self._sequence
        rows = e.shared("is_token", lambda name: e.cut(self._mask, start, end, axis=1, name=name))
        return e.cast(rows, FLOAT)

    def _solve(self, lower: ir.Value, right: ir.Value, out: str) -> ir.Value:
        """Solve (I + strictly lower part) X = right for X, [1, heads, W, W] and [1, heads, W, dv].

        The inverse's diagonal blocks double in size: the inverse of [[A, 0], [C, B]] is [[A', 0], [-B' C A', B']]. This
        is as stable as substitution and takes log2(W) steps.
        """
        e, rows = self._e, self._window
        inverse: ir.Value | None = None
        block = np.arange(rows)
        size = 1
        while size < rows:
            row, column = (block // size)[:, None], block // size
            below = (row == column + 1) & (row % 2 == 1)
            mask = e.constant(f"below.{rows}.{size}", below.astype(np.float32))
            part = e.op("Mul", lower, mask, name=f"{out}/below_{size}")
            if inverse is None:
                identity = e.constant(f"identity.{rows}", np.eye(rows, dtype=np.float32))
                inverse = e.op("Sub", identity, part, name=f"{out}/inverse_{size}")
            else:
                turned = e.op(
                    "MatMul",
                    e.op("MatMul", inverse, part, name=f"{out}/left_{size}"),
                    inverse,
                    name=f"{out}/both_{size}",
                )
                inverse = e.op("Sub", inverse, turned, name=f"{out}/inverse_{size}")
            size *= 2
        return right if inverse is None else e.op("MatMul", inverse, right, name=f"{out}/written")


LINEAR_ATTENTION_FORMS: dict[str, Callable[[WindowLinearAttention, Node, States], States]] = {
    "short_conv": WindowLinearAttention._short_conv,
    "gated_delta_rule": WindowLinearAttention._gated_delta_rule,
    "mamba2": WindowLinearAttention._mamba2,
}
