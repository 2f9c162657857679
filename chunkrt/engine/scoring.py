"""Scoring: log-probabilities of given tokens from a model's logits, in bounded memory.

A window of 512 tokens has 512 x 262,144 logits in the largest vocabularies: half a gigabyte. A prompt is therefore
prefilled in pieces, and float64 arithmetic processes a few rows at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from chunkrt.engine.arguments import as_token_ids
from chunkrt.engine.sequence import Steps, TokenSequence
from chunkrt.errors import ConfigError, ModelError
from chunkrt.tokenizer import Tokenizer

Float16 = NDArray[np.float16]
Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]
Tokens = NDArray[np.int64]

PIECE_BYTES = 256 * 2**20
"""Largest size of the logits of one piece, or of one chunk if that is larger."""

BLOCK_VALUES = 2**21
"""Number of values that are in float64 at a time."""


@dataclass(frozen=True, kw_only=True)
class Score:
    """Score of a continuation: the logarithm of its probability, and for each token True if it is the likeliest."""

    log_probability: float
    is_greedy: bool


def score_continuation(
    sequence: TokenSequence, context: Sequence[int], continuation: Sequence[int], *, chunk_length: int
) -> Steps[Score]:
    """Score some tokens after others.

    Args:
        sequence: goes back only as far as these tokens differ from those that it has seen.
        context: at least one token.
        continuation: at least one token.
        chunk_length: the engine's chunk length.

    Raises:
        ConfigError: one of them is empty or holds ids outside the vocabulary, or both together do not fit the context.
        BackendError: a subgraph failed.
    """
    context, continuation = as_token_ids(context), as_token_ids(continuation)
    check_pair(context, continuation, sequence.vocab_size, sequence.context_length)
    yield from _go_to(sequence, context[:-1])
    log_probability, is_greedy = 0.0, True

    def take(logits: Float32, start: int) -> None:
        nonlocal log_probability, is_greedy
        scores = score_tokens(logits, np.array(continuation[start : start + len(logits)], np.int64))
        log_probability += float(scores.log_probabilities.sum())
        is_greedy = is_greedy and bool(scores.is_top.all())

    yield from _run_in_pieces(sequence, [context[-1], *continuation[:-1]], chunk_length, take)
    return Score(log_probability=log_probability, is_greedy=is_greedy)


def check_pair(context: Sequence[int], continuation: Sequence[int], vocab_size: int, context_length: int) -> None:
    """Raise ConfigError unless some tokens can be scored after others; see `score_continuation`."""
    if not context or not continuation:
        raise ConfigError("scoring needs at least one token of context, and one to score")
    if outside := [token for token in (*context, *continuation) if not 0 <= token < vocab_size]:
        raise ConfigError(f"token id {outside[0]} is outside the vocabulary of {vocab_size}")
    if len(context) + len(continuation) - 1 > context_length:
        raise ConfigError(
            f"{len(context)} tokens and {len(continuation)} to score do not fit the context of {context_length}"
        )


def by_context(pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[list[int]]:
    """Return the indices of pairs, grouped by context: a session that scores a group runs its context once."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, (context, _) in enumerate(pairs):
        groups.setdefault(tuple(context), []).append(index)
    return list(groups.values())


