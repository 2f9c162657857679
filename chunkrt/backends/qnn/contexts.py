"""Compiled contexts on disk, found by a hash of their sources; a context is used only if it is complete.

A context is a folder with ONNX Runtime's wrapper, Qualcomm's binary, and a record with the hashes of both files, which
is written last. A damaged context is never loaded.

Contexts of several chunk lengths contain the same weights. An engine directory stores one of them completely, and the
pieces of the others that differ from it (`store_difference`); `ContextFolder.assemble` restores these.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from chunkrt.files import (
    bytes_below,
    cached_entry,
    content_fingerprint,
    fingerprint,
    only_writer,
    read_json,
    remove,
    written_aside,
)

FORMAT = 2
"""Version of the format of contexts, and of the graphs that `model.py` makes: raised when the format or the graphs
change.
"""

RECORD, WRAPPER = "context.json", "context.onnx"
DIFFERENCE_SUFFIX, BASE = ".difference", "base"
"""Suffix of the file that replaces a binary, and the record's key for the context from which it differs."""

PIECE_BYTES = 256
"""Size of the pieces in which binaries are compared. Qualcomm's compiler aligns tiles of weights to this number."""

log = logging.getLogger(__name__)


class ContextFolder:
    """A folder of contexts. A key is the file name of a context."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def find(self, key: str) -> Path | None:
        """Return the path of a context's wrapper if the context exists and is intact; otherwise None."""
        folder = self.path / key
        if not folder.is_dir():
            return None
        try:
            if BASE in read_json(folder / RECORD):
                return None
            wrapper = _whole(folder)
            with suppress(OSError):  # the folder may be read-only
                os.utime(folder / RECORD)
            return wrapper
        except _DAMAGES as error:
            _report_damage(folder, error)
            return None

    def assemble(self, key: str, into: ContextFolder) -> Path | None:
        """Restore a context that is stored as a difference. Return the path of its wrapper in another folder, or None
        if there is no such context, or if it is damaged.

        Raises:
            OSError: the other folder cannot be written.
        """
        folder = self.path / key
        if not folder.is_dir():
            return None
        try:
            if BASE not in read_json(folder / RECORD):
                return None
            made = self._restored_files(folder)
        except _DAMAGES as error:
            _report_damage(folder, error)
            return None

        def write(wrapper: Path) -> None:
            for name, content in made.items():
                wrapper.with_name(name).write_bytes(content)

        return into.make(key, write)

    def has(self, key: str) -> bool:
        """Return True if the context exists, even if it is damaged."""
        return (self.path / key).is_dir()

    def _restored_files(self, folder: Path) -> dict[str, memoryview]:
        """Return the files of a context that is stored as a difference. Damaged files raise errors of various types."""
        record = read_json(folder / RECORD)
        base = self.find(_plain_name(record[BASE]))
        if base is None:
            raise ValueError(f"it differs from {record[BASE]}, which is missing or damaged")
        made = {WRAPPER: memoryview((folder / WRAPPER).read_bytes())}
        for name in record["files"]:
            if name != WRAPPER:
                made[_plain_name(name)] = _restored(folder / f"{name}{DIFFERENCE_SUFFIX}", base)
            if list(content_fingerprint(made[name])) != record["files"][name]:
                raise ValueError(f"{name} differs from the written file")
        return made

    def is_intact(self, key: str) -> bool:
        """Return True if a context's files, or the difference and the context from which it differs, are intact. A
        damaged context is reported.
        """
        try:
            base = read_json(self.path / key / RECORD).get(BASE)
            if base is None:
                return self.find(key) is not None
            self._restored_files(self.path / key)
        except _DAMAGES as error:
            _report_damage(self.path / key, error)
            return False
        return True

    def evict(self, *, unused_s: float | None = None, most_bytes: int | None = None) -> int:
        """Remove contexts, and return their bytes.

        Args:
            unused_s: remove contexts that were not used for this number of seconds.
            most_bytes: remove the least recently used contexts until the others take at most this number of bytes.

        Raises:
            OSError: a context cannot be removed.
        """
        with only_writer(self.path, "removing contexts"):
            used = sorted(_last_use(folder) for folder in self.path.iterdir() if not folder.name.startswith("."))
            kept_bytes, freed_bytes = sum(num_bytes for _, num_bytes, _ in used), 0
            for used_at, num_bytes, folder in used:
                is_old = unused_s is not None and time.time() - used_at > unused_s
                if is_old or (most_bytes is not None and kept_bytes - freed_bytes > most_bytes):
                    remove(folder)
                    freed_bytes += num_bytes
        return freed_bytes

    def make(self, key: str, write: Callable[[Path], None]) -> Path:
        """Return the path of a context's wrapper; unless the context exists and is intact, `write(wrapper path)` writes
        it.

        If several processes need the same context, one writes it and the others wait.

        Raises:
            OSError: the folder cannot be written.
        """
        folder = self.path / key
        with cached_entry(folder, "compiling for the NPU", _whole) as found:
            if found is None:
                with written_aside(folder) as aside:
                    aside.mkdir()
                    write(aside / WRAPPER)
                    record = {"format": FORMAT, "files": {p.name: fingerprint(p) for p in sorted(aside.iterdir())}}
                    (aside / RECORD).write_text(json.dumps(record, indent=1), encoding="utf-8", newline="\n")
        return folder / WRAPPER

    def copy_from(self, other: ContextFolder, key: str) -> None:
        """Copy a complete context from another folder, unless it is intact here. The errors are those of `make`."""

        def write(wrapper: Path) -> None:
            for path in (other.path / key).iterdir():
                if path.name != RECORD:
                    shutil.copyfile(path, wrapper.with_name(path.name))

        self.make(key, write)


