"""Scoring: what a model says of tokens that came, from their logits, in bounded memory.

A window of 512 tokens has 512 x 262,144 logits in the largest vocabularies: half a gigabyte. A prompt is therefore
prefilled in pieces, and what needs float64 goes through rows a few at a time.
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
"""Of the logits of one piece, at most; of one chunk, if that is more."""

BLOCK_VALUES = 2**21
"""Values that are in float64 at a time."""


@dataclass(frozen=True, kw_only=True)
class Score:
    """Of a continuation: the logarithm of its probability, and whether each token of it is the likeliest."""

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
        chunk_length: of the engine.

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
    """Raises ConfigError unless some tokens can be scored after others; see `score_continuation`."""
    if not context or not continuation:
        raise ConfigError("nothing can be scored without a token before it, and one to score")
    if outside := [token for token in (*context, *continuation) if not 0 <= token < vocab_size]:
        raise ConfigError(f"token id {outside[0]} is outside the vocabulary of {vocab_size}")
    if len(context) + len(continuation) - 1 > context_length:
        raise ConfigError(
            f"{len(context)} tokens and {len(continuation)} to score do not fit the context of {context_length}"
        )


def by_context(pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[list[int]]:
    """The indices of pairs, those with one context together: a session that scores them runs it once."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, (context, _) in enumerate(pairs):
        groups.setdefault(tuple(context), []).append(index)
    return list(groups.values())


