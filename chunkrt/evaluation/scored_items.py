"""Tasks of many items: their files of JSON lines, their scores, and the accuracies that follow from scores."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Any, TypeVar

from chunkrt.engine.engine import Engine
from chunkrt.engine.scoring import Score, check_pair, encode_pair
from chunkrt.errors import ConfigError, cause_of
from chunkrt.tokenizer import Tokenizer

Pair = tuple[list[int], list[int]]


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """A share of items, and its standard error: sqrt(p (1 - p) / (n - 1)), None for a single item."""

    value: float
    standard_error: float | None

    @staticmethod
    def of(hits: Sequence[bool]) -> Accuracy:
        """Return the accuracy over one or more items, each of which is right or wrong."""
        value, others = sum(hits) / len(hits), len(hits) - 1
        return Accuracy(value=value, standard_error=sqrt(value * (1 - value) / others) if others else None)


def encode_item(tokenizer: Tokenizer, name: str, context: str, continuations: Sequence[str]) -> tuple[str, list[Pair]]:
    """Return an item with the tokens of its context and of its continuations. A space separates context and
    continuation.

    Raises:
        ConfigError: a text is not valid Unicode; the message begins with the name.
    """
    try:
        return name, [encode_pair(tokenizer, context, f" {continuation}") for continuation in continuations]
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error


def score_items(
    engine: Engine, items: Sequence[tuple[str, Sequence[Pair]]], progress: Callable[[int, int], None]
) -> list[list[Score]]:
    """Score every pair of every item; tokens that several items share are computed once.

    Args:
        items: the items; each has a name for errors, and pairs of a context and a continuation.
        progress: called with the number of finished items and the number of all items.

    Raises:
        ConfigError: an item does not fit the context; this is checked before any computation.
        BackendError: a subgraph failed.
    """
    places = [(number, place) for number, (_, pairs) in enumerate(items) for place in range(len(pairs))]
    for name, pairs in items:
        for pair in pairs:
            try:
                check_pair(*pair, engine.plan.vocab_size, engine.context_length)
            except ConfigError as error:
                raise ConfigError(f"{name}: {error}") from error
    found: list[dict[int, Score]] = [{} for _ in items]
    num_done = 0
    progress(num_done, len(items))
    for index, score in engine.scores([pair for _, pairs in items for pair in pairs]):
        number, place = places[index]
        found[number][place] = score
        if len(found[number]) == len(items[number][1]):
            num_done += 1
            progress(num_done, len(items))
    return [[scores[place] for place in range(len(scores))] for scores in found]


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
        raise ConfigError(f"cannot read the task from {path}: {cause_of(error)}") from error
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
