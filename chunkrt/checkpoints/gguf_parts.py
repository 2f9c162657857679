"""GGUF files in several parts, with llama-gguf-split's names: NAME-00001-of-00003.gguf."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from chunkrt.errors import ModelError

_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
PREFERRED = ("Q4_K_M", "Q8_0", "Q4_0", "Q4_1")
"""Quantisations in order of preference, for ids without one; llama.cpp's choice is first."""


def parts_of(path: Path) -> list[Path]:
    """Return the paths of all parts of a GGUF file, given one of them; only the given path if its name is not that of a
    part.
    """
    if not (found := _PART.fullmatch(path.name)):
        return [path]
    stem, count = found["stem"], int(found["count"])
    return [path.with_name(f"{stem}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]


def first_of_each(names: Sequence[str]) -> list[str]:
    """Return the file names that are GGUF models: a complete file, or the first of several parts."""
    models = [name for name in names if name.endswith(".gguf") and not Path(name).name.startswith("mmproj")]
    return sorted(n for n in models if not (part := _PART.fullmatch(Path(n).name)) or int(part["number"]) == 1)


def choose_gguf(names: Sequence[str], quantisation: str | None, where: str) -> str:
    """Return one of several GGUF models, by the quantisation in its name.

    Args:
        names: file names, possibly with folders.
        quantisation: e.g. "Q4_0", ignoring case; None for the first of PREFERRED that is available.
        where: for messages.

    Raises:
        ModelError: no file has that quantisation.
    """
    models = first_of_each(names)
    for wanted in PREFERRED if quantisation is None else (quantisation,):
        word = re.compile(rf"(?<![a-z0-9]){re.escape(wanted)}(?![a-z0-9]|_[a-z0-9])", re.IGNORECASE)
        if fitting := [name for name in models if word.search(Path(name).name) or word.search(name)]:
            return min(fitting, key=len)
    if quantisation is None and models:
        return models[0]
    there = f"available: {', '.join(models)}" if models else "there is no GGUF file"
    raise ModelError(
        f"{where} has no GGUF file with quantisation {quantisation}; {there}" if quantisation else f"{where}: {there}"
    )


def gguf_in(folder: Path) -> Path | None:
    """Return the GGUF file of a folder that has exactly one; the first of its parts."""
    models = first_of_each([path.name for path in folder.glob("*.gguf")])
    return folder / models[0] if len(models) == 1 else None
