"""Logits of many tokens in bounded memory, and their divergence from the logits of a base."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from chunkrt.engine.scoring import Float16, Float32, Float64, log_softmax, row_blocks
from chunkrt.engine.session import Session


def logit_pieces(session: Session, tokens: Sequence[int], lengths: Sequence[int]) -> Iterator[tuple[Float32, float]]:
    """Prefill tokens with all their logits, piece by piece; `lengths` add up to the tokens.

    Yields:
        Logits, float32 [piece, V], and the seconds that they took.

    Raises:
        ConfigError, BackendError: see `Session.prefill`.
    """
    start = 0
    for length in lengths:
        result = session.prefill(tokens[start : start + length], logits="all")
        assert result.logits is not None
        yield result.logits, result.seconds
        start += length


def divergences(base: Float16 | Float32, logits: Float32) -> Float64:
    """Return the Kullback-Leibler divergence from the base to the model for each row.

    The divergence is the sum over V of p_base log(p_base / p_model).

    Args:
        base, logits: logits of the base and of the model, [R, V].

    Returns:
        Divergences, float64 [R], in nats, all at least zero.

    Raises:
        ModelError: a logit is not finite.

    Numerics: the computation uses float64. A token whose probability in the base underflows to zero adds nothing.
    """
    found = np.empty(len(logits), np.float64)
    for rows in row_blocks(*logits.shape):
        expected = log_softmax(base[rows])
        difference = expected - log_softmax(logits[rows])
        difference *= np.exp(expected, out=expected)
        found[rows] = difference.sum(axis=1)
    return np.maximum(found, 0.0)
