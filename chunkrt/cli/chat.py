"""`chunkrt chat`: a conversation in the terminal."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import click

from chunkrt.cli.command import GroupedCommand, model_argument
from chunkrt.cli.generation import generation_options, split_options, stream_answer
from chunkrt.cli.options import engine_options, open_engine
from chunkrt.engine.session import Session
from chunkrt.errors import ConfigError

HELP = "/reset forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer"


@click.command(cls=GroupedCommand, first=("system", "max_new_tokens", "temperature", "context_length", "npu"))
@model_argument
@generation_options
@engine_options
def chat(model: str, **options: Any) -> None:
    """Talk with MODEL, one line a turn. What was said stays in the cache; only new tokens are prefilled.

    A turn that does not fit the context is refused, and an answer ends where the context is full, unless
    --context-shift drops what was said first.
    """
    settings, sampling, generation = split_options(options)
    system = generation.pop("system")
    opening = [{"role": "system", "content": system}] if system else []
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (line editing, where the platform has it)
    with open_engine(model, settings) as engine, engine.session() as session:
        tokenizer, messages = engine.require_tokenizer(), list(opening)
        click.echo(HELP, err=True)
        while (line := _read_line()) is not None:
            if not line:
                continue
            if line == "/exit":
                break
            if line == "/reset":
                messages = list(opening)
                continue
            if line.startswith("/"):
                click.echo(f"unknown command {line.split()[0]}; {HELP}", err=True)
                continue
            messages.append({"role": "user", "content": line})
            said: list[str] = []

            def emit(text: str, said: list[str] = said) -> None:
                said.append(text)
                click.echo(text, nl=False)

            try:
                tokens = reuse_prefix(session, tokenizer.encode_chat(messages))
                answer = stream_answer(session, tokens, sampling=sampling, **generation, emit=emit)
                click.echo()
                click.echo(f"[{answer.figures()}]", err=True)
            except KeyboardInterrupt:
                if not said:  # nothing was answered: the turn is as if it had never been
                    messages.pop()
                    click.echo("[stopped; the turn is left out]", err=True)
                    continue
                click.echo()
                click.echo("[stopped]", err=True)
            except ConfigError as error:  # the turn does not fit: the conversation goes on without it
                messages.pop()
                click.echo(f"{error}; /reset begins anew", err=True)
                continue
            messages.append({"role": "assistant", "content": "".join(said)})
    click.echo("", err=True)


def reuse_prefix(session: Session, tokens: list[int]) -> list[int]:
    """Rewind a session to what it shares with the tokens of a whole conversation; return those still to prefill.

    Where they part among tokens that shifts of the context have dropped, all that came after the kept ones goes.
    """
    shared = 0
    for old, new in zip(session.history, tokens[:-1], strict=False):
        if old != new:
            break
        shared += 1
    surplus = len(session.history) - shared
    session.rewind(min(shared, max(session.position - surplus, session.num_kept)))
    return tokens[len(session.history) :]


def _read_line() -> str | None:
    """The next line, or None at the end of the input; Ctrl-C at the prompt drops the line."""
    try:
        if not sys.stdin.isatty():
            line = sys.stdin.readline()
            return line.strip() if line else None
        return input("> ").strip()
    except EOFError:
        return None
    except KeyboardInterrupt:
        click.echo("", err=True)
        return ""
