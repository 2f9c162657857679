"""Prompts from the command line, files and standard input: texts, chats as JSON, many prompts as JSON lines.

`chunkrt run --prompts` answers many prompts, batched into shared chunks, as JSON lines.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from chunkrt.engine.engine import Engine
from chunkrt.engine.sampling import SamplingOptions
from chunkrt.errors import ConfigError, cause_of
from chunkrt.files import BYTE_ORDER_MARK, parse_json
from chunkrt.tokenizer import Tokenizer

MOST_CHARACTERS = 1 << 26
MOST_PROMPTS = 1 << 20
STDIN = "-"

Message = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A text or the messages of a chat.

    Attributes:
        prefill_answer: beginning of the answer.
        name: "id" of the prompt, which its answer repeats.
    """

    text: str = ""
    messages: tuple[Message, ...] = ()
    prefill_answer: str = ""
    name: str | int | None = None

    def tokens(
        self,
        tokenizer: Tokenizer,
        *,
        raw: bool = False,
        system: str | None = None,
        template_options: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the prompt's tokens, by the model's chat template unless the prompt is raw.

        Raises:
            ConfigError: an option needs a chat template and there is none; there are two system messages.
            ModelError: the template refuses the messages.
        """
        if raw or not tokenizer.has_chat_template:
            for option, given in (
                ("a system message", system),
                ("a chat as JSON", self.messages),
                ("an answer's beginning", self.prefill_answer),
                ("a template option", template_options),
            ):
                if given:
                    raise ConfigError(f"{option} needs the model's chat template; omit it, or omit --raw")
            return tokenizer.encode(self.text, add_special=True, parse_special=raw)
        messages = [*self.messages, *([{"role": "user", "content": self.text}] if self.text else [])]
        if system:
            if any(message.get("role") == "system" for message in messages):
                raise ConfigError("the chat has a system message already; omit --system")
            messages.insert(0, {"role": "system", "content": system})
        chat = tokenizer.render_chat(messages, template_options=template_options).followed_by(self.prefill_answer)
        return tokenizer.encode_prompt(chat)


def read_prompt(
    text: str | None, files: Sequence[str], messages_file: str | None = None, prefill_answer: str | None = None
) -> Prompt:
    """Return the prompt of a command line; files come before the text, separated by an empty line.

    Args:
        text: value of -p: a text, "-" for standard input, "@FILE" for a file, "@@" for text that begins with "@".
        files: values of -f. Without both, standard input is read unless it is a terminal.

    Raises:
        UsageError: no prompt is given.
        ConfigError: a file cannot be read, or all are empty.
    """
    names = list(files)
    if text is not None and (text == STDIN or (text.startswith("@") and not text.startswith("@@"))):
        names, text = [*names, text.removeprefix("@")], None
    if [*names, messages_file].count(STDIN) > 1:
        raise ConfigError("standard input can be read only once; give one of the prompts in a file")
    messages = read_messages(messages_file) if messages_file is not None else ()
    if not names and text is None and not messages:
        piped = "" if sys.stdin is None or sys.stdin.isatty() else read_text(STDIN)
        if not piped.strip():
            raise click.UsageError("give a prompt with -p TEXT or -f FILE, or on standard input")
        text = piped
    parts = [*map(read_text, names), *([] if text is None else [text.removeprefix("@") if text[:2] == "@@" else text])]
    whole = parts[0] if len(parts) == 1 else "\n\n".join(part.strip("\n") for part in parts)
    if not whole.strip() and not messages:
        raise ConfigError("the prompt is empty; give text with -p TEXT or -f FILE")
    return Prompt(text=whole if whole.strip() else "", messages=messages, prefill_answer=prefill_answer or "")


def read_messages(file: str) -> tuple[Message, ...]:
    """Return a chat: a JSON list of {"role", "content"}, or an object with such a list as "messages".

    Raises:
        ConfigError: the file cannot be read or holds something else.
    """
    text = read_text(file)
    try:
        return check_messages(parse_json(text))
    except ValueError as error:
        raise ConfigError(f"the messages in {file} are not JSON: {error}") from error
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error


def read_prompts(file: str) -> list[Prompt]:
    """Return prompts from JSON lines, each a text, or an object with "prompt" or "messages" and optionally "id".

    Raises:
        ConfigError: the file cannot be read, or a line holds something else; the message names the line.
    """
    prompts: list[Prompt] = []
    for number, line in enumerate(read_text(file).split("\n"), 1):  # JSON may hold other line separators
        if not line.strip():
            continue
        try:
            prompts.append(_prompt(parse_json(line)))
        except (ValueError, ConfigError) as error:
            raise ConfigError(f"{file}, line {number}: {error}") from error
        if len(prompts) > MOST_PROMPTS:
            raise ConfigError(f"{file} has more than {MOST_PROMPTS} prompts; divide it")
    if not prompts:
        raise ConfigError(f'{file} holds no prompts; expected one per line, e.g. {{"prompt": "Hello"}}')
    return prompts


def _prompt(value: Any) -> Prompt:
    if isinstance(value, str):
        value = {"prompt": value}
    if not isinstance(value, dict) or ("prompt" in value) == ("messages" in value):
        raise ConfigError('expected a text, or an object with either "prompt" or "messages"')
    if unknown := sorted(value.keys() - {"prompt", "messages", "prefill_answer", "id"}):
        raise ConfigError(f'unknown key {unknown[0]!r}; known keys are "prompt", "messages", "prefill_answer" and "id"')
    name, prefill_answer = value.get("id"), value.get("prefill_answer", "")
    if not isinstance(name, str | int | None) or isinstance(name, bool):
        raise ConfigError(f'"id" is {name!r}, expected a text or a whole number')
    if not isinstance(prefill_answer, str):
        raise ConfigError(f'"prefill_answer" is {prefill_answer!r}, expected a text')
    if "messages" in value:
        return Prompt(messages=check_messages(value["messages"]), prefill_answer=prefill_answer, name=name)
    if not isinstance(value["prompt"], str) or not value["prompt"].strip():
        raise ConfigError(f'"prompt" is {value["prompt"]!r}, expected a text that is not empty')
    return Prompt(text=value["prompt"], prefill_answer=prefill_answer, name=name)


def check_messages(value: Any) -> tuple[Message, ...]:
    if isinstance(value, dict):
        value = value.get("messages")
    if not isinstance(value, list) or not value:
        raise ConfigError('expected messages: a list of {"role": "user", "content": "..."}')
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            raise ConfigError(f'a message is {message!r}, expected {{"role": "user", "content": "..."}}')
    return tuple(value)


def read_text(file: str) -> str:
    """Return the text of a file or, for "-", of standard input, without a byte order mark and one final newline.

    Editors and `echo` end a text with a newline that is not part of the prompt; llama.cpp drops it, too. Reading stops
    at MOST_CHARACTERS, since a device may be endless.

    Raises:
        ConfigError: the file cannot be read, is not UTF-8, or has more characters than any context holds.
    """
    try:
        if file == STDIN:
            if sys.stdin is None:
                raise ConfigError("standard input is closed; give the prompt with -p TEXT or -f FILE")
            text = sys.stdin.read(MOST_CHARACTERS + 1)
        else:
            with Path(file).open(encoding="utf-8") as opened:
                text = opened.read(MOST_CHARACTERS + 1)
    except OSError as error:
        raise ConfigError(f"cannot read the prompt from {file}: {cause_of(error)}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the prompt in {file} is not UTF-8 text: {error}") from error
    if len(text) > MOST_CHARACTERS:
        raise ConfigError(
            f"the prompt in {file} is longer than {MOST_CHARACTERS} characters, the longest that is supported"
        )
    return text.removeprefix(BYTE_ORDER_MARK).removesuffix("\n")


def answer_prompts(
    engine: Engine,
    prompts: Sequence[Prompt],
    *,
    raw: bool,
    system: str | None,
    template_options: Mapping[str, Any],
    sampling: SamplingOptions,
    max_new_tokens: int,
    stop: Sequence[str],
) -> None:
    """Print one object per prompt, in order, as soon as all earlier answers are complete.

    Raises:
        ConfigError: a prompt does not fit the context; then no prompt is run.
    """
    tokenizer = engine.tokenizer
    tokens = [prompt.tokens(tokenizer, raw=raw, system=system, template_options=template_options) for prompt in prompts]
    for number, ids in enumerate(tokens, 1):
        if len(ids) > engine.context_length and not engine.options.context_shift:
            raise ConfigError(
                f"prompt {number} has {len(ids)} tokens, more than the context of {engine.context_length}; shorten it, "
                "or leave it out"
            )
    answers: list[dict[str, Any]] = [
        {
            "index": index,
            "id": prompt.name,
            "text": prompt.prefill_answer,
            "finish_reason": None,
            "prompt_tokens": len(ids),
            "new_tokens": 0,
        }
        for index, (prompt, ids) in enumerate(zip(prompts, tokens, strict=True))
    ]
    num_printed = 0
    for index, piece in engine.stream(tokens, max_new_tokens=max_new_tokens, sampling=sampling, stop=stop):
        answer = answers[index]
        answer["text"] += piece.text
        answer["new_tokens"] += piece.token_id is not None
        answer["finish_reason"] = piece.finish_reason
        while num_printed < len(answers) and answers[num_printed]["finish_reason"] is not None:
            click.echo(json.dumps(answers[num_printed], ensure_ascii=False))
            num_printed += 1
