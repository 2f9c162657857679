"""`chunkrt bench`: prefill and decode speed, in llama-bench's terms."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np

from chunkrt.cli.bench_parallel import measure_parallel
from chunkrt.cli.bench_rows import FORMATS, Setup, deviation, repeat, setup_of
from chunkrt.cli.options import engine_options, measured, open_engine, progress_bar, trace_option, written_trace
from chunkrt.engine.engine import Engine
from chunkrt.engine.session import Session
from chunkrt.errors import ConfigError
from chunkrt.runtime.record import RunRecord
from chunkrt.runtime.trace.utilisation import utilisation


@dataclass(frozen=True, kw_only=True)
class Row(Setup):
    """One test: `pp512` streams 512 tokens in chunks, `tg32` decodes 32 tokens one by one.

    `avg_ts`, `stddev_ts`: tokens per second over the repetitions. `samples_ns`: each repetition's time. The busy
    shares and the overlap are of the last repetition.
    """

    test: str
    avg_ts: float
    stddev_ts: float
    samples_ns: list[int]
    npu_busy: float
    cpu_busy: float
    overlap: float

    TEXTS = (*Setup.TEXTS, "test")

    def cells(self) -> dict[str, str]:
        """The speed, and how busy the processors were, behind the others."""
        shares = {name: f"{getattr(self, name):.1%}" for name in ("npu_busy", "cpu_busy", "overlap")}
        return super().cells() | {"t/s": f"{self.avg_ts:.2f} ± {self.stddev_ts:.2f}"} | shares


@click.command()
@click.argument("model")
@click.option("-p", "--prompt-lengths", default="128,512", show_default=True, help="Prefill tests; 0 for none.")
@click.option("-n", "--new-tokens", default="32", show_default=True, help="Decode tests; 0 for none.")
@click.option(
    "--parallel",
    metavar="NUMBERS",
    help="Prefill and decode in one test, with so many sequences at the same time, as in 1,2,4,8: every combination "
    "with a prompt length and a number of new tokens.",
)
@click.option("-r", "--repetitions", type=int, default=5, show_default=True)
@click.option("-o", "--output", type=click.Choice(["md", "json", "jsonl", "csv"]), default="md", show_default=True)
@trace_option
@engine_options
def bench(
    model: str,
    prompt_lengths: str,
    new_tokens: str,
    parallel: str | None,
    repetitions: int,
    output: str,
    trace: Path | None,
    **settings: Any,
) -> None:
    """Measure how fast MODEL prefills and decodes. Tokens are random; every test is run once before it counts, and the
    prefix cache is off unless it is asked for.

    A trace holds the last repetition of every test.
    """
    if repetitions < 1:
        raise ConfigError(f"--repetitions is {repetitions}, expected at least 1")
    tests = _tests(_numbers("-p", prompt_lengths), _numbers("-n", new_tokens), parallel)
    if not tests:
        raise ConfigError("nothing to measure: both -p and -n are 0")
    with written_trace(trace, model) as records, open_engine(model, measured(settings)) as engine:
        too_long = [test.num_tokens for test in tests if test.num_tokens > engine.context_length]
        if too_long:
            raise ConfigError(f"{too_long[0]} tokens do not fit the context of {engine.context_length}")
        rows = []
        with progress_bar() as progress:
            for done, test in enumerate(tests):
                progress(test.name, done, len(tests))
                rows.append(test.measure(engine, model, repetitions, records if trace else None))
            progress("", len(tests), len(tests))
    click.echo(FORMATS[output](rows), nl=False)


class _Test(NamedTuple):
    """`num_tokens`: that a sequence of it holds."""

    name: str
    num_tokens: int
    measure: Callable[[Engine, str, int, list[RunRecord] | None], Setup]


def _tests(prompt_lengths: list[int], new_tokens: list[int], parallel: str | None) -> list[_Test]:
    if parallel is None:
        kinds = [("pp", n) for n in prompt_lengths] + [("tg", n) for n in new_tokens]
        return [_Test(f"{kind}{n}", n, partial(_measure, kind, n)) for kind, n in kinds]
    numbers = _numbers("--parallel", parallel, least=1)
    combinations = itertools.product(prompt_lengths or [0], new_tokens or [0], numbers)
    return [
        _Test(f"pp{prompt}+tg{new} x {number}", prompt + new, partial(measure_parallel, number, prompt, new))
        for prompt, new, number in combinations
        if prompt or new
    ]


def _measure(
    kind: str, count: int, engine: Engine, model: str, repetitions: int, records: list[RunRecord] | None
) -> Row:
    """Run one test `repetitions` times, after one run that does not count; the last goes into `records`."""
    run = {"pp": _prefill, "tg": _decode}[kind]
    tokens = np.random.default_rng(0).integers(0, engine.plan.vocab_size, count).tolist()
    ran: list[RunRecord] = []
    with engine.session() as session:
        session.on_run = ran.append

        def once() -> int:
            session.rewind(0)
            ran.clear()
            begin = time.perf_counter_ns()
            run(session, tokens)
            return time.perf_counter_ns() - begin

        samples_ns = repeat(repetitions, once)
    if records is not None:
        records += ran
    rates = [count / (ns / 1e9) for ns in samples_ns]
    busy = utilisation([event for record in ran for event in record.events], ran[0].pipeline.stages)
    return Row(
        **setup_of(engine, model),
        test=f"{kind}{count}",
        avg_ts=statistics.mean(rates),
        stddev_ts=deviation(rates),
        samples_ns=samples_ns,
        **asdict(busy),
    )


def _prefill(session: Session, tokens: list[int]) -> None:
    session.prefill(tokens)


def _decode(session: Session, tokens: list[int]) -> None:
    for token in tokens:
        session.prefill([token])


def _numbers(option: str, text: str, *, least: int = 0) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"{option} is {text!r}, expected whole numbers with commas between, as in 128,512") from error
    if any(number < least for number in numbers):
        raise ConfigError(f"{option} is {text!r}, expected no {'number below 1' if least else 'negative number'}")
    return [number for number in numbers if number]
