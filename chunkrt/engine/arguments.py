"""What callers give: whole numbers, and the ids of tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from numbers import Integral

from chunkrt.errors import ConfigError


def require_whole(name: str, value: object) -> int:
    """An argument that has to be a whole number, NumPy's too. Raises ConfigError if it is none."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ConfigError(f"{name} is {value!r}, expected a whole number")
    return int(value)


def as_token_ids(prompt: object) -> list[int]:
    """A prompt that is no text. Raises ConfigError if it does not consist of whole numbers: nothing is rounded."""
    expected = "expected text, or the ids of tokens, which are whole numbers"
    if isinstance(prompt, bytes | bytearray | memoryview | Mapping | Set) or not isinstance(prompt, Iterable):
        raise ConfigError(f"the prompt is of type {type(prompt).__name__}; {expected}")
    ids = list(prompt)
    if wrong := [token for token in ids if isinstance(token, bool) or not isinstance(token, Integral)]:
        raise ConfigError(f"the prompt holds {wrong[0]!r}; {expected}")
    return [int(token) for token in ids]
