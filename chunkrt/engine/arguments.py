"""Checks of arguments: integers, token ids, the salt of a prefix cache."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Set
from numbers import Integral
from typing import Any

from chunkrt.errors import ConfigError


def require_whole(name: str, value: object) -> int:
    """Return an argument as an int. Raise ConfigError unless it is a whole number; NumPy's integers are allowed."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ConfigError(f"{name} is {value!r}, expected a whole number")
    return int(value)


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

    Raises ConfigError for strings, bytes, mappings, sets and values that are not iterable.
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
