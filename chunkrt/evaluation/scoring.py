"""Scoring continuations: how likely a model finds a text after another, and what accuracies are made of.

A session goes back only as far as the next tokens differ from those it has seen. Continuations that follow one after
the other on the same context run it once, and then only their own tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

import numpy as np

from chunkrt.engine.engine import Engine
from chunkrt.engine.session import Session
from chunkrt.errors import ConfigError
from chunkrt.evaluation.logits import logit_pieces, piece_lengths, score_tokens
from chunkrt.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Score:
    """Of a continuation: the logarithm of its probability, and whether each token of it is the likeliest."""

    log_probability: float
    is_greedy: bool


class Scorer:
    """Scores continuations, one after the other, in one session."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._session: Session = engine.session()

    def score(self, context: Sequence[int], continuation: Sequence[int]) -> Score:
        """Score some tokens after others.

        Args:
            context: at least one token.
            continuation: at least one token.

        Raises:
            ConfigError: one of them is empty, or both together do not fit the context.
            BackendError: a subgraph failed.
        """
        if not context or not continuation:
            raise ConfigError("nothing can be scored without a token before it, and one to score")
        if len(context) + len(continuation) - 1 > self._session.context_length:
            raise ConfigError(
                f"{len(context)} tokens and {len(continuation)} to score do not fit the context of "
                f"{self._session.context_length}"
            )
        self._go_to(context[:-1])
        tokens = [context[-1], *continuation[:-1]]
        lengths = piece_lengths(len(tokens), self._engine.plan.vocab_size, self._engine.chunk_length)
        following, start = np.array(continuation, np.int64), 0
        log_probability, is_greedy = 0.0, True
        for logits, _ in logit_pieces(self._session, tokens, lengths):
            scores = score_tokens(logits, following[start : start + len(logits)])
            log_probability += float(scores.log_probabilities.sum())
            is_greedy = is_greedy and bool(scores.is_top.all())
            start += len(logits)
        return Score(log_probability=log_probability, is_greedy=is_greedy)

    def _go_to(self, tokens: Sequence[int]) -> None:
        """Bring the session to where it has seen exactly these tokens."""
        pairs = zip(tokens, self._session.tokens, strict=False)
        shared = next((i for i, (new, old) in enumerate(pairs) if new != old), min(len(tokens), self._session.position))
        self._session.rewind(shared)
        if shared < len(tokens):
            self._session.prefill(tokens[shared:], logits="none")


def encode_pair(tokenizer: Tokenizer, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """The tokens of a context and of what follows, as lm-evaluation-harness divides them.

    Spaces at the end of the context go to the continuation. The continuation's tokens are what the tokens of both
    together have beyond the number of the context's.
    """
    kept = context.rstrip()
    whole = tokenizer.encode(context + continuation, add_special=True, parse_special=False)
    start = tokenizer.encode(kept, add_special=True, parse_special=False)
    return start, whole[len(start) :]


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