def store_difference(context: Path, base: Path) -> None:
    """Replace the binary of a context by its difference from the binary of another context in the same folder, if this
    saves at least half of its bytes.

    Args:
        context, base: folders of complete contexts.

    Raises:
        OSError: a file cannot be read or written.
    """
    record = read_json(context / RECORD)
    (name,) = [name for name in record["files"] if name != WRAPPER]
    (other,) = [name for name in read_json(base / RECORD)["files"] if name != WRAPPER]
    found = _difference(_pieces(context / name), _pieces(base / other))
    if found is None:
        return
    steps, is_own, own = found
    with (context / f"{name}{DIFFERENCE_SUFFIX}").open("wb") as file:
        np.savez_compressed(file, steps=steps, is_own=is_own, own=own, size=record["files"][name][0])
    (context / name).unlink()  # no longer mapped, because Windows removes no mapped file
    (context / RECORD).write_text(json.dumps(record | {BASE: base.name}, indent=1), encoding="utf-8", newline="\n")


def _difference(
    content: NDArray[np.uint8], known: NDArray[np.uint8]
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]] | None:
    """Return `steps`, `is_own` and `own` of a difference; None if it saves less than half of the bytes."""
    if not len(known):
        return None
    hashes = _hashes(known)
    order = np.argsort(hashes)
    found = order[np.minimum(np.searchsorted(hashes, _hashes(content), sorter=order), len(order) - 1)]
    is_own = (content != known[found]).any(axis=1)
    if np.mean(is_own) > 1 / 2:
        return None
    steps = np.diff(found, prepend=0).astype(np.int32)  # mostly 1, which compresses well
    return steps, is_own, content[is_own]


def _restored(difference: Path, base: Path) -> memoryview:
    """Return the bytes of a binary that is stored as its difference from the binary next to a wrapper. Damaged files
    raise errors of various types.
    """
    (other,) = [path for path in base.parent.iterdir() if path.name not in (RECORD, WRAPPER)]
    known = _pieces(other)
    with difference.open("rb") as file, np.load(file, allow_pickle=False) as stored:
        found, is_own, own, size = np.cumsum(stored["steps"]), stored["is_own"], stored["own"], int(stored["size"])
    content = known[found]
    content[is_own] = own
    restored: memoryview = content.reshape(-1)[:size].data
    return restored


def _hashes(pieces: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """Return a hash of each piece, a sum modulo 2^64. Equal hashes do not imply equal pieces."""
    words = pieces.view(np.uint64)
    factors = np.random.default_rng(0).integers(1, 2**63, words.shape[1], np.uint64) * np.uint64(2) + np.uint64(1)
    hashes: NDArray[np.uint64] = words @ factors
    return hashes


def _pieces(path: Path) -> NDArray[np.uint8]:
    """Return the content of a file as rows of PIECE_BYTES, padded with zeros. It is mapped if it needs no padding."""
    size = path.stat().st_size
    if size and size % PIECE_BYTES == 0:
        return np.memmap(path, np.uint8, "r").reshape(-1, PIECE_BYTES)
    pieces = np.zeros((-(-size // PIECE_BYTES), PIECE_BYTES), np.uint8)
    pieces.reshape(-1)[:size] = np.fromfile(path, np.uint8)
    return pieces


_DAMAGES = (  # NotImplementedError and RuntimeError are those of ZipFile
    OSError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    IndexError,
    RuntimeError,
    EOFError,
    BadZipFile,
    zlib.error,
)


def _report_damage(folder: Path, error: Exception) -> None:
    log.warning("%s is damaged (%s); it is not used", folder, str(error) or type(error).__name__)


def _last_use(folder: Path) -> tuple[float, int, Path]:
    """Return the time at which a context was last used, its bytes, and the folder."""
    record = folder / RECORD
    return (record if record.exists() else folder).stat().st_mtime, bytes_below(folder), folder


def _plain_name(name: str) -> str:
    if Path(name).name != name:
        raise ValueError(f"{name!r} is not the name of a file")
    return name


def _whole(folder: Path) -> Path:
    """Return the path of a context's wrapper. A damaged context raises errors of various types."""
    record = read_json(folder / RECORD)
    if record["format"] != FORMAT:
        raise ValueError(f"its format is {record['format']}, not {FORMAT}")
    if WRAPPER not in record["files"]:
        raise ValueError("its record names no wrapper")
    for name, expected in record["files"].items():
        if Path(name).name != name or list(fingerprint(folder / name)) != expected:
            raise ValueError(f"{name} differs from the written file")
    return folder / WRAPPER
