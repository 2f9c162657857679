"""Affinity: the CPUs that an engine's threads may run on, for processors whose cores are not alike.

Linux gives a new thread the CPUs of the thread that starts it. So `running_on` around the start of a thread pins that
thread for good, and around a call it pins the caller for as long as the call takes.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from chunkrt.errors import ConfigError

NO_AFFINITY, BIG = "none", "big"
CPU_FOLDER = Path("/sys/devices/system/cpu")

_SPEEDS = (("cpu_capacity", 0.5), ("cpufreq/cpuinfo_max_freq", 0.85))
"""Files that tell a CPU's speed, the better first, and the share of the fastest one's that a big core has at least. A
capacity is work a second, in which little cores do not reach half of a big one's. Frequencies lie closer together, but
equal cores differ by a few per cent in them too, since the best of them may boost a little higher."""


def check_affinity(affinity: str) -> None:
    """Raises ConfigError unless it is "none", "big" or a list of CPUs."""
    if affinity not in (NO_AFFINITY, BIG):
        _parse(affinity)


def find_cpus(affinity: str) -> frozenset[int] | None:
    """The CPUs that an affinity stands for on this machine; None for "none".

    Args:
        affinity: "none", "big" (see `big_cores`), or CPUs as in "0,2,4-7".

    Raises:
        ConfigError: it is none of these, this system has no affinity, or a CPU is one that this thread may not use.
    """
    if affinity == NO_AFFINITY:
        return None
    check_affinity(affinity)
    if not hasattr(os, "sched_setaffinity"):
        raise ConfigError(f"affinity is {affinity!r}, but {platform.system()} has no affinity; leave it 'none'")
    if affinity == BIG:
        return big_cores()
    cpus, allowed = _parse(affinity), os.sched_getaffinity(0)
    for cpu in sorted(cpus - allowed):
        problem = "outside this process's mask" if (CPU_FOLDER / f"cpu{cpu}").is_dir() else "not there"
        raise ConfigError(f"affinity is {affinity!r}, but CPU {cpu} is {problem}; choose among {cpu_list(allowed)}")
    return cpus


def available_cpus() -> frozenset[int]:
    """The CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def big_cores() -> frozenset[int]:
    """The fast ones of the CPUs that this thread may use; all of them where they are alike or nothing tells them apart.

    Only where `os.sched_getaffinity` is.
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
    """Keep this thread, and threads that it starts meanwhile, on these CPUs; None changes nothing.

    Afterwards this thread may use what it could before, the others stay.

    Raises:
        ConfigError: the system refuses, since CPUs went away.
    """
    if cpus is None:
        yield
        return
    before = os.sched_getaffinity(0)
    try:
        try:
            os.sched_setaffinity(0, cpus)
        except OSError as error:
            raise ConfigError(f"cannot run on CPUs {cpu_list(cpus)}: {error.strerror}; load with others") from error
        yield
    finally:
        os.sched_setaffinity(0, before)


def cpu_list(cpus: Collection[int]) -> str:
    """CPUs as people and Linux write them: "0,2,4-7"."""
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
            raise ConfigError(f"affinity is {text!r}, expected none, big, or CPUs as in 0,2,4-7")
        cpus.update(range(first, last + 1))
    return frozenset(cpus)
