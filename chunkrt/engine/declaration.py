"""Declaration of an option: its flag, help text, group and checks, in one place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

from chunkrt.backends.qnn.htp_options import HtpOptions
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
    """Properties of an option other than its name, type and default.

    Attributes:
        flag: flag in click's notation.
        help: help text, in terms of the command line.
        group: title of the option's group in `--help-all` and in the documentation.
        metavar: placeholder of the value in help texts.
        choices: allowed names. If `noun` is set, `require` refuses other names; otherwise `check` must do this.
        must: predicate of allowed values with its description, if the type is not sufficient.
        check: function that raises ConfigError for a value that is not allowed.
    """

    flag: str
    help: str
    group: str
    metavar: str | None = None
    choices: Callable[[], Sequence[str]] | None = None
    noun: str | None = None
    must: tuple[Callable[[Any], bool], str] | None = None
    check: Callable[[Any], object] = id

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
