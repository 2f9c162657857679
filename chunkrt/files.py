"""Files and folders that several processes write. An entry is either complete or absent, also after a process was
killed.

An entry is written under a hidden name next to its final name, and then renamed. The hidden name is the same for every
attempt, so the next attempt replaces the incomplete entry of a killed process. Only one process at a time writes into a
folder of the cache. Therefore hidden entries in it come from killed processes, and the next writer removes them.
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
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import fields
from functools import cache
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar
from uuid import uuid4

from chunkrt.errors import ConfigError, OutOfMemoryError, cause_of

if TYPE_CHECKING:
    from zipfile import ZipFile

    from filelock import BaseFileLock

log = logging.getLogger(__name__)
Entry = TypeVar("Entry")

Count = Callable[[int, int], None]
"""Progress function that is called with (amount done, total)."""

Progress = Callable[[str, int, int], None]
"""Progress function that is called with (description, amount done, total), for example ("compiling", 1, 2)."""


def no_progress(what: str, done: int, total: int) -> None:
    """Ignore progress."""


BYTE_ORDER_MARK = "\ufeff"
"""Byte order mark (U+FEFF), which Windows PowerShell and some editors write at the beginning of a text."""

SILENT_SECONDS = 1.0
"""Seconds that a process waits for another process before it logs a warning."""


@contextmanager
def locked(path: Path, doing: str) -> Iterator[None]:
    """Hold a lock file. If the process ends, the system releases the lock.

    Args:
        doing: activity of the process that holds the lock, for the warning of a waiting process.

    Raises:
        OSError: the file cannot be written.
    """
    lock = _file_lock(path)
    try:
        held = lock.acquire(timeout=SILENT_SECONDS)
    except TimeoutError:
        if not path.exists():
            path.touch()  # an error, for example in /proc, where the lock would retry forever
        _tell_of_waiting(doing)
        held = lock.acquire()
    with held:
        yield


@contextmanager
def only_writer(folder: Path, doing: str) -> Iterator[None]:
    """Hold the lock for writing into a folder, and delete hidden entries in the folder. It must be a folder of
    chunkrt's own.

    The lock file is next to the folder. Arguments and errors are those of `locked`.
    """
    _make_folder(folder.parent)
    with locked(folder.with_name(f".{folder.name}.lock"), doing):
        for leftover in list(folder.glob(".*")):
            remove(leftover)
        yield


@contextmanager
def cached_entry(path: Path, doing: str, read: Callable[[Path], Entry]) -> Iterator[Entry | None]:
    """Yield an entry of a cache; or None if the block has to create the entry, while other processes wait for it.

    Args:
        path: path of the entry, in a folder of chunkrt's own. The block writes it with `written_aside`.
        doing: activity that creates the entry, for warnings, e.g. "compiling a model".
        read: reads an existing entry. If it raises an error other than MemoryError, the entry is damaged. A warning is
            then logged, and the entry is removed.

    Raises:
        OSError: the folder cannot be written.
    """
    found: Entry | None = None
    try:
        found = read(path) if path.exists() else None
    except MemoryError:
        raise
    except Exception:  # a damaged entry may raise any error
        log.debug("%s cannot be read", path, exc_info=True)
    if found is not None:
        yield found
        return
    with only_writer(path.parent, doing):
        try:
            found = read(path) if path.exists() else None  # another process may have created it in the meantime
        except MemoryError:
            raise
        except Exception as error:
            log.warning("%s is damaged (%s); %s again", path, str(error) or type(error).__name__, doing)
            remove(path)
        yield found


@contextmanager
def written_aside(path: Path) -> Iterator[Path]:
    """Yield a path for writing a file or a folder, which is renamed to `path` if the block succeeds, and removed
    otherwise.

    The data are flushed to the disk before renaming. Concurrent attempts wait for each other. A file replaces an
    existing file, but a folder does not replace an existing folder.

    Raises:
        OSError: the parent folder cannot be created, or the entry cannot be renamed.
    """
    aside, lock = (path.parent / f".{path.name}{suffix}" for suffix in (".part", ".lock"))
    _make_folder(path.parent)
    with locked(lock, f"writing {path}"):
        remove(aside)
        for left in path.parent.glob(f".{escape(path.name)}.old-*"):
            remove(left)
        try:
            yield aside
            for file in (aside, *aside.rglob("*")):
                if file.is_file():
                    with file.open("rb+") as written:
                        os.fsync(written.fileno())
            _replace(aside, path)
        finally:
            remove(aside)
            remove(
                lock
            )  # removed while it is locked: a waiting process detects the removal, and creates a new lock file


def write_text(path: Path, text: str) -> None:
    """Write a file in UTF-8 through `written_aside`. Raise ConfigError with the path and the reason if it fails."""
    try:
        with written_aside(path) as aside:
            aside.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {cause_of(error)}") from error


@contextmanager
def own_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """Yield a new empty folder for this process, and remove it at the end.

    A lock file next to the folder is held as long as the process lives. `remove_abandoned` removes the folders whose
    processes were killed.

    Raises:
        OSError: the parent folder cannot be created or written.
    """
    _make_folder(parent)
    folder = parent / f"{prefix}{uuid4().hex[:12]}"
    lock = _lock_of(folder)
    with _file_lock(lock):
        folder.mkdir()
        try:
            yield folder
        finally:
            remove(folder)
            remove(lock)  # on Windows the release removes it


def remove_abandoned(parent: Path, prefix: str) -> None:
    """Remove folders of `own_folder` whose processes were killed, and ignore errors."""
    for folder in {path.with_name(path.name.removesuffix(".lock")) for path in parent.glob(f"{prefix}*")}:
        lock = _lock_of(folder)
        with suppress(OSError), _file_lock(lock).acquire(timeout=0):
            remove(folder)
            remove(lock)


def _file_lock(path: Path) -> BaseFileLock:
    from filelock import FileLock  # imported here, because most starts write no file

    return FileLock(path)


def _lock_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.lock")


def _make_folder(folder: Path) -> None:
    """Create a folder and its parents, if they do not exist. Raise NotADirectoryError if one of them is a file, for
    which Windows says that it exists.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder)) from error


