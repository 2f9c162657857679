"""Profiles composed of two descriptions: facts about an SoC, and costs of a software as multiples of these facts.

`socs.toml` lists facts for each SoC. A file of `software/` is a device profile without a name and an SoC, in which a
parameter may be a multiple of a fact: `gops = { value = 380, of = "npu_tops", source = "..." }`. So an SoC without any
published run gets a profile too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from chunkrt.backends.qnn.socs import find_soc
from chunkrt.errors import ConfigError, unknown_name
from chunkrt.simulate.toml_tables import DEFAULT_FACTOR, read_table

_FOLDER = Path(__file__).parent
_SOFTWARE = _FOLDER / "software"

SOFTWARE = tuple(sorted(path.stem for path in _SOFTWARE.glob("*.toml")))
"""Descriptions of software that come with chunkrt."""

DEFAULT_SOFTWARE = "genie"
"""Software of a device that is named by its SoC alone, and has no profile of its own."""


@cache
def soc_facts() -> Mapping[str, Mapping[str, Any]]:
    """Return the tables of all SoCs, by Qualcomm's name."""
    return read_table(_FOLDER / "socs.toml")


def software_table(name: str) -> dict[str, Any]:
    """Return the description of a software. Raise ConfigError if the name is unknown."""
    if name not in SOFTWARE:
        raise unknown_name("software", name, SOFTWARE)
    return read_table(_SOFTWARE / f"{name}.toml")


def find_facts(name: str) -> tuple[str, Mapping[str, Any]] | None:
    """Return Qualcomm's name of an SoC, and its facts; None if there are none."""
    facts = soc_facts()
    if (exact := name.upper()) in facts:
        return exact, facts[exact]
    try:
        found = find_soc(name).name
    except ConfigError:
        return None
    return (found, facts[found]) if found in facts else None


def compose(soc: str, facts: Mapping[str, Any], software: Mapping[str, Any]) -> dict[str, Any]:
    """Return the table of a profile, in which every parameter has its own value, range and source.

    Raises:
        ConfigError: a parameter names an unknown fact.
    """
    table = dict(software)
    title = table.pop("title")
    return {"name": f"{facts['product']} with {title}", "soc": soc} | _resolved(table, facts, soc)


def _resolved(table: Mapping[str, Any], facts: Mapping[str, Any], soc: str) -> dict[str, Any]:
    def value_of(key: str, found: Any) -> Any:
        if not isinstance(found, Mapping):
            return found
        return _product(key, found, facts, soc) if "of" in found else _resolved(found, facts, soc)

    return {key: value_of(key, found) for key, found in table.items()}


def _product(key: str, share: Mapping[str, Any], facts: Mapping[str, Any], soc: str) -> dict[str, Any]:
    """Return a parameter that is a multiple of a fact. Their errors are independent."""
    name = share["of"]
    if name not in facts:
        raise ConfigError(f"{key} is a multiple of {name!r}; {unknown_name('fact', name, [*facts])}")
    fact = facts[name]
    value = share["value"] * fact["value"]
    below, above = (
        math.exp(math.hypot(*(math.log(_end(part, end) / part["value"]) for part in (share, fact)))) for end in (0, 1)
    )
    return {
        "value": value,
        "source": f"{share['value']:g} x {fact['value']:g} of {soc} ({fact['source']}): {share['source']}",
        "guess": share.get("guess", False) or fact.get("guess", False),
        "range": [value / below, value * above],
    }


def _end(parameter: Mapping[str, Any], end: int) -> float:
    factor = DEFAULT_FACTOR[parameter.get("guess", False)]
    return float(parameter.get("range", [parameter["value"] / factor, parameter["value"] * factor])[end])
