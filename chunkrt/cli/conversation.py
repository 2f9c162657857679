"""State of a conversation in the terminal: its messages, its settings, and the commands that change them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import click

from chunkrt.cli.generation_options import SAMPLING, Answer
from chunkrt.cli.prompts import read_messages
from chunkrt.engine.sampling import SamplingOptions
from chunkrt.errors import ConfigError, cause_of, unknown_name
from chunkrt.files import written_aside

ASKS_AGAIN, LEAVES = "again", "leave"
"""Results of commands: answer the last turn again, and end the chat."""

_NUMBERS = {"max_new_tokens": int, "min_new_tokens": int, "top_k": int, "seed": int}
SETTINGS = ("max_new_tokens", *(name for name in SAMPLING if name != "ignore_eos"))
"""Names of numeric settings."""


@dataclass
class ChatConversation:
    """Messages, each a dictionary with role and content, an optional system message, and settings."""

    model: str
    system: str | None
    sampling: SamplingOptions
    max_new_tokens: int
    stop: tuple[str, ...]
    template_options: Mapping[str, Any]
    messages: list[dict[str, Any]] = field(default_factory=list)
    last: Answer | None = None

    def all_messages(self) -> list[dict[str, Any]]:
        """Return the messages, with the system message first."""
        return [*([{"role": "system", "content": self.system}] if self.system else []), *self.messages]

    def without_last_answer(self) -> bool:
        """Remove the last answer; return True if there was one."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            return False
        self.messages.pop()
        return True

    def command(self, line: str) -> str | None:
        """Execute a line that begins with "/", and return ASKS_AGAIN, LEAVES or None.

        Raises:
            ConfigError: the command is unknown or cannot be executed.
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
            "  Ctrl-C stops an answer, Ctrl-D ends the chat; Alt-Enter starts a new line, pasted lines are one turn",
            err=True,
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
                raise ConfigError(f"{name} is {value.strip()!r}, expected a number, e.g. /set {name} 1") from error
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
            raise ConfigError("there is no turn to answer again")
        return ASKS_AGAIN

    def _save(self, rest: str) -> None:
        try:
            with written_aside(_path(rest)) as aside:
                text = json.dumps({"messages": self.all_messages()}, indent=1, ensure_ascii=False)
                aside.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write {rest}: {cause_of(error)}") from error
        quoted = f'"{rest}"' if " " in rest else rest
        click.echo(f"wrote {rest}; continue with /load {rest}, or with chunkrt run --messages {quoted}", err=True)

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
        raise ConfigError("name a file, e.g. /save chat.json")
    return Path(text).expanduser()


COMMANDS: dict[str, tuple[str, Callable[[ChatConversation, str], str | None]]] = {
    "/help": ("lists the commands", ChatConversation._help),
    "/set": (
        "NAME VALUE changes a setting, e.g. /set temperature 0.7; without arguments, shows all settings",
        ChatConversation._set,
    ),
    "/status": ("shows the model, the settings and the last answer's figures", ChatConversation._status),
    "/save": ("FILE writes the conversation as JSON", ChatConversation._save),
    "/load": ("FILE replaces the conversation by a saved one", ChatConversation._load),
    "/system": (
        "TEXT clears the conversation and sets a system message; without TEXT, removes it",
        ChatConversation._system,
    ),
    "/retry": ("answers the last turn again", ChatConversation._retry),
    "/undo": ("removes the last turn", ChatConversation._undo),
    "/reset": ("clears the conversation", ChatConversation._reset),
    "/quit": ("ends the chat, like /exit and Ctrl-D", ChatConversation._quit),
    "/exit": ("ends the chat", ChatConversation._quit),
}
