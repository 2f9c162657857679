"""Scoring of HellaSwag's kind of items, a context and four endings: contenders and report."""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import click
import numpy as np

from chunkrt import ChunkrtError
from chunkrt.checkpoints.gguf import GgufSource
from chunkrt.tokenizer import Tokenizer
from peers.command import find_checkpoint, started, tell, writable
from peers.contenders import Contender
from peers.environment import Forms, check_interpreter, make_environment
from peers.process import ContenderError
from peers.report import describe_machine
from peers.rounds import PAUSE_S, spread

Pair = tuple[list[int], list[int]]

NUM_ENDINGS = 4
CONTEXT_TOKENS, ENDING_TOKENS = (60, 120), (5, 30)
"""The shortest and the longest context, and ending."""

NUM_WARMING = 4
"""Items for warm-up, which are not measured."""

BATCH = 16
WAYS = ("together", "item by item", "pair by pair")
PACKAGES = ("accelerate", "gguf", "torch", "transformers")


class Scorer(Protocol):
    """Interface of a contender that scores pairs; a `ContenderProcess`."""

    def score(self, pairs: Sequence[Pair]) -> dict[str, Any]: ...


@dataclass
class Measured:
    """Samples of one contender, one a round. items_per_s; rows computed, and with padding; the scores of all rounds."""

    rates: list[float] = field(default_factory=list)
    num_rows: int = 0
    num_padded: int = 0
    scores: list[float] = field(default_factory=list)
    failure: str = ""


def contenders_for(schemes: Sequence[str], ways: Sequence[str]) -> list[Contender]:
    """Return chunkrt's contenders for each scheme, and transformers. The linears of `float` run on ONNX Runtime."""
    own = [
        Contender(
            name=f"chunkrt {scheme}, {way}",
            kind="chunkrt",
            engine_folder="scoring",
            options={"way": way, "scheme": scheme, "npu": "onnxrt" if scheme == "float" else "native"},
        )
        for scheme in schemes
        for way in ways
    ]
    peer = Contender(
        name=f"transformers, batches of {BATCH}",
        kind="torch",
        form="hugging-face",
        engine_folder="scoring",
        options={"batch": BATCH},
    )
    return [*own, peer]


def items_of(tokens: Sequence[int], number: int, random: np.random.Generator) -> list[list[Pair]]:
    """Draw items from the tokens of a text: the first ending is the continuation, the others are from elsewhere."""

    def piece(start: int, least: int, most: int) -> list[int]:
        return list(tokens[start : start + int(random.integers(least, most + 1))])

    room = len(tokens) - CONTEXT_TOKENS[1] - ENDING_TOKENS[1]
    items = []
    for _ in range(number):
        start = int(random.integers(0, room))
        context = piece(start, *CONTEXT_TOKENS)
        places = [start + len(context), *random.integers(0, room, NUM_ENDINGS - 1).tolist()]
        items.append([(context, piece(place, *ENDING_TOKENS)) for place in places])
    return items


def least_rows(pairs: Sequence[Pair]) -> int:
    """Count the rows that every method has to compute: one for each distinct prefix of a pair, except the last."""
    nodes: dict[tuple[int, int], int] = {}
    for context, continuation in pairs:
        node = -1
        for token in (*context, *continuation[:-1]):
            node = nodes.setdefault((node, token), len(nodes))
    return len(nodes)


def measure_scoring(
    contenders: Mapping[str, Scorer],
    rounds: Sequence[Sequence[Sequence[Pair]]],
    warming: Sequence[Sequence[Pair]],
    pause: Callable[[float], None] = time.sleep,
) -> dict[str, Measured]:
    """Let every contender score the items of each round in turn, after a warm-up."""
    found = {name: Measured() for name in contenders}
    for number, items in enumerate([warming, *rounds]):
        pairs = [pair for item in items for pair in item]
        for name, contender in contenders.items():
            if found[name].failure:
                continue
            try:
                answer = contender.score(pairs)
            except ContenderError as error:
                found[name].failure = str(error)
                continue
            pause(PAUSE_S)
            if number:
                found[name].rates.append(len(items) / answer["seconds"])
                found[name].num_rows += answer["rows"]
                found[name].num_padded += answer["padded"]
                found[name].scores += answer["scores"]
                tell(f"round {number} of {len(rounds)}: {name}: {len(items) / answer['seconds']:.3g} items/s")
    return found


