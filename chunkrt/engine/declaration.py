"""Declaration of an option: its flags, help text, group, conditions, conversions and checks, in one place."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from pathlib import Path
from typing import Any

from chunkrt.backends.qnn.htp_options import HtpOptions
from chunkrt.engine.arguments import read_size, require_path
from chunkrt.errors import ConfigError, unknown_name


def is_whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "str": (lambda value: isinstance(value, str), "text"),
    "int": (is_whole, "a whole number"),
    "bool": (lambda value: isinstance(value, bool), "true or false"),
    "HtpOptions": (lambda value: isinstance(value, HtpOptions), "HtpOptions"),
}


Need = tuple[Callable[[Mapping[str, Any]], bool], str]
"""Condition under which an option has an effect: a predicate of all options, and the condition in terms of the command
line, in which {name} stands for the value of an option.
"""


@dataclass(frozen=True, kw_only=True)
class Declaration:
    """Properties of an option other than its name, type and default.

    Attributes:
        flag: flag in click's notation.
        help: help text, in terms of the command line.
        group: title of the option's group in `--help-all` and in the documentation.
        metavar: placeholder of the value in help texts.
        choices: allowed names. If `noun` is set, `require` refuses other names; otherwise `check` must do this.
        must: predicate of allowed values with its description, if the type is not sufficient.
        check: function that raises ConfigError for a value that is not allowed.
        reads: conversion of a value, given the option's name and the value, in every interface.
        reads_flag: conversion of the flag's text, or of the texts if it `is_repeatable`.
        is_repeatable: True for a flag that may be given several times.
        aliases: flags by which other tools, mostly llama.cpp, name the option.
        needs: conditions under which the option has an effect.
        is_planned: True if a plan or its runners depend on the option.
    """

    flag: str
    help: str
    group: str
    metavar: str | None = None
    choices: Callable[[], Sequence[str]] | None = None
    noun: str | None = None
    must: tuple[Callable[[Any], bool], str] | None = None
    check: Callable[[Any], object] = id
    reads: Callable[[str, Any], Any] | None = None
    reads_flag: Callable[[Any], Any] | None = None
    is_repeatable: bool = False
    aliases: tuple[str, ...] = ()
    needs: tuple[Need, ...] = ()
    is_planned: bool = False

    @property
    def main_flag(self) -> str:
        """Flag without its negation, for example --rotate of --rotate/--no-rotate; empty without a flag."""
        return self.flag.partition("/")[0]

    def require(self, name: str, kind: str, value: Any) -> None:
        """Raise ConfigError unless this value is allowed. Whole numbers must be at least 1 unless `must` states another
        rule.
        """
        accepts, expected = self.must or _KINDS.get(kind, (lambda value: True, ""))
        if not accepts(value):
            raise ConfigError(f"`{name}` is {value!r}, expected {expected}")
        if kind == "int" and value < 1 and not self.must:
            raise ConfigError(f"`{name}` is {value}, expected at least 1")
        if self.noun and self.choices and value not in self.choices():
            raise unknown_name(self.noun, value, self.choices())
        self.check(value)


def declared_option(flag: str, help: str, *, default: Any = None, **more: Any) -> Any:
    """Return a dataclass field with a Declaration. `flag` may end with a space and the metavar of the flag."""
    flag, _, metavar = flag.partition(" ")
    return field(
        default=default, metadata={"option": Declaration(flag=flag, metavar=metavar or None, help=help, **more)}
    )


def size(name: str, value: Any) -> int:
    """Return a size in bytes; see `read_size`."""
    return read_size(f"`{name}`", value)


def path(name: str, value: Any) -> Any:
    """Return a path as a Path, and other values unchanged."""
    return Path(require_path(f"`{name}`", value)) if isinstance(value, str | os.PathLike) else value


def word_or_path(name: str, value: Any) -> Any:
    """Return an object that represents a path as a Path, and other values, such as text, unchanged."""
    return value if isinstance(value, str) else path(name, value)


def number_flag(flag: str, expected: str, *, prefix: str = "", word: str | None = None) -> Callable[[str], Any]:
    """Return a conversion of a flag's text to a number after a prefix, or to a word."""

    def read(text: str) -> float | str:
        try:
            return text if text == word else float(text.removeprefix(prefix))
        except ValueError as error:
            raise ConfigError(f"{flag} is {text!r}, expected {expected}") from error

    return read
