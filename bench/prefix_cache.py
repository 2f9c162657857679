"""Savings of the prefix cache: time to first token after tokens that were seen before, in memory and from disk.

    python bench/prefix_cache.py smollm2-135m-instruct --threads 2
    python bench/prefix_cache.py smollm2-135m-instruct --threads 2 --python build/peers/environment/bin/python

With an interpreter that has other runtimes (`bench/peers.py` creates one), only a conversation is compared with theirs.

All compared cases are measured in turns, and medians are printed. From disk: in a new process, after the operating
system's cache of the files was dropped (posix_fadvise), so that they are read from the disk.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import click
import numpy as np
from peers.conversation import print_conversation

from chunkrt.cli.shared_options import engine_options, open_engine
from chunkrt.engine.engine import Engine

SEEN, NEW, FRESH = 1900, 35, 64
TURNS, TURN, ANSWER = 10, 40, 24


@click.command()
@click.argument("model")
@click.option("--rounds", type=int, default=5, show_default=True)
@click.option("-p", "num_prompt", type=int, default=4000, show_default=True, help="Tokens of the prompt on disk.")
@click.option("--python", help="Interpreter with other runtimes: compare a conversation with theirs.")
@click.option("--peers-dir", type=click.Path(path_type=Path), default="build/peers", show_default=True)
@click.option("--turns", type=click.IntRange(1), default=TURNS, show_default=True, help="Of the conversation.")
@engine_options
def prefix_cache(
    model: str, rounds: int, num_prompt: int, python: str | None, peers_dir: Path, turns: int, **settings: Any
) -> None:
    """Print MODEL's time to first token after tokens that it has seen, and after tokens that it has not."""
    if python:
        print_conversation(
            model,
            python=python,
            peers_dir=peers_dir,
            threads=settings["threads"] or os.cpu_count() or 1,
            rounds=rounds,
            turns=turns,
            turn_tokens=TURN,
            answer=ANSWER,
        )
        return
    off, on = ({**settings, "prefix_cache": place} for place in ("off", "memory"))
    with open_engine(model, off) as plain, open_engine(model, on) as cached:
        rng = np.random.default_rng(0)

        def tokens(number: int) -> list[int]:
            return list(map(int, rng.integers(0, plain.plan.vocab_size, number)))

        _lone(plain, cached, tokens, rounds)
        _after_seen(plain, cached, tokens, rounds)
        _turns(plain, cached, tokens, turns)
        prompt = tokens(num_prompt)
    _from_disk(model, settings, prompt, rounds)


def _seconds(engine: Engine, prompt: Sequence[int]) -> tuple[float, int]:
    """Return the seconds to the first token, in a session of its own, and the number of cached tokens."""
    start = perf_counter()
    with engine.session() as session:
        result = session.prefill(prompt)
        next(session.generate(max_new_tokens=1))
        return perf_counter() - start, result.num_cached


def _lone(plain: Engine, cached: Engine, tokens: Any, rounds: int) -> None:
    """Measure the cost of keeping prefixes that no later prompt uses."""
    times: dict[str, list[float]] = {"off": [], "memory": []}
    for _ in range(rounds):
        prompt = tokens(512)
        times["off"].append(_seconds(plain, prompt)[0])
        times["memory"].append(_seconds(cached, prompt)[0])
    one, other = median(times["off"]), median(times["memory"])
    click.echo(f"512 tokens never seen before: {one:.3f} s without the cache, {other:.3f} s with it: {other / one:.3f}")


def _after_seen(plain: Engine, cached: Engine, tokens: Any, rounds: int) -> None:
    seen = tokens(SEEN)
    _seconds(cached, seen)
    fresh, again, ratios = [], [], []
    for _ in range(rounds):
        fresh.append(_seconds(plain, tokens(FRESH))[0])
        seconds, num_cached = _seconds(cached, seen + tokens(NEW))
        again.append(seconds)
        ratios.append(seconds / fresh[-1])
    click.echo(
        f"{num_cached} tokens seen before and {NEW} new: {median(again):.3f} s to the first token; {FRESH} new alone: "
        f"{median(fresh):.3f} s; ratio {median(ratios):.2f}"
    )


def _turns(plain: Engine, cached: Engine, tokens: Any, turns: int) -> None:
    """Measure a conversation, each turn in a session of its own with the complete conversation, like a server."""
    said: list[int] = []
    times: dict[str, list[float]] = {"off": [], "memory": []}
    counts = []
    for _ in range(turns):
        said += tokens(TURN)
        for place, engine in (("off", plain), ("memory", cached)):
            start = perf_counter()
            with engine.session() as session:
                result = session.prefill(said)
                answer = session.generate(max_new_tokens=ANSWER)
                next(answer)
                times[place].append(perf_counter() - start)
                if place == "memory":
                    counts.append((result.num_tokens, result.num_cached))
                    list(answer)
                    after = list(session.tokens)
        said = after
    click.echo("| turn | tokens | run | seconds without | seconds with |\n| ---: | ---: | ---: | ---: | ---: |")
    for turn, ((run, had), one, other) in enumerate(zip(counts, times["off"], times["memory"], strict=True), 1):
        click.echo(f"| {turn} | {run + had} | {run} | {one:.3f} | {other:.3f} |")


_CHILD = """
import json, sys
from time import perf_counter
import chunkrt

model, settings, prompt = json.load(sys.stdin)
with chunkrt.load(model, **settings) as engine:
    engine.loaded.check_ready()
    with engine.session() as session:
        session.prefill(prompt[:1])
    start = perf_counter()
    with engine.session() as session:
        result = session.prefill(prompt)
        print(json.dumps([perf_counter() - start, result.num_cached]))
"""


def _from_disk(model: str, settings: dict[str, Any], prompt: list[int], rounds: int) -> None:
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        given = {key: value for key, value in settings.items() if isinstance(value, str | int) and value is not None}
        given |= {"prefix_cache": folder}
        first, _ = _in_child(model, given, prompt)
        restored = []
        for _ in range(rounds):
            _drop(Path(folder))
            seconds, num_cached = _in_child(model, given, prompt)
            restored.append(seconds)
        size = sum(path.stat().st_size for path in Path(folder).iterdir())
    share = median(restored) / first
    click.echo(
        f"{len(prompt)} tokens: {first:.2f} s to prefill; {median(restored):.3f} s in a new process, {num_cached} of "
        f"them from disk ({size / 1e6:.0f} MB, not in the system's cache): {share:.1%}"
    )


def _in_child(model: str, settings: dict[str, Any], prompt: list[int]) -> tuple[float, int]:
    text = json.dumps([model, settings, prompt])
    child = subprocess.run([sys.executable, "-P", "-c", _CHILD], input=text, capture_output=True, text=True, check=True)
    seconds, num_cached = json.loads(child.stdout)
    return seconds, num_cached


def _drop(folder: Path) -> None:
    """Make the operating system drop its cache of the files."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    prefix_cache()