def _replace(aside: Path, path: Path) -> None:
    """Rename `aside` to `path` as Linux does: an empty folder is replaced, and a mapped file too, which Windows does
    not.
    """
    if sys.platform == "win32" and aside.is_dir() and path.is_dir():
        path.rmdir()
    try:
        aside.replace(path)
    except PermissionError:
        if sys.platform != "win32" or not path.is_file():
            raise
        remove(path)
        aside.replace(path)


def check_writable(path: Path) -> None:
    """Raise OSError if `written_aside` would fail to write a file, as far as this can be determined in advance."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    aside = path.with_name(f".{path.name}.part")
    if sys.platform == "win32" and len(aside.name) > 255:  # its file systems' limit, which `stat` does not report
        raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
    with suppress(FileNotFoundError, NotADirectoryError):
        aside.stat()  # the name may be too long
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, f"{folder} is not a folder")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, f"{folder} is not writable")


def read_text(path: Path) -> str:
    """Return the text of a regular file, without a byte order mark. A pipe or a device is an error, because it might
    never end.

    Raises:
        OSError: the file cannot be read, or is not a regular file.
        ValueError: the text is not UTF-8.
    """
    check_regular(path)
    return path.read_text(encoding="utf-8-sig")


def check_regular(path: Path) -> None:
    """Raise OSError unless the path is a file or a folder."""
    mode = path.stat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise OSError(errno.EINVAL, "it is a pipe or a device, expected a regular file")


def map_read_only(path: Path) -> mmap.mmap:
    """Map a file into memory for reading. The mapping stays open as long as an array refers to it.

    Raises:
        OSError: the file is missing or unreadable, or not a regular file.
        ValueError: the file is empty.
        OutOfMemoryError: the address space or memory is not sufficient.
    """
    check_regular(path)
    with _open_shared(path) as file:
        try:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            if error.errno != errno.ENOMEM:
                raise
            raise OutOfMemoryError(
                f"there is too little memory to map {path}, which takes {path.stat().st_size / 1e6:.0f} MB; close "
                "other programs, raise the limit of this one (ulimit -v), or choose a smaller model"
            ) from error


def _open_shared(path: Path) -> BinaryIO:
    """Open a file for reading. Other programs may rename it in the meantime, on Windows too."""
    if sys.platform != "win32":
        return path.open("rb")
    import ctypes
    import msvcrt

    sys.audit("open", str(path), "rb", 0)  # as `open` does
    read, share, open_existing = 0x80000000, 1 | 2 | 4, 3  # GENERIC_READ; FILE_SHARE_READ, _WRITE and _DELETE
    create = ctypes.WinDLL("kernel32", use_last_error=True).CreateFileW
    create.restype = ctypes.c_void_p
    handle = create(str(path), read, share, None, open_existing, 0, None)
    if handle == ctypes.c_void_p(-1).value:
        code = ctypes.get_last_error()
        raise OSError(0, ctypes.FormatError(code).strip(), str(path), code)
    return os.fdopen(msvcrt.open_osfhandle(handle, os.O_RDONLY | os.O_BINARY), "rb")


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file. Raise OSError if it cannot be read, or ValueError if it is not TOML."""
    import tomllib

    try:
        return tomllib.loads(read_text(path))
    except RecursionError as error:
        raise ValueError("its values are nested too deeply") from error


