"""Many sequences at once: contenders, order of measurements, and figures from the times of tokens."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import click
import numpy as np

from chunkrt import ChunkrtError
from chunkrt.checkpoints.gguf import GgufSource
from peers.command import choose, find_checkpoint, started, tell, writable
from peers.contenders import SERVERS, packages_for
from peers.environment import Forms, check_interpreter, make_environment
from peers.process import ContenderError
from peers.report import Report, describe_machine, to_json, to_markdown
from peers.rounds import PAUSE_S, Results

PACKAGES = ("accelerate", "ctranslate2", "gguf", "openvino-genai", "torch", "transformers")
"""Packages that are installed if chosen contenders need them. llama.cpp has to be compiled and is not installed: it is
measured if it is installed already.
"""

FIGURES = ("tokens/s", "generated tokens/s", "first token p50, s", "first token p95, s", "gap p50, s", "gap p95, s")
"""Figures of a round. Tokens of prompts and answers, and of answers alone, per second from the first arrival to the
last token. Percentiles over the prompts of the time from arrival to first token, and over all answers of the time from
each token to the next.
"""


class Server(Protocol):
    """Interface of a contender that answers many prompts; a `ContenderProcess`."""

    def serve(self, prompts: list[list[int]], arrivals: list[float], new_tokens: int) -> list[dict[str, Any]]: ...


@click.command()
@click.argument("model")
@click.option("--threads", type=click.IntRange(1), default=2, show_default=True)
@click.option("--sessions", type=click.IntRange(1), default=8, show_default=True, help="Prompts of a round.")
@click.option("-p", "--prompt-length", type=click.IntRange(1), default=512, show_default=True)
@click.option("-n", "--new-tokens", type=click.IntRange(2), default=64, show_default=True)
@click.option(
    "--rate",
    type=click.FloatRange(0, min_open=True),
    default=1.0,
    show_default=True,
    help="Prompts a second of the Poisson arrivals.",
)
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True)
@click.option("--chunk", type=click.IntRange(1), help="chunkrt's chunk length; by default its own.")
@click.option(
    "--peers", "kinds", help="Other runtimes to measure, of llama.cpp, openvino-genai, ctranslate2; by default all."
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the random prompts and arrivals.")
@click.option("--python", help="Interpreter with the other runtimes installed; nothing is installed then.")
@click.option("--peers-dir", type=click.Path(path_type=Path), default="build/peers", show_default=True)
@click.option("--json", "json_file", callback=writable, help="Write every round's figures to this file.")
def serving(
    model: str,
    threads: int,
    sessions: int,
    prompt_length: int,
    new_tokens: int,
    rate: float,
    rounds: int,
    chunk: int | None,
    kinds: str | None,
    seed: int,
    python: str | None,
    peers_dir: Path,
    json_file: Path | None,
) -> None:
    """Measure MODEL (a catalogue name or a GGUF file) with many sequences at once, in chunkrt and other runtimes."""
    wanted = kinds.split(",") if kinds else [c.kind for c in SERVERS if c.kind != "chunkrt"]
    contenders = choose(wanted, {"chunk_length": chunk}, SERVERS)
    contenders = [
        replace(c, options={"num_sequences": sessions, **c.options}) if c.kind == "llama.cpp" else c for c in contenders
    ]
    peers_dir = peers_dir.resolve()
    try:
        if python:
            check_interpreter(python)
        checkpoint = find_checkpoint(model)
        packages = {name: names for name, names in packages_for(contenders).items() if name in PACKAGES}
        python = python or make_environment(peers_dir / "environment", tell, packages)
        vocabulary_size = int(GgufSource(checkpoint).config["vocab_size"])
    except (ChunkrtError, ContenderError) as error:
        raise click.ClickException(str(error)) from error
    forms = Forms(checkpoint.resolve(), peers_dir / "models", python, tell)
    with started(contenders, forms, python, threads, prompt_length + new_tokens) as (running, absent):
        tell(f"measuring {len(running)} contenders, {rounds} rounds after a warm-up")
        results, same = measure_serving(
            running,
            {"all at once": None, f"Poisson, {rate:g}/s": rate},
            shape=(sessions, prompt_length),
            new_tokens=new_tokens,
            rounds=rounds,
            vocabulary_size=vocabulary_size,
            seed=seed,
        )
        report = Report(
            conditions={
                "model": checkpoint.name,
                **describe_machine(),
                "threads": threads,
                "sequences": f"{sessions}, each {prompt_length} tokens and {new_tokens} more, greedy, no end token",
                "rounds": f"{rounds}, after a warm-up; {PAUSE_S} s between two measurements",
                "prompts": f"random tokens and arrivals, new in every round (seed {seed}), the same for all",
                "date": datetime.date.today().isoformat(),
            },
            baselines=[c.name for c in contenders if c.kind == "chunkrt" and c.name in running],
            about={n: {"versions": dict(p.versions), "settings": p.settings} for n, p in running.items()},
            absent=absent,
            agreement=same,
            results=results,
            measure="figure",
        )
    click.echo(to_markdown(report))
    if json_file:
        json_file.write_text(to_json(report), "utf-8")


def measure_serving(
    contenders: Mapping[str, Server],
    tests: Mapping[str, float | None],
    *,
    shape: tuple[int, int],
    new_tokens: int,
    rounds: int,
    vocabulary_size: int,
    seed: int,
    pause: Callable[[float], None] = time.sleep,
) -> tuple[Results, dict[str, str]]:
    """Run all tests, every contender in turn, round after round, after a warm-up round.

    Args:
        tests: by name, the mean rate of prompts a second, at times of a Poisson process; None: all at once.
        shape: number of prompts, and the tokens of each.
        new_tokens: tokens of each answer, at least 2.

    Returns: FIGURES of every test, as `Results` of "test: figure"; and by contender how many answers begin with the
        same token as the first contender's.
    """
    random = np.random.default_rng(seed)
    names = [f"{test}: {figure}" for test in tests for figure in FIGURES]
    results = Results(
        rates={name: {contender: [] for contender in contenders} for name in names},
        failures={test: {} for test in tests},
    )
    first_tokens: dict[str, list[int]] = {name: [] for name in contenders}
    for round_index in range(rounds + 1):
        for test, rate in tests.items():
            prompts = random.integers(0, vocabulary_size, shape).tolist()
            gaps = np.zeros(shape[0]) if rate is None else random.exponential(1 / rate, shape[0])
            arrivals = (np.cumsum(gaps) - gaps[0]).tolist()
            for name, contender in contenders.items():
                figures: Sequence[float | None] = [None] * len(FIGURES)
                if name not in results.failures[test]:
                    try:
                        answers = contender.serve(prompts, arrivals, new_tokens)
                    except ContenderError as error:
                        results.failures[test][name] = str(error)
                    else:
                        figures = figures_of(arrivals, [answer["times"] for answer in answers], shape[1])
                        first_tokens[name] += [answer["tokens"][0] for answer in answers]
                    pause(PAUSE_S)
                if round_index:  # the first round warms up
                    for figure, value in zip(FIGURES, figures, strict=True):
                        results.rates[f"{test}: {figure}"][name].append(value)
    return results, _agreement(first_tokens)


def figures_of(arrivals: Sequence[float], times: Sequence[Sequence[float]], prompt_length: int) -> list[float]:
    """Return FIGURES of one round, from the arrival time of each prompt and the time of each token, in seconds."""
    array = np.array(times)
    seconds = array.max() - arrivals[0]
    first, gaps = array[:, 0] - arrivals, np.diff(array, axis=1)
    num_prompt_tokens = array.shape[0] * prompt_length
    rates = [(num_prompt_tokens + array.size) / seconds, array.size / seconds]
    return [*map(float, rates), *np.percentile(first, [50, 95]).tolist(), *np.percentile(gaps, [50, 95]).tolist()]


def _agreement(first_tokens: Mapping[str, list[int]]) -> dict[str, str]:
    """Count equal first tokens. Prompts are random, so quantisation decides more of them than in text."""
    expected = next(iter(first_tokens.values()), [])
    texts = {}
    for name, tokens in first_tokens.items():
        same = sum(a == b for a, b in zip(expected, tokens, strict=False))
        texts[name] = f"{same} of {len(expected)}" if len(tokens) == len(expected) else "not all asked"
    return texts
