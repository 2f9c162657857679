"""Requests to a simulated server. Arrival times and lengths are drawn from distributions with a seed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from math import inf, isfinite, log
from pathlib import Path
from random import Random

from chunkrt.errors import ConfigError, cause_of

CLOSED, POISSON = "closed", "poisson:"
LEAST_RATE = 1e-6
"""Least number of requests per second: at much later times than those that follow, float64 represents no nanoseconds.
"""
ARRIVALS_FORM = f"{POISSON}RATE (requests per second) or {CLOSED}"
LENGTHS_FORM = "a number, uniform:LOW:HIGH, lognormal:MEDIAN:SIGMA, or a file with one number a line"

MOST_TOKENS = 1 << 31


@dataclass(frozen=True, kw_only=True)
class SimulatedRequest:
    """A prompt, and the number of tokens to generate after it.

    Attributes:
        arrival_ns: arrival time; None if the request arrives as soon as another request has been answered.
    """

    arrival_ns: float | None
    prompt: int
    generate: int


@dataclass(frozen=True, kw_only=True)
class Load:
    """Requests, and the number of requests that were clipped to the context length."""

    requests: Sequence[SimulatedRequest] = field(repr=False)
    num_cut: int


def draw(arrivals: str, prompt: str, generate: str, *, requests: int, context_length: int, seed: int = 0) -> Load:
    """Draw requests.

    Arrivals and both lengths are drawn independently: changing the distribution of one of them does not change the
    others.

    Args:
        arrivals: `poisson:RATE` for RATE requests per second on average, at least LEAST_RATE; or `closed`.
        prompt: number of tokens of a prompt: an integer, `uniform:LOW:HIGH`, `lognormal:MEDIAN:SIGMA`, or the path of a
            file with one integer per line; the integers of a file are used in order and repeated.
        generate: number of tokens to generate, in the same forms as `prompt`.
        requests: number of requests, at least 1.
        context_length: context length of the model. A longer request is an error, except that lognormal lengths, which
            are unbounded, are clipped.
        seed: random seed, at least 0.

    Raises:
        ConfigError: a value is out of range or malformed.
    """
    if requests < 1:
        raise ConfigError(f"{requests} requests, expected at least 1")
    if seed < 0:
        raise ConfigError(f"the seed is {seed}, expected 0 or more")
    times = _times(arrivals, Random(f"{seed} arrivals"))
    prompts, follow = _lengths("prompt", prompt, seed), _lengths("generate", generate, seed)
    is_endless = any(text.startswith("lognormal:") for text in (prompt, generate))
    found, num_cut = [], 0
    for arrival_ns, tokens, new in zip(times, prompts, follow, strict=False):
        if tokens + new > context_length:
            if not is_endless:
                raise ConfigError(
                    f"a prompt of {tokens} and an answer of {new} tokens exceed the model's context of {context_length}"
                )
            tokens = min(tokens, context_length - 1)
            new = min(new, context_length - tokens)
            num_cut += 1
        found.append(SimulatedRequest(arrival_ns=arrival_ns, prompt=tokens, generate=new))
        if len(found) == requests:
            break
    return Load(requests=found, num_cut=num_cut)


def _times(text: str, random: Random) -> Iterator[float | None]:
    if text == CLOSED:
        return cycle([None])
    try:
        rate = float(text.removeprefix(POISSON)) if text.startswith(POISSON) else 0.0
    except ValueError:
        rate = 0.0
    if not LEAST_RATE <= rate < inf:
        raise ConfigError(f"arrivals are {text!r}, expected {ARRIVALS_FORM}, with RATE from {LEAST_RATE:g} on")
    return _poisson(rate, random)


def _poisson(rate: float, random: Random) -> Iterator[float]:
    now = 0.0
    while True:
        now += 1e9 * random.expovariate(rate)
        yield now


def _lengths(name: str, text: str, seed: int) -> Iterator[int]:
    random = Random(f"{seed} {name}")
    kind, _, rest = text.partition(":")
    try:
        if kind == "uniform":
            low, high = map(int, rest.split(":"))
            if 1 <= low <= high <= MOST_TOKENS:
                return _endless(lambda: random.randint(low, high))
        elif kind == "lognormal":
            median, sigma = map(float, rest.split(":"))
            if 1 <= median <= MOST_TOKENS and isfinite(sigma) and 0 <= sigma <= 10:
                return _endless(lambda: max(1, round(min(random.lognormvariate(log(median), sigma), MOST_TOKENS))))
        elif 1 <= (number := int(text)) <= MOST_TOKENS:
            return cycle([number])
    except ValueError:
        if text and kind not in ("uniform", "lognormal") and Path(text).exists():
            return cycle(_read(name, Path(text)))
        if text and kind not in ("uniform", "lognormal"):
            raise ConfigError(f"{name} is {text!r}, expected {LENGTHS_FORM}; there is no such file") from None
    raise ConfigError(f"{name} is {text!r}, expected {LENGTHS_FORM}")


def _endless(draw_one: Callable[[], int]) -> Iterator[int]:
    while True:
        yield draw_one()


def _read(name: str, path: Path) -> list[int]:
    try:
        lines = path.read_text("utf-8-sig").split()
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {name} lengths from {path}: {cause_of(error)}") from error
    for number, line in enumerate(lines, 1):
        if not (line.isascii() and line.isdigit() and 1 <= int(line[:11]) <= MOST_TOKENS):
            raise ConfigError(
                f"number {number} of {path} is {line[:40]!r}, expected a whole number of tokens from 1 on"
            )
    if not lines:
        raise ConfigError(f"{path} holds no numbers; expected one a line, the tokens of each {name}")
    return [int(line) for line in lines]
