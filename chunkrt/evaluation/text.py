"""Evaluation on a text: perplexity, and divergence from a base.

The tokens of a text are split into windows, each of which runs in a fresh session. All tokens of a window except the
first are scored, given the tokens before them in the window. If the model wants a beginning token, that token is the
first one, and all of the text is scored.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import repeat

import numpy as np

from chunkrt.engine.engine import Engine
from chunkrt.engine.scoring import Float64, piece_lengths, score_tokens
from chunkrt.errors import ConfigError
from chunkrt.evaluation.baseline import Baseline, divergences, logit_pieces

DEFAULT_WINDOW_LENGTH = 512
DEFAULT_NUM_WINDOWS = 16


@dataclass(frozen=True, kw_only=True)
class TextPart:
    """One of `count` equal parts of a text, by tokens. `index` counts from 1."""

    index: int = 1
    count: int = 1

    @staticmethod
    def parse(text: str) -> TextPart:
        """Parse "2/3". Raise ConfigError if the text is malformed or the part does not exist."""
        found = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text)
        part = TextPart(index=int(found[1]), count=int(found[2])) if found else None
        if part is None or not 1 <= part.index <= part.count:
            raise ConfigError(f"the part is {text!r}, expected K/N with K from 1 to N, as in 2/2 for the second half")
        return part

    def of(self, tokens: Sequence[int]) -> Sequence[int]:
        """Return the tokens of this part. The parts of a text do not overlap, and together they cover the complete
        text."""
        return tokens[(self.index - 1) * len(tokens) // self.count : self.index * len(tokens) // self.count]

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"


def cut_windows(tokens: Sequence[int], length: int, *, bos_id: int | None) -> list[list[int]]:
    """Split tokens into consecutive windows without overlap.

    Args:
        tokens: the tokens of the text, without a beginning token.
        length: number of positions of a window, including its beginning token.
        bos_id: id of the token that each window begins with, if the model wants one.

    Returns:
        Windows of 2 tokens or more. The last window may be shorter than the others.

    Raises:
        ConfigError: the length is less than 2, or the tokens are too few to score one.
    """
    if length < 2:
        raise ConfigError(
            f"the window is {length}, expected at least 2 tokens: the first token of a window is not scored"
        )
    start = [] if bos_id is None else [bos_id]
    step = length - len(start)
    windows = [[*start, *tokens[at : at + step]] for at in range(0, len(tokens), step)]
    windows = [window for window in windows if len(window) >= 2]
    if not windows:
        raise ConfigError(f"there are too few tokens to evaluate ({len(tokens)}); give a longer text, or fewer parts")
    return windows


def spread(windows: Sequence[list[int]], number: int | None) -> list[list[int]]:
    """Select `number` windows, evenly spread; a short window is omitted if complete windows exist.

    Args:
        number: number of windows, at least 1; None for DEFAULT_NUM_WINDOWS, or for all windows if there are fewer.

    Raises:
        ConfigError: fewer windows exist.
    """
    whole = [window for window in windows if len(window) == len(windows[0])]
    wanted = min(DEFAULT_NUM_WINDOWS, len(whole)) if number is None else number
    if not 1 <= wanted <= len(whole):
        raise ConfigError(
            f"{wanted} windows were requested, but the text has {len(whole)}; choose 1 to {len(whole)}, or all"
        )
    return [whole[(2 * i + 1) * len(whole) // (2 * wanted)] for i in range(wanted)]


@dataclass(frozen=True, kw_only=True)
class TextComparison:
    """Comparison of a model with its base, over the scored tokens.

    Attributes:
        perplexity: perplexity of the base.
        ratio: perplexity of the model divided by that of the base.
        mean_kl, kl_99, largest_kl: mean, 99th percentile and maximum of the divergence from the base to the model, in
            nats.
        top_1: share of tokens after which model and base have the same likeliest next token.
    """

    perplexity: float
    ratio: float
    mean_kl: float
    kl_99: float
    largest_kl: float
    top_1: float


@dataclass(frozen=True, kw_only=True)
class TextFigures:
    """Results of a model on a text. `tokens_per_second` is the rate of prefill with all logits, without the base and
    the comparison.
    """

    perplexity: float
    num_tokens: int
    tokens_per_second: float
    comparison: TextComparison | None


def evaluate_text(
    engine: Engine,
    windows: Sequence[Sequence[int]],
    base: Baseline | None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> TextFigures:
    """Run every window in a separate session, and compare the logits with those of the base.

    Args:
        windows: windows of 2 tokens or more.
        base: None evaluates the model alone.
        progress: called with the number of finished windows and the number of all windows.

    Raises:
        ConfigError: a window does not fit the context, or is computed in pieces although positions depend on its
            length, or the base has another vocabulary.
        ModelError: a logit is not finite.
        BackendError: a subgraph failed.
    """
    if base is not None and base.vocab_size != engine.plan.vocab_size:
        raise ConfigError(
            f"the base {base.model} has a vocabulary of {base.vocab_size}, the model has one of "
            f"{engine.plan.vocab_size}; choose a base with the same tokens"
        )
    _check_pieces(engine, max(map(len, windows)))
    found = _TokenSums()
    for done, window in enumerate(windows):
        progress(done, len(windows))
        _evaluate_window(engine, window, base, found)
    progress(len(windows), len(windows))
    return found.figures(has_base=base is not None)


def _check_pieces(engine: Engine, longest: int) -> None:
    """Refuse windows of which the first pieces would have the positions of a shorter prompt."""
    limit = engine.plan.long_context_from
    if limit is None or longest - 1 <= limit:  # the last token is only predicted
        return
    if len(piece_lengths(longest - 1, engine.plan.vocab_size, engine.chunk_length)) > 1:
        raise ConfigError(
            f"beyond {limit} tokens, positions of this model depend on the length of the prompt, but windows of "
            f"{longest} tokens are computed in pieces; choose a `window` of at most {limit + 1}"
        )


class _TokenSums:
    """Sums over the tokens scored so far."""

    def __init__(self) -> None:
        self.surprisals: list[Float64] = []
        self.base_surprisals: list[Float64] = []
        self.divergences: list[Float64] = []
        self.num_agreed = 0
        self.seconds = 0.0

    def figures(self, *, has_base: bool) -> TextFigures:
        surprisals = np.concatenate(self.surprisals)
        perplexity = float(np.exp(surprisals.mean()))
        comparison = None
        if has_base:
            base_perplexity = float(np.exp(np.concatenate(self.base_surprisals).mean()))
            kl = np.concatenate(self.divergences)
            comparison = TextComparison(
                perplexity=base_perplexity,
                ratio=perplexity / base_perplexity,
                mean_kl=float(kl.mean()),
                kl_99=float(np.quantile(kl, 0.99)),
                largest_kl=float(kl.max()),
                top_1=self.num_agreed / kl.size,
            )
        return TextFigures(
            perplexity=perplexity,
            num_tokens=surprisals.size,
            tokens_per_second=surprisals.size / self.seconds,
            comparison=comparison,
        )


def _evaluate_window(engine: Engine, window: Sequence[int], base: Baseline | None, found: _TokenSums) -> None:
    lengths = piece_lengths(len(window) - 1, engine.plan.vocab_size, engine.chunk_length)
    following, start = np.array(window[1:], np.int64), 0
    base_pieces = base.pieces(window, lengths) if base else repeat(None)
    with engine.session() as session:
        # The base comes first in the zip: it has as many pieces, and at their end its file is closed.
        for expected, (logits, seconds) in zip(base_pieces, logit_pieces(session, window[:-1], lengths), strict=False):
            found.seconds += seconds
            log_probabilities, _ = score_tokens(logits, following[start : start + len(logits)])
            found.surprisals.append(-log_probabilities)
            start += len(logits)
            if expected is not None:
                found.base_surprisals.append(expected.surprisals.astype(np.float64))
                found.divergences.append(divergences(expected.logits, logits))
                found.num_agreed += int(np.sum(expected.logits.argmax(axis=1) == logits.argmax(axis=1)))
