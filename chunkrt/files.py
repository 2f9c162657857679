"""Folders that several processes write into: an entry is there whole or not at all, and nothing is left by the dead.

An entry is written under a hidden name beside its own, then renamed. Only one process at a time writes into a folder of
the cache, so whatever is hidden there was left by one that died, and the next writer removes it.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from zipfile import ZipFile

from filelock import FileLock, Timeout

log = logging.getLogger(__name__)

Count = Callable[[int, int], None]
"""Told how much of something is done, and of how much."""

Progress = Callable[[str, int, int], None]
"""The same, with what it is first: "compiling"."""


@contextmanager
def locked(path: Path, doing: str) -> Iterator[None]:
    """Hold a lock file; the system releases it if the process dies.

    Args:
        doing: what the others do who hold it, for the warning of whoever has to wait.

    Raises:
        OSError: the file cannot be written.
    """
    lock = FileLock(path)
    try:
        held = lock.acquire(timeout=0)
    except Timeout:
        _tell_of_waiting(doing)
        held = lock.acquire()
    with held:
        yield


@contextmanager
def only_writer(folder: Path, doing: str) -> Iterator[None]:
    """Be the only process that writes into a folder. It must be chunkrt's own: what is hidden in it is deleted.

    The lock lies beside the folder. Arguments and errors are those of `locked`.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(folder.with_name(f".{folder.name}.lock"), doing):
        for leftover in list(folder.glob(".*")):
            remove(leftover)
        yield


@contextmanager
def written_aside(path: Path) -> Iterator[Path]:
    """A path to write a file or a folder to, which becomes `path` when the block ends well, and else is removed.

    It is the same for every attempt, so an attempt that was killed leaves nothing after the next; attempts must not
    overlap. A folder does not replace another.

    Raises:
        OSError: the folder around it cannot be made, or it cannot be renamed.
    """
    aside = path.with_name(f".{path.name}.part")
    remove(aside)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield aside
        aside.rename(path)
    finally:
        remove(aside)


def fingerprint(path: Path) -> tuple[int, str]:
    """Bytes and SHA-256 of a file. Raises OSError if it cannot be read."""
    with path.open("rb") as file:
        return path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()


def check_archive(archive: ZipFile, *, ratio: int = 1) -> None:
    """Refuse an archive that would inflate beyond so many times the size of its file.

    Raises:
        ValueError: the sizes that it declares are larger, or a name comes twice.
    """
    members = archive.infolist()
    if len({member.filename for member in members}) < len(members):
        raise ValueError("a name comes twice in it")
    assert archive.fp is not None
    file_bytes = archive.fp.seek(0, os.SEEK_END)
    if sum(member.file_size for member in members) > ratio * file_bytes:
        raise ValueError(f"it would inflate to more than {ratio} times its size")


def remove(path: Path) -> None:
    """Delete a file or a folder, as far as that can be done."""
    with contextlib.suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


@cache
def _tell_of_waiting(doing: str) -> None:
    log.warning("another process is %s; waiting for it", doing)
