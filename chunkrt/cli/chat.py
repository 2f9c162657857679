"""`chunkrt chat`: hold a conversation in the terminal."""

from __future__ import annotations

from typing import Any

import click

from chunkrt.cli.command import GroupedCommand, model_argument, option
from chunkrt.cli.conversation import ASKS_AGAIN, LEAVES, ChatConversation
from chunkrt.cli.generation_options import as_advised, generation_options, refuse_idle, split_options, stream_answer
from chunkrt.cli.shared_options import engine_options_but, open_engine
from chunkrt.cli.terminal import Shown, line_reader
from chunkrt.engine.sampling import SamplingOptions
from chunkrt.engine.session import Session
from chunkrt.errors import ConfigError, ModelError
from chunkrt.tokenizer import Tokenizer
from chunkrt.tokenizer.chat_template import prepare

HELP = "/help lists the commands, /exit or Ctrl-D ends the chat, Ctrl-C stops an answer"


@click.command(
    cls=GroupedCommand,
    first="system max_new_tokens temperature top_p seed npu scheme threads context_length context_shift",
)
@model_argument
@option(
    "--markdown/--no-markdown",
    group="Answer",
    default=True,
    help="Render the Markdown of answers in a terminal.  [default: render]",
)
@generation_options
@engine_options_but("batcher", "queue")
def chat(model: str, markdown: bool, **options: Any) -> None:
    """Chat with MODEL. The conversation stays in the cache, so each turn prefills only new tokens.

    Enter ends a turn. Pasted lines are one turn, and Alt-Enter starts a new line. /help lists further commands:
    settings, saving, loading, retrying. From a pipe, each line is a turn. Sampling options that are not given are taken
    from the model's generation_config.json, if it has one.

    A turn that does not fit the context is refused, and an answer ends when the context is full, unless
    --context-shift drops the oldest tokens.
    """
    settings, sampling, generation = split_options(options)
    prepare()
    with open_engine(model, settings) as engine, engine.session() as session:
        tokenizer = engine.tokenizer
        if not tokenizer.has_chat_template:
            raise ModelError("the model has no chat template; use `chunkrt run`, or a model tuned for chat")
        conversation = ChatConversation(model=model, sampling=sampling_of(tokenizer, sampling), **generation)
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
    """Return sampling options, with the model's recommended values for options that were not given, and report these.

    Raises:
        ConfigError: an option was given that has no effect.
    """
    try:
        sampling = as_advised(given, tokenizer.settings.sampling)
    except ConfigError as error:
        click.echo(f"the model's recommended sampling options are ignored: {error}", err=True)
        sampling = given
    refuse_idle(sampling)
    if sampling != given:
        new = {name: v for name, v in vars(sampling).items() if v != getattr(given, name)}
        reported = ", ".join(f"{name} {value:g}" for name, value in new.items())
        click.echo(
            f"sampling as the model recommends: {reported}; --temp 0 or /set temperature 0 turns it off", err=True
        )
    return sampling


def answer_turn(conversation: ChatConversation, session: Session, tokenizer: Tokenizer, shown: Shown) -> None:
    """Answer the last message, or remove it from the conversation if it cannot be answered."""
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
        if not said:
            messages.pop()
            click.echo("[stopped; the turn is discarded]", err=True)
            return
        shown.end()
        click.echo("[stopped]", err=True)
    except (ConfigError, ModelError) as error:  # for example, the turn does not fit the context
        messages.pop()
        click.echo(f"{error}; /reset clears the conversation", err=True)
        return
    messages.append({"role": "assistant", "content": "".join(said)})


def reuse_prefix(session: Session, tokens: list[int]) -> list[int]:
    """Rewind a session to the longest common prefix with a conversation's tokens, and return the remaining tokens.

    If the first difference lies among tokens that a context shift has dropped, only the kept tokens are reused.
    """
    shared = 0
    for old, new in zip(session.history, tokens[:-1], strict=False):
        if old != new:
            break
        shared += 1
    surplus = len(session.history) - shared
    session.rewind(min(shared, max(session.position - surplus, session.num_kept)))
    return tokens[len(session.history) :]
