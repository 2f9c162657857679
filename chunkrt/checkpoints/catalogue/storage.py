"""Pulled checkpoints: their paths in the model folder, and their defects."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from chunkrt.checkpoints.catalogue.entry import CatalogueEntry, HubSource, PathSource, WheelSource, find
from chunkrt.errors import ConfigError
from chunkrt.files import fingerprint


def home() -> Path:
    """Return chunkrt's folder for downloads: CHUNKRT_HOME, or a folder in the platform's cache folder."""
    if chosen := os.environ.get("CHUNKRT_HOME"):
        return Path(chosen).expanduser()
    if sys.platform == "win32" and (cache := os.environ.get("LOCALAPPDATA")):
        return Path(cache) / "chunkrt"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "chunkrt"


def location(entry: CatalogueEntry) -> Path:
    """Return the path to which `pull` fetches the GGUF file or folder, whether it exists or not."""
    folder = home() / "models" / entry.name
    match entry.source:
        case WheelSource(file=file):
            return folder / file
        case HubSource():
            return folder / "checkpoint"
        case PathSource(path=path):
            return Path(path)


def pulled(entry: CatalogueEntry) -> Path | None:
    """Return the checkpoint's path, or None if the checkpoint has to be pulled first."""
    path = location(entry)
    return path if path.exists() else None


def how_to_fetch(path: Path) -> str:
    """Return the end of a message about a damaged file: the command that fetches the file again, if the catalogue
    provides it.
    """
    models, file = (home() / "models").absolute(), path.absolute()
    if file.is_relative_to(models) and file != models:
        name = file.relative_to(models).parts[0]
        try:
            entry = find(name)
        except ConfigError:
            return "fetch it again"
        if not isinstance(entry.source, PathSource) and file.is_relative_to(location(entry).absolute()):
            force = " --force" if isinstance(entry.source, HubSource) else ""
            return f"`chunkrt pull {name}{force}` fetches it again"
    return "fetch it again"


def damage(entry: CatalogueEntry, *, is_hashed: bool = False) -> str:
    """Return the defect of a pulled checkpoint; empty if none is known.

    Args:
        is_hashed: whether the complete file is read and its SHA-256 compared; otherwise only its size is compared.
    """
    path, source = location(entry), entry.source
    if not isinstance(source, WheelSource) or not path.exists():
        return ""
    if is_hashed:
        return difference(path, source.bytes, source.sha256) or ""
    num_bytes = path.stat().st_size
    return f"it has {num_bytes} bytes, expected {source.bytes}" if num_bytes != source.bytes else ""


def difference(path: Path, num_bytes: int, sha256: str) -> str | None:
    """Return a description of the difference between a file and the expected one, or None if they are equal."""
    found_bytes, found = fingerprint(path)
    if found_bytes != num_bytes:
        return f"it has {found_bytes} bytes, expected {num_bytes}"
    return None if found == sha256 else f"its SHA-256 is {found}, expected {sha256}"
