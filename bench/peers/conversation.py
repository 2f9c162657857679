"""A conversation in chunkrt and other runtimes, with and without prefix caches: time to first token, by turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median

import click
import numpy as np

from chunkrt import ChunkrtError
from chunkrt.checkpoints.gguf import GgufSource
from peers.command import find_checkpoint, started, tell
from peers.contenders import CONVERSING
from peers.environment import Forms, check_interpreter
from peers.process import ContenderError
from peers.rounds import PAUSE_S
from peers.serving import Server

Times = dict[str, list[list[float]]]
"""By contender and turn, seconds to the first token in each round."""


def measure_conversation(
    contenders: Mapping[str, Server],
    *,
    turns: int,
    turn_tokens: int,
    answer_tokens: int,
    rounds: int,
    vocabulary_size: int,
    pause: Callable[[float], None] = time.sleep,
) -> tuple[Times, dict[str, str]]:
    """Let every contender in turn answer each turn, round after round, after a warm-up round.

    The text of a turn is random, new in every round and the same for all; the answers in between are each contender's
    own, of the same length. A turn's prompt is the complete conversation so far, including the turn.

    Returns: the times, and the reasons of failures.
    """
    random = np.random.default_rng(0)
    times: Times = {name: [[] for _ in range(turns)] for name in contenders}
    failures: dict[str, str] = {}
    for round_index in range(rounds + 1):
        said: dict[str, list[int]] = {name: [] for name in contenders}
        for turn in range(turns):
            new = random.integers(0, vocabulary_size, turn_tokens).tolist()
            for name, contender in contenders.items():
                if name in failures:
                    continue
                said[name] += new
                try:
                    answer = contender.serve([said[name].copy()], [0.0], answer_tokens)[0]
                except ContenderError as error:
                    failures[name] = str(error)
                    del times[name]
                    continue
                said[name] += answer["tokens"]
                if round_index:
                    times[name][turn].append(answer["times"][0])
                pause(PAUSE_S)
    return times, failures


def print_conversation(
    model: str, *, python: str, peers_dir: Path, threads: int, rounds: int, turns: int, turn_tokens: int, answer: int
) -> None:
    """Print the medians of all contenders that run MODEL (a catalogue name or a GGUF file), and the reasons of the
    others.
    """
    try:
        check_interpreter(python)
        checkpoint = find_checkpoint(model)
        vocabulary_size = int(GgufSource(checkpoint).config["vocab_size"])
    except (ChunkrtError, ContenderError) as error:
        raise click.ClickException(str(error)) from error
    forms = Forms(checkpoint.resolve(), peers_dir.resolve() / "models", python, tell)
    room = turns * (turn_tokens + answer)
    with started(CONVERSING, forms, python, threads, room) as (running, absent):
        times, failures = measure_conversation(
            running,
            turns=turns,
            turn_tokens=turn_tokens,
            answer_tokens=answer,
            rounds=rounds,
            vocabulary_size=vocabulary_size,
        )
        settings = {name: f"{dict(process.versions)}, {process.settings}" for name, process in running.items()}
    click.echo(table(times, turn_tokens, answer))
    for name, reason in {**absent, **failures}.items():
        click.echo(f"- {name} is not measured: {reason}")
    for name in times:
        click.echo(f"- {name}: {settings[name]}")


def table(times: Times, turn_tokens: int, answer_tokens: int) -> str:
    """Return medians in seconds, a row a turn and a column a contender."""
    rows = [["turn", "tokens", *times], ["---:"] * (2 + len(times))]
    for turn in range(len(next(iter(times.values()), []))):
        num_tokens = turn * (turn_tokens + answer_tokens) + turn_tokens
        rows.append([str(turn + 1), str(num_tokens), *(f"{median(one[turn]):.3f}" for one in times.values())])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
