"""Scoring: log-probabilities of given tokens from a model's logits, in bounded memory.

With the largest vocabularies, 512 tokens have 512 x 262,144 logits, which take half a gigabyte. A prompt is therefore
prefilled in slices, and float64 arithmetic processes a few rows at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from chunkrt.engine.arguments import as_token_ids
from chunkrt.engine.sequence import TokenSequence
from chunkrt.errors import ConfigError, ModelError
from chunkrt.tokenizer import Tokenizer

Float16 = NDArray[np.float16]
Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]
Tokens = NDArray[np.int64]

PIECE_BYTES = 256 * 2**20
"""Maximum size in bytes of the logits of one slice; one chunk is always allowed."""

BLOCK_VALUES = 2**21
"""Number of values that are converted to float64 at a time."""


@dataclass(frozen=True, kw_only=True)
class Score:
    """Score of a continuation: the logarithm of its probability, and for each token True if it is the likeliest."""

    log_probability: float
    is_greedy: bool


def score_continuation(
    sequence: TokenSequence, context: Sequence[int], continuation: Sequence[int], *, chunk_length: int
) -> Score:
    """Compute the score of a continuation after a context.

    Args:
        sequence: the sequence to use. It is rewound only to the first token that differs from the context.
        context: at least one token.
        continuation: at least one token.
        chunk_length: the engine's chunk length.

    Raises:
        ConfigError: one of the two is empty or contains ids outside the vocabulary, or both together exceed the context
            length.
        BackendError: a subgraph failed.
    """
    context, continuation = as_token_ids(context), as_token_ids(continuation)
    check_pair(context, continuation, sequence.vocab_size, sequence.context_length)
    _go_to(sequence, context[:-1], num_left=len(continuation))
    log_probability, is_greedy = 0.0, True

    def take(logits: Float32, start: int) -> None:
        nonlocal log_probability, is_greedy
        found, is_top = score_tokens(logits, np.array(continuation[start : start + len(logits)], np.int64))
        log_probability += float(found.sum())
        is_greedy = is_greedy and bool(is_top.all())

    _run_in_pieces(sequence, [context[-1], *continuation[:-1]], chunk_length, take)
    return Score(log_probability=log_probability, is_greedy=is_greedy)


def check_pair(context: Sequence[int], continuation: Sequence[int], vocab_size: int, context_length: int) -> None:
    """Raise ConfigError unless the continuation can be scored after the context; see `score_continuation`."""
    if not context or not continuation:
        raise ConfigError("scoring needs at least one token of context, and one to score")
    if outside := [token for token in (*context, *continuation) if not 0 <= token < vocab_size]:
        raise ConfigError(f"token id {outside[0]} is outside the vocabulary of {vocab_size}")
    if len(context) + len(continuation) - 1 > context_length:
        raise ConfigError(
            f"{len(context)} tokens and {len(continuation)} to score do not fit the context of {context_length}"
        )


def by_context(pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[list[int]]:
    """Return the indices of pairs, grouped by context, because a session that scores a group runs its context only
    once.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, (context, _) in enumerate(pairs):
        groups.setdefault(tuple(context), []).append(index)
    return list(groups.values())


