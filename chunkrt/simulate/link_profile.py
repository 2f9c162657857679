"""Profiles of links, the network between the ranks of one decoder, and the duration of a sum over ranks.

The profiles in `links/` name the source of every number, like device profiles (`profile.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import isfinite
from pathlib import Path

from chunkrt.errors import ConfigError, unknown_name
from chunkrt.runtime.ranks.messages import exchange_of
from chunkrt.simulate.toml_tables import Source, build, read_table

_FOLDER = Path(__file__).parent / "links"
LINKS = tuple(sorted(path.stem for path in _FOLDER.glob("*.toml")))
"""Profiles that come with chunkrt."""

_GIVEN = ("gb_per_s", "latency_us")
FORM = "gb_per_s=1.25,latency_us=50"


@dataclass(frozen=True, kw_only=True)
class LinkProfile:
    """One link, full duplex and exclusive to each rank, through a non-blocking switch.

    Attributes:
        nominal_gbit_per_s: the advertised speed, which is not used in computations.
        gb_per_s: TCP's payload speed in one direction.
        latency_us: one-way latency of a message between two programs.
        sources: source of every number, by its name.
    """

    name: str
    nominal_gbit_per_s: float
    gb_per_s: float
    latency_us: float
    sources: Mapping[str, Source] = field(default_factory=dict)

    def sum_us(self, num_bytes: int, ranks: int) -> float:
        """Return the microseconds of a sum of `num_bytes` over ranks that all begin at once, without other traffic."""
        steps, sent_bytes = exchange_of(num_bytes, ranks)
        return steps * self.latency_us + sent_bytes / (1000 * self.gb_per_s)

    def gather_us(self, num_bytes: int, ranks: int) -> float:
        """Return the microseconds in which a rank receives a part of `num_bytes` from every other rank."""
        return self.latency_us + (ranks - 1) * num_bytes / (1000 * self.gb_per_s)

    def __str__(self) -> str:
        return f"{self.name} ({self.gb_per_s:g} GB/s, {self.latency_us:g} us)"


def find_link(text: str) -> LinkProfile:
    """Return a link, given the name of a bundled link, the path of a TOML file, or two numbers as in FORM.

    Raises:
        ConfigError: the name is unknown, the file is invalid, or a number is missing or invalid.
    """
    if text in LINKS:
        return read_link(_FOLDER / f"{text}.toml")
    if text.endswith(".toml"):
        return read_link(Path(text))
    if "=" in text:
        return _given(text)
    raise unknown_name("link", text, LINKS, hint=f"available: {', '.join(LINKS)}, a TOML file, or numbers as in {FORM}")


def read_link(path: Path) -> LinkProfile:
    """Read a profile.

    Raises:
        ConfigError: the file cannot be read, or a key is unknown, missing or invalid.
    """
    sources: dict[str, Source] = {}
    link = build(LinkProfile, read_table(path), str(path), sources)
    if link.gb_per_s == 0:
        raise ConfigError(f"{path}: gb_per_s is 0, expected a speed above 0")
    return replace(link, sources=sources)


def _given(text: str) -> LinkProfile:
    """Parse a link from "gb_per_s=NUMBER,latency_us=NUMBER", in any order."""
    numbers: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = (piece.strip() for piece in part.partition("="))
        if name not in _GIVEN:
            raise unknown_name("number of a link", name, _GIVEN, hint=f"write both, as in {FORM}")
        if name in numbers:
            raise ConfigError(f"the link {text!r} gives {name} twice")
        try:
            numbers[name] = float(value)
        except ValueError:
            numbers[name] = -1.0
        least = "above 0" if name == "gb_per_s" else "of at least 0"
        if not isfinite(numbers[name]) or numbers[name] < 0 or (name == "gb_per_s" and not numbers[name]):
            raise ConfigError(f"the link {text!r} has {name} {value!r}, expected a number {least}")
    if missing := [name for name in _GIVEN if name not in numbers]:
        raise ConfigError(f"the link {text!r} lacks {missing[0]}; write both numbers, as in {FORM}")
    source = Source(text="given", is_guess=False)
    return LinkProfile(
        name="link as given",
        nominal_gbit_per_s=8 * numbers["gb_per_s"],
        **numbers,
        sources=dict.fromkeys(_GIVEN, source),
    )
