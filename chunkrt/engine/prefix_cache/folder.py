"""The prefix cache's folder: its files, their total size, and the lock for writing.

Any number of processes may read at the same time. Only one process at a time writes files, and removes the least
recently used files, so the total size never exceeds the budget. Incomplete files of killed processes are removed first.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

SUFFIX, PART = ".prefix", ".part"
_NAME = re.compile(r"\.?[0-9a-f]{64}\.prefix(\.part)?")
_LOCK = ".prefix.lock"
SECONDS_TO_WAIT = 10.0


def entries(folder: Path) -> dict[Path, os.stat_result]:
    """Return the files of a prefix cache in a folder, and ignore other files. If the folder does not exist, return no
    files. The time of a file's modification is that of its last use.
    """
    found = {}
    with suppress(OSError), os.scandir(folder) as listed:
        for item in listed:
            if _NAME.fullmatch(item.name):
                with suppress(OSError):  # removed by another process
                    found[folder / item.name] = item.stat(follow_symlinks=False)
    return found


def is_part(path: Path) -> bool:
    """Return True for a file that is incomplete."""
    return path.name.startswith(".") or path.suffix == PART


def clear(folder: Path) -> int:
    """Remove the files of a prefix cache, and return their number of bytes. Raise OSError if a file cannot be
    removed."""
    freed = 0
    with _writer(folder):
        for path, stat in entries(folder).items():
            path.unlink(missing_ok=True)
            freed += stat.st_size
    return freed


def path_of(folder: Path, name: str) -> Path:
    """Return the path of a file, which may not exist."""
    return folder / f"{name}{SUFFIX}"


def write_file(folder: Path, name: str, num_bytes: int, budget: int, write: Callable[[BinaryIO], object]) -> bool:
    """Write a file of about `num_bytes` bytes under a temporary name, and then rename it.

    Return False if the file exceeds `budget`, the maximum number of bytes of all files.

    Raises:
        OSError: the file cannot be written.
    """
    if num_bytes > budget:
        return False
    folder.mkdir(parents=True, exist_ok=True)
    with _writer(folder):
        _make_room(folder, budget - num_bytes)
        aside = folder / f".{name}{SUFFIX}{PART}"
        try:
            with aside.open("wb") as file:
                write(file)
            aside.replace(path_of(folder, name))
        finally:
            with suppress(OSError):
                aside.unlink(missing_ok=True)
    return True


def _make_room(folder: Path, limit: int) -> None:
    """Remove incomplete files, and the least recently used other files that exceed a limit."""
    found = entries(folder)
    total = sum(stat.st_size for stat in found.values())
    for path in sorted(found, key=lambda path: (not is_part(path), found[path].st_mtime)):
        if not is_part(path) and total <= limit:
            return
        path.unlink(missing_ok=True)
        total -= found[path].st_size


@contextmanager
def _writer(folder: Path) -> Iterator[None]:
    """Hold the lock of the writer. If the process ends, the system releases the lock. Raise OSError if another process
    holds the lock for too long.
    """
    from filelock import FileLock  # imported here, because most engines have no folder

    try:
        with FileLock(folder / _LOCK).acquire(timeout=SECONDS_TO_WAIT):
            yield
    except TimeoutError as error:
        raise OSError(f"another process has written for {SECONDS_TO_WAIT:.0f} s") from error
