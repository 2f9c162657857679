"""Common parts of all servers: a clock that starts with the first prompt, and the times of tokens."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field


class Clock:
    """Seconds since its construction."""

    def __init__(self) -> None:
        self._begin = time.perf_counter()

    def __call__(self) -> float:
        return time.perf_counter() - self._begin

    def wait_until(self, seconds: float) -> None:
        """Sleep until a time, unless it has passed."""
        time.sleep(max(seconds - self(), 0.0))


@dataclass
class Answer:
    """Tokens, and the time of each, in seconds of the clock."""

    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    def add(self, token: int, seconds: float) -> None:
        """Record a token."""
        self.tokens.append(token)
        self.times.append(seconds)


def num_arrived(arrivals: Sequence[float], seconds: float) -> int:
    """Return how many have arrived by a time."""
    return sum(arrival <= seconds for arrival in arrivals)
