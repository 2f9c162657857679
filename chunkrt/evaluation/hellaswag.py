"""HellaSwag: choice of the likeliest of four endings.

The file is that of the data set (`hellaswag_val.jsonl`): each line is an object with `activity_label`, `ctx_a`,
`ctx_b`, `endings` and `label`. Prompts and results are the same as in lm-evaluation-harness.

Source: Zellers et al., "HellaSwag: Can a Machine Really Finish Your Sentence?", 2019.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chunkrt.engine.engine import Engine
from chunkrt.evaluation.scored_items import Accuracy, encode_item, read_items, score_items, text_of


@dataclass(frozen=True, kw_only=True)
class HellaSwagItem:
    """A context, its endings without the separating space, and the index of the right ending. `line` is the line number
    in the file.
    """

    line: int
    context: str
    endings: tuple[str, ...]
    label: int


@dataclass(frozen=True, kw_only=True)
class HellaSwagFigures:
    """Shares of items whose right ending had the largest log-probability, either plain or divided by its characters."""

    num_items: int
    accuracy: Accuracy
    normalised_accuracy: Accuracy


def read(path: Path, limit: int | None = None) -> list[HellaSwagItem]:
    """Read the items of a file. Raise ConfigError if it cannot be read, or a line is malformed."""
    return read_items(path, _parse, limit)


def evaluate(
    engine: Engine, items: Sequence[HellaSwagItem], progress: Callable[[int, int], None] = lambda done, total: None
) -> HellaSwagFigures:
    """Score every ending of every item.

    Raises:
        ConfigError: an item does not fit the context.
        ModelError: the model has no tokenizer.
        BackendError: a subgraph failed.
    """
    tokenizer = engine.tokenizer
    with_lines = [encode_item(tokenizer, f"HellaSwag, line {item.line}", item.context, item.endings) for item in items]
    hits: list[bool] = []
    normalised_hits: list[bool] = []
    for item, scores in zip(items, score_items(engine, with_lines, progress), strict=True):
        found = [score.log_probability for score in scores]
        normalised = [value / len(ending) for value, ending in zip(found, item.endings, strict=True)]
        hits.append(found.index(max(found)) == item.label)
        normalised_hits.append(normalised.index(max(normalised)) == item.label)
    return HellaSwagFigures(
        num_items=len(items), accuracy=Accuracy.of(hits), normalised_accuracy=Accuracy.of(normalised_hits)
    )


def clean(text: str) -> str:
    """Remove the marks that texts of the WikiHow half of the data set contain."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")


def _parse(data: dict[str, Any], line: int) -> HellaSwagItem:
    activity, first, second = (text_of(data, key) for key in ("activity_label", "ctx_a", "ctx_b"))
    endings, label = data.get("endings"), data.get("label")
    if not isinstance(endings, list) or len(endings) < 2 or not all(isinstance(ending, str) for ending in endings):
        raise ValueError("'endings' is not a list of two texts or more")
    if isinstance(label, str) and label.isdecimal():
        label = int(label)  # the form of the copy on the Hugging Face hub
    if type(label) is not int or not 0 <= label < len(endings):
        hint = "; the test split has no labels, take the validation split" if label in (None, "") else ""
        raise ValueError(f"'label' is {label!r}, expected 0 to {len(endings) - 1}{hint}")
    cleaned = tuple(map(clean, endings))
    if not all(cleaned):
        raise ValueError("an ending has no text except marks in brackets")
    context = clean(f"{activity}: {first} {second.capitalize()}")
    return HellaSwagItem(line=line, context=context, endings=cleaned, label=label)
