"""Device profiles: cost models of devices, as TOML that users can read, correct and extend.

The profiles in `devices/` are compiled from published numbers; every number names its source, and guesses are marked.
`chunkrt profile`, in contrast, writes a measured profile of the machine that it runs on; see `measured.py`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from chunkrt.backends.qnn.socs import SOCS, find_soc
from chunkrt.errors import ConfigError, unknown_name
from chunkrt.graph.plan import Device, Plan
from chunkrt.runtime.tasks import Processor, processors_for
from chunkrt.simulate.measured import MeasuredProfile, read_measured
from chunkrt.simulate.tables import Source, build, read_table

_FOLDER = Path(__file__).parent / "devices"
DEVICES = tuple(sorted(path.stem for path in _FOLDER.glob("*.toml")))
"""Profiles that come with chunkrt."""

OPERATORS = ("linear_a8", "linear_a16", "linear_float", "attention", "other")
"""Kinds of operators: linears by the bits of their activations, attention, and other operators (norms, look-ups,
...)."""


@dataclass(frozen=True, kw_only=True)
class OperatorCost:
    """Cost of one kind of operator: `fixed_us` plus the longer of the times of its bytes and its operations.

    Attributes:
        gb_per_s: speed of reading its weights, keys and values, or (for "other") its inputs and outputs.
        gops: 10^9 operations per second; a multiply-add counts as two.
    """

    fixed_us: float
    gb_per_s: float
    gops: float


@dataclass(frozen=True, kw_only=True)
class ProcessorCost:
    """One processor, which runs one task at a time.

    Attributes:
        task_us: time for starting and ending any task.
        busy_watts: power while the processor runs a task.
    """

    task_us: float
    busy_watts: float
    operators: Mapping[str, OperatorCost]


@dataclass(frozen=True, kw_only=True)
class TransferCost:
    """Cost of values that cross to another device: conversion and copying at `gb_per_s`, plus `fixed_us` for each
    value."""

    fixed_us: float
    gb_per_s: float


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
    with suppress(ConfigError):
        soc = find_soc(name).name
        profiles = (read_profile(_FOLDER / f"{device}.toml") for device in sorted(DEVICES, key=len))
        if found := next((p for p in profiles if isinstance(p, DeviceProfile) and p.soc == soc), None):
            return found
    raise unknown_name("device", name, DEVICES, hint=f"available: {', '.join(DEVICES)}, or a profile's TOML file")


def read_profile(path: str | os.PathLike[str]) -> DeviceProfile | MeasuredProfile:
    """Read a profile, either a cost model or a measured one.

    Raises:
        ConfigError: the file cannot be read, or a key is unknown, missing or invalid.
    """
    path = Path(path)
    table = read_table(path)
    if "measured" in table:
        return read_measured(table, path)
    sources: dict[str, Source] = {}
    profile = build(DeviceProfile, table, str(path), sources)
    if profile.soc not in SOCS:
        raise ConfigError(f"{path}: {unknown_name('SoC', profile.soc, SOCS)}")
    for name in ("npu", "cpu"):
        operators = getattr(profile, name).operators
        for operator in operators:
            if operator not in OPERATORS:
                raise ConfigError(f"{path}: {unknown_name(f'operator of {name}', operator, OPERATORS)}")
        for operator in OPERATORS:
            if operator not in operators:
                raise ConfigError(f"{path}: the table '{name}.operators.{operator}' is missing")
    for key in sources:
        if key.endswith(("gb_per_s", "gops")) and _lookup(profile, key) == 0:
            raise ConfigError(f"{path}: {key} is 0, expected a speed above 0")
    return replace(profile, sources=sources)


def _lookup(profile: object, key: str) -> object:
    for part in key.split("."):
        profile = profile[part] if isinstance(profile, Mapping) else getattr(profile, part)
    return profile