def read_json(path: Path) -> Any:
    """Read a JSON file. Raise OSError if it cannot be read, or ValueError if it is not JSON. NaN and Infinity are not
    JSON.
    """
    return parse_json(read_text(path))


def parse_json(text: str | bytes) -> Any:
    """Parse JSON, and ignore a byte order mark at the beginning. Raise ValueError like `read_json`."""
    if isinstance(text, str):  # in bytes the library ignores the byte order mark
        text = text.removeprefix(BYTE_ORDER_MARK)
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise ValueError("its values are nested too deeply") from error


def check_keys(table: Mapping[str, Any], kind: type) -> None:
    """Raise ValueError if a table contains a key that is not a field of the dataclass."""
    if unknown := sorted(table.keys() - {field.name for field in fields(kind)}):
        raise ValueError(f"{kind.__name__} has no key {unknown[0]!r}")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def fingerprint(path: Path) -> tuple[int, str]:
    """Return the size in bytes and the SHA-256 of a regular file. Raise OSError if it cannot be read, or is not a
    regular file.
    """
    check_regular(path)
    with path.open("rb") as file:
        return path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()


def content_fingerprint(content: memoryview) -> tuple[int, str]:
    """Return the `fingerprint` of a file with a content."""
    return content.nbytes, hashlib.sha256(content).hexdigest()


def check_archive(archive: ZipFile, *, ratio: int = 1) -> None:
    """Reject an archive whose contents are larger than `ratio` times the size of its file.

    Raises:
        ValueError: the declared sizes exceed the limit, or a name occurs twice.
    """
    members = archive.infolist()
    if len({member.filename for member in members}) < len(members):
        raise ValueError("a name occurs twice in it")
    assert archive.fp is not None
    file_bytes = archive.fp.seek(0, os.SEEK_END)
    if sum(member.file_size for member in members) > ratio * file_bytes:
        raise ValueError(f"it would inflate to more than {ratio} times its size")


def remove(path: Path) -> None:
    """Delete a file or a folder, and ignore errors.

    Windows renames a mapped file, but does not delete it. It gets a hidden name next to `path`, and the next writer
    deletes it.
    """
    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    if sys.platform == "win32" and not path.name.startswith("."):
        for file in (path, *path.rglob("*")):
            if file.is_file():
                with suppress(OSError):
                    file.replace(path.with_name(f".{path.name}.old-{uuid4().hex[:8]}"))
        shutil.rmtree(path, ignore_errors=True)


@cache
def _tell_of_waiting(doing: str) -> None:
    log.warning("another process is %s; waiting for it", doing)


def bytes_below(path: Path) -> int:
    """Return the size in bytes of a file, or of all files in a folder. Files that are deleted in the meantime do not
    count.
    """
    files = [path] if path.is_file() else (Path(folder, name) for folder, _, names in os.walk(path) for name in names)
    total = 0
    for file in files:
        with suppress(OSError):
            found = file.lstat()
            total += found.st_size if stat.S_ISREG(found.st_mode) else 0
    return total
