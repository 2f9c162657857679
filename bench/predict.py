"""Accuracy of the simulator on this machine: profile, simulate, run; the ratio of predicted to measured makespan.

    python bench/predict.py smollm2-135m-instruct --budgets 1,2 --rounds 5

In every round the runs for the profile and the runs to be predicted take turns, so that both see the same machine; no
run serves both purposes. A ratio is taken within a round, and the median over the rounds is reported. A prediction
should be within 10 %. The machine should be otherwise idle: the share of its processors that other processes used is
printed.
"""

from __future__ import annotations

import statistics
from typing import Any

import click
import psutil

from chunkrt.cli.profile import measure_profile
from chunkrt.cli.shared_options import engine_options, open_engine
from chunkrt.runtime.record import RunRecord
from chunkrt.simulate import simulate

TOLERANCE = 0.1


@click.command()
@click.argument("model")
@click.option("-p", "--prompt-lengths", default="128,512,1024", show_default=True)
@click.option("--budgets", default="1,2", show_default=True, help="Thread budgets.")
@click.option("--rounds", type=int, default=5, show_default=True)
@click.option(
    "-r", "--repetitions", type=int, default=5, show_default=True, help="Repetitions of every run in a round."
)
@engine_options
def predict(model: str, prompt_lengths: str, budgets: str, rounds: int, repetitions: int, **settings: Any) -> None:
    """Print predicted and measured makespans of MODEL. Exit with 1 if one is off by more than 10 %."""
    settings.pop("threads")
    lengths = [int(part) for part in prompt_lengths.split(",")]
    threads = [int(part) for part in budgets.split(",")]
    cases = [(budget, length) for budget in threads for length in lengths]
    ratios: dict[tuple[int, int], list[float]] = {case: [] for case in cases}
    spans: dict[tuple[int, int], list[tuple[float, float]]] = {case: [] for case in cases}
    loads = []
    with open_engine(model, settings) as engine:
        plan = engine.plan
    for _ in range(rounds):
        loads.append(psutil.cpu_percent(interval=0.5))
        profile, records = measure_profile(model, threads, repetitions, settings, also=lengths)
        for budget, length in cases:
            predicted = simulate(
                plan,
                profile,
                prompt_length=length,
                chunk_length=profile.chunk_length,
                policy=settings["policy"],
                scheme=profile.scheme,
                threads=budget,
            ).makespan_ms
            measured = statistics.median(_makespan_ms(record) for record in records[budget, length])
            ratios[budget, length].append(predicted / measured)
            spans[budget, length].append((predicted, measured))
    click.echo(profile.conditions)
    click.echo(f"{rounds} rounds; other processes used {statistics.median(loads):.0f} % of the processors between them")
    click.echo("| threads | prompt | predicted ms | measured ms | ratio, median | ratio, least - most |")
    click.echo("| ---: | ---: | ---: | ---: | ---: | ---: |")
    for (budget, length), found in ratios.items():
        predicted, measured_ms = (statistics.median(column) for column in zip(*spans[budget, length], strict=True))
        click.echo(
            f"| {budget} | pp{length} | {predicted:.1f} | {measured_ms:.1f} | {statistics.median(found):.3f} "
            f"| {min(found):.3f} - {max(found):.3f} |"
        )
    if any(abs(statistics.median(found) - 1) > TOLERANCE for found in ratios.values()):
        raise click.exceptions.Exit(1)


def _makespan_ms(record: RunRecord) -> float:
    return (max(e.end_ns for e in record.events) - min(e.start_ns for e in record.events)) / 1e6


if __name__ == "__main__":
    predict()
