"""Fit of composed profiles to published figures.

The fit minimises the squared errors of the logarithms of all rates, in units of `NOISE`, plus the squared distances of
the numbers from their prior values, in units of their prior deviations: the posterior's mode. The numbers are those of
a software, which all SoCs share, and facts about SoCs. Each system also has an own factor of prefill and of decode, so
that one program's inefficiency does not count as a property of its SoC; for the systems of `REFERENCES` it is 1, and
for a system that was not fitted it is unknown. Derivatives come from the simulation: a number that causes a
share of the time changes the logarithm of the time by that share.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np
from published import FLOORS, Figure, Prediction, predict

from chunkrt.simulate import DeviceProfile
from chunkrt.simulate.compose import soc_facts, software_table
from chunkrt.simulate.profile import composed_profile
from chunkrt.simulate.toml_tables import DEFAULT_FACTOR, ENDS

NOISE = 0.15
"""Deviation of the logarithm of a published rate from a model with the right numbers."""

OWN_FACTOR = 0.3
"""Deviation of the logarithm of a system's own factor."""

REFERENCES = ("AI Hub", "PocketPal", "llama.cpp Hexagon", "ExecuTorch", FLOORS)
"""The main system of each software."""

NO_WEIGHT = 1e6
"""Deviation of a figure that does not count."""

OUT = 1e12
"""Speed of a term that is left out."""

ITERATIONS = 8
MOST_STEP = 0.5

LINEARS = ("linear_a8", "linear_a16", "linear_float")


@dataclass(frozen=True, kw_only=True)
class Number:
    """Numbers of a software that are fitted as one.

    Attributes:
        prior: the value before any figure is seen.
        factor: distance of the ends of its 80 % range.
    """

    name: str
    paths: Sequence[str]
    prior: float
    factor: float


def _of(kinds: Sequence[str], name: str, processor: str = "npu") -> list[str]:
    return [f"{processor}.operators.{kind}.{name}" for kind in kinds]


NPU = (
    Number(name="gops", paths=[*_of(LINEARS[1:], "gops"), *_of(["attention"], "gops")], prior=360, factor=2),
    Number(name="weights", paths=_of(LINEARS, "gb_per_s"), prior=0.7, factor=1.4),
    Number(name="cache", paths=_of(["attention"], "gb_per_s"), prior=0.35, factor=2),
    Number(name="softmax", paths=_of(["attention"], "softmax_g_per_s"), prior=3, factor=3),
    Number(name="other", paths=_of(["other"], "gb_per_s"), prior=50, factor=3),
    Number(name="start", paths=_of(LINEARS, "fixed_us"), prior=5, factor=3),
    Number(name="attention start", paths=_of(["attention"], "fixed_us"), prior=20, factor=3),
    Number(name="graph", paths=["npu.task_us"], prior=300, factor=2),
    Number(name="prompt", paths=["prompt_us"], prior=1000, factor=3),
)
CPU = (
    Number(name="gops", paths=_of(LINEARS[:1], "gops", "cpu"), prior=0.3, factor=2),
    Number(name="weights", paths=_of([*LINEARS, "attention", "other"], "gb_per_s", "cpu"), prior=0.6, factor=1.4),
    Number(name="attention", paths=_of(["attention"], "gops", "cpu"), prior=0.06, factor=2),
    Number(name="start", paths=_of([*LINEARS, "other"], "fixed_us", "cpu"), prior=10, factor=3),
)
HEADS = Number(name="heads", paths=["transfer.head_us"], prior=15, factor=3)
OWN_WEIGHTS = Number(name="own weights", paths=_of(LINEARS, "gb_per_s"), prior=0.6, factor=1.4)
NUMBERS: Mapping[str, Sequence[Number]] = {
    "genie": NPU,
    "genie-float16": NPU,
    "llama.cpp-hexagon": NPU,
    "executorch": (*(number for number in NPU if number.name != "weights"), OWN_WEIGHTS, HEADS),
    "llama.cpp": CPU,
}


def key_of(software: str, number: Number) -> tuple[str, str]:
    """Return the key of a fitted number. All but two of ExecuTorch's numbers are Genie's."""
    is_own = software != "executorch" or number in (HEADS, OWN_WEIGHTS)
    return (software if is_own else "genie"), number.name


FACTS = ("npu_tops", "npu_threads", "npu_gb_per_s", "cpu_gops", "cpu_gb_per_s")


@dataclass(frozen=True)
class Fit:
    """Logarithms of fitted numbers over their prior values, by (software, number) and by (SoC, fact), and the
    deviations of these logarithms. Other numbers keep their prior values and deviations.

    Attributes:
        without: paths of parameters whose terms are left out of the model.
        priors: other prior values and factors of numbers, by name.
    """

    logs: Mapping[tuple[str, str], float] = field(default_factory=dict)
    deviations: Mapping[tuple[str, str], float] = field(default_factory=dict)
    without: Sequence[str] = ()
    priors: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def profile(self, soc: str, software: str, model_error: float = 0.0) -> DeviceProfile:
        """Return the profile of an SoC with a software, with the fitted numbers."""
        table = copy.deepcopy(software_table(software))
        table["model_error"] = {"value": model_error, "source": "bench/replay.py"}
        for number in NUMBERS[software]:
            value, ends = self.number(software, number)
            for path in number.paths:
                _entry(table, path).update(value=value, range=ends)
        for path in self.without:
            entry = _entry(table, path)
            entry.clear()
            entry.update(value=OUT, source="left out")
        facts = {name: dict(fact) if isinstance(fact, Mapping) else fact for name, fact in soc_facts()[soc].items()}
        for name in FACTS:
            value, ends = self.fact(soc, name)
            facts[name].update(value=value, range=ends)
        return composed_profile(soc, facts, table, place=f"{soc}+{software}")

    def number(self, software: str, number: Number) -> tuple[float, list[float]]:
        """Return a number's value and the ends of its range."""
        prior, factor = self.prior(number)
        return self._value(key_of(software, number), prior, math.log(factor) / ENDS)

    def prior(self, number: Number) -> tuple[float, float]:
        """Return a number's prior value and factor."""
        return self.priors.get(number.name, (number.prior, number.factor))

    def fact(self, soc: str, name: str) -> tuple[float, list[float]]:
        """Return a fact's value and the ends of its range."""
        entry = soc_facts()[soc][name]
        return self._value((soc, name), nominal(entry), _deviation(entry))

    def _value(self, key: tuple[str, str], prior: float, deviation: float) -> tuple[float, list[float]]:
        value = prior * math.exp(self.logs.get(key, 0.0))
        factor = math.exp(ENDS * self.deviations.get(key, deviation))
        return value, [value / factor, value * factor]


