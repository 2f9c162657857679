"""Cost of `--trace` during a prompt: prefills with and without it, in turns, and the ratio of their times.

    python bench/trace_cost.py smollm2-135m-instruct -p 512 --rounds 40

The file is written at the end; the time for that is printed separately.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

import click
import numpy as np

from chunkrt.cli.shared_options import engine_options, measured, open_engine
from chunkrt.engine.engine import Engine
from chunkrt.runtime.record import RunRecord
from chunkrt.runtime.trace.file import write_trace


@click.command()
@click.argument("model")
@click.option("-p", "--prompt-length", type=int, default=512, show_default=True)
@click.option("--rounds", type=int, default=40, show_default=True)
@engine_options
def trace_cost(model: str, prompt_length: int, rounds: int, **settings: Any) -> None:
    """Print the slowdown of a prefill of MODEL when it is traced."""
    random = np.random.default_rng(0)
    records: list[RunRecord] = []
    ratios = []
    with open_engine(model, measured(settings)) as engine:
        for number in range(rounds + 1):
            tokens = random.integers(0, engine.plan.vocab_size, prompt_length).tolist()
            order = (None, records) if number % 2 else (records, None)
            seconds = {into is records: _seconds(engine, tokens, into) for into in order}
            if number:
                ratios.append(seconds[True] / seconds[False])
    quarters = statistics.quantiles(ratios, n=4)
    click.echo(
        f"pp{prompt_length}, {rounds} rounds: with --trace / without, median {statistics.median(ratios):.4f}, "
        f"half of the rounds in {quarters[0]:.4f} - {quarters[2]:.4f}"
    )
    with tempfile.TemporaryDirectory() as folder:
        start = perf_counter()
        write_trace(Path(folder) / "trace.json", records, model)
        click.echo(f"writing {len(records)} runs afterwards: {perf_counter() - start:.2f} s")


def _seconds(engine: Engine, tokens: list[int], records: list[RunRecord] | None) -> float:
    session = engine.session()
    if records is not None:
        session.on_run = records.append
    start = perf_counter()
    session.prefill(tokens)
    return perf_counter() - start


if __name__ == "__main__":
    trace_cost()
