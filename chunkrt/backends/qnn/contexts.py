"""Compiled contexts on disk: found by what they were compiled from, whole or not at all.

A context is a folder with ONNX Runtime's wrapper, Qualcomm's binary, and a record of both with their hashes, written
last. What is damaged is never loaded.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

from chunkrt.files import fingerprint, made_once, read_json, written_aside

FORMAT = 2
"""Of a context, and of the graphs that `model.py` has compiled: raised when either changes."""

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
        try:
            return _whole(folder)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            log.warning("%s is damaged (%s); it is not used", folder, str(error) or type(error).__name__)
            return None

    def make(self, key: str, write: Callable[[Path], None]) -> Path:
        """The wrapper of a context, written now by `write(wrapper path)` unless it is there and whole.

        Of several processes that want the same one, one writes it and the others wait.

        Raises:
            OSError: the folder cannot be written.
        """
        folder = self.path / key

        def made() -> Path:
            with written_aside(folder) as aside:
                aside.mkdir()
                write(aside / WRAPPER)
                record = {"format": FORMAT, "files": {p.name: fingerprint(p) for p in sorted(aside.iterdir())}}
                (aside / RECORD).write_text(json.dumps(record, indent=1), encoding="utf-8")
            return folder / WRAPPER

        return made_once(folder, "compiling for the NPU", lambda: _whole(folder), made)


def _whole(folder: Path) -> Path:
    """The wrapper of a context. Raises what comes of damage; of some of it ValueError."""
    record = read_json(folder / RECORD)
    if record["format"] != FORMAT:
        raise ValueError(f"its format is {record['format']}, not {FORMAT}")
    if WRAPPER not in record["files"]:
        raise ValueError("its record names no wrapper")
    for name, expected in record["files"].items():
        if Path(name).name != name or list(fingerprint(folder / name)) != expected:
            raise ValueError(f"{name} is not what was written")
    return folder / WRAPPER
