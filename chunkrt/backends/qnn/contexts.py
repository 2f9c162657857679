"""Compiled contexts on disk, found by a hash of their sources; a context is used only if it is complete.

A context is a folder with ONNX Runtime's wrapper, Qualcomm's binary, and a record with the hashes of both files, which
is written last. A damaged context is never loaded.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

from chunkrt.files import cached_entry, fingerprint, read_json, written_aside

FORMAT = 2
"""Version of the format of contexts, and of the graphs that `model.py` makes: raised when the format or the graphs
change.
"""

RECORD, WRAPPER = "context.json", "context.onnx"
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
            return _whole(folder)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            log.warning("%s is damaged (%s); it is not used", folder, str(error) or type(error).__name__)
            return None

    def has(self, key: str) -> bool:
        """Return True if the context exists, even if it is damaged."""
        return (self.path / key).is_dir()

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
                    (aside / RECORD).write_text(json.dumps(record, indent=1), encoding="utf-8")
        return folder / WRAPPER


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
