"""The measurement: every contender in turn, test by test, round after round."""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from peers.process import ContenderError

PAUSE_S = 0.3
"""Pause between two measurements: longer than idle threads of an OpenMP pool spin."""


class Asked(Protocol):
    """Interface of a contender; a `ContenderProcess`."""

    def ask(self, do: str, tokens: list[int]) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Test:
    """`pp512` prefills 512 tokens, `tg64` decodes 64 one by one; `pp512+2` does so next to two other processes that are
    always busy.
    """

    __test__ = False  # not a test of pytest's

    do: str
    count: int
    num_busy: int = 0

    @staticmethod
    def parse(text: str) -> Test:
        """Parse a name such as "pp512". Raise ValueError for anything else."""
        kinds = {"pp": "prefill", "tg": "decode"}
        found = re.fullmatch(r"(pp|tg)([0-9]{1,9})(?:\+([0-9]{1,3}))?", text)
        if not found or not int(found[2]):
            raise ValueError(
                f"the test is {text!r}, expected pp or tg and a number of tokens, as in pp512, or pp512+2 next to two "
                "busy processes"
            )
        return Test(kinds[found[1]], int(found[2]), int(found[3] or 0))

    def __str__(self) -> str:
        busy = f"+{self.num_busy}" if self.num_busy else ""
        return f"{'pp' if self.do == 'prefill' else 'tg'}{self.count}{busy}"

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Run the body while the other processes are busy."""
        others = [subprocess.Popen([sys.executable, "-Sc", "while True: pass"]) for _ in range(self.num_busy)]
        try:
            yield
        finally:
            for other in others:
                other.kill()
                other.wait()


@dataclass
class Results:
    """Results of a measurement. Both are by the test's name, then the contender's.

    rates: tokens per second, a sample a round; None in a round where the contender failed.
    failures: why, in a line. A contender that failed in a test is omitted from it afterwards.
    """

    rates: dict[str, dict[str, list[float | None]]] = field(default_factory=dict)
    failures: dict[str, dict[str, str]] = field(default_factory=dict)

    def samples(self, test: str, name: str) -> list[float]:
        """Return the existing samples."""
        return [rate for rate in self.rates[test][name] if rate is not None]

    def shares(self, name: str) -> dict[str, list[float]]:
        """Return for each test next to busy processes the remaining share of the rate without them, round by round."""
        found = {}
        for test, rates in self.rates.items():
            alone = self.rates.get(test.partition("+")[0])
            if "+" in test and alone:
                both = zip(rates[name], alone[name], strict=True)
                found[test] = [rate / of for rate, of in both if rate is not None and of is not None]
        return found

    def ratios(self, test: str, name: str, other: str) -> list[float]:
        """Return one contender's rate over another's, round by round."""
        both = zip(self.rates[test][name], self.rates[test][other], strict=True)
        return [rate / of for rate, of in both if rate is not None and of is not None]

    def spread(self, test: str, name: str) -> tuple[float, float, float] | None:
        """Return median, minimum and maximum; None without samples."""
        return spread(self.samples(test, name))


def spread(samples: Sequence[float]) -> tuple[float, float, float] | None:
    """Return median, minimum and maximum; None for no values."""
    return (statistics.median(samples), min(samples), max(samples)) if samples else None


def measure(
    contenders: Mapping[str, Asked],
    tests: Sequence[Test],
    *,
    rounds: int,
    vocabulary_size: int,
    seed: int,
    pause: Callable[[float], None] = time.sleep,
) -> Results:
    """Run all tests, after a warm-up round. A round has fresh random prompts, the same for all contenders."""
    random = np.random.default_rng(seed)
    results = Results(
        rates={str(test): {name: [] for name in contenders} for test in tests},
        failures={str(test): {} for test in tests},
    )
    for round_index in range(rounds + 1):
        for test in tests:
            tokens = random.integers(0, vocabulary_size, test.count).tolist()
            for name, contender in contenders.items():
                rate = None
                if name not in results.failures[str(test)]:
                    try:
                        with test.beside():
                            rate = test.count / contender.ask(test.do, tokens)["seconds"]
                    except ContenderError as error:
                        results.failures[str(test)][name] = str(error)
                    pause(PAUSE_S)
                if round_index:  # the first round warms up
                    results.rates[str(test)][name].append(rate)
    return results


def agreement(contenders: Mapping[str, Asked], prompts: Sequence[list[int]]) -> dict[str, list[int] | str]:
    """Return the most likely next token of each prompt, by contender; or the reason of a failure, in a line.

    Contenders that compute the same model agree on nearly all of them: quantisation decides only close calls.
    """
    found: dict[str, list[int] | str] = {}
    for name, contender in contenders.items():
        try:
            found[name] = [contender.ask("next", prompt)["token"] for prompt in prompts]
        except ContenderError as error:
            found[name] = str(error)
    return found
