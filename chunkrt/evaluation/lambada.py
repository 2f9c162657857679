"""LAMBADA: prediction of the last word of a passage. The last sentence alone does not determine this word.

Each line of the file is an object with `text`. Prompts and results are the same as in lm-evaluation-harness.

Source: Paperno et al., "The LAMBADA dataset: Word prediction requiring a broad discourse context", 2016.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp
from pathlib import Path
from typing import Any

from chunkrt.engine.engine import Engine
from chunkrt.evaluation.scored_items import Accuracy, encode_item, read_items, score_items, text_of


@dataclass(frozen=True, kw_only=True)
class LambadaItem:
    """A passage without its last word, and that word without the separating space. `line` is the line number in the
    file."""

    line: int
    context: str
    word: str


@dataclass(frozen=True, kw_only=True)
class LambadaFigures:
    """Share of last words all of whose tokens were the likeliest, and the perplexity of last words (per word, not
    token)."""

    num_items: int
    accuracy: Accuracy
    perplexity: float


def read(path: Path, limit: int | None = None) -> list[LambadaItem]:
    """Read the items of a file. Raise ConfigError if it cannot be read, or a line is malformed."""
    return read_items(path, _parse, limit)


def evaluate(
    engine: Engine, items: Sequence[LambadaItem], progress: Callable[[int, int], None] = lambda done, total: None
) -> LambadaFigures:
    """Score the last word of every item.

    Raises:
        ConfigError: an item does not fit the context.
        ModelError: the model has no tokenizer.
        BackendError: a subgraph failed.
    """
    tokenizer = engine.tokenizer
    pairs = [encode_item(tokenizer, f"LAMBADA, line {item.line}", item.context, [item.word]) for item in items]
    scores = [score for (score,) in score_items(engine, pairs, progress)]
    return LambadaFigures(
        num_items=len(items),
        accuracy=Accuracy.of([score.is_greedy for score in scores]),
        perplexity=exp(-sum(score.log_probability for score in scores) / len(scores)),
    )


def _parse(data: dict[str, Any], line: int) -> LambadaItem:
    context, space, word = text_of(data, "text").rstrip().rpartition(" ")
    if not context.strip() or not space or not word:
        raise ValueError("'text' has fewer than two words")
    return LambadaItem(line=line, context=context, word=word)
