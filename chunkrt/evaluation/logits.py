"""The logits of many tokens, in bounded memory, and what is computed from a few rows of them.

A window of 512 tokens has 512 x 262,144 logits in the largest vocabularies: half a gigabyte. A prompt is therefore
prefilled in pieces, and what needs float64 goes through rows a few at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from chunkrt.engine.session import Session
from chunkrt.errors import ModelError

Float16 = NDArray[np.float16]
Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]
Tokens = NDArray[np.int64]

PIECE_BYTES = 256 * 2**20
"""Of the logits of one piece, at most; of one chunk, if that is more."""

BLOCK_VALUES = 2**21
"""Values that are in float64 at a time."""


def piece_lengths(num_tokens: int, vocab_size: int, chunk_length: int) -> list[int]:
    """How many tokens are prefilled at a time: whole chunks; no piece of one token follows others.

    An engine with an NPU runs single tokens elsewhere, and a measurement shall be of one thing.
    """
    most = max(PIECE_BYTES // (4 * vocab_size) // chunk_length, 1) * chunk_length
    lengths = [min(most, num_tokens - start) for start in range(0, num_tokens, most)]
    if len(lengths) > 1 and lengths[-1] == 1:
        lengths[-2:] = [lengths[-2] + 1]
    return lengths


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


def row_blocks(num_rows: int, vocab_size: int) -> Iterator[slice]:
    """Rows, so many at a time that BLOCK_VALUES hold them."""
    step = max(BLOCK_VALUES // vocab_size, 1)
    return (slice(start, start + step) for start in range(0, num_rows, step))


def log_softmax(logits: Float16 | Float32) -> Float64:
    """Logarithms of probabilities, float64 [R, V], of a few rows of logits.

    Raises:
        ModelError: a logit is not finite.
    """
    found = logits.astype(np.float64)
    found -= found.max(axis=1, keepdims=True)
    total = np.log(np.exp(found).sum(axis=1, keepdims=True))
    if not np.isfinite(found.min()) or not np.isfinite(total).all():
        raise ModelError("the model computed logits that are not finite; is the checkpoint damaged?")
    found -= total
    return found


@dataclass(frozen=True, kw_only=True)
class TokenScores:
    """What a model says of the tokens that came: `log_probabilities` float64 [R]; `is_top` bool [R], the likeliest."""

    log_probabilities: Float64
    is_top: NDArray[np.bool_]


def score_tokens(logits: Float32, tokens: Tokens) -> TokenScores:
    """Score the token that came after each row.

    Args:
        logits: float32 [R, V].
        tokens: int64 [R].

    Raises:
        ModelError: a logit is not finite.
    """
    found = np.empty(len(tokens), np.float64)
    for rows in row_blocks(*logits.shape):
        found[rows] = np.take_along_axis(log_softmax(logits[rows]), tokens[rows, None], axis=1)[:, 0]
    return TokenScores(log_probabilities=found, is_top=logits.argmax(axis=1) == tokens)


def divergences(base: Float16 | Float32, logits: Float32) -> Float64:
    """Kullback-Leibler divergence of the base to the model, row by row: sum over V of p_base log(p_base / p_model).

    Args:
        base, logits: [R, V].

    Returns:
        float64 [R], in nats, none below zero.

    Raises:
        ModelError: a logit is not finite.

    Numerics: float64. A token without probability in the base (it underflows) adds nothing.
    """
    found = np.empty(len(logits), np.float64)
    for rows in row_blocks(*logits.shape):
        expected = log_softmax(base[rows])
        difference = expected - log_softmax(logits[rows])
        difference *= np.exp(expected, out=expected)
        found[rows] = difference.sum(axis=1)
    return np.maximum(found, 0.0)