def nominal(fact: Mapping[str, Any]) -> float:
    """Return a fact before any figure is seen."""
    return float(fact.get("nominal", fact["value"]))


def _entry(table: dict[str, Any], path: str) -> dict[str, Any]:
    for key in path.split("."):
        table = table[key]
    return table


def _deviation(fact: Mapping[str, Any]) -> float:
    """Return the deviation of the logarithm of a fact."""
    factor = DEFAULT_FACTOR[fact.get("guess", False)]
    value = nominal(fact)
    low, high = fact.get("nominal_range", fact.get("range", [value / factor, value * factor]))
    return math.log(high / low) / (2 * ENDS)


def fit(
    figures: Sequence[Figure],
    without: Sequence[str] = (),
    other: Mapping[str, tuple[float, float]] = MappingProxyType({}),
) -> Fit:
    """Fit the numbers of all software and SoCs that occur among the figures.

    Args:
        figures: the published figures.
        without: paths of parameters whose terms are left out.
        other: other prior values and factors of numbers, by name.
    """
    start = Fit(without=without, priors=other)
    softwares = sorted({f.software for f in figures})
    priors = {key_of(s, n): math.log(start.prior(n)[1]) / ENDS for s in softwares for n in NUMBERS[s]}
    facts = soc_facts()
    priors |= {(soc, name): _deviation(facts[soc][name]) for soc in sorted({f.soc for f in figures}) for name in FACTS}
    own = {(f.system, f.metric) for f in figures if f.system not in REFERENCES}
    priors |= dict.fromkeys(sorted(own), OWN_FACTOR)
    keys = list(priors)
    index = {key: i for i, key in enumerate(keys)}
    deviations = np.array([priors[key] for key in keys])
    logs = np.zeros(len(keys))
    for _ in range(ITERATIONS):
        current = replace(start, logs=dict(zip(keys, map(float, logs), strict=True)))
        errors, slopes = np.zeros(len(figures)), np.zeros((len(figures), len(keys)))
        profiles = {pair: current.profile(*pair) for pair in sorted({(f.soc, f.software) for f in figures})}
        known: dict[object, Prediction] = {}
        noises = np.full(len(figures), NOISE)
        for row, figure in enumerate(figures):
            point = figure.operating_point
            if point not in known:
                known[point] = predict(figure, profiles[figure.soc, figure.software])
            found = known[point]
            errors[row] = math.log(found.rate / figure.published) + current.logs.get(
                (figure.system, figure.metric), 0.0
            )
            noises[row] = math.hypot(NOISE, math.log(found.ends[1] / found.ends[0]) / (2 * ENDS))
            if figure.system == FLOORS and errors[row] > 0:
                noises[row] = NO_WEIGHT  # a floor that is exceeded says nothing more
            for key, slope in _slopes(figure, found.simulation.ms_by_parameter).items():
                slopes[row, index[key]] += slope
            if (figure.system, figure.metric) in index:
                slopes[row, index[figure.system, figure.metric]] = 1.0
        # Large errors count by their size and not by its square, so that one wrong figure decides little.
        weights = np.minimum(1.0, 2 * noises / np.maximum(np.abs(errors), 1e-9)) / noises**2
        left = slopes.T @ (slopes * weights[:, None]) + np.diag(deviations**-2)
        right = -slopes.T @ (weights * errors) - logs / deviations**2
        step = np.linalg.solve(left, right)
        logs += np.clip(step, -MOST_STEP, MOST_STEP)
        if np.abs(step).max() < 1e-3:
            break
    spread = np.sqrt(np.diag(np.linalg.inv(left)))
    fitted, deviated = (dict(zip(keys, map(float, of_all), strict=True)) for of_all in (logs, spread))
    return replace(start, logs=fitted, deviations=deviated)


def _slopes(figure: Figure, ms: Mapping[str, float]) -> dict[tuple[str, str], float]:
    """Return the derivatives of the logarithm of a rate by the logarithms of numbers and facts."""
    total = sum(ms.values())
    table = software_table(figure.software)
    key_by_path = {path: key_of(figure.software, n) for n in NUMBERS[figure.software] for path in n.paths}
    found: dict[tuple[str, str], float] = {}
    for path, of_one in ms.items():
        slope = -of_one / total if path.endswith("_us") else of_one / total
        if path in key_by_path:
            key = key_by_path[path]
            found[key] = found.get(key, 0.0) + slope
        fact = _entry(table, path).get("of")
        if fact in FACTS:
            key = figure.soc, fact
            found[key] = found.get(key, 0.0) + slope
    return found
