"""Declaration of an option, in one place: its check and its help text on the command line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

from chunkrt.backends.qnn.options import HtpOptions
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


@dataclass(frozen=True, kw_only=True)
class Declaration:
    """Properties of an option in addition to its name, type and default.

    flag: the flag for click; empty for an option that the command line does not have.
    choices: allowed names. With a `noun` for them, other names are rejected here; otherwise by `check`.
    must: a condition for the value, and its description, if the type is not sufficient.
    """

    flag: str
    help: str
    metavar: str | None = None
    choices: Callable[[], Sequence[str]] | None = None
    noun: str | None = None
    must: tuple[Callable[[Any], bool], str] | None = None
    check: Callable[[Any], object] = id

    def require(self, name: str, kind: str, value: Any) -> None:
        """Raise ConfigError unless the option may have this value; a whole number must be at least 1."""
        accepts, expected = self.must or _KINDS.get(kind, (lambda value: True, ""))
        if not accepts(value):
            raise ConfigError(f"{name} is {value!r}, expected {expected}")
        if kind == "int" and value < 1 and not self.must:
            raise ConfigError(f"{name} is {value}, expected at least 1")
        if self.noun and self.choices and value not in self.choices():
            raise unknown_name(self.noun, value, self.choices())
        self.check(value)


def declared_option(flag: str, help: str, *, default: Any = None, **more: Any) -> Any:
    flag, _, metavar = flag.partition(" ")
    return field(
        default=default, metadata={"option": Declaration(flag=flag, metavar=metavar or None, help=help, **more)}
    )
