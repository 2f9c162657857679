"""From logits to the next token, and from stop strings to the end of the text.

The filters and their order are Hugging Face Transformers': repetition penalty, temperature, top-k, top-p and
min-p; before the temperature come OpenAI's: biases, presence and frequency penalties. Temperature 0 is greedy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from sys import float_info
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chunkrt.backends.registry import REFERENCE, operators
from chunkrt.engine.arguments import listed
from chunkrt.errors import BackendError, ChunkrtError, ConfigError
from chunkrt.graph.uses import SAMPLER

EXCLUDED = np.finfo(np.float32).min
"""Logit of a token that must not be drawn, at any temperature."""


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How the next token is chosen.

    Args:
        temperature: 0 is greedy; otherwise logits are divided by it. Finite, at least 0.
        top_k: keep the k most likely tokens (more where logits tie). At least 1; None keeps all.
        top_p: keep the most likely tokens whose probabilities add up to it. In [0, 1]; 1 keeps all, 0 the likeliest
            alone.
        min_p: keep tokens at least this fraction as likely as the likeliest. In [0, 1]; 0 keeps all.
        repetition_penalty: divides positive and multiplies negative logits of tokens that occurred. In
            [0.01, 100]; 1 does nothing.
        presence_penalty: taken from the logits of tokens that this generation has drawn. In [-2, 2].
        frequency_penalty: the same, as many times as they were drawn. In [-2, 2].
        logit_bias: added to the logits of tokens, by id, each in [-100, 100].
        seed: of the random numbers (NumPy's PCG64), at least 0; the same seed gives the same tokens. None is
            a fresh one each time.
        ignore_eos: never choose an end-of-generation token, so that an answer has as many tokens as it may.
        min_new_tokens: choose no end-of-generation token before so many tokens, and look for no stop string in
            their text. At least 0.

    Raises:
        ConfigError: an option is out of its range; the message names it.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    ignore_eos: bool = False
    min_new_tokens: int = 0

    def __post_init__(self) -> None:
        _require_number(
            "temperature", self.temperature, "a finite number, at least 0", lambda t: 0 <= t <= float_info.max
        )
        _require_integer("top_k", self.top_k, minimum=1)
        _require_number("top_p", self.top_p, "a number in [0, 1]", lambda p: 0 <= p <= 1)
        _require_number("min_p", self.min_p, "a number in [0, 1]", lambda p: 0 <= p <= 1)
        _require_number(
            "repetition_penalty",
            self.repetition_penalty,
            "a number in [0.01, 100]",
            lambda r: 0.01 <= r <= 100,
        )
        for name in ("presence_penalty", "frequency_penalty"):
            _require_number(name, getattr(self, name), "a number in [-2, 2]", lambda p: -2 <= p <= 2)
        if not isinstance(self.logit_bias, Mapping):
            raise ConfigError(f"logit_bias: found {self.logit_bias!r:.80}, expected a mapping of token ids to numbers")
        for token_id, bias in self.logit_bias.items():
            _require_integer("logit_bias, a token id", token_id, minimum=0)
            _require_number("logit_bias", bias, "numbers in [-100, 100]", lambda b: -100 <= b <= 100)
        _require_integer("seed", self.seed, minimum=0)
        if not isinstance(self.ignore_eos, bool):
            raise ConfigError(f"ignore_eos: found {self.ignore_eos!r:.80}, expected True or False")
        if self.min_new_tokens is None:
            raise ConfigError("min_new_tokens: found None, expected an integer, at least 0")
        _require_integer("min_new_tokens", self.min_new_tokens, minimum=0)


@operators.register(SAMPLER, REFERENCE)
class Sampler:
    """Draws tokens by one set of options. It owns a stream of random numbers: one sampler, one generation."""

    def __init__(self, options: SamplingOptions) -> None:
        self.options = options
        self._random = np.random.Generator(np.random.PCG64(options.seed))
        self._drawn: Counter[int] = Counter()

    def next(self, logits: NDArray[np.float32], history: Sequence[int] | NDArray[np.int64] = ()) -> int:
        """Choose the next token.

        Args:
            logits: float32 [V]; not changed.
            history: ids of the prompt's and the generated tokens, read by the repetition penalty alone.

        Raises:
            BackendError: a logit is not finite.
            ConfigError: logits are not of shape [V], or an id in `history` or with a bias is not in [0, V).
        """
        if self.options.temperature == 0:
            token_id = int(np.argmax(self._scores(logits, history)))
        else:
            token_ids, probabilities = self.distribution(logits, history)
            cumulative = np.cumsum(probabilities)
            place = np.searchsorted(cumulative[:-1], self._random.random() * cumulative[-1], side="right")
            token_id = int(token_ids[place])
        self._drawn[token_id] += 1
        return token_id

    def distribution(
        self, logits: NDArray[np.float32], history: Sequence[int] | NDArray[np.int64] = ()
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """The tokens that can be drawn, int64 [n], and their probabilities, float64 [n], which add up to 1.

        Arguments and errors are `next`'s. Greedy options leave one token of probability 1.
        """
        options = self.options
        scores = self._scores(logits, history)
        if options.temperature == 0:
            return np.array([np.argmax(scores)], np.int64), np.ones(1)
        token_ids = np.flatnonzero(logits != EXCLUDED)  # a high temperature would make these as likely as the others
        if len(token_ids) == 0:
            token_ids = np.arange(len(scores), dtype=np.int64)
        scores = scores[token_ids]
        if options.top_k is not None and options.top_k < len(scores):
            threshold = np.partition(scores, -options.top_k)[-options.top_k]
            kept = np.flatnonzero(scores >= threshold)
            token_ids, scores = token_ids[kept], scores[kept]
        with np.errstate(over="ignore", under="ignore"):
            probabilities = np.exp((scores.astype(np.float64) - scores.max()) / options.temperature)
        probabilities /= probabilities.sum()
        if options.top_p < 1:
            # Rarer tokens make less than 1 - top_p together, so they need no sorting to be left out.
            likely = np.flatnonzero(probabilities >= (1 - options.top_p) / len(probabilities))
            order = likely[np.argsort(-scores[likely], kind="stable")]
            before = np.cumsum(probabilities[order]) - probabilities[order]
            kept = order[before < options.top_p] if options.top_p else order[:1]
            token_ids, probabilities = token_ids[kept], probabilities[kept]
        if options.min_p > 0:
            kept = np.flatnonzero(probabilities >= options.min_p * probabilities.max())
            token_ids, probabilities = token_ids[kept], probabilities[kept]
        return token_ids, probabilities / probabilities.sum()

    def _scores(
        self, logits: NDArray[np.float32], history: Sequence[int] | NDArray[np.int64]
    ) -> NDArray[np.floating[Any]]:
        """The logits, checked, with biases and after penalties."""
        options = self.options
        scores = _penalised(logits, history, options.repetition_penalty)
        if options.logit_bias:
            if (outside := max(options.logit_bias)) >= logits.size:
                raise ConfigError(f"logit_bias: found token id {outside}, expected 0 to {logits.size - 1}")
            scores = scores.astype(np.float64)
            scores[list(options.logit_bias)] += list(options.logit_bias.values())
        if self._drawn and (options.presence_penalty or options.frequency_penalty):
            scores = scores.astype(np.float64)
            scores[list(self._drawn)] -= options.presence_penalty
            scores[list(self._drawn)] -= options.frequency_penalty * np.array(list(self._drawn.values()))
        return scores


class PluginSampler:
    """Somebody else's sampler, whose tokens are checked and whose errors name it.

    Args:
        make: takes the options, and returns what has `next`, as `Sampler` does.
        origin: where it comes from.

    Raises:
        BackendError: here and of `next`, whatever the other raised, or chose that is no token.
    """

    def __init__(self, make: Callable[[SamplingOptions], Any], origin: str, options: SamplingOptions) -> None:
        self._origin = origin
        with self._told():
            self._sampler = make(options)

    def next(self, logits: NDArray[np.float32], history: Sequence[int] | NDArray[np.int64] = ()) -> int:
        """See `Sampler.next`."""
        logits = logits.view()
        logits.flags.writeable = False
        with self._told():
            token_id = self._sampler.next(logits, history)
        if not (isinstance(token_id, int | np.integer) and 0 <= token_id < len(logits)):
            raise self._error(f"chose {token_id!r}, expected a token from 0 to {len(logits) - 1}")
        return int(token_id)

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except ChunkrtError:
            raise
        except Exception as error:  # whatever another's code raises
            raise self._error(f"failed: {type(error).__name__}: {error}") from error

    def _error(self, what: str) -> BackendError:
        return BackendError(f"the sampler of {self._origin} {what}; switch it off with --ops=-sampler")


class StopStrings:
    """Ends a stream of text before the first of some strings, and holds back what may become one.

    The match that is complete first wins, and of several complete at once the longest; so the outcome does
    not depend on how the text was cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Raises ConfigError if a stop string is empty or not a string."""
        is_list = isinstance(stops, Iterable) and not isinstance(stops, str | bytes)
        self._stops = tuple(listed("stop", stops)) if is_list else ()
        if not is_list or not all(isinstance(stop, str) and stop for stop in self._stops):
            raise ConfigError(f"stop strings: found {stops!r}, expected a list of non-empty strings")
        self._held = ""
        self._stopped = False

    @property
    def strings(self) -> tuple[str, ...]:
        """The stop strings."""
        return self._stops

    def __bool__(self) -> bool:
        """Return True if there is a stop string."""
        return bool(self._stops)

    def push(self, text: str) -> tuple[str, bool]:
        """Take the next piece; return what is safe to emit now, and whether a stop string was met.

        Once it was, every further piece is swallowed.
        """
        if self._stopped:
            return "", True
        text = self._held + text
        matches = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if matches:
            self._stopped, self._held = True, ""
            return text[: min(matches)[1]], True
        safe = len(text) - max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[safe:]
        return text[:safe], False

    def flush(self) -> str:
        """What was held back, for the end of a text that met no stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop` without completing it."""
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return next((length for length in lengths if stop.startswith(text[-length:])), 0)


def _penalised(
    logits: NDArray[np.float32], history: Sequence[int] | NDArray[np.int64], penalty: float
) -> NDArray[np.floating[Any]]:
    """The logits, checked, after the repetition penalty."""
    if logits.ndim != 1 or logits.size == 0:
        raise ConfigError(f"sampling: found logits of shape {list(logits.shape)}, expected [V]")
    finite = np.isfinite(logits)
    if not finite.all():
        first = int(np.argmin(finite))
        raise BackendError(
            f"{logits.size - np.count_nonzero(finite)} of {logits.size} logits are not finite (token {first} "
            f"has {logits[first]}), so no token can be chosen; run the prompt with --npu reference "
            "(npu='reference' in Python) to tell a faulty backend from faulty weights"
        )
    if penalty == 1 or len(history) == 0:
        return logits
    seen = np.unique(np.asarray(history, np.int64))
    if seen[0] < 0 or seen[-1] >= logits.size:
        raise ConfigError(f"history: found token ids {seen[0]} to {seen[-1]}, expected 0 to {logits.size - 1}")
    scores = logits.astype(np.float64)
    scores[seen] = np.where(scores[seen] < 0, scores[seen] * penalty, scores[seen] / penalty)
    return scores


def _require_number(name: str, value: object, expected: str, holds: Callable[[float], bool]) -> None:
    """NaN holds no condition."""
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float | np.integer | np.floating)
        or not holds(_as_number(value))
    ):
        raise ConfigError(f"{name}: found {value!r}, expected {expected}")


def _as_number(value: Any) -> int | float:
    """Return a NumPy scalar as Python's number, which no comparison casts."""
    return value.item() if isinstance(value, np.generic) else value  # type: ignore[no-any-return]


def _require_integer(name: str, value: object, *, minimum: int) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | np.integer) or value < minimum):
        raise ConfigError(f"{name}: found {value!r}, expected an integer, at least {minimum}, or None")


GREEDY = SamplingOptions()
"""Always the likeliest token."""
