"""Processors as Windows describes them: efficiency classes of cores, and x86-64 programs on 64-bit Arm."""

from __future__ import annotations

import ctypes
import struct
import sys

_CPU_SET = struct.Struct("<IIIHBBBBBBIQ")
"""Source: SYSTEM_CPU_SET_INFORMATION of winnt.h. Size, type, id, group, processor, core, cache, NUMA node, efficiency
class, flags, scheduling class, tag.
"""

_ARM64 = 0xAA64  # IMAGE_FILE_MACHINE_ARM64


def parse_cpu_sets(data: bytes) -> dict[int, int]:
    """Return the efficiency class of each processor. Cores of a higher class are faster.

    Args:
        data: records as GetSystemCpuSetInformation writes them. Records of unknown types are skipped.
    """
    classes, offset = {}, 0
    while offset + _CPU_SET.size <= len(data):
        size, kind, _, group, processor, _, _, _, efficiency, *_ = _CPU_SET.unpack_from(data, offset)
        if kind == 0:  # CpuSetInformation
            classes[64 * group + processor] = efficiency
        offset += max(size, 8)
    return classes


def efficiency_classes() -> dict[int, int]:
    """Return the efficiency class of each processor of this machine; empty if Windows does not report classes."""
    if sys.platform != "win32":
        return {}
    find = getattr(ctypes.windll.kernel32, "GetSystemCpuSetInformation", None)
    if find is None:
        return {}
    needed = ctypes.c_ulong(0)
    find(None, 0, ctypes.byref(needed), None, 0)
    data = ctypes.create_string_buffer(needed.value)
    if not needed.value or not find(data, needed, ctypes.byref(needed), None, 0):
        return {}
    return parse_cpu_sets(data.raw)


def is_emulated_on_arm() -> bool:
    """Return whether Windows on Arm emulates this x86-64 process."""
    if sys.platform != "win32":
        return False
    kernel = ctypes.windll.kernel32
    kernel.GetCurrentProcess.restype = ctypes.c_void_p
    process, native = ctypes.c_ushort(0), ctypes.c_ushort(0)
    ask = getattr(kernel, "IsWow64Process2", None)  # since Windows 10, 1511
    this = ctypes.c_void_p(kernel.GetCurrentProcess())
    if ask is None or not ask(this, ctypes.byref(process), ctypes.byref(native)):
        return False
    return native.value == _ARM64 and "AMD64" in sys.version


EMULATED = (
    "Windows emulates this x86-64 Python on an Arm processor; the Python for ARM64 of python.org is many times faster"
)
"""Advice for processes that are emulated on Arm."""
