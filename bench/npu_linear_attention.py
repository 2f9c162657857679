"""Support for linear attention in the NPU's compiler, and errors of its values in emulation.

    python bench/npu_linear_attention.py

prints the tables of docs/npu.md. Both kinds are built as graphs of standard operators and fixed shapes; states are
carried over several chunks. A gated delta rule is built in its chunk form: decays between rows as sums of logarithms,
each of its own terms alone, and the triangular system solved by blocks of doubling size.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import click
import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from chunkrt.backends.qnn import find_soc, open_htp
from chunkrt.backends.qnn.library import open_session
from chunkrt.backends.recurrences import linear_attention

Array = NDArray[Any]
SHORT, DELTA = "short_conv", "gated_delta_rule"
WIDTHS = (16, 1000, 1024, 2048)
HEADS = ((2, 4, 16), (16, 32, 128))
"""Heads of keys, heads of values, and their dimension; the second are Qwen3-Next's."""
LEAST_EXPONENT = -16.0
"""exp of this is 2 steps of float16; for less than -88 the NPU returns NaN."""
DECAYS = {
    "0.9999": lambda rng, shape: -np.full(shape, 1e-4),
    "0.98 to 0.999": lambda rng, shape: -rng.uniform(0.001, 0.02, shape),
    "0.37 to 0.9": lambda rng, shape: -rng.uniform(0.1, 1, shape),
    "below 0.00005": lambda rng, shape: -rng.uniform(10, 40, shape),
    "any": lambda rng, shape: -np.exp(rng.uniform(np.log(1e-5), np.log(50), shape)),
    "1, and 0 now and then": lambda rng, shape: np.where(
        rng.uniform(size=shape) < 0.1, -30, -rng.uniform(1e-4, 1e-2, shape)
    ),
}


class Graph:
    """Builder of an ONNX graph; values are names."""

    def __init__(self) -> None:
        self._nodes: list[Any] = []
        self._constants: list[Any] = []
        self._inputs: list[Any] = []
        self._outputs: list[Any] = []

    def op(self, op: str, *inputs: str, **attributes: Any) -> str:
        """Add a node with one output."""
        return self.ops(op, inputs, 1, **attributes)[0]

    def ops(self, op: str, inputs: Any, number: int, **attributes: Any) -> list[str]:
        """Add a node with several outputs."""
        names = [f"{op}.{len(self._nodes)}.{index}" for index in range(number)]
        self._nodes.append(helper.make_node(op, list(inputs), names, name=f"node.{len(self._nodes)}", **attributes))
        return names

    def constant(self, values: Any, dtype: Any = np.float32) -> str:
        """Add a constant, by default float32."""
        name = f"constant.{len(self._constants)}"
        self._constants.append(numpy_helper.from_array(np.ascontiguousarray(values, dtype), name))
        return name

    def reshape(self, value: str, *shape: int) -> str:
        """Add a reshape to the given dimensions."""
        return self.op("Reshape", value, self.constant(shape, np.int64))

    def split(self, value: str, *sizes: int) -> list[str]:
        """Split columns."""
        return self.ops("Split", [value, self.constant(sizes, np.int64)], len(sizes), axis=-1)

    def enter(self, name: str, *shape: int) -> str:
        """Add a float16 input."""
        self._inputs.append(helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT16, shape))
        return self.op("Cast", name, to=onnx.TensorProto.FLOAT)

    def leave(self, value: str, name: str, *shape: int) -> None:
        """Add a float16 output."""
        cast = helper.make_node("Cast", [value], [name], to=onnx.TensorProto.FLOAT16, name=f"out.{name}")
        self._nodes.append(cast)
        self._outputs.append(helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT16, shape))

    def model(self) -> bytes:
        """Return the ONNX model."""
        graph = helper.make_graph(self._nodes, "graph", self._inputs, self._outputs, self._constants)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)])
        model.ir_version = 10
        serialized: bytes = model.SerializeToString()
        return serialized

    def convolved(self, rows: str, state: str, taps: Array, num_rows: int) -> str:
        """Convolve rows that follow those of the state; taps [C, 1, K]."""
        seen = self.op("Concat", state, rows, axis=0)
        axis, total = self.constant([0], np.int64), ""
        for tap in range(taps.shape[-1]):
            ends = (self.constant([at], np.int64) for at in (tap, tap + num_rows))
            part = self.op("Mul", self.op("Slice", seen, *ends, axis), self.constant(taps[None, :, 0, tap]))
            total = self.op("Add", total, part) if total else part
        return total

    def decay(self, logarithm: str) -> str:
        """Return the exponential of a value."""
        return self.op("Exp", self.op("Clip", logarithm, self.constant(LEAST_EXPONENT), self.constant(0.0)))


def short_convolution(rows: int, taps: Array) -> bytes:
    """Build a graph with inputs qkv [rows, 3 C] and state [K - 1, C], outputs out and new, whose last rows are the next
    state.
    """
    graph, (channels, _, num_taps) = Graph(), taps.shape
    qkv, state = graph.enter("qkv", rows, 3 * channels), graph.enter("state", num_taps - 1, channels)
    before, after, x = graph.split(qkv, channels, channels, channels)
    gated = graph.op("Mul", before, x)
    graph.leave(graph.op("Mul", after, graph.convolved(gated, state, taps, rows)), "out", rows, channels)
    graph.leave(gated, "new", rows, channels)
    return graph.model()


