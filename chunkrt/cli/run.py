"""`chunkrt run`: one prompt, one answer."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import click

from chunkrt.cli.generation import generation_options, split_options, stream_answer
from chunkrt.cli.options import engine_options, open_engine, trace_option, written_trace
from chunkrt.engine.engine import Engine
from chunkrt.errors import ConfigError

MOST_CHARACTERS = 1 << 26


@click.command()
@click.argument("model")
@click.option("-p", "--prompt", help="The prompt.")
@click.option("-f", "--file", type=click.Path(path_type=Path), help="Read the prompt from a file; - is stdin.")
@click.option("--raw", is_flag=True, help="Continue the prompt as it is, without the model's chat template.")
@click.option("--json", "as_json", is_flag=True, help="Print the answer and figures as one JSON object.")
@trace_option
@generation_options
@engine_options
def run(
    model: str, prompt: str | None, file: Path | None, raw: bool, as_json: bool, trace: Path | None, **options: Any
) -> None:
    """Answer a prompt with MODEL: a catalogue name, a GGUF file, a Hugging Face folder, an ONNX decoder
    or an engine directory.

    The answer streams to stdout, figures go to stderr.
    """
    engine_settings, sampling, generation = split_options(options)
    system = generation.pop("system")
    text = read_prompt(prompt, file)
    begin = time.perf_counter()
    with written_trace(trace, model) as records, open_engine(model, engine_settings) as engine:
        load_seconds = time.perf_counter() - begin
        tokens = _tokens(engine, text, system, raw=raw)
        session = engine.session()
        session.on_run = records.append if trace else None
        answer = stream_answer(
            session,
            tokens,
            sampling=sampling,
            **generation,
            emit=_ignore if as_json else _print,
        )
        if as_json:
            click.echo(json.dumps({"model": model, **answer.as_dict(), "load_s": load_seconds}, ensure_ascii=False))
        else:
            click.echo()
            click.echo(f"[load {load_seconds:.2f} s, {answer.figures()}]", err=True)


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """The prompt from the option or the file.

    Raises:
        UsageError: neither or both are given.
        ConfigError: the file cannot be read, or there is no text in it.
    """
    if (prompt is None) == (file is None):
        raise click.UsageError("give a prompt with -p TEXT or -f FILE, one of them")
    if file is not None:
        try:
            prompt = _read(file)
        except OSError as error:
            raise ConfigError(f"cannot read the prompt from {file}: {error.strerror or error}") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"the prompt in {file} is not UTF-8 text: {error}") from error
    assert prompt is not None
    if not prompt.strip():
        raise ConfigError("the prompt is empty")
    return prompt


def _read(file: Path) -> str:
    """A file's text or, of "-", standard input's; a device may have no end."""
    if str(file) == "-":
        if sys.stdin is None:
            raise ConfigError("standard input is closed; give the prompt with -p TEXT or -f FILE")
        text = sys.stdin.read(MOST_CHARACTERS + 1)
    else:
        with file.open(encoding="utf-8") as opened:
            text = opened.read(MOST_CHARACTERS + 1)
    if len(text) > MOST_CHARACTERS:
        raise ConfigError(f"the prompt in {file} has more than {MOST_CHARACTERS} characters; no context holds so many")
    return text


def _print(piece: str) -> None:
    click.echo(piece, nl=False)


def _ignore(piece: str) -> None:
    """The answer is printed whole, as JSON, at the end."""


def _tokens(engine: Engine, text: str, system: str | None, *, raw: bool) -> list[int]:
    tokenizer = engine.require_tokenizer()
    if raw or not tokenizer.has_chat_template:
        if system:
            raise ConfigError("a system message needs the model's chat template; leave --system or --raw away")
        return tokenizer.encode(text, add_special=True, parse_special=raw)
    messages = [{"role": "system", "content": system}] if system else []
    return tokenizer.encode_chat([*messages, {"role": "user", "content": text}])
