"""Cost of a chunk of few rows, compared with one row: a model's linears alone, and its layers with a sequence a row.

    python bench/few_rows.py smollm2-135m-instruct --rounds 12

CPU time of one thread, the minimum over all rounds, in which the cases take turns: other processes disturb it less than
wall time. Linears have random weights, with more copies than the caches can hold. Static 4-bit linears are unpacked
panel by panel and otherwise computed like int8 ones: the difference is the cost or gain of unpacking.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from math import prod
from time import thread_time_ns
from typing import Any

import click
import numpy as np

from chunkrt._native import Program, ProgramBuilder, ThreadPool
from chunkrt.backends.base import SegmentExecutable, SegmentOperands
from chunkrt.backends.native.backend import NativeBackend
from chunkrt.cli.shared_options import engine_options, measured, open_engine
from chunkrt.engine.engine import Engine
from chunkrt.graph.plan import linear_nodes
from chunkrt.graph.rewrites import merged_on_cpu
from chunkrt.runtime.state import State

ROWS = (1, 2, 4, 8, 16, 32)
COPIES_BYTES = 24_000_000
CONTEXT, FIRST = 256, 40


@click.command()
@click.argument("model")
@click.option("--rounds", type=int, default=12, show_default=True)
@engine_options
def few_rows(model: str, rounds: int, **settings: Any) -> None:
    """Print the cost of 1 to 32 rows of MODEL's linears, layers and LM head."""
    with open_engine(model, {**measured(settings), "npu": "native", "threads": 1}) as engine:
        plan = engine.plan
        shapes = sorted({tuple(int(d) for d in plan.tensors[name].shape) for name in linear_nodes(plan)})
        _print_head("linear", "weights")
        makes = {
            "int8": _int8,
            "4-bit blocks": _in_blocks,
            "int8, static": _static_int8,
            "4 bits, static": _static_int4,
        }
        for weights, make in makes.items():
            for depth, columns in shapes:
                _print_row(f"{depth} x {columns} | {weights}", _linear_times(make, depth, columns, rounds))
        _print_head("part", "scheme")
        for name, times in _chunk_times(engine, rounds).items():
            _print_row(f"{name} | {engine.scheme.name}", times)


def _print_head(*names: str) -> None:
    click.echo("\n| " + " | ".join([*names, *(f"M = {m}" for m in ROWS)]) + " |")
    click.echo("| --- | --- |" + " ---: |" * len(ROWS))


def _print_row(name: str, times: Mapping[int, float]) -> None:
    one = times[ROWS[0]]
    click.echo(f"| {name} | " + " | ".join(f"{t / 1e3:.0f} us, {t / one:.2f}" for t in times.values()) + " |")


def _least(cases: Mapping[int, Callable[[], None]], rounds: int) -> dict[int, float]:
    """Return the nanoseconds of each number of rows."""
    least = dict.fromkeys(cases, float("inf"))
    for _ in range(rounds + 1):
        for rows, run in cases.items():
            start = thread_time_ns()
            run()
            least[rows] = min(least[rows], thread_time_ns() - start)
    return least


