"""Checks and conversions of arguments: integers, sizes, paths, token ids, the salt of a prefix cache."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Iterable, Mapping, Set
from numbers import Integral
from typing import Any, TypeVar

from chunkrt.errors import ConfigError

Function = TypeVar("Function", bound=Callable[..., Any])


def require_whole(name: str, value: object) -> int:
    """Return an argument as an int. Raise ConfigError unless it is a whole number; NumPy's integers are allowed."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ConfigError(f"{name} is {value!r}, expected a whole number")
    return int(value)


_UNITS = {"K": 1, "M": 2, "G": 3, "T": 4}


def read_size(name: str, value: object, *, unit: str = "") -> int:
    """Return a size in bytes.

    Args:
        name: name of the argument, for errors.
        value: a number of bytes, or text of a number and a unit, for example 2GB (10^9 bytes each) or 1.5GiB (2^30).
        unit: unit of text without one; by default such text is an error.

    Raises:
        ConfigError: the value is not a size, or is less than a byte.
    """
    if isinstance(value, str):
        found = re.fullmatch(r"(\d{1,18}(?:\.\d*)?|\.\d+) *([KMGT]i?B|)", value.strip(), re.IGNORECASE)
        if found and (unit := found[2] or unit):
            scale = (1024 if unit[1] in "iI" else 1000) ** _UNITS[unit[0].upper()]
            if (num_bytes := int(float(found[1]) * scale)) >= 1:
                return num_bytes
    elif isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 1:
        return int(value)
    raise ConfigError(f"{name} is {value!r}, expected a size above 0, e.g. 2GB, 800MB or 1.5GiB")


def as_token_ids(prompt: object) -> list[int]:
    """Return a prompt of token ids as a list. Raise ConfigError if it contains values that are not integers; floats are
    not rounded.
    """
    expected = "expected text, or a list of token ids (whole numbers)"
    if isinstance(prompt, bytes | bytearray | memoryview | Mapping | Set) or not isinstance(prompt, Iterable):
        raise ConfigError(f"the prompt is of type {type(prompt).__name__}; {expected}")
    ids = listed("the prompt", prompt)
    if wrong := [token for token in ids if isinstance(token, bool) or not isinstance(token, Integral)]:
        raise ConfigError(f"the prompt contains {wrong[0]!r}; {expected}")
    return [int(token) for token in ids]


def listed(name: str, several: object) -> list[Any]:
    """Return the items of a list, a tuple, an array or another iterable.

    Raise ConfigError for strings, bytes, mappings, sets and values that are not iterable.
    """
    if not isinstance(several, bytes | bytearray | memoryview | Mapping | Set) and isinstance(several, Iterable):
        try:
            return list(several)
        except TypeError:  # an array without dimensions
            pass
    raise ConfigError(f"{name} is of type {type(several).__name__}, expected a list")


def require_path(name: str, value: object) -> str:
    """Return a path as text. Raise ConfigError if it is not a path, or not a valid file name."""
    if isinstance(value, str | os.PathLike) and isinstance(path := os.fspath(value), str):
        try:
            if path and b"\0" not in os.fsencode(path):
                return path
        except UnicodeEncodeError:  # a lone surrogate
            pass
    raise ConfigError(f"{name} is {value!r:.80}, expected a path")


def checked_salt(cache_salt: object) -> str:
    """Return the salt of a prefix cache; None becomes an empty string. Raise ConfigError unless it is None or a
    non-empty string.
    """
    if cache_salt is None:
        return ""
    if not isinstance(cache_salt, str) or not cache_salt:
        raise ConfigError(f"cache_salt is {cache_salt!r}, expected a non-empty string, or None")
    return cache_salt


def shows_fields(options: Mapping[str, tuple[Any, Any]]) -> Callable[[Function], Function]:
    """Show the names behind a function's `**options` in `help` and in the completion of notebooks.

    Args:
        options: type and default of each name.
    """

    def decorate(function: Function) -> Function:
        signature = inspect.signature(function)
        shown = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=kind, default=default)
            for name, (kind, default) in options.items()
        ]
        named = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        function.__signature__ = signature.replace(parameters=[*named, *shown])  # type: ignore[attr-defined]
        return function

    return decorate
