"""`chunkrt chat`: a conversation in the terminal."""

from __future__ import annotations

from typing import Any

import click

from chunkrt.cli.command import GroupedCommand, model_argument
from chunkrt.cli.conversation import ASKS_AGAIN, LEAVES, Conversation
from chunkrt.cli.generation import as_advised, generation_options, refuse_idle, split_options, stream_answer
from chunkrt.cli.options import engine_options_but, open_engine
from chunkrt.cli.terminal import Shown, line_reader
from chunkrt.engine.sampling import SamplingOptions
from chunkrt.engine.session import Session
from chunkrt.errors import ConfigError, ModelError
from chunkrt.tokenizer import Tokenizer

HELP = "/help lists the commands, /exit or Ctrl-D leaves, Ctrl-C stops an answer"


@click.command(cls=GroupedCommand, first=("system", "max_new_tokens", "temperature", "context_length", "npu"))
@model_argument
@click.option("--markdown/--no-markdown", default=True, help="Render answers in a terminal.  [default: render]")
@generation_options
@engine_options_but("batcher", "queue")
def chat(model: str, markdown: bool, **options: Any) -> None:
    """Talk with MODEL. What was said stays in the cache; only new tokens are prefilled.

    Enter ends a turn; several lines that are pasted are one turn, and Alt-Enter begins a new line. /help lists what
    else there is: settings, saving and loading, trying again. From a pipe, a line is a turn. Sampling options that are
    not given are those that the model's makers advise (generation_config.json), if they do.

    A turn that does not fit the context is refused, and an answer ends where the context is full, unless
    --context-shift drops what was said first.
    """
    settings, sampling, generation = split_options(options)
    with open_engine(model, settings) as engine, engine.session() as session:
        tokenizer = engine.require_tokenizer()
        if not tokenizer.has_chat_template:
            raise ModelError("the model has no chat template; ask it with `chunkrt run`, or take one tuned for chat")
        conversation = Conversation(model=model, sampling=sampling_of(tokenizer, sampling), **generation)
        click.echo(HELP, err=True)
        read = line_reader()
        while (line := read()) is not None:
            if line.startswith("/"):
                try:
                    wanted = conversation.command(line)
                except ConfigError as error:
                    click.echo(str(error), err=True)
                    continue
                if wanted == LEAVES:
                    break
                if wanted != ASKS_AGAIN:
                    continue
            elif line:
                conversation.messages.append({"role": "user", "content": line})
            else:
                continue
            answer_turn(conversation, session, tokenizer, Shown(renders=markdown))
    click.echo("", err=True)


def sampling_of(tokenizer: Tokenizer, given: SamplingOptions) -> SamplingOptions:
    """The sampling options that were given, and what the model's makers advise for the rest, which is told.

    Raises:
        ConfigError: an option was given that does nothing.
    """
    try:
        sampling = as_advised(given, tokenizer.settings.sampling)
    except ConfigError as error:
        click.echo(f"the sampling options that this model comes with are left out: {error}", err=True)
        sampling = given
    refuse_idle(sampling)
    if sampling != given:
        new = {name: v for name, v in vars(sampling).items() if v != getattr(given, name)}
        told = ", ".join(f"{name} {value:g}" for name, value in new.items())
        click.echo(f"as this model's makers advise: {told}; --temp 0 or /set temperature 0 is greedy", err=True)
    return sampling


def answer_turn(conversation: Conversation, session: Session, tokenizer: Tokenizer, shown: Shown) -> None:
    """Answer the last message; one that cannot be answered is left out of the conversation."""
    said: list[str] = []

    def emit(text: str) -> None:
        said.append(text)
        shown(text)

    messages = conversation.messages
    try:
        tokens = tokenizer.encode_chat(conversation.all_messages(), template_options=conversation.template_options)
        tokens = reuse_prefix(session, tokens)
        answer = stream_answer(
            session,
            tokens,
            sampling=conversation.sampling,
            max_new_tokens=conversation.max_new_tokens,
            stop=conversation.stop,
            emit=emit,
        )
        shown.end()
        conversation.last = answer
        click.echo(f"[{answer.figures()}]", err=True)
    except KeyboardInterrupt:
        if not said:  # nothing was answered: the turn is as if it had never been
            messages.pop()
            click.echo("[stopped; the turn is left out]", err=True)
            return
        shown.end()
        click.echo("[stopped]", err=True)
    except (ConfigError, ModelError) as error:  # the turn does not fit: the conversation goes on without it
        messages.pop()
        click.echo(f"{error}; /reset begins anew", err=True)
        return
    messages.append({"role": "assistant", "content": "".join(said)})


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
