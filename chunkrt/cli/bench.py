"""`chunkrt bench`: prefill and decode speed, in llama-bench's terms."""

from __future__ import annotations

import csv
import io
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import click
import numpy as np

from chunkrt.cli.options import engine_options, open_engine, progress_bar, trace_option, written_trace
from chunkrt.engine.engine import Engine
from chunkrt.engine.session import Session
from chunkrt.errors import ConfigError
from chunkrt.runtime.record import RunRecord
from chunkrt.runtime.trace.utilisation import utilisation


@dataclass(frozen=True, kw_only=True)
class Row:
    """One test: `pp512` streams 512 tokens in chunks, `tg32` decodes 32 tokens one by one.

    `avg_ts`, `stddev_ts`: tokens per second over the repetitions. `samples_ns`: each repetition's time. The busy
    shares and the overlap are of the last repetition.
    """

    model: str
    backend: str
    scheme: str
    chunk: int
    policy: str
    threads: int
    affinity: str
    test: str
    avg_ts: float
    stddev_ts: float
    samples_ns: list[int]
    npu_busy: float
    cpu_busy: float
    overlap: float


@click.command()
@click.argument("model")
@click.option("-p", "--prompt-lengths", default="128,512", show_default=True, help="Prefill tests; 0 for none.")
@click.option("-n", "--new-tokens", default="32", show_default=True, help="Decode tests; 0 for none.")
@click.option("-r", "--repetitions", type=int, default=5, show_default=True)
@click.option("-o", "--output", type=click.Choice(["md", "json", "jsonl", "csv"]), default="md", show_default=True)
@trace_option
@engine_options
def bench(
    model: str,
    prompt_lengths: str,
    new_tokens: str,
    repetitions: int,
    output: str,
    trace: Path | None,
    **settings: Any,
) -> None:
    """Measure how fast MODEL prefills and decodes. Tokens are random; every test is run once before it counts.

    A trace holds the last repetition of every test.
    """
    if repetitions < 1:
        raise ConfigError(f"--repetitions is {repetitions}, expected at least 1")
    tests = [("pp", n) for n in _numbers("-p", prompt_lengths)] + [("tg", n) for n in _numbers("-n", new_tokens)]
    if not tests:
        raise ConfigError("nothing to measure: both -p and -n are 0")
    with written_trace(trace, model) as records, open_engine(model, settings) as engine:
        too_long = [n for _, n in tests if n > engine.context_length]
        if too_long:
            raise ConfigError(f"{too_long[0]} tokens do not fit the context of {engine.context_length}")
        rows = []
        with progress_bar() as progress:
            for done, (kind, count) in enumerate(tests):
                progress(f"{kind}{count}", done, len(tests))
                rows.append(measure(engine, model, kind, count, repetitions, records if trace else None))
            progress("", len(tests), len(tests))
    click.echo(FORMATS[output](rows), nl=False)


def measure(
    engine: Engine, model: str, kind: str, count: int, repetitions: int, records: list[RunRecord] | None = None
) -> Row:
    """Run one test `repetitions` times, after one run that does not count; the last goes into `records`."""
    run = {"pp": _prefill, "tg": _decode}[kind]
    tokens = np.random.default_rng(0).integers(0, engine.plan.vocab_size, count).tolist()
    samples_ns: list[int] = []
    ran: list[RunRecord] = []
    with engine.session() as session:
        for repetition in range(repetitions + 1):
            session.rewind(0)
            ran.clear()
            session.on_run = ran.append
            begin = time.perf_counter_ns()
            run(session, tokens)
            if repetition:
                samples_ns.append(time.perf_counter_ns() - begin)
    if records is not None:
        records += ran
    rates = [count / (ns / 1e9) for ns in samples_ns]
    busy = utilisation([event for record in ran for event in record.events], ran[0].pipeline.stages)
    return Row(
        model=model,
        backend=engine.npu_backend.name,
        scheme=engine.scheme.name,
        chunk=engine.chunk_length,
        policy=engine.options.policy,
        threads=engine.options.num_threads,
        affinity=engine.options.affinity,
        test=f"{kind}{count}",
        avg_ts=statistics.mean(rates),
        stddev_ts=statistics.stdev(rates) if len(rates) > 1 else 0.0,
        samples_ns=samples_ns,
        **asdict(busy),
    )


def _prefill(session: Session, tokens: list[int]) -> None:
    session.prefill(tokens)


def _decode(session: Session, tokens: list[int]) -> None:
    for token in tokens:
        session.prefill([token])


def _numbers(option: str, text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"{option} is {text!r}, expected whole numbers with commas between, as in 128,512") from error
    if any(number < 0 for number in numbers):
        raise ConfigError(f"{option} is {text!r}, expected no negative number")
    return [number for number in numbers if number]


def _markdown(rows: Sequence[Row]) -> str:
    head = [
        "model",
        "backend",
        "scheme",
        "chunk",
        "policy",
        "threads",
        "test",
        "t/s",
        "npu_busy",
        "cpu_busy",
        "overlap",
    ]
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * 7 + " ---: |" * 4]
    for row in rows:
        cells: list[Any] = [getattr(row, name) for name in head[:7]]
        cells.append(f"{row.avg_ts:.2f} ± {row.stddev_ts:.2f}")
        cells += [f"{getattr(row, name):.1%}" for name in head[8:]]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


def _json(rows: Sequence[Row]) -> str:
    return json.dumps([asdict(row) for row in rows], indent=1) + "\n"


def _json_lines(rows: Sequence[Row]) -> str:
    return "".join(json.dumps(asdict(row)) + "\n" for row in rows)


def _csv(rows: Sequence[Row]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, [f.name for f in fields(Row)], lineterminator="\n")
    writer.writeheader()
    writer.writerows({**asdict(row), "samples_ns": " ".join(map(str, row.samples_ns))} for row in rows)
    return text.getvalue()


FORMATS: dict[str, Callable[[Sequence[Row]], str]] = {
    "md": _markdown,
    "json": _json,
    "jsonl": _json_lines,
    "csv": _csv,
}