def by_beginning(prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the indices of prompts in order, grouped so that each begins like the one before for half its length."""
    groups: list[list[int]] = []
    for index in sorted(range(len(prompts)), key=lambda index: tuple(prompts[index])):
        if groups and 2 * num_shared(prompts[groups[-1][-1]], prompts[index]) >= len(prompts[index]):
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


def num_shared(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the number of tokens with which both begin."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def tell_of_tokens(
    sequence: TokenSequence,
    tokens: Sequence[int],
    number: int,
    *,
    chunk_length: int,
    before: Sequence[TokenLogProbabilities] = (),
) -> Steps[Told]:
    """Run tokens, and return the log-probabilities of each from the second on, and of the `number` likeliest in its
    place.

    Args:
        sequence: empty, or has seen the tokens of `before`.
        tokens: at least one. Those with which the sequence began, too, are not run again, except the last.
        number: number of likeliest tokens.
        chunk_length: the engine's chunk length.
        before: results for the sequence's tokens, with the same `number`.

    Raises:
        ConfigError: they do not fit the context.
        BackendError: a subgraph failed.
    """
    start = max(min(num_shared(tokens, sequence.tokens), len(before) + 1) - 1, 0)
    if len(sequence.history) != len(sequence.tokens):
        start = 0  # the tokens of a shifted context have seen the dropped tokens
    sequence.rewind(start)
    # rings and recurrent state may go back further: continue from there, piece by piece
    if sequence.state.position < start:
        start = sequence.state.position
        sequence.rewind(start)
    told = list(before[:start])
    tokens = tokens[start:]

    def take(logits: Float32, start: int) -> None:
        following = tokens[start + 1 : start + 1 + len(logits)]  # no token follows the last
        told.extend(likeliest(row, token, number) for row, token in zip(logits, following, strict=False))

    yield from _run_in_pieces(sequence, tokens, chunk_length, take)
    return Told(of_tokens=told, num_cached=start)


def encode_pair(tokenizer: Tokenizer, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """Return the tokens of a context and of its continuation, divided like in lm-evaluation-harness.

    Spaces at the end of the context go to the continuation. The continuation's tokens are those of both texts together
    after the number of the context's.
    """
    kept = context.rstrip()
    whole = tokenizer.encode(context + continuation, add_special=True, parse_special=False)
    start = tokenizer.encode(kept, add_special=True, parse_special=False)
    return start, whole[len(start) :]


def _run_in_pieces(
    sequence: TokenSequence, tokens: Sequence[int], chunk_length: int, take: Callable[[Float32, int], None]
) -> Steps[None]:
    """Run tokens; `take` is called with their logits, a bounded number of rows at a time, and the index of the first
    token."""
    start = 0
    for length in piece_lengths(len(tokens), sequence.vocab_size, chunk_length):
        result = yield from sequence.extend(tokens[start : start + length], "all")
        assert result.logits is not None
        take(result.logits, start)
        start += length


def _go_to(sequence: TokenSequence, tokens: Sequence[int]) -> Steps[None]:
    """Bring a sequence and its state to the point where they have seen exactly these tokens."""
    sequence.rewind(num_shared(tokens, sequence.tokens))
    start = sequence.state.position  # rings and recurrent state may go back further
    if start < len(tokens):
        sequence.rewind(start)
        yield from sequence.extend(tokens[start:], "none")


def piece_lengths(num_tokens: int, vocab_size: int, chunk_length: int) -> list[int]:
    """Return the number of tokens of each piece: complete chunks, and no piece of one token after others.

    An engine with an NPU runs single tokens elsewhere, and a measurement should use one path.
    """
    most = max(PIECE_BYTES // (4 * vocab_size) // chunk_length, 1) * chunk_length
    lengths = [min(most, num_tokens - start) for start in range(0, num_tokens, most)]
    if len(lengths) > 1 and lengths[-1] == 1:
        lengths[-2:] = [lengths[-2] + 1]
    return lengths


def row_blocks(num_rows: int, vocab_size: int) -> Iterator[slice]:
    """Yield slices of rows with at most BLOCK_VALUES values each."""
    step = max(BLOCK_VALUES // vocab_size, 1)
    return (slice(start, start + step) for start in range(0, num_rows, step))


def log_softmax(logits: Float16 | Float32) -> Float64:
    """Return the logarithms of probabilities, float64 [R, V], of a few rows of logits.

    Raises:
        ModelError: a logit is not finite.
    """
    check_finite(logits)
    found = logits.astype(np.float64)
    found -= found.max(axis=1, keepdims=True)
    found -= np.log(np.exp(found).sum(axis=1, keepdims=True))
    return found


def check_finite(logits: Float16 | Float32) -> None:
    """Raise ModelError if a logit is not finite."""
    if not (np.isfinite(logits.min()) and np.isfinite(logits.max())):  # both are NaN if one value is
        raise ModelError("the model's logits are not finite; check the checkpoint for damage")


@dataclass(frozen=True, kw_only=True)
class TokenScores:
    """Scores of given tokens: `log_probabilities` float64 [R]; `is_top` bool [R], True for the likeliest token."""

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
    # row by row, so that the data stay in the CPU cache
    for row, (values, token) in enumerate(zip(logits, tokens, strict=True)):
        check_finite(values)
        relative = values.astype(np.float64)
        relative -= values.max()
        own = relative[token]
        found[row] = own - np.log(np.exp(relative, out=relative).sum())
    return TokenScores(log_probabilities=found, is_top=logits.argmax(axis=1) == tokens)


@dataclass(frozen=True, kw_only=True)
class TokenLogProbabilities:
    """Log-probability of a given token, `own`; and (token id, log-probability) of the likeliest, in order, `top`."""

    own: float
    top: Sequence[tuple[int, float]]


@dataclass(frozen=True, kw_only=True)
class Told:
    """Results for a text: `of_tokens` from the second on, and the number of tokens at its beginning that had been run
    before."""

    of_tokens: Sequence[TokenLogProbabilities]
    num_cached: int


def likeliest(logits: Float32, token_id: int, number: int) -> TokenLogProbabilities:
    """Return the log-probabilities of a given token, and of the likeliest tokens.

    Args:
        logits: float32 [V], before the token.
        token_id: the token.
        number: number of likeliest tokens; of equally likely ones the lower id comes first.

    Raises:
        ModelError: a logit is not finite.
    """
    found = log_softmax(logits[None])[0]
    return TokenLogProbabilities(
        own=float(found[token_id]), top=[(int(i), float(found[i])) for i in _largest(found, number)]
    )


def _largest(values: Float64, number: int) -> Tokens:
    """Return the indices of the largest values, the largest first; of equal ones the lower index."""
    if not number:
        return np.empty(0, np.int64)
    rest = max(len(values) - number, 0)
    least = np.partition(values, rest)[rest]
    candidates = np.flatnonzero(values >= least)  # more than `number` if several equal the smallest
    return candidates[np.argsort(-values[candidates], kind="stable")[:number]]
