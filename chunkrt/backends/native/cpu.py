"""Instruction sets of the native kernels: built, supported by this processor, and chosen."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import TypedDict

from chunkrt.errors import ConfigError


class IsaInfo(TypedDict):
    """One instruction set.

    `built`: this installation contains its kernels. `present`: this processor has it. `supported`: the operating system
    also allows it.
    """

    name: str
    built: bool
    present: bool
    supported: bool


class CpuInfo(TypedDict):
    """See `cpu_info`."""

    processor: str
    architecture: str
    isas: list[IsaInfo]
    selected: dict[str, str]


def cpu_info() -> CpuInfo:
    """Return the processor and its kernels.

    Returns:
        `processor`: its name as reported by the operating system. `architecture`: the one that the kernels were
            compiled for.
        `isas`: every instruction set that chunkrt has kernels for. `selected`: the chosen one, by kernel.

    Raises:
        ConfigError: CHUNKRT_FORCE_ISA names an instruction set that is unknown, not built or not supported here.
    """
    from chunkrt import _native

    present, supported = _native.present_isas(), _native.supported_isas()
    isas = [
        IsaInfo(name=name, built=built, present=present[name], supported=supported[name])
        for name, built in _native.built_isas().items()
    ]
    return CpuInfo(
        processor=_processor_name(),
        architecture=_native.architecture(),
        isas=isas,
        selected=selected_kernels(),
    )


def selected_kernels() -> dict[str, str]:
    """Return the instruction set chosen for each kernel. Raises ConfigError as `cpu_info` does."""
    from chunkrt import _native

    try:
        return _native.selected_kernels()
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _processor_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
