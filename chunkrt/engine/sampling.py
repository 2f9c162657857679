"""Sampling: from logits to the next token, and from stop strings to the end of the text.

The filters and their order are those of Hugging Face Transformers: repetition penalty, temperature, top-k, top-p and
min-p. OpenAI's biases and its presence and frequency penalties are applied before the temperature. At temperature 0 the
likeliest token is chosen (greedy).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from math import isfinite
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
    """Options that determine the choice of the next token.

    Args:
        temperature: divisor of the logits; 0 always chooses the likeliest token. Finite, at least 0.
        top_k: keep the k most likely tokens (more if logits tie). At least 1; None keeps all.
        top_p: keep the most likely tokens whose probabilities add up to this value. In [0, 1]; 1 keeps all tokens, 0
            only the likeliest.
        min_p: keep tokens at least this fraction as likely as the likeliest. In [0, 1]; 0 keeps all.
        repetition_penalty: divides positive and multiplies negative logits of tokens that occurred. In [0.01, 100]; 1
            has no effect.
        presence_penalty: subtracted from the logits of tokens that this generation has drawn. In [-2, 2].
        frequency_penalty: like `presence_penalty`, but multiplied by the number of times that the token was drawn. In
            [-2, 2].
        logit_bias: added to the logits of tokens, by id, each in [-100, 100].
        seed: seed of the random numbers (NumPy's PCG64), at least 0; the same seed gives the same tokens. None uses a
            new seed for each generation.
        ignore_eos: never choose an end-of-generation token, so an answer has the maximum number of tokens.
        min_new_tokens: number of first tokens, at least 0, among which no end-of-generation token is chosen, and in
            whose text stop strings are ignored.

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

    def __repr__(self) -> str:
        """Return the options that differ from the defaults."""
        given = {name: value for name, value in vars(self).items() if value != getattr(GREEDY, name)}
        return f"SamplingOptions({', '.join(f'{name}={value!r:.80}' for name, value in given.items())})"

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
            _require_integer("logit_bias, a token id", token_id, minimum=0, takes_none=False)
            _require_number("logit_bias", bias, "numbers in [-100, 100]", lambda b: -100 <= b <= 100)
        _require_integer("seed", self.seed, minimum=0)
        if not isinstance(self.ignore_eos, bool):
            raise ConfigError(f"ignore_eos: found {self.ignore_eos!r:.80}, expected True or False")
        _require_integer("min_new_tokens", self.min_new_tokens, minimum=0, takes_none=False)


@operators.register(SAMPLER, REFERENCE)
class Sampler:
    """Sampler that draws tokens with one set of options. It owns a stream of random numbers, so each generation needs a
    new sampler.
    """

    def __init__(self, options: SamplingOptions) -> None:
        self.options = options
        self._drawn: Counter[int] = Counter()

    @cached_property
    def _random(self) -> np.random.Generator:
        return np.random.Generator(np.random.PCG64(self.options.seed))

    def next(self, logits: NDArray[np.float32], history: Sequence[int] | NDArray[np.int64] = ()) -> int:
        """Choose the next token.

        Args:
            logits: float32 [V]; the array is not changed. A sampler of a plug-in must not keep it after the call.
            history: ids of the prompt's and the generated tokens, which only the repetition penalty uses.

        Raises:
            BackendError: a logit is not finite.
            ConfigError: logits are not of shape [V], or an id in `history` or with a bias is not in [0, V).
        """
        if self.options.temperature == 0:
            token_id = _likeliest(logits)
            scores = self._scores(logits, history)
            if scores is not logits:
                token_id = int(scores.argmax())
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
        """Return the tokens that can be drawn, int64 [n], and their probabilities, float64 [n], which add up to 1.

        Arguments and errors are those of `next`. Greedy options leave one token of probability 1.
        """
        options = self.options
        _likeliest(logits)
        scores = self._scores(logits, history)
        if options.temperature == 0:
            return np.array([np.argmax(scores)], np.int64), np.ones(1)
        # a high temperature would make excluded tokens as likely as the others
        token_ids = np.flatnonzero(logits != EXCLUDED)
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
            # Rarer tokens have a total probability below 1 - top_p, so they can be omitted without sorting.
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
        """Return logits with biases and penalties applied; without any, the same array."""
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
    """Wrapper of a plug-in's sampler, which checks its tokens and names the plug-in in errors.

    Args:
        make: function that takes the options, and returns an object with a method `next` like that of `Sampler`.
        origin: name of the plug-in.

    Raises:
        BackendError: the plug-in raised an error or chose an invalid token, at creation or in `next`.
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
        except Exception as error:  # a plug-in may raise any error
            raise self._error(f"failed: {type(error).__name__}: {error}") from error

    def _error(self, what: str) -> BackendError:
        return BackendError(f"the sampler of {self._origin} {what}; switch it off with `ops='-sampler'`")


class StopStrings:
    """Filter that ends a stream of text before the first stop string, and withholds text that may be the start of one.

    The match that is complete first wins. If several matches are complete at once, the longest wins. So the result does
    not depend on how the text was cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Check the stop strings. Raise ConfigError if one is empty or not a string."""
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
        """Return True if the filter has a stop string."""
        return bool(self._stops)

    def push(self, text: str) -> tuple[str, bool]:
        """Process the next piece. Return the text that is now final, and True if a stop string was found.

        After a stop string, every further piece is discarded.
        """
        if not self._stops:
            return text, False
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
        """Return the withheld text at the end of a text without a stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `stop`."""
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return next((length for length in lengths if stop.startswith(text[-length:])), 0)


def _likeliest(logits: NDArray[np.float32]) -> int:
    """Check the logits, and return the index of the largest one."""
    if logits.ndim != 1 or logits.size == 0:
        raise ConfigError(f"sampling: found logits of shape {list(logits.shape)}, expected [V]")
    largest = logits.argmax()  # the first NaN, if there is one
    if not (isfinite(logits[largest]) and isfinite(logits[logits.argmin()])):
        finite = np.isfinite(logits)
        first = int(np.argmin(finite))
        raise BackendError(
            f"{logits.size - np.count_nonzero(finite)} of {logits.size} logits are not finite (token {first} "
            f"has {logits[first]}), so no token can be chosen; run the prompt with `npu='reference'` "
            "to distinguish a faulty backend from faulty weights"
        )
    return int(largest)


def _penalised(
    logits: NDArray[np.float32], history: Sequence[int] | NDArray[np.int64], penalty: float
) -> NDArray[np.floating[Any]]:
    """Return logits with the repetition penalty applied."""
    if penalty == 1 or len(history) == 0:
        return logits
    seen = np.unique(np.asarray(history, np.int64))
    if seen[0] < 0 or seen[-1] >= logits.size:
        raise ConfigError(f"history: found token ids {seen[0]} to {seen[-1]}, expected 0 to {logits.size - 1}")
    scores = logits.astype(np.float64)
    scores[seen] = np.where(scores[seen] < 0, scores[seen] * penalty, scores[seen] / penalty)
    return scores


def _require_number(name: str, value: object, expected: str, holds: Callable[[float], bool]) -> None:
    """Raise ConfigError unless the condition holds. For NaN it never holds."""
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float | np.integer | np.floating)
        or not holds(_as_number(value))
    ):
        raise ConfigError(f"{name}: found {value!r}, expected {expected}")


def _as_number(value: Any) -> int | float:
    """Return a NumPy scalar as a Python number, so that no comparison converts it."""
    return value.item() if isinstance(value, np.generic) else value  # type: ignore[no-any-return]


def _require_integer(name: str, value: object, *, minimum: int, takes_none: bool = True) -> None:
    if value is None and takes_none:
        return
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < minimum:
        raise ConfigError(f"{name}: found {value!r}, expected an integer, at least {minimum}{', or None' * takes_none}")


GREEDY = SamplingOptions()
"""Options that always choose the likeliest token."""