def by_beginning(prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the indices of prompts in sorted order, in groups. In a group, each prompt shares at least half its length
    with the beginning of the previous prompt.
    """
    groups: list[list[int]] = []
    for index in sorted(range(len(prompts)), key=lambda index: tuple(prompts[index])):
        if groups and 2 * num_shared(prompts[groups[-1][-1]], prompts[index]) >= len(prompts[index]):
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


def num_shared(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the common beginning of two token sequences."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def tell_of_tokens(
    sequence: TokenSequence,
    tokens: Sequence[int],
    number: int,
    *,
    chunk_length: int,
    before: Sequence[TokenLogProbabilities] = (),
) -> tuple[Sequence[TokenLogProbabilities], int]:
    """Run tokens, and return the log-probability of each token from the second on, and of the `number` likeliest tokens
    at its position; and the number of first tokens that were not run again.

    Args:
        sequence: an empty sequence, or one that contains the tokens of `before`.
        tokens: at least one token. The tokens that the sequence already begins with are not run again, except for the
            last one.
        number: number of likeliest tokens.
        chunk_length: the engine's chunk length.
        before: results for the sequence's tokens, with the same `number`.

    Raises:
        ConfigError: the tokens exceed the context length.
        BackendError: a subgraph failed.
    """
    start = max(min(num_shared(tokens, sequence.tokens), len(before) + 1) - 1, 0)
    if len(sequence.history) != len(sequence.tokens):
        start = 0  # after a context shift, the state still depends on the dropped tokens
    if not sequence.holds_for(len(tokens)):
        start = 0
    sequence.rewind(start)
    # rings and recurrent state may be rewound further: continue from there, slice by slice
    if sequence.state.position < start:
        start = sequence.state.position
        sequence.rewind(start)
    told = list(before[:start])
    tokens = tokens[start:]

    def take(logits: Float32, start: int) -> None:
        following = tokens[start + 1 : start + 1 + len(logits)]  # no token follows the last one
        told.extend(likeliest(row, token, number) for row, token in zip(logits, following, strict=False))

    _run_in_pieces(sequence, tokens, chunk_length, take)
    return told, start


def encode_pair(tokenizer: Tokenizer, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """Return the tokens of a context and of its continuation, split as in lm-evaluation-harness.

    Spaces at the end of the context are moved to the continuation. If the context alone has n tokens, the continuation
    consists of the tokens of the joined text after the first n.
    """
    kept = context.rstrip()
    whole = tokenizer.encode(context + continuation, add_special=True, parse_special=False)
    start = tokenizer.encode(kept, add_special=True, parse_special=False)
    return start, whole[len(start) :]


def _run_in_pieces(
    sequence: TokenSequence, tokens: Sequence[int], chunk_length: int, take: Callable[[Float32, int], None]
) -> None:
    """Run tokens, and call `take` with a bounded number of rows of logits at a time, and the index of the first token
    of these rows.
    """
    start = 0
    for length in piece_lengths(len(tokens), sequence.vocab_size, chunk_length):
        num_left = len(tokens) - start - length
        result = sequence.extend(tokens[start : start + length], "all", num_left=num_left)
        assert result.logits is not None
        take(result.logits, start)
        start += length


def _go_to(sequence: TokenSequence, tokens: Sequence[int], *, num_left: int) -> None:
    """Rewind or extend a sequence so that the sequence and its state contain exactly these tokens, of a prompt that has
    `num_left` more.
    """
    sequence.rewind(num_shared(tokens, sequence.tokens) if sequence.holds_for(len(tokens) + num_left) else 0)
    start = sequence.state.position  # rings and recurrent state may be rewound further
    if start < len(tokens):
        sequence.rewind(start)
        sequence.extend(tokens[start:], "none", num_left=num_left)


def piece_lengths(num_tokens: int, vocab_size: int, chunk_length: int) -> list[int]:
    """Return the number of tokens of each slice. Slices are complete chunks, and the last slice is never a single
    token.

    An engine with an NPU runs single tokens on the CPU, and a measurement should use one path only.
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
    """Return the log-probabilities, float64 [R, V], of a few rows of logits.

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
    if not (np.isfinite(logits.min()) and np.isfinite(logits.max())):  # both are NaN if one value is NaN
        raise ModelError("the model's logits are not finite; check the checkpoint for damage")


def score_tokens(logits: Float32, tokens: Tokens) -> tuple[Float64, NDArray[np.bool_]]:
    """Score the token after each row of logits.

    Args:
        logits: float32 [R, V].
        tokens: int64 [R], the token that follows each row.

    Returns:
        The log-probabilities of the tokens, float64 [R], and whether each token is the likeliest, bool [R].

    Raises:
        ModelError: a logit is not finite.
    """
    found = np.empty(len(tokens), np.float64)
    # row by row, so the data stay in the CPU cache
    for row, (values, token) in enumerate(zip(logits, tokens, strict=True)):
        check_finite(values)
        relative = values.astype(np.float64)
        relative -= values.max()
        own = relative[token]
        found[row] = own - np.log(np.exp(relative, out=relative).sum())
    return found, logits.argmax(axis=1) == tokens


@dataclass(frozen=True, kw_only=True)
class TokenLogProbabilities:
    """Log-probabilities at one position: `own` is that of the given token, and `top` lists the token ids and
    log-probabilities of the likeliest tokens, in descending order.
    """

    own: float
    top: Sequence[tuple[int, float]]


def likeliest(logits: Float32, token_id: int, number: int) -> TokenLogProbabilities:
    """Return the log-probabilities of a given token, and of the likeliest tokens.

    Args:
        logits: float32 [V], the logits for the position of the token.
        token_id: the token.
        number: number of likeliest tokens. Of equally likely tokens, the lower id comes first.

    Raises:
        ModelError: a logit is not finite.
    """
    found = log_softmax(logits[None])[0]
    return TokenLogProbabilities(
        own=float(found[token_id]), top=[(int(i), float(found[i])) for i in _largest(found, number)]
    )


def _largest(values: Float64, number: int) -> Tokens:
    """Return the indices of the largest values, the largest first. Of equal values, the lower index comes first."""
    if not number:
        return np.empty(0, np.int64)
    rest = max(len(values) - number, 0)
    least = np.partition(values, rest)[rest]
    candidates = np.flatnonzero(
        values >= least
    )  # these are more than `number` if several values equal the smallest one
    return candidates[np.argsort(-values[candidates], kind="stable")[:number]]
