"""Prompts that arrive at random times and wait for each other, as the search counts them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import ceil, inf
from random import Random

import numpy as np
import numpy.typing as npt

from chunkrt.errors import ConfigError
from chunkrt.simulate.arrivals import LEAST_RATE, POISSON, draw

Float64 = npt.NDArray[np.float64]

NUM_ARRIVALS = 10_000
"""Number of requests of a queue. The queue is empty before the first one."""


def percentile(values: Sequence[float] | Float64, share: float) -> float:
    """Return the least of some values that at least a share of them do not exceed (the nearest rank)."""
    return float(np.sort(values)[max(0, ceil(share * len(values) - 1e-9) - 1)])


@dataclass(frozen=True, kw_only=True)
class Queue:
    """Requests with random arrival times and prompts, which are computed one at a time in order of arrival.

    Attributes:
        arrivals: `poisson:RATE`, for RATE requests per second on average.
        seed: random seed of the arrival times and of the prompts.
        num_prompts: number of different prompts; each request has one of them with equal probability.
    """

    arrivals: str
    seed: int = 0
    num_prompts: int = field(default=1, repr=False)

    def __post_init__(self) -> None:
        """Raise ConfigError if the arrivals or the seed are invalid."""
        try:
            is_rate = self.arrivals.startswith(POISSON) and LEAST_RATE <= self.rate < inf
        except ValueError:
            is_rate = False
        if not is_rate:
            raise ConfigError(
                f"arrivals are {self.arrivals!r}, expected {POISSON}RATE, with RATE in requests per second from "
                f"{LEAST_RATE:g} on"
            )
        if self.seed < 0:
            raise ConfigError(f"the seed is {self.seed}, expected 0 or more")

    @property
    def rate(self) -> float:
        """Mean number of requests per second."""
        return float(self.arrivals.removeprefix(POISSON))

    @cached_property
    def arrival_ms(self) -> Float64:
        """Arrival time of every request; the times are those of `chunkrt simulate --arrivals` with this seed."""
        load = draw(self.arrivals, "1", "1", requests=NUM_ARRIVALS, context_length=2, seed=self.seed)
        return np.array([request.arrival_ns for request in load.requests], np.float64) / 1e6

    @cached_property
    def prompts(self) -> npt.NDArray[np.int64]:
        """Index of the prompt of every request."""
        random = Random(f"{self.seed} prompts")
        return np.array(random.choices(range(self.num_prompts), k=NUM_ARRIVALS), np.int64)

    def load(self, service_ms: Sequence[float]) -> float:
        """Return the share of the time in which the device is busy; from 1 on, the queue grows without bound."""
        return self.rate * float(np.mean(service_ms)) / 1e3

    def times_ms(self, service_ms: Sequence[float]) -> Float64:
        """Return the time from the arrival of every request to its first token.

        Args:
            service_ms: time to the first token of every prompt without waiting.
        """
        service = np.asarray(service_ms, np.float64)[self.prompts]
        done = np.cumsum(service)
        # A request ends when all requests since the last idle time are computed.
        starts = np.maximum.accumulate(self.arrival_ms - (done - service))
        return np.asarray(starts + done - self.arrival_ms, np.float64)

    def p95_ms(self, service_ms: Sequence[float]) -> float | None:
        """Return the 95th percentile of `times_ms`; None if the queue grows without bound."""
        return percentile(self.times_ms(service_ms), 0.95) if self.load(service_ms) < 1 else None
