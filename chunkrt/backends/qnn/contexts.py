"""Compiled contexts on disk: found by what they were compiled from, whole or not at all.

A context is a folder with ONNX Runtime's wrapper, Qualcomm's binary, and a record of both with their hashes, written
last. It is written aside and renamed; what is damaged, or was left by a process that died, is never loaded.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import filelock

FORMAT = 1
RECORD, WRAPPER = "context.json", "context.onnx"
log = logging.getLogger(__name__)


class ContextFolder:
    """A folder of contexts by key. A key is a file name."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def find(self, key: str) -> Path | None:
        """The wrapper of a context that is there and whole."""
        folder = self.path / key
        if not folder.is_dir():
            return None
        if problem := _problem(folder):
            log.warning("%s is damaged (%s); it is not used", folder, problem)
            return None
        return folder / WRAPPER

    def make(self, key: str, write: Callable[[Path], None]) -> Path:
        """The wrapper of a context, written now by `write(wrapper path)` unless it is there and whole.

        Of several processes that want the same one, one writes it and the others wait.

        Raises:
            OSError: the folder cannot be written.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(self.path / f".{key}.lock"):
            if wrapper := self.find(key):
                return wrapper
            folder, aside = self.path / key, self.path / f".{key}"
            for leftover in (aside, folder):
                shutil.rmtree(leftover, ignore_errors=True)
            aside.mkdir()
            try:
                write(aside / WRAPPER)
                record = {"format": FORMAT, "files": {p.name: _fingerprint(p) for p in sorted(aside.iterdir())}}
                (aside / RECORD).write_text(json.dumps(record, indent=1), encoding="utf-8")
                aside.rename(folder)
            finally:
                shutil.rmtree(aside, ignore_errors=True)
        return folder / WRAPPER

    def copy_to(self, key: str, other: Path) -> None:
        """Put a context that is here into another folder as well, as it is."""
        shutil.copytree(self.path / key, other / key)


def _problem(folder: Path) -> str:
    """What is wrong with a context; empty if nothing is."""
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        if record["format"] != FORMAT:
            return f"its format is {record['format']}, not {FORMAT}"
        if WRAPPER not in record["files"]:
            return "its record names no wrapper"
        for name, expected in record["files"].items():
            if _fingerprint(folder / Path(name).name) != expected:
                return f"{name} is not what was written"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return str(error) or type(error).__name__
    return ""


def _fingerprint(path: Path) -> list[int | str]:
    with path.open("rb") as file:
        return [path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()]
