"""Gain of packed chunks on this machine: decode of many sequences, and a long prompt during decode.

    python bench/packed.py smollm2-135m-instruct --rounds 3

Cases take turns, round after round; medians are printed. The machine should be otherwise idle.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import Any

import click
import numpy as np

from chunkrt.cli.shared_options import engine_options, measured, open_engine
from chunkrt.engine.engine import Engine
from chunkrt.engine.session import Session

SEQUENCES = (1, 2, 4, 8, 16)
DECODING = 4
"""Number of sequences that decode during a long prompt."""


@dataclass
class Decoding:
    """A sequence that decodes in a thread of its own, until `stop`. `times`: when each token was generated."""

    session: Session
    times: list[float] = field(default_factory=list)
    stops: bool = False

    def __call__(self, most: int) -> None:
        for _ in self.session.generate(max_new_tokens=most):
            self.times.append(perf_counter())
            if self.stops:
                return


@click.command()
@click.argument("model")
@click.option("--rounds", type=int, default=3, show_default=True)
@click.option("-n", "num_tokens", type=int, default=48, show_default=True, help="Tokens to decode in every sequence.")
@click.option("-p", "num_prompt", type=int, default=4000, show_default=True, help="Tokens of the long prompt.")
@engine_options
def packed(model: str, rounds: int, num_tokens: int, num_prompt: int, **settings: Any) -> None:
    """Print the decode rates of MODEL for several sequences, and the mutual slowdown of a long prompt and decode."""
    with open_engine(model, measured(settings)) as engine:
        decoded: dict[int, list[float]] = {number: [] for number in SEQUENCES}
        alone, beside, gaps, chunks = [], [], list[float](), list[float]()
        for _ in range(rounds):
            for number in SEQUENCES:
                decoded[number].append(_decode(engine, number, num_tokens))
            alone.append(_prefill(engine.session(), engine, num_prompt))
            seconds, waits, num_chunks = _beside(engine, num_prompt)
            beside.append(seconds)
            gaps += waits
            chunks.append(seconds / num_chunks)
    one = median(decoded[1])
    click.echo("| sequences | tokens/s | over one |\n| ---: | ---: | ---: |")
    for number, rates in decoded.items():
        click.echo(f"| {number} | {median(rates):.1f} | {median(rates) / one:.2f} |")
    ratio = median(b / a for a, b in zip(alone, beside, strict=True))
    chunk = median(chunks)
    p50, p95 = np.percentile(gaps, [50, 95])
    click.echo(
        f"\nA prompt of {num_prompt} tokens: {median(alone):.2f} s to its first token alone, {median(beside):.2f} s "
        f"during decode of {DECODING} sequences: {ratio:.3f} times.\n"
        f"Gaps between their tokens meanwhile: p50 {p50 * 1e3:.0f} ms, p95 {p95 * 1e3:.0f} ms; a chunk took "
        f"{chunk * 1e3:.0f} ms: {p95 / chunk:.2f} chunk times."
    )


def _prefill(session: Session, engine: Engine, num_tokens: int) -> float:
    tokens = np.random.default_rng(num_tokens).integers(0, engine.plan.vocab_size, num_tokens).tolist()
    start = perf_counter()
    session.prefill(tokens)
    return perf_counter() - start


def _started(engine: Engine, number: int) -> list[Decoding]:
    decoding = [Decoding(engine.session()) for _ in range(number)]
    for one in decoding:
        _prefill(one.session, engine, 32)
    return decoding


def _in_threads(calls: list[Callable[[], object]]) -> list[threading.Thread]:
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    return threads


def _decode(engine: Engine, number: int, num_tokens: int) -> float:
    """Return the tokens a second of all sequences together."""
    decoding = _started(engine, number)
    start = perf_counter()
    for thread in _in_threads([lambda one=one: one(num_tokens) for one in decoding]):  # type: ignore[misc]
        thread.join()
    return sum(len(one.times) for one in decoding) / (perf_counter() - start)


def _beside(engine: Engine, num_prompt: int) -> tuple[float, list[float], int]:
    """Return the seconds of a long prompt during decode, the gaps between decoded tokens, and the prompt's chunks."""
    decoding, most = _started(engine, DECODING), engine.context_length - 64
    threads = _in_threads([lambda one=one: one(most) for one in decoding])  # type: ignore[misc]
    session = engine.session()
    begin = perf_counter()
    tokens = np.random.default_rng(num_prompt).integers(0, engine.plan.vocab_size, num_prompt).tolist()
    result = session.prefill(tokens)
    end = perf_counter()
    for one in decoding:
        one.stops = True
    for thread in threads:
        thread.join()
    waits = []
    for one in decoding:
        times = [time for time in one.times if begin <= time <= end]
        waits += [later - earlier for earlier, later in pairwise(times)]
    return end - begin, waits, result.num_chunks


if __name__ == "__main__":
    packed()
