"""Reader of JSON lines: every line is an object, and an error names the malformed line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from chunkrt.errors import ConfigError

Item = TypeVar("Item")


def read_items(path: Path, parse: Callable[[dict[str, Any], int], Item], limit: int | None) -> list[Item]:
    """Read the items of a file.

    Args:
        parse: function that makes an item of a line's object and the line's number, or raises ValueError with the
            reason.
        limit: maximum number of items to read.

    Raises:
        ConfigError: the file cannot be read or has no items, or a line is malformed.
    """
    items: list[Item] = []
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, 1):
                if len(items) == limit:
                    break
                if line.strip():
                    items.append(_parse_line(path, number, line, parse))
    except OSError as error:
        raise ConfigError(f"cannot read the task from {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the task in {path} is not UTF-8: {error}") from error
    if not items:
        raise ConfigError(f"{path} has no items; expected a JSON object on every line")
    return items


def text_of(data: dict[str, Any], key: str) -> str:
    """Return the text under a key. Raise ValueError if it is missing or not a text."""
    value = data.get(key)
    if not isinstance(value, str):
        raise ValueError(f"{key!r} is {'missing' if key not in data else repr(value)[:80]}, expected a text")
    return value


def _parse_line(path: Path, number: int, line: str, parse: Callable[[dict[str, Any], int], Item]) -> Item:
    try:
        data = json.loads(line)
        if not isinstance(data, dict):
            raise ValueError("expected a JSON object")
        return parse(data, number)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}, line {number}: {error}") from error