def _int8(builder: ProgramBuilder, value: int, depth: int, columns: int) -> int:
    random = np.random.default_rng(0)
    packed = random.integers(-127, 128, (-(-columns // 16), -(-depth // 4), 16, 4), np.int8)
    return builder.linear(value, builder.constant(packed), builder.constant(np.full(columns, 1e-3, np.float32)))


def _in_blocks(builder: ProgramBuilder, value: int, depth: int, columns: int) -> int:
    random = np.random.default_rng(0)
    blocks = -(-columns // 16), depth // 32
    packed = random.integers(0, 256, (*blocks, 4, 16, 4), np.uint8)
    scales = random.random((*blocks, 2, 16), np.float32).astype(np.float16)
    return builder.block_linear(value, builder.constant(packed), builder.constant(scales), columns)


def _static_int8(builder: ProgramBuilder, value: int, depth: int, columns: int) -> int:
    random = np.random.default_rng(0)
    packed = random.integers(-112, 113, (-(-columns // 16), -(-depth // 4), 16, 4), np.int8)
    scales = builder.constant(np.full(columns, 1e-3, np.float32))
    return builder.linear(value, builder.constant(packed), scales, num_digits=2, input_step=1e-4)


def _static_int4(builder: ProgramBuilder, value: int, depth: int, columns: int) -> int:
    random = np.random.default_rng(0)
    blocks = -(-columns // 16), -(-depth // 32)
    packed = random.integers(0, 256, (*blocks, 4, 16, 4), np.uint8)
    multipliers = builder.constant(random.integers(1, 17, (*blocks, 16), np.uint8))
    scales = builder.constant(np.full(columns, 1e-3, np.float32))
    operands = builder.constant(packed), scales, None, None, 2
    return builder.linear(value, *operands, input_step=1e-4, multipliers=multipliers)


def _linear_times(make: Callable[..., int], depth: int, columns: int, rounds: int) -> dict[int, float]:
    copies = max(1, COPIES_BYTES // prod((depth, columns)))
    builder = ProgramBuilder(ThreadPool(1), max(ROWS))
    value = builder.input("x", "float32", ["T", depth])
    for i in range(copies):
        builder.output(f"y{i}", make(builder, value, depth, columns))
    program = builder.build()
    x = np.random.default_rng(1).standard_normal((max(ROWS), depth), np.float32)
    outputs = [np.empty((max(ROWS), columns), np.float32) for _ in range(copies)]

    def run(of: Program, rows: int) -> None:
        of.run([x[:rows]], [output[:rows] for output in outputs])

    times = _least({rows: partial(run, program, rows) for rows in ROWS}, rounds)
    return {rows: time / copies for rows, time in times.items()}


def _chunk_times(engine: Engine, rounds: int) -> dict[str, dict[int, float]]:
    """Measure all layers, for a sequence a row and for rows of one sequence, and the LM head."""
    plan = merged_on_cpu(engine.plan)
    layers, head = plan.subgraphs
    of_layers, of_head = (
        NativeBackend(1).compile(subgraph, plan, max(ROWS), engine.scheme, engine.loaded.weights)
        for subgraph in (layers, head)
    )
    assert isinstance(of_layers, SegmentExecutable)
    states = [State(plan, CONTEXT, "float16", chunk_length=max(ROWS)) for _ in range(max(ROWS))]
    positions = [np.array([FIRST + 3 * i]) for i in range(len(states))]
    ids = np.arange(max(ROWS))
    hidden, logits = (
        {name: np.zeros((max(ROWS), int(plan.tensors[name].shape[1])), np.float32) for name in subgraph.outputs}
        for subgraph in (layers, head)
    )

    def run_layers(segments: int, rows: int) -> None:
        operands = [
            SegmentOperands(rows, {**s.tensors, "position": p, "rope_position": p})
            for s, p in zip(states[:segments], positions[:segments], strict=True)
        ]
        count = segments * rows
        outputs = {name: output[:count] for name, output in hidden.items()}
        of_layers.run_segments({"input_ids": ids[:count]}, outputs, operands)

    def run_head(rows: int) -> None:
        inputs = {**hidden, "logit_rows": ids[:rows]}
        of_head.run({n: inputs[n] for n in head.inputs}, {name: output[:rows] for name, output in logits.items()})

    return {
        "layers, a sequence a row": _least({m: partial(run_layers, m, 1) for m in ROWS}, rounds),
        "layers, rows of one sequence": _least({m: partial(run_layers, 1, m) for m in ROWS}, rounds),
        "head": _least({m: partial(run_head, m) for m in ROWS}, rounds),
    }


if __name__ == "__main__":
    few_rows()