def to_markdown(found: Mapping[str, Measured], least: int) -> str:
    """Return a table that compares each contender with the first; ratios are taken within a round."""
    first = next(iter(found.values()))
    head = (
        "contender",
        "items/s",
        "first / this",
        "rows computed / least",
        "with padding / least",
        "same ending as the first",
        "largest difference of a score",
    )
    lines = ["| " + " | ".join(head) + " |", "| --- |" + " ---: |" * (len(head) - 1)]
    for name, one in found.items():
        if one.failure or not one.rates:
            continue
        cells = [_spread_text(one.rates)]
        if first.failure:
            cells += ["-"] * (len(head) - 2)
        else:
            ratios = [a / b for a, b in zip(first.rates, one.rates, strict=True)]
            differences = np.abs(np.array(one.scores) - first.scores)
            chosen, expected = (np.reshape(x.scores, (-1, NUM_ENDINGS)).argmax(axis=1) for x in (one, first))
            cells += [
                _spread_text(ratios),
                f"{one.num_rows / least:.3f}",
                f"{one.num_padded / least:.3f}",
                f"{int((chosen == expected).sum())} of {len(expected)}",
                f"{differences.max():.3g}",
            ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    failures = [f"- {name} failed: {one.failure}" for name, one in found.items() if one.failure]
    return "\n".join([*lines, *(["", *failures] if failures else [])])


def _spread_text(samples: Sequence[float]) -> str:
    median, least, most = spread(samples) or (0, 0, 0)
    return f"{median:.3g} ({least:.3g} - {most:.3g})"


@click.command()
@click.argument("model")
@click.option(
    "--text",
    "text_file",
    type=click.Path(exists=True, path_type=Path),
    required=True,
    help="Text that items are drawn from.",
)
@click.option(
    "--items",
    type=click.IntRange(1),
    default=1000,
    show_default=True,
    help="Items of all rounds together. On two AVX2 cores a thousand items of a model with 135 million parameters take "
    "each method of chunkrt 10 to 30 minutes, and transformers an hour; twice that on a busy machine.",
)
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True, help="Rounds, which share the items.")
@click.option("--threads", type=click.IntRange(1), default=2, show_default=True)
@click.option("--scheme", "schemes", multiple=True, default=["w8a8-dynamic"], show_default=True)
@click.option(
    "--way",
    "ways",
    multiple=True,
    type=click.Choice(WAYS),
    default=WAYS,
    help="Methods of chunkrt; by default all three.",
)
@click.option("--no-peer", is_flag=True, help="Omit transformers.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the items.")
@click.option("--python", help="Interpreter with torch and transformers installed; nothing is installed then.")
@click.option("--peers-dir", type=click.Path(path_type=Path), default="build/peers", show_default=True)
@click.option("--json", "json_file", callback=writable, help="Write every round's figures to this file.")
def scoring(
    model: str,
    text_file: Path,
    items: int,
    rounds: int,
    threads: int,
    schemes: Sequence[str],
    ways: Sequence[str],
    no_peer: bool,
    seed: int,
    python: str | None,
    peers_dir: Path,
    json_file: Path | None,
) -> None:
    """Measure the rate at which MODEL (a catalogue name or a GGUF file) scores items of a context and four endings."""
    if items < rounds:
        raise click.UsageError(f"{items} items cannot be divided over {rounds} rounds")
    contenders = contenders_for(schemes, ways)[: -1 if no_peer else None]
    try:
        if python:
            check_interpreter(python)
        checkpoint = find_checkpoint(model)
        tokens = _tokens(checkpoint, text_file)
        peers_dir = peers_dir.resolve()
        if not no_peer:
            python = python or make_environment(peers_dir / "environment", tell, dict.fromkeys(PACKAGES, ("PyTorch",)))
    except (ChunkrtError, ContenderError, OSError, UnicodeDecodeError) as error:
        raise click.ClickException(str(error)) from error
    random = np.random.default_rng(seed)
    parts = [items_of(tokens, items // rounds + (n < items % rounds), random) for n in range(rounds)]
    forms = Forms(checkpoint.resolve(), peers_dir / "models", python or "", tell)
    room = CONTEXT_TOKENS[1] + ENDING_TOKENS[1]
    with started(contenders, forms, python or "", threads, room) as (running, absent):
        if not running:
            raise click.ClickException("no contender could be started")
        found = measure_scoring(running, parts, items_of(tokens, NUM_WARMING, random))
    least = sum(least_rows([pair for item in part for pair in item]) for part in parts)
    conditions = {
        "model": checkpoint.name,
        **describe_machine(),
        "threads": threads,
        "items": f"{items} in {rounds} rounds, {NUM_ENDINGS} endings each, drawn from {text_file.name} (seed {seed})",
        "least possible rows": least,
        "date": datetime.date.today().isoformat(),
    }
    click.echo("\n".join(f"- {key}: {value}" for key, value in conditions.items()))
    click.echo("\nMedian (least - most) of the rounds.\n")
    click.echo(to_markdown(found, least))
    for name, process in running.items():
        versions = ", ".join(f"{package} {number}" for package, number in process.versions.items())
        click.echo(f"- {name}: {versions}; {process.settings}")
    for name, reason in absent.items():
        click.echo(f"- {name} is absent: {reason}")
    if json_file:
        samples = {name: vars(one) for name, one in found.items()}
        json_file.write_text(
            json.dumps({"conditions": conditions, "absent": absent, "found": samples}, indent=2), "utf-8"
        )


def _tokens(checkpoint: Path, text_file: Path) -> list[int]:
    tokenizer = Tokenizer.from_source(GgufSource(checkpoint))
    if tokenizer is None:
        raise click.ClickException(f"{checkpoint} has no tokenizer")
    tokens = tokenizer.encode(text_file.read_text("utf-8"), add_special=False, parse_special=False)
    if len(tokens) < (least := 2 * (CONTEXT_TOKENS[1] + ENDING_TOKENS[1])):
        raise click.ClickException(f"{text_file} has {len(tokens)} tokens, too few to draw items from; give {least}")
    return tokens
