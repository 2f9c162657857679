"""Placement: assignment of modules to devices by a file or a mapping, before the decoder is traced.

A placement file is TOML, with one line for each pattern of module paths. A line applies to the matching modules and to
all modules below them; later lines take precedence:

    "model.layers.*.mlp.down_proj" = "cpu"
    "lm_head" = "npu"

The text "layers=0,15" is a placement of these decoder layers on the NPU and all others on the CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Protocol, get_args

from chunkrt.errors import ConfigError, cause_of
from chunkrt.files import read_toml
from chunkrt.graph.plan import Place

Placement = Mapping[str, Place]
"""Devices by pattern of module paths; the pattern "" matches the complete decoder."""


class Placed(Protocol):
    """An object with a placement, such as a tree of `chunkrt.graph.load_module`."""

    @property
    def placement(self) -> Placement:
        """Devices by pattern of module paths."""
        ...


ALL_ON_CPU: Placement = {"": "cpu"}

MOST_DIGITS = 9
LAYERS = "layers="
"""Prefix of a text that lists the decoder layers for the NPU."""


def read_placement(path: Path) -> Placement:
    """Read a placement file, or the text "layers=0,15" in place of its name.

    Raises:
        ConfigError: the file cannot be read, is not TOML, or names an unknown device; or the text has no numbers.
    """
    if str(path).startswith(LAYERS):
        return layers_placement(str(path))
    try:
        placement = read_toml(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the placement file {path}: {cause_of(error)}") from error
    return check_placement(placement, str(path))


def layers_placement(text: str) -> Placement:
    """Return the placement of a text that begins with LAYERS. Raise ConfigError unless numbers follow."""
    numbers = text.removeprefix(LAYERS).split(",")
    if not all(number.strip().isdecimal() and len(number) <= MOST_DIGITS for number in numbers):
        raise ConfigError(f"the placement is {text!r:.80}, expected numbers of layers, as in layers=0,15")
    return {"model.layers.*": "cpu", **{f"model.layers.{int(number)}": "npu" for number in numbers}}


def check_placement(placement: Any, where: str) -> Placement:
    """Validate an untrusted placement and return it.

    Args:
        placement: the object from the file or the argument; a module tree, whose placement is returned; or the text
            "layers=0,15".
        where: the file or the argument, for messages.

    Raises:
        ConfigError: the placement is not a mapping of patterns to devices.
    """
    if isinstance(placement, str) and placement.startswith(LAYERS):
        return layers_placement(placement)
    if not isinstance(placement, Mapping):
        placement = getattr(placement, "placement", placement)  # a module tree
    if not isinstance(placement, Mapping):
        raise ConfigError(f"{where} holds {placement!r}, expected a mapping such as {{'lm_head': 'npu'}}")
    for pattern, device in placement.items():
        if device not in get_args(Place):
            hint = "; write the pattern in quotes" if isinstance(device, Mapping) else ""
            raise ConfigError(f"{where}: {pattern!r} is placed on {device!r}, expected 'npu' or 'cpu'{hint}")
    return dict(placement)


def placed_by_name(placement: Placement, node: str) -> Place | None:
    """Return the device of a node by its name, which begins with its module's path; None if no pattern matches."""
    devices = [device for pattern, device in placement.items() if matches(pattern, node)]
    return devices[-1] if devices else None


def matches(pattern: str, node: str) -> bool:
    """Return whether a pattern of module paths matches one of the modules that contain a node, by the node's name."""
    parts = node.split(".")
    return any(fnmatchcase(".".join(parts[:length]), pattern) for length in range(len(parts)))
