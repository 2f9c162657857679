"""The prefix cache's folder: its files, their total size, and the lock for writing.

Any number of processes may read at the same time. Only one process at a time writes files, and removes the least
recently used files, so the total size never exceeds the budget. Incomplete files of killed processes are removed first.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from filelock import FileLock, Timeout

SUFFIX = ".prefix"
_NAME = re.compile(r"(\.?)([0-9a-f]{64})\.prefix(\.part)?")
_LOCK = ".prefix.lock"
SECONDS_TO_WAIT = 10.0


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A file, its size in bytes, and the time of its last use."""

    path: Path
    num_bytes: int
    used: float
    is_part: bool


def entries(folder: Path) -> list[Entry]:
    """Return the files of a prefix cache in a folder, and ignore other files. If the folder does not exist, return no
    files.
    """
    found = []
    with suppress(OSError), os.scandir(folder) as listed:
        for item in listed:
            if match := _NAME.fullmatch(item.name):
                with suppress(OSError):  # removed by another process
                    stat = item.stat(follow_symlinks=False)
                    is_part = bool(match[1] or match[3])
                    path = folder / item.name
                    found.append(Entry(path=path, num_bytes=stat.st_size, used=stat.st_mtime, is_part=is_part))
    return found


def clear(folder: Path) -> int:
    """Remove the files of a prefix cache, and return their number of bytes. Raise OSError if a file cannot be
    removed."""
    freed = 0
    with _writer(folder):
        for entry in entries(folder):
            entry.path.unlink(missing_ok=True)
            freed += entry.num_bytes
    return freed


class CacheFolder:
    """A folder with a limit on its total number of bytes."""

    def __init__(self, path: Path, budget: int) -> None:
        self.path, self.budget = path, budget

    def file(self, name: str) -> Path:
        """Return the path of a file, which may not exist."""
        return self.path / f"{name}{SUFFIX}"

    def touch(self, name: str) -> None:
        """Record the use of a file."""
        with suppress(OSError):
            os.utime(self.file(name))

    def write(self, name: str, num_bytes: int, write: Callable[[BinaryIO], object]) -> bool:
        """Write a file of about `num_bytes` bytes under a temporary name, and then rename it.

        Return False if the file exceeds the limit.

        Raises:
            OSError: the file cannot be written.
        """
        if num_bytes > self.budget:
            return False
        self.path.mkdir(parents=True, exist_ok=True)
        with _writer(self.path):
            self._make_room(num_bytes)
            aside = self.path / f".{name}{SUFFIX}.part"
            try:
                with aside.open("wb") as file:
                    write(file)
                aside.replace(self.file(name))
            finally:
                with suppress(OSError):
                    aside.unlink(missing_ok=True)
        return True

    def _make_room(self, num_bytes: int) -> None:
        found = entries(self.path)
        total = sum(entry.num_bytes for entry in found)
        for entry in sorted(found, key=lambda entry: (not entry.is_part, entry.used)):
            if not entry.is_part and total + num_bytes <= self.budget:
                return
            entry.path.unlink(missing_ok=True)
            total -= entry.num_bytes


@contextmanager
def _writer(folder: Path) -> Iterator[None]:
    """Hold the lock of the writer. If the process ends, the system releases the lock. Raise OSError if another process
    holds the lock for too long.
    """
    try:
        with FileLock(folder / _LOCK).acquire(timeout=SECONDS_TO_WAIT):
            yield
    except Timeout as error:
        raise OSError(f"another process has written for {SECONDS_TO_WAIT:.0f} s") from error
