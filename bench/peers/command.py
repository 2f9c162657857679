"""The command line: contenders, tests and rounds; then the report."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import get_args

import click

from chunkrt import ChunkrtError
from chunkrt.backends.base import AttentionMath
from chunkrt.checkpoints import catalogue
from chunkrt.checkpoints.catalogue.fetch import pull
from chunkrt.checkpoints.gguf import GgufSource
from chunkrt.files import check_writable
from chunkrt.tokenizer import Tokenizer
from peers.contenders import CONTENDERS, PEERS, Contender, packages_for
from peers.environment import Forms, check_interpreter, make_environment
from peers.process import ContenderError, ContenderProcess
from peers.report import Report, describe_machine, plot, to_json, to_markdown
from peers.rounds import PAUSE_S, Test, agreement, measure
from peers.shapes import SHAPES, write_random_model

TEXT = "The capital of France is Paris, and the capital of Italy is Rome. Water boils at a hundred degrees and"
"""Every prefix of it, from the fourth token on, is a prompt for `agreement`."""

ROOM = 64
"""Positions of the context in addition to the longest test."""


def writable(context: click.Context, parameter: click.Parameter, name: str | None) -> Path | None:
    """A file that is written at the end; that it is writable is checked at the start."""
    if name is None:
        return None
    try:
        check_writable(path := Path(name))
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise click.UsageError(f"cannot write {name}: {error.strerror or error}") from error
    return path


def find_checkpoint(model: str) -> Path:
    """Return the file at a path, or the file of a catalogue name, downloaded if necessary. Raise ModelError or
    ConfigError.
    """
    return Path(model) if Path(model).exists() else pull(catalogue.find(model))


@click.command()
@click.argument("model")
@click.option("--threads", type=click.IntRange(1), default=2, show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True)
@click.option("--tests", default="pp128,pp512,pp1024,pp4096,tg64", show_default=True)
@click.option("--chunk", type=click.IntRange(1), help="chunkrt's chunk length; by default its own.")
@click.option(
    "--attention-math",
    type=click.Choice(get_args(AttentionMath)),
    help="Number format of the products in chunkrt's attention.",
)
@click.option("--peers", "kinds", help=f"Other runtimes to measure: {', '.join(PEERS)}. By default all.")
@click.option(
    "--shape",
    type=click.Choice(sorted(SHAPES)),
    help="Random weights of this shape with MODEL's tokenizer; compared only with llama.cpp unless --peers is given.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of the random prompts.")
@click.option("--python", help="Interpreter with the other runtimes installed; nothing is installed then.")
@click.option("--peers-dir", type=click.Path(path_type=Path), default="build/peers", show_default=True)
@click.option("--json", "json_file", callback=writable, help="Write all samples to this file.")
@click.option("--plot", "plot_file", callback=writable, help="Draw bars to this file; needs matplotlib.")
def peers(
    model: str,
    threads: int,
    rounds: int,
    tests: str,
    chunk: int | None,
    attention_math: str | None,
    kinds: str | None,
    shape: str | None,
    seed: int,
    python: str | None,
    peers_dir: Path,
    json_file: Path | None,
    plot_file: Path | None,
) -> None:
    """Measure MODEL (a catalogue name or a GGUF file) in chunkrt and in other runtimes."""
    try:
        wanted = [Test.parse(text) for text in tests.split(",")]
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    own = {"chunk_length": chunk, "attention_math": attention_math}
    contenders = choose(kinds.split(",") if kinds else ["llama.cpp"] if shape else PEERS, own)
    peers_dir = peers_dir.resolve()
    try:
        if python:
            check_interpreter(python)
        checkpoint = find_checkpoint(model)
        python = python or make_environment(peers_dir / "environment", tell, packages_for(contenders))
        if shape:
            checkpoint = _random_model(shape, checkpoint, peers_dir)
        vocabulary_size = int(GgufSource(checkpoint).config["vocab_size"])
        prompts = _prompts(checkpoint)
    except (ChunkrtError, ContenderError) as error:
        raise click.ClickException(str(error)) from error
    forms = Forms(checkpoint.resolve(), peers_dir / "models", python, tell)
    room = max(test.count for test in wanted) + ROOM
    with started(contenders, forms, python, threads, room) as (running, absent):
        tell(f"measuring {len(running)} contenders, {rounds} rounds after a warm-up")
        agrees = _agreement_texts(agreement(running, prompts))
        results = measure(running, wanted, rounds=rounds, vocabulary_size=vocabulary_size, seed=seed)
    report = Report(
        conditions={
            "model": f"{shape}, random weights" if shape else checkpoint.name,
            **describe_machine(),
            "threads": threads,
            "rounds": f"{rounds}, after a warm-up; {PAUSE_S} s between two measurements",
            "prompts": f"random tokens, new in every round (seed {seed}), the same for all",
            "date": datetime.date.today().isoformat(),
        },
        baselines=[c.name for c in contenders if c.kind == "chunkrt" and c.name in running],
        about={n: {"versions": dict(p.versions), "settings": p.settings} for n, p in running.items()},
        absent=absent,
        agreement=agrees,
        results=results,
    )
    click.echo(to_markdown(report))
    if json_file:
        json_file.write_text(to_json(report), "utf-8")
    if plot_file:
        try:
            plot(report, plot_file)
        except ImportError as error:
            raise click.ClickException(f"{plot_file} cannot be drawn: {error}; pip install matplotlib") from error


def choose(
    kinds: Sequence[str], own: Mapping[str, object], contenders: Sequence[Contender] = CONTENDERS
) -> list[Contender]:
    """Return chunkrt's contenders, with the options that are not None, and those of the given kinds, in the list's
    order.

    Raises UsageError for other kinds.
    """
    peers = list(dict.fromkeys(c.kind for c in contenders if c.kind != "chunkrt"))
    for kind in kinds:
        if kind not in peers:
            raise click.UsageError(f"unknown runtime {kind!r}; available: {', '.join(peers)}")
    given = {name: value for name, value in own.items() if value is not None}
    return [
        replace(c, options=given | dict(c.options)) if c.kind == "chunkrt" else c
        for c in contenders
        if c.kind == "chunkrt" or c.kind in kinds
    ]


@contextmanager
def started(
    contenders: Sequence[Contender], forms: Forms, python: str, threads: int, room: int
) -> Iterator[tuple[dict[str, ContenderProcess], dict[str, str]]]:
    """Yield the contenders that start, and the reasons of the others. chunkrt runs in this interpreter, others in
    theirs.

    All processes end with the context, or with a Ctrl-C while the others start.
    """
    running: dict[str, ContenderProcess] = {}
    absent: dict[str, str] = {}
    with ExitStack() as stack:
        for contender in contenders:
            tell(f"starting {contender.name}")
            try:
                process = ContenderProcess(
                    contender,
                    python=sys.executable if contender.kind == "chunkrt" else python,
                    model=forms.make(contender.form),
                    threads=threads,
                    context_length=room,
                    log=forms.folder / f"{contender.name}.log",
                )
                running[contender.name] = stack.enter_context(process)
            except ContenderError as error:
                absent[contender.name] = str(error)
                tell(f"{contender.name} is absent: {error}")
        yield running, absent


def _random_model(shape: str, tokenizer: Path, peers_dir: Path) -> Path:
    path = peers_dir / "models" / f"{shape}-random.gguf"
    if not path.exists():
        tell(f"writing {path}")
        path.parent.mkdir(parents=True, exist_ok=True)
        write_random_model(SHAPES[shape], tokenizer, path)
    return path


def _prompts(checkpoint: Path) -> list[list[int]]:
    if not (tokenizer := Tokenizer.from_source(GgufSource(checkpoint))):
        raise click.ClickException(f"{checkpoint} has no tokenizer, which some runtimes need; give a complete model")
    tokens = tokenizer.encode(TEXT, add_special=True, parse_special=False)
    return [tokens[:count] for count in range(4, len(tokens) + 1)]


def _agreement_texts(found: Mapping[str, list[int] | str]) -> dict[str, str]:
    """Count for each contender the next tokens that equal the first contender's."""
    first = next(iter(found.values()), [])
    texts = {}
    for name, tokens in found.items():
        if isinstance(tokens, str):
            texts[name] = f"failed: {tokens}"
        elif isinstance(first, str):
            texts[name] = "the first failed"
        else:
            same = sum(a == b for a, b in zip(first, tokens, strict=True))
            texts[name] = f"{same} of {len(first)}"
    return texts


def tell(what: str) -> None:
    click.echo(what, err=True)
