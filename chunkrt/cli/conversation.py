"""A conversation in the terminal: what was said, the settings of its answers, and the commands that change them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import click

from chunkrt.cli.generation import SAMPLING, Answer
from chunkrt.cli.prompts import read_messages
from chunkrt.engine.sampling import SamplingOptions
from chunkrt.errors import ConfigError, unknown_name
from chunkrt.files import written_aside

ASKS_AGAIN, LEAVES = "again", "leave"
"""What a command wants of the loop: that the last turn is answered anew; that the chat ends."""

_NUMBERS = {"max_new_tokens": int, "min_new_tokens": int, "top_k": int, "seed": int}
SETTINGS = ("max_new_tokens", *(name for name in SAMPLING if name != "ignore_eos"))
"""Settings that are numbers."""


@dataclass
class Conversation:
    """What was said, a dictionary of role and content each, after a system message perhaps."""

    model: str
    system: str | None
    sampling: SamplingOptions
    max_new_tokens: int
    stop: tuple[str, ...]
    template_options: Mapping[str, Any]
    messages: list[dict[str, Any]] = field(default_factory=list)
    last: Answer | None = None

    def all_messages(self) -> list[dict[str, Any]]:
        """With the system message."""
        return [*([{"role": "system", "content": self.system}] if self.system else []), *self.messages]

    def without_last_answer(self) -> bool:
        """Forget the last answer; whether there was one."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            return False
        self.messages.pop()
        return True

    def command(self, line: str) -> str | None:
        """Do what a line that begins with "/" says; what it wants of the loop, if anything.

        Raises:
            ConfigError: there is no such command, or it cannot be done.
        """
        name, _, rest = line.partition(" ")
        if name not in COMMANDS:
            raise ConfigError(f"unknown command {name}; /help lists them")
        return COMMANDS[name][1](self, rest.strip())

    def _help(self, rest: str) -> None:
        width = max(map(len, COMMANDS))
        for name, (text, _) in COMMANDS.items():
            click.echo(f"  {name:{width}}  {text}", err=True)
        click.echo(
            "  Ctrl-C stops an answer, Ctrl-D leaves; Alt-Enter begins a new line, a paste is one turn", err=True
        )

    def _set(self, rest: str) -> None:
        name, _, value = rest.replace("=", " ", 1).partition(" ")
        if name:
            name = {"temp": "temperature", "n": "max_new_tokens"}.get(name, name.replace("-", "_"))
            if name not in SETTINGS:
                raise unknown_name("setting", name, SETTINGS)
            try:
                number: Any = None if value.strip() == "none" else _NUMBERS.get(name, float)(value)
            except ValueError as error:
                raise ConfigError(f"{name} is {value.strip()!r}, expected a number, as in /set {name} 1") from error
            if name != "max_new_tokens":
                self.sampling = replace(self.sampling, **{name: number})
            elif not isinstance(number, int) or number < 1:
                raise ConfigError(f"max_new_tokens is {value.strip()}, expected at least 1")
            else:
                self.max_new_tokens = number
        values = {"max_new_tokens": self.max_new_tokens} | vars(self.sampling)
        click.echo(", ".join(f"{key} {value}" for key, value in values.items()), err=True)

    def _status(self, rest: str) -> None:
        turns = sum(message["role"] == "user" for message in self.messages)
        click.echo(f"{self.model}: {turns} turns{'' if self.system is None else ', with a system message'}", err=True)
        if self.last is not None:
            click.echo(self.last.figures(), err=True)
        self._set("")

    def _system(self, rest: str) -> None:
        self.system = rest or None
        self._reset("")

    def _reset(self, rest: str) -> None:
        self.messages.clear()

    def _undo(self, rest: str) -> None:
        while self.messages and self.messages.pop()["role"] != "user":
            pass

    def _retry(self, rest: str) -> str:
        self.without_last_answer()
        if not self.messages:
            raise ConfigError("there is no answer to try again; say something first")
        return ASKS_AGAIN

    def _save(self, rest: str) -> None:
        try:
            with written_aside(_path(rest)) as aside:
                text = json.dumps({"messages": self.all_messages()}, indent=1, ensure_ascii=False)
                aside.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write {rest}: {error.strerror or error}") from error
        click.echo(f"wrote {rest}; /load {rest}, or chunkrt run --messages {rest}, goes on from there", err=True)

    def _load(self, rest: str) -> None:
        messages = [dict(message) for message in read_messages(str(_path(rest)))]
        has_system = messages[0]["role"] == "system"
        self.system = str(messages[0]["content"]) if has_system else None
        self.messages = messages[1:] if has_system else messages
        click.echo(f"read {len(self.messages)} messages", err=True)

    def _quit(self, rest: str) -> str:
        return LEAVES


def _path(text: str) -> Path:
    if not text:
        raise ConfigError("name a file, as in /save chat.json")
    return Path(text).expanduser()


COMMANDS: dict[str, tuple[str, Callable[[Conversation, str], str | None]]] = {
    "/help": ("lists the commands", Conversation._help),
    "/set": ("NAME VALUE changes a setting, as in /set temperature 0.7; alone it shows them", Conversation._set),
    "/status": ("shows the model, the settings and the last answer's figures", Conversation._status),
    "/save": ("FILE writes the conversation, as JSON", Conversation._save),
    "/load": ("FILE reads one, in place of this", Conversation._load),
    "/system": ("TEXT begins anew with a system message; alone without one", Conversation._system),
    "/retry": ("answers the last turn anew", Conversation._retry),
    "/undo": ("forgets the last turn", Conversation._undo),
    "/reset": ("forgets the conversation", Conversation._reset),
    "/quit": ("leaves, as /exit and Ctrl-D do", Conversation._quit),
    "/exit": ("leaves", Conversation._quit),
}