def by_beginning(prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """The indices of prompts, those together, in order, of which each begins as the one before for half its length."""
    groups: list[list[int]] = []
    for index in sorted(range(len(prompts)), key=lambda index: tuple(prompts[index])):
        if groups and 2 * num_shared(prompts[groups[-1][-1]], prompts[index]) >= len(prompts[index]):
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


def num_shared(one: Sequence[int], other: Sequence[int]) -> int:
    """With how many tokens both begin."""
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
    """Run tokens, and tell of each from the second on, and of the `number` that were likeliest in its place.

    Args:
        sequence: empty; or it has seen tokens of which `before` was told.
        tokens: at least one. Those with which the sequence began, too, are not run again, but for the last.
        number: of the likeliest.
        chunk_length: of the engine.
        before: told of the sequence's tokens, with the same `number`.

    Raises:
        ConfigError: they do not fit the context.
        BackendError: a subgraph failed.
    """
    start = max(min(num_shared(tokens, sequence.tokens), len(before) + 1) - 1, 0)
    if len(sequence.history) != len(sequence.tokens):
        start = 0  # what a context that shifted holds has seen what it dropped
    sequence.rewind(start)
    if sequence.state.position < start:  # rings and recurrent state go back further: from there on, piece by piece
        start = sequence.state.position
        sequence.rewind(start)
    told = list(before[:start])
    tokens = tokens[start:]

    def take(logits: Float32, start: int) -> None:
        following = tokens[start + 1 : start + 1 + len(logits)]  # nothing follows the last
        told.extend(likeliest(row, token, number) for row, token in zip(logits, following, strict=False))

    yield from _run_in_pieces(sequence, tokens, chunk_length, take)
    return Told(of_tokens=told, num_cached=start)


def encode_pair(tokenizer: Tokenizer, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """The tokens of a context and of what follows, as lm-evaluation-harness divides them.

    Spaces at the end of the context go to the continuation. The continuation's tokens are what the tokens of both
    together have beyond the number of the context's.
    """
    kept = context.rstrip()
    whole = tokenizer.encode(context + continuation, add_special=True, parse_special=False)
    start = tokenizer.encode(kept, add_special=True, parse_special=False)
    return start, whole[len(start) :]


def _run_in_pieces(
    sequence: TokenSequence, tokens: Sequence[int], chunk_length: int, take: Callable[[Float32, int], None]
) -> Steps[None]:
    """Run tokens; `take` is given their logits, a bounded number of rows at a time, and which token the first is of."""
    start = 0
    for length in piece_lengths(len(tokens), sequence.vocab_size, chunk_length):
        result = yield from sequence.extend(tokens[start : start + length], "all")
        assert result.logits is not None
        take(result.logits, start)
        start += length


def _go_to(sequence: TokenSequence, tokens: Sequence[int]) -> Steps[None]:
    """Bring a sequence to where it and its state have seen exactly these tokens."""
    sequence.rewind(num_shared(tokens, sequence.tokens))
    start = sequence.state.position  # rings and recurrent state go back further
    if start < len(tokens):
        sequence.rewind(start)
        yield from sequence.extend(tokens[start:], "none")


def piece_lengths(num_tokens: int, vocab_size: int, chunk_length: int) -> list[int]:
    """How many tokens are prefilled at a time: whole chunks; no piece of one token follows others.

    An engine with an NPU runs single tokens elsewhere, and a measurement shall be of one thing.
    """
    most = max(PIECE_BYTES // (4 * vocab_size) // chunk_length, 1) * chunk_length
    lengths = [min(most, num_tokens - start) for start in range(0, num_tokens, most)]
    if len(lengths) > 1 and lengths[-1] == 1:
        lengths[-2:] = [lengths[-2] + 1]
    return lengths


def row_blocks(num_rows: int, vocab_size: int) -> Iterator[slice]:
    """Rows, so many at a time that BLOCK_VALUES hold them."""
    step = max(BLOCK_VALUES // vocab_size, 1)
    return (slice(start, start + step) for start in range(0, num_rows, step))


def log_softmax(logits: Float16 | Float32) -> Float64:
    """Logarithms of probabilities, float64 [R, V], of a few rows of logits.

    Raises:
        ModelError: a logit is not finite.
    """
    check_finite(logits)
    found = logits.astype(np.float64)
    found -= found.max(axis=1, keepdims=True)
    found -= np.log(np.exp(found).sum(axis=1, keepdims=True))
    return found


def check_finite(logits: Float16 | Float32) -> None:
    """Raises ModelError if a logit is not finite."""
    if not (np.isfinite(logits.min()) and np.isfinite(logits.max())):  # either is NaN if one is
        raise ModelError("the model computed logits that are not finite; is the checkpoint damaged?")


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
    for row, (values, token) in enumerate(zip(logits, tokens, strict=True)):  # one at a time stays in the cache
        check_finite(values)
        relative = values.astype(np.float64)
        relative -= values.max()
        own = relative[token]
        found[row] = own - np.log(np.exp(relative, out=relative).sum())
    return TokenScores(log_probabilities=found, is_top=logits.argmax(axis=1) == tokens)


@dataclass(frozen=True, kw_only=True)
class TokenLogProbabilities:
    """Of a token that came, `own`; and of the likeliest, `top`: (token id, log-probability), the likeliest first."""

    own: float
    top: Sequence[tuple[int, float]]


@dataclass(frozen=True, kw_only=True)
class Told:
    """Of a text: `of_tokens` from the second on, and how many tokens from the first on had been run before."""

    of_tokens: Sequence[TokenLogProbabilities]
    num_cached: int


def likeliest(logits: Float32, token_id: int, number: int) -> TokenLogProbabilities:
    """What the model says of a token that came, and of those that are likeliest.

    Args:
        logits: float32 [V], before the token.
        token_id: the token.
        number: of the likeliest; of equally likely ones the lower id comes first.

    Raises:
        ModelError: a logit is not finite.
    """
    found = log_softmax(logits[None])[0]
    return TokenLogProbabilities(
        own=float(found[token_id]), top=[(int(i), float(found[i])) for i in _largest(found, number)]
    )


def _largest(values: Float64, number: int) -> Tokens:
    """The indices of the largest values, the largest first; of equal ones the lower index."""
    if not number:
        return np.empty(0, np.int64)
    rest = max(len(values) - number, 0)
    least = np.partition(values, rest)[rest]
    candidates = np.flatnonzero(values >= least)  # more than `number` where several equal the least
    return candidates[np.argsort(-values[candidates], kind="stable")[:number]]