def delta_rule(rows: int, taps: Array, k_heads: int, v_heads: int, dim: int) -> bytes:
    """Build a graph with inputs qkv, state, gate, beta and matrix [v_heads, dim, dim], outputs out, and new: the next
    matrix.
    """
    graph, group = Graph(), v_heads // k_heads
    qkv, state = graph.enter("qkv", rows, taps.shape[0]), graph.enter("state", taps.shape[-1] - 1, taps.shape[0])
    gate, beta = graph.enter("gate", rows, v_heads), graph.enter("beta", rows, v_heads)
    matrix = graph.enter("matrix", v_heads, dim, dim)
    mixed = graph.convolved(qkv, state, taps, rows)
    active = graph.op("Mul", mixed, graph.op("Sigmoid", mixed))
    q, k, v = graph.split(active, k_heads * dim, k_heads * dim, v_heads * dim)

    def unit(value: str, length: float) -> str:
        by_head = graph.reshape(value, rows * k_heads, dim)
        scale = graph.constant(np.full(dim, length * dim**-0.5))
        normed = graph.op("RMSNormalization", by_head, graph.constant(np.ones(dim)), axis=-1, epsilon=1e-6 / dim)
        return graph.op("Transpose", graph.reshape(graph.op("Mul", normed, scale), rows, k_heads, dim), perm=[1, 0, 2])

    def repeated(value: str, columns: int) -> str:
        once = graph.reshape(value, k_heads, 1, rows, columns)
        return graph.reshape(graph.op("Concat", *[once] * group, axis=1), v_heads, rows, columns)

    q, k = unit(q, dim**-0.5), unit(k, 1.0)
    k_columns = graph.op("Transpose", k, perm=[0, 2, 1])
    kk, qk = (repeated(graph.op("MatMul", each, k_columns), rows) for each in (k, q))
    q, k = repeated(q, dim), repeated(k, dim)
    v = graph.op("Transpose", graph.reshape(v, rows, v_heads, dim), perm=[1, 0, 2])
    step = graph.reshape(graph.op("Transpose", beta, perm=[1, 0]), v_heads, rows, 1)
    logarithms = graph.op("Transpose", gate, perm=[1, 0])

    def decayed(of_rows: Array, *shape: int) -> str:
        sums = graph.op("MatMul", logarithms, graph.constant(of_rows.reshape(rows, -1)))
        return graph.decay(graph.reshape(sums, v_heads, *shape))

    row = np.arange(rows)
    t, i, j = row[:, None, None], row[None, :, None], row[None, None, :]
    between = graph.op(
        "Mul", decayed((t <= i) & (t > j), rows, rows), graph.constant(np.tril(np.ones((1, rows, rows))))
    )
    since_start, to_end = decayed(row[:, None] <= row, rows, 1), decayed(row[:, None] > row, rows, 1)
    whole = decayed(np.ones((rows, 1)), 1, 1)
    below = graph.op("Mul", graph.op("Mul", kk, step), between)
    inverse, size = graph.constant(np.eye(rows)[None]), 1
    while size < rows:  # inverses of blocks on the diagonal become those of blocks twice as large
        is_joining = (row[:, None] // (2 * size) == row // (2 * size)) & (row[:, None] // size > row // size)
        joining = graph.op("Mul", below, graph.constant(is_joining[None]))
        product = graph.op("MatMul", graph.op("MatMul", inverse, joining), inverse) if size > 1 else joining
        inverse, size = graph.op("Sub", inverse, product), 2 * size
    recalled = graph.op("MatMul", graph.op("Mul", k, since_start), matrix)
    delta = graph.op("MatMul", inverse, graph.op("Mul", graph.op("Sub", v, recalled), step))
    of_past = graph.op("MatMul", graph.op("Mul", q, since_start), matrix)
    output = graph.op("Add", of_past, graph.op("MatMul", graph.op("Mul", qk, between), delta))
    kept = graph.op("Transpose", graph.op("Mul", k, to_end), perm=[0, 2, 1])
    new = graph.op("Add", graph.op("Mul", matrix, whole), graph.op("MatMul", kept, delta))
    by_row = graph.reshape(graph.op("Transpose", output, perm=[1, 0, 2]), rows, v_heads * dim)
    graph.leave(by_row, "out", rows, v_heads * dim)
    graph.leave(new, "new", v_heads, dim, dim)
    return graph.model()


def compiled(model: bytes, soc: str) -> tuple[Any, int]:
    """Return a session over a compiled context, and the context's bytes."""
    with tempfile.TemporaryDirectory() as folder:
        wrapper = Path(folder, "context.onnx")
        open_session(open_htp(), find_soc(soc), model, options={}, write_context=wrapper)
        num_bytes = sum(path.stat().st_size for path in Path(folder).iterdir())
        return open_session(open_htp(), find_soc(soc), wrapper, options={}), num_bytes


def error(found: Array, expected: Array) -> float:
    """Return the root mean square error, as a power of two."""
    difference = np.mean((found.astype(np.float64) - expected) ** 2)
    return float(np.log2(np.sqrt(difference / np.mean(np.square(expected, dtype=np.float64)))))


def run(session: Any, **inputs: Array) -> list[Array]:
    """Return all outputs as float32."""
    return [each.astype(np.float32) for each in session.run(None, {n: a.astype(np.float16) for n, a in inputs.items()})]


def try_convolution(channels: int, rows: int, num_chunks: int, soc: str) -> str:
    """Print a row of the first table."""
    rng = np.random.default_rng(0)
    taps = rng.normal(size=(channels, 1, 3)).astype(np.float32)
    session, num_bytes = compiled(short_convolution(rows, taps), soc)
    state, expected_state = np.zeros((2, channels), np.float32), np.zeros((channels, 2), np.float32)
    worst = worst_state = -np.inf
    for _ in range(num_chunks):
        qkv = rng.normal(size=(rows, 3 * channels)).astype(np.float32)
        sizes = {"num_k_heads": 1, "num_v_heads": 1, "head_k_dim": channels, "head_v_dim": channels}
        expected = linear_attention(qkv, None, None, taps, None, expected_state, None, attn_type=SHORT, **sizes)
        found, new = run(session, qkv=qkv, state=state)
        state = np.concatenate([state, new])[-2:]
        worst = max(worst, error(found, expected))
        worst_state = max(worst_state, error(state, expected_state.T))
    return f"| {rows} | {channels} | {num_bytes / 1e6:.2f} | 2^{worst:.1f} / 2^{worst_state:.1f} |"


def try_delta_rule(k_heads: int, v_heads: int, dim: int, rows: int, num_chunks: int, soc: str) -> list[str]:
    """Print rows of the second table: decays, and keys that are random or nearly equal."""
    rng = np.random.default_rng(0)
    channels = (2 * k_heads + v_heads) * dim
    taps = (rng.normal(size=(channels, 1, 4)) / 2).astype(np.float32)
    session, num_bytes = compiled(delta_rule(rows, taps, k_heads, v_heads, dim), soc)
    lines, all_k = [], 2 * k_heads * dim
    sizes = {"num_k_heads": k_heads, "num_v_heads": v_heads, "head_k_dim": dim, "head_v_dim": dim, "use_qk_l2norm": 1}
    for name, decays in DECAYS.items():
        cells = []
        for is_same in (False, True):
            rng = np.random.default_rng(1)
            state, expected_state = np.zeros((3, channels), np.float32), np.zeros((channels, 3), np.float32)
            matrix, expected_matrix = np.zeros((2, v_heads, dim, dim), np.float32)
            base, worst, worst_matrix = rng.normal(size=all_k), -np.inf, -np.inf
            for _ in range(num_chunks):
                qkv = 2 * rng.normal(size=(rows, channels)).astype(np.float32)
                if is_same:
                    qkv[:, :all_k] = 4 * base + 0.05 * qkv[:, :all_k]
                gate = decays(rng, (rows, v_heads)).astype(np.float32)
                beta = rng.uniform(0.9 if is_same else 0, 1, (rows, v_heads)).astype(np.float32)
                given = (qkv, gate, beta, taps, None, expected_state, expected_matrix)
                expected = linear_attention(*given, attn_type=DELTA, **sizes)
                found, matrix = run(session, qkv=qkv, state=state, gate=gate, beta=beta, matrix=matrix)
                state = np.concatenate([state, qkv])[-3:]
                worst = max(worst, error(found, expected))
                worst_matrix = max(worst_matrix, error(matrix, expected_matrix))
            cells.append(f"2^{worst:.1f} / 2^{worst_matrix:.1f}")
        lines.append(
            f"| {rows} | {k_heads}, {v_heads} of {dim} | {num_bytes / 1e6:.2f} | {name} | {' | '.join(cells)} |"
        )
    return lines


@click.command()
@click.option("--soc", default="SM8650", show_default=True)
@click.option("--chunks", "num_chunks", default=8, show_default=True, type=click.IntRange(1))
def main(soc: str, num_chunks: int) -> None:
    """Print errors of outputs and states against float64; the worst of all chunks."""
    click.echo(f"{SHORT}, outputs / states\n")
    click.echo("| rows | channels | MB of context | error |\n| ---: | ---: | ---: | ---: |")
    for channels in WIDTHS:
        for rows in (32, 1):
            click.echo(try_convolution(channels, rows, num_chunks, soc))
    click.echo(f"\n{DELTA}, outputs / states\n")
    click.echo("| rows | heads | MB of context | decays | random keys | nearly equal keys |")
    click.echo("| ---: | --- | ---: | --- | ---: | ---: |")
    for heads in HEADS:
        for rows in (32, 1):
            for line in try_delta_rule(*heads, rows, num_chunks, soc):
                click.echo(line)


if __name__ == "__main__":
    main()
