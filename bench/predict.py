"""Accuracy of the simulator on this machine: profile, simulate, run; the ratio of predicted to measured times.

    python bench/predict.py smollm2-135m-instruct --rounds 3

Cases are prompts, the decode of one sequence, and the decode of four, on the native backend and on a fake NPU
(`fake_npu.py`) with one thread for the CPU. The profile knows prompts of half a chunk and of 1,024 tokens, and the
decode of one and of eight sequences. In every round the runs for the profile and the runs to be predicted take turns,
so that both see the same machine; no run serves both purposes. A ratio is taken within a round, and the median over the
rounds is reported. A prediction should be within 10 %. The machine should be otherwise idle: the share of its
processors that other processes used is printed.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import click
import fake_npu
import psutil

from chunkrt.cli.bench_tests import Case, measure, measure_parallel
from chunkrt.cli.profile import measure_profile, run
from chunkrt.cli.shared_options import engine_options, open_engine
from chunkrt.engine.engine import Engine
from chunkrt.graph.plan import Plan
from chunkrt.simulate import MeasuredProfile, simulate
from chunkrt.simulate.arrivals import CLOSED, draw
from chunkrt.simulate.serving import simulate_serving

TOLERANCE = 0.1
NEW_TOKENS = 32
SEQUENCES = 4
DEPTHS = (64, 512)
"""Numbers of tokens before those of the decode of one sequence."""


class Test(NamedTuple):
    """Functions that return the milliseconds of one case: measured on an engine, and predicted for a thread budget."""

    measure: Callable[[Engine], float]
    predict: Callable[[Plan, MeasuredProfile, int], float]


@click.command()
@click.argument("model")
@click.option("-p", "--prompt-lengths", default="128,512,1024,4096", show_default=True)
@click.option("--budgets", default="1,2", show_default=True, help="Thread budgets of the native backend.")
@click.option("--rounds", type=int, default=3, show_default=True)
@click.option(
    "-r", "--repetitions", type=int, default=3, show_default=True, help="Repetitions of every run in a round."
)
@engine_options
def predict(model: str, prompt_lengths: str, budgets: str, rounds: int, repetitions: int, **settings: Any) -> None:
    """Print predicted and measured times of MODEL. Exit with 1 if one is off by more than 10 %."""
    fake_npu.register()
    for name in ("threads", "npu"):
        settings.pop(name)
    lengths = [int(part) for part in prompt_lengths.split(",")]
    setups = {"native": [int(part) for part in budgets.split(",")], fake_npu.NAME: [1]}
    found: dict[tuple[str, int, str], list[tuple[float, float]]] = {}
    loads, profile = [], None
    for npu, threads in setups.items():
        with open_engine(model, {**settings, "npu": npu}) as engine:
            plan, context, chunk_length = engine.plan, engine.context_length, engine.chunk_length
        tests = dict(_tests(lengths, model, context, chunk_length, settings["policy"]))
        for _ in range(rounds):
            loads.append(psutil.cpu_percent(interval=0.5))
            also = {name: test.measure for name, test in tests.items()}
            profile, measured = measure_profile(model, threads, repetitions, {**settings, "npu": npu}, also=also)
            for (budget, name), times in measured.items():
                predicted = tests[name].predict(plan, profile, budget)
                found.setdefault((npu, budget, name), []).append((predicted, statistics.median(times)))
        click.echo(profile.conditions)
    click.echo(f"{rounds} rounds; other processes used {statistics.median(loads):.0f} % of the processors between them")
    click.echo("| backend | threads | test | predicted ms | measured ms | ratio, median | ratio, least - most |")
    click.echo("| --- | ---: | --- | ---: | ---: | ---: | ---: |")
    is_good = True
    for (npu, budget, name), times in found.items():
        predicted, actual = (statistics.median(column) for column in zip(*times, strict=True))
        ratios = [one / other for one, other in times]
        is_good &= abs(statistics.median(ratios) - 1) <= TOLERANCE
        click.echo(
            f"| {npu} | {budget} | {name} | {predicted:.1f} | {actual:.1f} | {statistics.median(ratios):.3f} "
            f"| {min(ratios):.3f} - {max(ratios):.3f} |"
        )
    if not is_good:
        raise click.exceptions.Exit(1)


def _tests(
    lengths: Iterable[int], model: str, context: int, chunk_length: int, policy: str
) -> Iterable[tuple[str, Test]]:
    """Yield the cases with their names. All prompts of the sequences that decode together fit into one chunk."""
    for length in lengths:
        yield f"pp{length}", Test(partial(_prompt_ms, length), partial(_predicted_prompt_ms, length, policy))
    for depth in (depth for depth in DEPTHS if depth + NEW_TOKENS < context):
        yield f"tg{NEW_TOKENS} @ d{depth}", Test(partial(_token_ms, depth, model), partial(_steps_ms, 1, depth, policy))
    each = chunk_length // SEQUENCES
    yield (
        f"{SEQUENCES} sequences, tg{NEW_TOKENS}",
        Test(partial(_together_ms, each, model), partial(_steps_ms, SEQUENCES, each, policy)),
    )


def _prompt_ms(length: int, engine: Engine) -> float:
    events = run(engine, length).events
    return (max(event.end_ns for event in events) - min(event.start_ns for event in events)) / 1e6


def _predicted_prompt_ms(length: int, policy: str, plan: Plan, profile: MeasuredProfile, threads: int) -> float:
    return simulate(
        plan,
        profile,
        prompt_length=length,
        chunk_length=profile.chunk_length,
        graph_lengths=profile.graph_lengths,
        policy=policy,
        scheme=profile.scheme,
        threads=threads,
    ).makespan_ms


def _token_ms(depth: int, model: str, engine: Engine) -> float:
    (sample,) = measure(Case(n_gen=NEW_TOKENS, n_depth=depth), engine, model, 1, None).samples_ns
    return sample / 1e6


def _together_ms(depth: int, model: str, engine: Engine) -> float:
    (sample,) = measure_parallel(SEQUENCES, depth, NEW_TOKENS, engine, model, 1, None).samples_tg_ns
    return sample / 1e6


def _steps_ms(sequences: int, depth: int, policy: str, plan: Plan, profile: MeasuredProfile, threads: int) -> float:
    """Return the milliseconds of the tokens after the first ones, which end the prompts."""
    load = draw(CLOSED, str(depth), str(NEW_TOKENS + 1), requests=sequences, context_length=plan.context_length)
    gap_ms = simulate_serving(
        plan,
        profile,
        load,
        sessions=sequences,
        chunk_length=profile.chunk_length,
        graph_lengths=profile.graph_lengths,
        policy=policy,
        scheme=profile.scheme,
        decode_on="cpu" if profile.has_npu else "auto",
        threads=threads,
    ).gap_ms
    assert gap_ms is not None
    return NEW_TOKENS * gap_ms.mean


if __name__ == "__main__":
    predict()
