"""Switches: which operators run in the form of their backend or of a plug-in, and which in the reference's.

    all            every operator (the default)
    none           no operator (the default of npu "reference")
    +rms_norm      this one, whatever else is said
    -rms_norm      not this one

Several may be given, with commas between or as several texts: "none,+linear". A part of an operator, as `rope` is of
`cached_attention`, goes with the operator unless it is named.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from chunkrt.errors import ConfigError, unknown_name

ALL, NONE = "all", "none"


@dataclass(frozen=True, kw_only=True)
class Switches:
    """What `ops` says. `base`: "all", "none", or empty if neither was given."""

    base: str = ""
    on: frozenset[str] = frozenset()
    off: frozenset[str] = frozenset()

    @staticmethod
    def parse(ops: str | Sequence[str] | None) -> Switches:
        """Read what a person wrote.

        Raises:
            ConfigError: it is no text, a switch is empty or has no sign, or two contradict each other.
        """
        texts = [] if ops is None else [ops] if isinstance(ops, str) else ops
        if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
            raise ConfigError(f"ops is {ops!r}, expected text such as 'none,+rms_norm', or a list of such texts")
        words = [word.strip() for text in texts for word in text.split(",")]
        bases = sorted({word for word in words if word in (ALL, NONE)})
        if len(bases) > 1:
            raise ConfigError("ops: 'all' and 'none' contradict each other; give one of them")
        for word in words:
            if word not in (ALL, NONE) and (word[:1] not in ("+", "-") or len(word) < 2):
                name = word.lstrip("+-")
                hint = f"write +{name} to switch it on, -{name} to switch it off" if name else "name an operator"
                raise ConfigError(f"ops: {word!r} is no switch, expected all, none, +name or -name; {hint}")
        on, off = (frozenset(word[1:] for word in words if word[:1] == sign) for sign in "+-")
        if both := sorted(on & off):
            raise ConfigError(f"ops: +{both[0]} and -{both[0]} contradict each other; give one of them")
        return Switches(base=bases[0] if bases else "", on=on, off=off)

    def check(self, known: Collection[str], required: Collection[str]) -> None:
        """Refuse names that nobody has.

        Args:
            known: every operator.
            required: those that insist on their form.

        Raises:
            ConfigError: an unknown name, with the nearest offered; or one that cannot be switched off.
        """
        for name in sorted(self.on | self.off):
            if name not in known:
                raise unknown_name("operator", name, known)
        if refused := sorted(self.off & set(required)):
            raise ConfigError(f"ops: the operator {refused[0]!r} insists on its form and cannot be switched off")

    def why_off(self, operator: str, *, default: str = ALL) -> str:
        """Why an operator is switched off, in words; empty if it is on.

        Args:
            default: "all" or "none", where the switches say neither.
        """
        if operator in self.off:
            return f"switched off by --ops -{operator}"
        if operator in self.on or (self.base or default) == ALL:
            return ""
        return "switched off by --ops none" if self.base else "off by default with npu 'reference'"

    def names(self, operator: str) -> bool:
        """Whether an operator is named, on or off."""
        return operator in self.on | self.off
