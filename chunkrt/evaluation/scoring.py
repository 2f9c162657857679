"""Accuracies: what scores of continuations are made into."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """A share of items, and its standard error: sqrt(p (1 - p) / (n - 1)), None for a single item."""

    value: float
    standard_error: float | None

    @staticmethod
    def of(hits: Sequence[bool]) -> Accuracy:
        """Of at least one item, right or wrong."""
        value, others = sum(hits) / len(hits), len(hits) - 1
        return Accuracy(value=value, standard_error=sqrt(value * (1 - value) / others) if others else None)
