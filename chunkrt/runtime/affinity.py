"""CPU affinity: the CPUs that an engine's threads may run on, for processors with cores of different speeds.

On Linux a new thread inherits the CPUs of the thread that starts it. So a `running_on` block around the start of a
thread pins the new thread permanently. A block around a call pins the calling thread for the duration of the call.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from math import ceil
from pathlib import Path

from chunkrt.errors import ConfigError, cause_of

NO_AFFINITY, BIG = "none", "big"
CPU_FOLDER = Path("/sys/devices/system/cpu")
CGROUP_FOLDER = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")

_SPEEDS = (("cpu_capacity", 0.5), ("cpufreq/cpuinfo_max_freq", 0.85))
"""Files that report the speed of a CPU, in order of preference, and the minimum speed of a big core relative to the
fastest core. `cpu_capacity` is work per second; the capacity of little cores is below half of a big core's. Frequencies
differ less, but even equal cores differ by a few per cent, because the best ones may boost a little higher.
"""


def check_affinity(affinity: str) -> None:
    """Raise ConfigError unless the affinity is "none", "big" or a list of CPUs."""
    if affinity not in (NO_AFFINITY, BIG):
        _parse(affinity)


def find_cpus(affinity: str) -> frozenset[int] | None:
    """Return the CPUs that an affinity selects on this machine; None for "none".

    Args:
        affinity: "none", "big" (see `big_cores`), or CPUs such as "0,2,4-7".

    Raises:
        ConfigError: the affinity is invalid, this system does not support CPU affinity, or this thread may not use one
            of the CPUs.
    """
    if affinity == NO_AFFINITY:
        return None
    check_affinity(affinity)
    if not hasattr(os, "sched_setaffinity"):
        raise ConfigError(
            f"`affinity` is {affinity!r}, but {platform.system()} does not support CPU affinity; use `affinity='none'`"
        )
    if affinity == BIG:
        return big_cores()
    cpus, allowed = _parse(affinity), os.sched_getaffinity(0)
    for cpu in sorted(cpus - allowed):
        problem = "outside this process's mask" if (CPU_FOLDER / f"cpu{cpu}").is_dir() else "not present"
        raise ConfigError(f"`affinity` is {affinity!r}, but CPU {cpu} is {problem}; choose among {cpu_list(allowed)}")
    return cpus


def available_cpus() -> frozenset[int]:
    """Return the CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def available_cores(cpus: Collection[int] | None = None) -> int:
    """Return the number of cores that this process may use under its CPU quota, at least 1.

    A container may see all CPUs of its host and still have a quota (`docker run --cpus 2`); more threads would only be
    throttled. A fraction of a core is rounded up.

    Args:
        cpus: the CPUs that limit the number; by default all CPUs that the process may run on.
    """
    count = len(available_cpus() if cpus is None else cpus)
    quota = cpu_quota()
    return count if quota is None else max(1, min(count, ceil(quota)))


def cpu_quota() -> float | None:
    """Return the CPU quota of this process's control groups, in cores. Return None if no quota applies, or on systems
    other than Linux.

    The smallest quota on the path to the root applies. Source: Linux kernel documentation, cgroup-v2.rst (`cpu.max`)
    and sched-bwc.rst (`cpu.cfs_quota_us`, version 1).
    """
    try:
        lines = OWN_CGROUPS.read_text().splitlines()
    except OSError:
        return None
    quotas = []
    for line in lines:
        _, controllers, path = ([*line.split(":", 2), "", ""])[:3]
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = CGROUP_FOLDER / controllers if controllers else CGROUP_FOLDER
        if not root.is_dir():
            root = CGROUP_FOLDER / "cpu"
        folder = root / path.strip("/")
        # In a container the path may be that of the host; the container's own group is then mounted as the root.
        folders = [folder, *folder.parents] if folder.is_dir() else [root]
        quotas += [quota for f in folders if f.is_relative_to(root) and (quota := _quota_of(f)) is not None]
    return min(quotas, default=None)


def _quota_of(folder: Path) -> float | None:
    """Return the quota of one control group, in cores; None if the group has no quota."""
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
        cores = int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):  # "max", or the file does not exist
        return None
    return cores if cores > 0 else None


def big_cores() -> frozenset[int]:
    """Return the big cores among the CPUs that this thread may use. If the CPUs are equally fast, or their speed is
    unknown, return all of them.

    Requires `os.sched_getaffinity`.
    """
    allowed = os.sched_getaffinity(0)
    for file, share in _SPEEDS:
        try:
            speeds = {cpu: int((CPU_FOLDER / f"cpu{cpu}" / file).read_text(encoding="ascii")) for cpu in allowed}
        except (OSError, ValueError):
            continue
        return frozenset(cpu for cpu, speed in speeds.items() if speed >= share * max(speeds.values()))
    return frozenset(allowed)


@contextmanager
def running_on(cpus: Collection[int] | None) -> Iterator[None]:
    """Pin this thread, and threads that it starts inside the block, to the given CPUs. None has no effect.

    After the block this thread may use its previous CPUs again; the new threads stay pinned.

    Raises:
        ConfigError: the system rejects the CPUs, for example because some were removed.
    """
    if cpus is None:
        yield
        return
    before = os.sched_getaffinity(0)
    try:
        try:
            os.sched_setaffinity(0, cpus)
        except OSError as error:
            raise ConfigError(
                f"cannot run on CPUs {cpu_list(cpus)}: {cause_of(error)}; load the model with other CPUs"
            ) from error
        yield
    finally:
        os.sched_setaffinity(0, before)


def cpu_list(cpus: Collection[int]) -> str:
    """Return CPUs in the notation of Linux: "0,2,4-7"."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][-1] + 1:
            runs[-1].append(cpu)
        else:
            runs.append([cpu])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _parse(text: str) -> frozenset[int]:
    cpus: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,4})(?:-([0-9]{1,4}))?\s*", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last:
            raise ConfigError(f"`affinity` is {text!r}, expected none, big, or CPUs such as 0,2,4-7")
        cpus.update(range(first, last + 1))
    return frozenset(cpus)
