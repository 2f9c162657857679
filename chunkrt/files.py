"""Files and folders that several processes write: each is there whole or not at all, and nothing is left by the dead.

An entry is written under a hidden name beside its own, the same for every attempt, then renamed: what was left by a
process that was killed is replaced by the next one. Only one process at a time writes into a folder of the cache, so
whatever is hidden there was left by one that died, and the next writer removes it.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import mmap
import os
import shutil
import stat
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any, TypeVar
from zipfile import ZipFile

from filelock import FileLock, Timeout

from chunkrt.errors import OutOfMemoryError

log = logging.getLogger(__name__)
Entry = TypeVar("Entry")

Count = Callable[[int, int], None]
"""Told how much of something is done, and of how much."""

Progress = Callable[[str, int, int], None]
"""The same, with what it is first: "compiling"."""


def no_progress(what: str, done: int, total: int) -> None:
    """A Progress that nobody is told of."""


BYTE_ORDER_MARK = "\ufeff"
"""U+FEFF, which Windows PowerShell and some editors write before a text."""

SILENT_SECONDS = 1.0
"""For so long a process waits for another without a word."""


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
        held = lock.acquire(timeout=SILENT_SECONDS)
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


def made_once(path: Path, doing: str, read: Callable[[], Entry], make: Callable[[], Entry]) -> Entry:
    """An entry of a cache: read, or made by one process while the others wait, then to read it.

    Args:
        path: the entry, in a folder of chunkrt's own.
        doing: what makes it, for warnings: "compiling a model".
        read: only called if something is there; whatever it raises but MemoryError is damage, which is warned of and
            made anew.
        make: writes it, by `written_aside`.

    Raises:
        OSError: the folder cannot be written.
    """
    try:
        if path.exists():
            return read()
    except MemoryError:
        raise
    except Exception:  # a damaged entry raises whatever its bytes lead to
        log.debug("%s cannot be read", path, exc_info=True)
    with only_writer(path.parent, doing):
        try:
            if path.exists():  # made by another process meanwhile
                return read()
        except MemoryError:
            raise
        except Exception as error:
            log.warning("%s is damaged (%s); %s again", path, str(error) or type(error).__name__, doing)
            remove(path)
        return make()


@contextmanager
def written_aside(path: Path) -> Iterator[Path]:
    """A path to write a file or a folder to, which becomes `path` when the block ends well, and else is removed.

    It is on the disk before it is renamed. Of several attempts at once each waits for the one before it. A file
    replaces another, a folder does not.

    Raises:
        OSError: the folder around it cannot be made, or it cannot be renamed.
    """
    aside, lock = (path.parent / f".{path.name}{suffix}" for suffix in (".part", ".lock"))
    path.parent.mkdir(parents=True, exist_ok=True)
    with locked(lock, f"writing {path}"):
        remove(aside)
        try:
            yield aside
            for file in (aside, *aside.rglob("*")):
                if file.is_file():
                    with file.open("rb+") as written:
                        os.fsync(written.fileno())
            aside.replace(path)
        finally:
            remove(aside)
            remove(lock)  # while it is held: whoever waits for it tells that it is gone, and makes another


def check_writable(path: Path) -> None:
    """Raises OSError where `written_aside` could not write a file, as far as can be told beforehand."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    with suppress(FileNotFoundError, NotADirectoryError):
        path.with_name(f".{path.name}.part").stat()  # the name may be too long
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, f"{folder} is no folder")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, f"{folder} may not be written to")


def read_text(path: Path) -> str:
    """Return the text of a regular file, without a byte order mark; a pipe or a device might never end.

    Raises:
        OSError: it cannot be read, or is no regular file.
        ValueError: it is not UTF-8.
    """
    check_regular(path)
    return path.read_text(encoding="utf-8-sig")


def check_regular(path: Path) -> None:
    """Raises OSError if there is something at the path that is neither a file nor a folder, or nothing."""
    mode = path.stat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise OSError(errno.EINVAL, "it is a pipe or a device, expected a regular file")


def map_read_only(path: Path) -> mmap.mmap:
    """Map a file for reading; the map stays open for as long as an array views it.

    Raises:
        OSError: it is missing or unreadable, or no regular file.
        ValueError: it is empty.
        OutOfMemoryError: there is no room for it.
    """
    check_regular(path)
    with path.open("rb") as file:
        try:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            if error.errno != errno.ENOMEM:
                raise
            raise OutOfMemoryError(
                f"there is too little memory to map {path}, which takes {path.stat().st_size / 1e6:.0f} MB; close "
                "other programs, raise the limit of this one (ulimit -v), or choose a smaller model"
            ) from error


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file. Raises OSError or ValueError if it cannot be read or is none."""
    try:
        return tomllib.loads(read_text(path))
    except RecursionError as error:
        raise ValueError("its values are nested too deeply") from error


def read_json(path: Path) -> Any:
    """A JSON file. Raises OSError or ValueError if it cannot be read or is none; NaN and Infinity are not JSON."""
    return parse_json(read_text(path))


def parse_json(text: str | bytes) -> Any:
    """Parse JSON. Raises ValueError as `read_json` does. A byte order mark before it is ignored."""
    if isinstance(text, str):  # of bytes the library ignores it
        text = text.removeprefix(BYTE_ORDER_MARK)
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise ValueError("its values are nested too deeply") from error


def check_keys(table: Mapping[str, Any], kind: type) -> None:
    """Raise ValueError for a key that a dataclass, read from this table, has no field for."""
    if unknown := sorted(table.keys() - {field.name for field in fields(kind)}):
        raise ValueError(f"{kind.__name__} has no key {unknown[0]!r}")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def fingerprint(path: Path) -> tuple[int, str]:
    """Bytes and SHA-256 of a regular file. Raises OSError if it cannot be read, or is something else."""
    check_regular(path)
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
    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


@cache
def _tell_of_waiting(doing: str) -> None:
    log.warning("another process is %s; waiting for it", doing)


def bytes_below(path: Path) -> int:
    """Return the bytes of a file, or of all files in a folder. Files that vanish meanwhile count nothing."""
    files = [path] if path.is_file() else (Path(folder, name) for folder, _, names in os.walk(path) for name in names)
    total = 0
    for file in files:
        with suppress(OSError):
            found = file.lstat()
            total += found.st_size if stat.S_ISREG(found.st_mode) else 0
    return total
