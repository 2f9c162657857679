"""The largest memory of this process, for the output of commands."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path

import psutil


def peak_memory_bytes() -> int:
    """Return the largest resident memory of this process so far, in bytes."""
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    with suppress(OSError):  # without procfs
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
