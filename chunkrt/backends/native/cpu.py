"""Instruction sets of the native kernels, with their availability on this machine."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Final, TypedDict

from chunkrt.backends.base import AttentionMath
from chunkrt.errors import ConfigError

BFLOAT16_ISAS: Final = ("neon_bf16", "avx512bf16", "amx_bf16")
"""Instruction sets whose products of bfloat16 are faster than those of float32, where they are selected. The other
kernels of attention in bfloat16 multiply in float32.
"""


INT8_ISAS: Final = ("avx512bf16",)
"""Instruction sets on which attention with int8 scores was measured to be the fastest, where they are selected."""


class IsaInfo(TypedDict):
    """Availability of one instruction set.

    Attributes:
        built: True if this installation contains kernels for it.
        present: True if this processor implements it.
        supported: True if the operating system also allows it.
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
    """Return a description of the processor and of the kernels for it.

    Returns:
        `processor`: the processor's name as reported by the operating system.
        `architecture`: the architecture that the kernels were compiled for.
        `isas`: every instruction set that chunkrt has kernels for.
        `selected`: the chosen instruction set by kernel.

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


def fastest_attention(*, has_key_biases: bool = False) -> AttentionMath:
    """Return the fastest arithmetic of attention on this processor that is precise enough.

    Args:
        has_key_biases: True if keys have biases. They may be much larger than the rest of a key, and int8 is then too
            coarse.
    """
    selected = selected_kernels()
    if selected["attend_f32_s8_bf16_cache"] in INT8_ISAS and not has_key_biases:
        return "int8"
    return "bfloat16" if selected["attend_f32_bf16_cache"] in BFLOAT16_ISAS else "float32"


def _processor_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
