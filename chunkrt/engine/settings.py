"""The settings file: options of an engine as TOML, which `chunkrt tune` writes and the commands take with --settings.

    soc = "SM8650"
    scheme = "w8a16"
    chunk_length = 128
    policy = "look_ahead"
    chunks_in_flight = 4

    [placement]
    "model.layers.*.mlp.down_proj" = "cpu"

Keys are the fields of `EngineOptions`. `[placement]` assigns devices to patterns of module paths, and `[htp]` contains
settings of the NPU. `placement = "layers=0,15"` puts only these decoder layers on the NPU. The key `device`, a profile,
is for simulations alone.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from chunkrt.backends.qnn.htp_options import HtpOptions
from chunkrt.engine.arguments import require_path
from chunkrt.engine.options import EngineOptions
from chunkrt.errors import ConfigError, cause_of, unknown_name
from chunkrt.files import read_toml
from chunkrt.graph.placement import LAYERS

DEVICE = "device"
"""Key of the profile with which a simulation chose the settings."""


def read_settings(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the fields of `EngineOptions` in a settings file, for `chunkrt.load(model, **read_settings(path))`.

    The paths of a calibration and of an adapter are relative to the folder of the settings file.

    Raises:
        ConfigError: the file cannot be read, a key is unknown, or a value is not allowed.
    """
    path = Path(require_path("path", path))
    settings = _read(path)
    settings.pop(DEVICE, None)
    known = EngineOptions.__dataclass_fields__
    try:
        for key in settings:
            if key not in known:
                raise unknown_name("key", key, known)
        for key, other in (("placement", ', or "layers=0,15"'), ("htp", "")):
            is_list = key == "placement" and str(settings.get(key)).startswith(LAYERS)
            if not (is_list or isinstance(settings.get(key, {}), dict)):
                raise ConfigError(f"{key} is {settings[key]!r}, expected a table, [{key}]{other}")
        if "htp" in settings:
            settings["htp"] = HtpOptions.parse([f"{name}={value}" for name, value in settings["htp"].items()])
        for key, kind in (("calibration", "file"), ("adapter", "file or folder")):
            if key in settings:
                if not isinstance(settings[key], str):
                    raise ConfigError(f"{key} is {settings[key]!r}, expected the name of a {kind}")
                settings[key] = path.parent / settings[key]
        options = EngineOptions(**settings)
    except ConfigError as error:
        raise ConfigError(f"{path}: {str(error).replace('`', '')}") from error
    return {name: getattr(options, name) for name in settings}


def read_device(path: str | os.PathLike[str]) -> str | None:
    """Return the device of a settings file for simulations: its profile, or else its SoC; None if it names neither.

    A profile's file is relative to the folder of the settings file.

    Raises:
        ConfigError: the file cannot be read, or the device is not text.
    """
    path = Path(require_path("path", path))
    settings = _read(path)
    name = settings.get(DEVICE)
    if name is None:
        return settings.get("soc")
    return str(path.parent / name) if name.endswith(".toml") else str(name)


def _read(path: Path) -> dict[str, Any]:
    try:
        settings = read_toml(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the settings file {path}: {cause_of(error)}") from error
    if not isinstance(settings.get(DEVICE, ""), str):
        raise ConfigError(f"{path}: {DEVICE} is {settings[DEVICE]!r}, expected a name or a file, as of --device")
    return settings


def settings_text(settings: Mapping[str, str | int | Mapping[str, str]], comments: Sequence[str]) -> str:
    """Return the text of a settings file. Comments come first, then fields of `EngineOptions`, and tables last."""
    plain = {key: value for key, value in settings.items() if not isinstance(value, Mapping)}
    tables = {key: value for key, value in settings.items() if isinstance(value, Mapping)}
    lines = [f"# {' '.join(comment.split())}" for comment in comments]
    lines += [f"{key} = {_toml(value)}" for key, value in plain.items()]
    for name, table in tables.items():
        lines += ["", f"[{name}]", *(f"{_toml(key)} = {_toml(value)}" for key, value in table.items())]
    return "\n".join(lines) + "\n"


def _toml(value: str | int) -> str:
    return json.dumps(value, ensure_ascii=False)
