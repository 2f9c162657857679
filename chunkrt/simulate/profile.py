"""Device profiles: cost models of devices, as TOML that users can read, correct and extend.

The profiles in `devices/` are compiled from published numbers; every number names its source, and guesses are marked.
`chunkrt profile`, in contrast, writes a measured profile of the machine that it runs on; see `measured.py`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from chunkrt.backends.qnn.socs import SOCS, find_soc
from chunkrt.errors import ConfigError, unknown_name
from chunkrt.graph.plan import Device, Plan
from chunkrt.runtime.tasks import Processor, processors_for
from chunkrt.simulate.compose import DEFAULT_SOFTWARE, SOFTWARE, compose, find_facts, soc_facts, software_table
from chunkrt.simulate.measured import MeasuredProfile, read_measured
from chunkrt.simulate.toml_tables import Source, build, read_table

_FOLDER = Path(__file__).parent / "devices"
DEVICES = tuple(sorted(path.stem for path in _FOLDER.glob("*.toml")))
"""Profiles that come with chunkrt."""

OPERATORS = ("linear_a8", "linear_a16", "linear_float", "attention", "other")
"""Kinds of operators: linears by the bits of their activations, attention, and other operators (norms, look-ups,
...)."""


ABOVE_0 = (
    *("gb_per_s", "gops", "g_per_s", "tile_rows", "fast_mb", ".clock", ".bandwidth"),
    *("thermal.c_per_w", "thermal.j_per_c"),
)
"""Ends of the names of parameters that must not be 0."""
LEAST_CLOCK = 0.02
"""Least share of the clock of a throttled processor; `sustained` rounds clocks to multiples of it."""
MOST_MODEL_ERROR = 3.0


@dataclass(frozen=True, kw_only=True)
class OperatorCost:
    """Cost of one kind of operator: `fixed_us` plus the longer of the times of its bytes and its operations.

    Attributes:
        gb_per_s: speed of reading its weights, keys and values, or (for "other") its inputs and outputs.
        gops: 10^9 operations per second; a multiply-add counts as two.
        tile_rows: rows of a linear are computed in tiles of as many; a last, shorter tile takes as long as a full one.
        softmax_g_per_s: for attention, 10^9 scores per second of mask, softmax and conversion, after the products;
            None if `gops` includes them.
    """

    fixed_us: float
    gb_per_s: float
    gops: float
    tile_rows: float | None = None
    softmax_g_per_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class ThrottleCost:
    """Loss of a processor's clock to heat: above `from_c` degrees Celsius, the share `per_c` for each degree, down to
    the share `least` of the full clock."""

    from_c: float
    per_c: float
    least: float

    def clock(self, celsius: float) -> float:
        """Return the share of the full clock at a temperature."""
        return min(1.0, max(self.least, 1.0 - self.per_c * (celsius - self.from_c)))


@dataclass(frozen=True, kw_only=True)
class ThermalCost:
    """A device's temperature, as that of one body: `ambient_c` degrees Celsius without load, in the long run `c_per_w`
    degrees more for each watt, and `j_per_c` joules for each degree."""

    ambient_c: float
    c_per_w: float
    j_per_c: float

    def after(self, celsius: float, watts: float, seconds: float) -> float:
        """Return the temperature after some seconds of constant power: dT/dt = (watts - (T - ambient) / R) / C."""
        final = self.ambient_c + watts * self.c_per_w
        return final + (celsius - final) * math.exp(-seconds / (self.c_per_w * self.j_per_c))


@dataclass(frozen=True, kw_only=True)
class ModeCost:
    """A power mode of the NPU, relative to the numbers of the profile: its clock, the speed at which it reads memory,
    and its power while busy."""

    clock: float
    bandwidth: float
    watts: float


@dataclass(frozen=True, kw_only=True)
class ProcessorCost:
    """One processor, which runs one task at a time.

    Attributes:
        task_us: time for starting and ending any task.
        busy_watts: power while the processor runs a task.
        throttle: None if heat never slows it down.
        cache_bytes: bytes of one element of the keys and values; None stands for 2.
        fast_mb: size of the memory next to the processor, in 10^6 bytes. A linear whose input exceeds it is computed in
            several parts, each of which reads the weights again, and its input and output go through the shared memory.
            None: all inputs fit.
    """

    task_us: float
    busy_watts: float
    operators: Mapping[str, OperatorCost]
    cache_bytes: float | None = None
    fast_mb: float | None = None
    throttle: ThrottleCost | None = None

    def at(self, clock: float, bandwidth: float, watts: float) -> ProcessorCost:
        """Return the costs at a share of the clock, of the memory's speed, and of the power.

        Operators that do not read weights or caches work in the processor's own memory, whose speed is the clock's.
        """

        def slowed(kind: str, cost: OperatorCost) -> OperatorCost:
            softmax = cost.softmax_g_per_s
            return replace(
                cost,
                fixed_us=cost.fixed_us / clock,
                gb_per_s=cost.gb_per_s * (clock if kind == "other" else bandwidth),
                gops=cost.gops * clock,
                softmax_g_per_s=None if softmax is None else softmax * clock,
            )

        return replace(
            self,
            task_us=self.task_us / clock,
            busy_watts=self.busy_watts * watts,
            operators={kind: slowed(kind, cost) for kind, cost in self.operators.items()},
        )


@dataclass(frozen=True, kw_only=True)
class TransferCost:
    """Cost of values that cross to another device: conversion and copying at `gb_per_s`, plus `fixed_us` for each
    value.

    Attributes:
        cache_gb_per_s: speed of copying the cache slots that a graph reads; None stands for `gb_per_s`.
        head_us: time for each KV head of each layer whose new keys or values leave a graph as a tensor of their own:
            cache maintenance, and copying into the cache. None: a layer's heads are one tensor.
    """

    fixed_us: float
    gb_per_s: float
    cache_gb_per_s: float | None = None
    head_us: float | None = None


@dataclass(frozen=True, kw_only=True)
class MemoryCost:
    """Memory that all processors share: its total bandwidth, and the picojoules per byte read or written."""

    gb_per_s: float
    pj_per_byte: float


@dataclass(frozen=True, kw_only=True)
class DeviceProfile:
    """One device.

    Attributes:
        soc: Qualcomm's name, as in `backends/qnn/socs.py`.
        prompt_us: overhead of a prompt before its first task.
        idle_watts: constant power of the complete device.
        uses_npu: False for a software that runs everything on the CPU.
        model_error: error of a time that comes from the model and not from its parameters, as a share of the time: the
            standard deviation of the logarithm over the published figures that did not enter the profile.
        modes: power modes of the NPU, by the names of `--power-mode`.
        thermal: None if the profile says nothing of heat.
        accuracy: comparison of predictions with measured runs, which did not enter the profile.
        sources: source of every parameter, by its dotted path.
    """

    name: str
    soc: str
    prompt_us: float
    idle_watts: float
    memory: MemoryCost = field(repr=False)
    transfer: TransferCost = field(repr=False)
    npu: ProcessorCost = field(repr=False)
    cpu: ProcessorCost = field(repr=False)
    uses_npu: bool = True
    model_error: float | None = None
    modes: Mapping[str, ModeCost] = field(default_factory=dict, repr=False)
    thermal: ThermalCost | None = field(default=None, repr=False)
    accuracy: str = "not compared with any run"
    sources: Mapping[str, Source] = field(default_factory=dict, repr=False)

    def processors(self, plan: Plan, *, overlaps_conversion: bool = False) -> tuple[Processor, ...]:
        """Return the processors of a plan, each with one task at a time. Without NPU subgraphs, it is the CPU alone.

        Args:
            overlaps_conversion: the NPU takes a second task, whose values are converted while the first task computes.
        """
        calls = 2 if overlaps_conversion else 1
        has_npu = any(s.device == "npu" for s in plan.subgraphs)
        return processors_for(calls if has_npu else None, 1, num_computing=1)

    def in_mode(self, name: str) -> DeviceProfile:
        """Return the profile in a power mode of its NPU.

        Raises:
            ConfigError: the profile has no such mode; the message lists its modes.
        """
        if name not in self.modes:
            if not self.modes:
                raise ConfigError(f"{self.name} has no power modes; omit the mode {name!r}")
            raise unknown_name(f"power mode of {self.name}", name, self.modes)
        mode = self.modes[name]
        return replace(self, name=f"{self.name}, {name}", npu=self.npu.at(mode.clock, mode.bandwidth, mode.watts))

    def processor_cost(self, device: Device) -> ProcessorCost:
        """Return the cost of the processor that serves in a role."""
        return self.npu if device == "npu" else self.cpu


def find_device(name: str | os.PathLike[str]) -> DeviceProfile | MeasuredProfile:
    """Return a profile, given the name of a bundled profile, any name of its SoC, or the path of a TOML file.

    Raises:
        ConfigError: the name is unknown, or the file is invalid.
    """
    name = os.fspath(name)
    if name in DEVICES:
        return read_profile(_FOLDER / f"{name}.toml")
    if name.endswith(".toml"):
        return read_profile(Path(name))
    soc_name, plus, software = name.partition("+")
    if plus and software in SOFTWARE and (known := find_facts(soc_name)):
        return composed_profile(*known, software_table(software), place=name)
    with suppress(ConfigError):
        soc = find_soc(name).name
        profiles = (read_profile(_FOLDER / f"{device}.toml") for device in sorted(DEVICES, key=len))
        if found := next((p for p in profiles if isinstance(p, DeviceProfile) and p.soc == soc), None):
            return found
    if known := find_facts(name):
        return composed_profile(*known, software_table(DEFAULT_SOFTWARE), place=name)
    hint = f"available: {', '.join(DEVICES)}; an SoC with a software, as in SM8850+genie; or a profile's TOML file"
    if plus and software in SOFTWARE:
        raise unknown_name("SoC", soc_name, list(soc_facts()))
    composed = [f"{soc_name}+{each}" for each in SOFTWARE] if find_facts(soc_name) else []
    raise unknown_name("device", name, [*DEVICES, *composed], hint=hint)


def composed_profile(soc: str, facts: Mapping[str, Any], software: Mapping[str, Any], *, place: str) -> DeviceProfile:
    """Return the profile of an SoC with a software, from the facts of the former and the table of the latter.

    Raises:
        ConfigError: a key is unknown, missing or invalid; the message begins with `place`.
    """
    return _checked(compose(soc, facts, software), place, [*SOCS, *soc_facts()])


def read_profile(path: str | os.PathLike[str]) -> DeviceProfile | MeasuredProfile:
    """Read a profile, either a cost model or a measured one.

    Raises:
        ConfigError: the file cannot be read, or a key is unknown, missing or invalid.
    """
    path = Path(path)
    table = read_table(path)
    if "measured" in table:
        return read_measured(table, path)
    return _checked(table, str(path), [*SOCS])


def _checked(table: Mapping[str, Any], path: str, known_socs: Sequence[str]) -> DeviceProfile:
    sources: dict[str, Source] = {}
    profile = build(DeviceProfile, table, path, sources)
    if profile.soc not in known_socs:
        raise ConfigError(f"{path}: {unknown_name('SoC', profile.soc, known_socs)}")
    for name in ("npu", "cpu"):
        operators = getattr(profile, name).operators
        for operator in operators:
            if operator not in OPERATORS:
                raise ConfigError(f"{path}: {unknown_name(f'operator of {name}', operator, OPERATORS)}")
        for operator in OPERATORS:
            if operator not in operators:
                raise ConfigError(f"{path}: the table '{name}.operators.{operator}' is missing")
    for key in sources:
        if key.endswith(ABOVE_0) and _lookup(profile, key) == 0:
            raise ConfigError(f"{path}: {key} is 0, expected a number above 0")
        if key.endswith("throttle.least") and not LEAST_CLOCK <= cast(float, _lookup(profile, key)) <= 1:
            raise ConfigError(f"{path}: {key} is {_lookup(profile, key)}, expected {LEAST_CLOCK} to 1")
    if profile.model_error is not None and profile.model_error > MOST_MODEL_ERROR:
        raise ConfigError(f"{path}: model_error is {profile.model_error:g}, expected at most {MOST_MODEL_ERROR:g}")
    return replace(profile, sources=sources)


def _lookup(profile: object, key: str) -> object:
    for part in key.split("."):
        profile = profile[part] if isinstance(profile, Mapping) else getattr(profile, part)
    return profile
