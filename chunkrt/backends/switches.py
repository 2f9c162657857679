"""Switches, which select whether an operator runs in its backend's or a plug-in's implementation, or in the reference.

    all            every operator (the default)
    none           no operator (the default of npu "reference")
    +rms_norm      switch this one on, regardless of the other switches
    -rms_norm      switch this one off

Several switches may be given, separated by commas or as a list: "none,+linear". A part of an operator, e.g. `rope` of
`cached_attention`, follows the operator unless it is named.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from chunkrt.errors import ConfigError, unknown_name

ALL, NONE = "all", "none"


@dataclass(frozen=True, kw_only=True)
class Switches:
    """Parsed switches of `ops`. `base` is "all", "none", or empty if neither was given."""

    base: str = ""
    on: frozenset[str] = frozenset()
    off: frozenset[str] = frozenset()

    @staticmethod
    def parse(ops: str | Sequence[str] | None) -> Switches:
        """Parse the user's switches.

        Raises:
            ConfigError: the value is not text, a switch is empty or has no sign, or two switches contradict each other.
        """
        texts = [] if ops is None else [ops] if isinstance(ops, str) else ops
        if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
            raise ConfigError(f"ops is {ops!r}, expected text such as 'none,+rms_norm', or a list of such texts")
        words = [word.strip() for text in texts for word in text.split(",")]
        bases = sorted({word for word in words if word in (ALL, NONE)})
        if len(bases) > 1:
            raise ConfigError("ops: 'all' and 'none' contradict each other; remove one of them")
        for word in words:
            if word not in (ALL, NONE) and (word[:1] not in ("+", "-") or len(word) < 2):
                name = word.lstrip("+-")
                hint = f"write +{name} to switch it on, -{name} to switch it off" if name else "name an operator"
                raise ConfigError(f"ops: {word!r} is not a switch; expected all, none, +name or -name; {hint}")
        on, off = (frozenset(word[1:] for word in words if word[:1] == sign) for sign in "+-")
        if both := sorted(on & off):
            raise ConfigError(f"ops: +{both[0]} and -{both[0]} contradict each other; remove one of them")
        return Switches(base=bases[0] if bases else "", on=on, off=off)

    def check(self, known: Collection[str], required: Collection[str]) -> None:
        """Refuse names of unknown or required operators.

        Args:
            known: every operator.
            required: operators that cannot be switched off.

        Raises:
            ConfigError: a name is unknown (the message suggests the nearest name), or the operator cannot be switched
                off.
        """
        for name in sorted(self.on | self.off):
            if name not in known:
                raise unknown_name("operator", name, known)
        if refused := sorted(self.off & set(required)):
            raise ConfigError(f"ops: the operator {refused[0]!r} requires its form and cannot be switched off")

    def why_off(self, operator: str, *, default: str = ALL) -> str:
        """Return the reason why an operator is switched off; empty if it is on.

        Args:
            default: "all" or "none", used if the switches name neither.
        """
        if operator in self.off:
            return f"switched off by `ops='-{operator}'`"
        if operator in self.on or (self.base or default) == ALL:
            return ""
        return "switched off by `ops='none'`" if self.base else "off by default with `npu='reference'`"

    def names(self, operator: str) -> bool:
        """Return whether a switch names an operator."""
        return operator in self.on | self.off
