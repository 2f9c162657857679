"""Build dataclasses from TOML tables. Every key is checked, and every number names its source.

A parameter is written as `gops = { value = 3000, source = "llm.npu, table 3" }`. A parameter that was neither measured
nor published has `guess = true`, and its source gives the reason for the guess. `range = [2500, 3500]` gives the ends
between which the true value lies with a probability of 80 %; without a range, they are a factor of 1.1 away, or of 1.5
for a guess.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from chunkrt.errors import ConfigError, cause_of, unknown_name
from chunkrt.files import read_toml

Table = TypeVar("Table")


@dataclass(frozen=True, kw_only=True)
class Source:
    """Source of a parameter's value. A guess was neither measured nor published.

    Attributes:
        low, high: ends between which the true value lies with a probability of 80 %.
    """

    text: str
    is_guess: bool
    low: float = 0.0
    high: float = 0.0

    @property
    def log_deviation(self) -> float:
        """Standard deviation of the value's logarithm."""
        return math.log(self.high / self.low) / (2 * ENDS) if self.low > 0 else 0.0


ENDS = 1.2816
"""Ends of the central 80 % of a normal distribution, in standard deviations."""

DEFAULT_FACTOR = {False: 1.1, True: 1.5}
"""Distance of the ends of a range from the value, for a published value and for a guess."""


def read_table(path: Path) -> dict[str, Any]:
    """Read a TOML file. Raise ConfigError if it cannot be read."""
    try:
        return read_toml(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {cause_of(error)}") from error


def build(kind: type[Table], table: Any, place: str, sources: dict[str, Source], prefix: str = "") -> Table:
    """Build a frozen dataclass from a table.

    Fields of type float are parameters with a source, and other plain types are written directly. Fields of a dataclass
    type are tables, and mappings of dataclasses are tables of tables.

    Args:
        kind: the dataclass to build.
        table: the value found in the file.
        place: path of the file, for messages.
        sources: receives the source of every parameter by its dotted path.
        prefix: path of the table, followed by a dot.

    Raises:
        ConfigError: a key is unknown, missing or of the wrong type; a parameter is below 0 or without a source.
    """
    if not isinstance(table, Mapping):
        raise ConfigError(f"{place}: {prefix.rstrip('.') or 'the file'} is {table!r}, expected a table")
    known = {field.name: field for field in fields(kind) if field.name != "sources"}  # type: ignore[arg-type]
    types = get_type_hints(kind)
    for key in table:
        if key not in known:
            raise ConfigError(f"{place}: {unknown_name('key', prefix + key, [prefix + name for name in known])}")
    values = {}
    for name, field in known.items():
        path = prefix + name
        if name in table:
            values[name] = _value(types[name], table[name], place, path, sources)
        elif field.default is MISSING and field.default_factory is MISSING:
            raise ConfigError(f"{place}: the key {path!r} is missing")
    return kind(**values)


def _value(expected: Any, found: Any, place: str, path: str, sources: dict[str, Source]) -> Any:
    if type(None) in get_args(expected):
        (expected,) = (kind for kind in get_args(expected) if kind is not type(None))
    if expected is float:
        return _parameter(found, place, path, sources)
    if is_dataclass(expected) and isinstance(expected, type):
        return build(expected, found, place, sources, f"{path}.")
    if get_origin(expected) is tuple:
        if not isinstance(found, list) or not all(isinstance(item, get_args(expected)[0]) for item in found):
            raise ConfigError(f"{place}: {path} is {found!r}, expected a list of {get_args(expected)[0].__name__}")
        return tuple(found)
    if get_origin(expected) is not None:  # Mapping[str, dataclass]
        if not isinstance(found, Mapping):
            raise ConfigError(f"{place}: {path} is {found!r}, expected a table of tables")
        inner = get_args(expected)[1]
        return {key: build(inner, value, place, sources, f"{path}.{key}.") for key, value in found.items()}
    if type(found) is not expected:
        raise ConfigError(f"{place}: {path} is {found!r}, expected {expected.__name__}")
    return found


LARGEST = 1e30


def _parameter(found: Any, place: str, path: str, sources: dict[str, Source]) -> float:
    form = '{ value = 1.5, source = "..." }'
    if not isinstance(found, Mapping):
        raise ConfigError(f"{place}: {path} is {found!r}, expected a value and its source, as in {form}")
    keys = ("value", "source", "guess", "range")
    for key in found:
        if key not in keys:
            raise ConfigError(f"{place}: {unknown_name('key', f'{path}.{key}', [f'{path}.{name}' for name in keys])}")
    value, source, guess = found.get("value"), found.get("source"), found.get("guess", False)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < LARGEST:
        raise ConfigError(f"{place}: {path} is {value!r}, expected a number of at least 0, and finite")
    if not isinstance(source, str) or not source.strip():
        raise ConfigError(f"{place}: {path} has no source; write the source of {value!r}, as in {form}")
    if not isinstance(guess, bool):
        raise ConfigError(f"{place}: {path}.guess is {guess!r}, expected true or false")
    factor = DEFAULT_FACTOR[guess]
    ends = found.get("range", [value / factor, value * factor])
    if not (isinstance(ends, list) and len(ends) == 2 and all(map(_is_number, ends))):
        raise ConfigError(f"{place}: {path}.range is {ends!r}, expected two numbers, as in range = [1.2, 1.8]")
    if not 0 <= ends[0] <= value <= ends[1] or (value and not ends[0]):
        raise ConfigError(f"{place}: {path}.range is {ends!r}, expected ends above 0 around the value {value!r}")
    sources[path] = Source(text=source, is_guess=guess, low=float(ends[0]), high=float(ends[1]))
    return float(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST
