"""Switches, which select the form of an operator that runs, for all of its nodes or for those of some modules.

    all                                 every operator runs in its preferred form (the default)
    none                                every operator runs in the reference (the default of npu "reference")
    +rms_norm                           switch this one on, regardless of `none`
    -rms_norm                           switch this one off: it runs in the reference
    rms_norm=acme                       choose a form by name
    rms_norm=acme/native                choose the first of these forms that accepts a node
    model.layers.*.mlp.linear=acme      as above, for the nodes of the modules that a pattern matches

Several switches may be given, separated by commas or as a list: "none,+linear". A switch with a pattern takes
precedence over one without; of several patterns that match a node, the last one decides. Patterns match as in a
placement. A part of an operator, e.g. `rope` of `cached_attention`, follows the operator unless it is named.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from chunkrt.errors import ConfigError, unknown_name
from chunkrt.graph.placement import matches

ALL, NONE = "all", "none"

REFERENCE = "reference"

_WORD = re.compile(r"(?P<sign>[+-]?)(?:(?P<path>[^=]+)\.)?(?P<operator>[^=.]+)(?:=(?P<forms>[^=]+))?")


@dataclass(frozen=True, kw_only=True)
class Switch:
    """A switch of one operator.

    Attributes:
        text: the switch as the user wrote it.
        path: pattern of module paths; empty for all nodes.
        forms: names of forms, the preferred one first; empty for a switch that switches the operator on.
    """

    text: str
    path: str
    operator: str
    forms: tuple[str, ...]

    @property
    def is_off(self) -> bool:
        """True if the switch leaves the reference alone."""
        return self.forms == (REFERENCE,)

    @property
    def reason(self) -> str:
        """Reason of the choice, in terms of the option."""
        return f"{'switched off' if self.text.startswith('-') else 'chosen'} by `ops='{self.text}'`"

    def applies_to(self, operator: str, node: str) -> bool:
        """Return whether the switch names an operator and its pattern matches a node, by the node's name."""
        return operator == self.operator and (not self.path or matches(self.path, node))


@dataclass(frozen=True, kw_only=True)
class Switches:
    """Parsed switches of `ops`. `base` is "all", "none", or empty if neither was given."""

    base: str = ""
    switches: tuple[Switch, ...] = ()

    @staticmethod
    def parse(ops: str | Sequence[str] | None) -> Switches:
        """Parse the user's switches.

        Raises:
            ConfigError: the value is not text, a switch is malformed, or two switches contradict each other.
        """
        texts = [] if ops is None else [ops] if isinstance(ops, str) else ops
        if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
            raise ConfigError(f"ops is {ops!r}, expected text such as 'none,+rms_norm', or a list of such texts")
        words = [word.strip() for text in texts for word in text.split(",")]
        bases = sorted({word for word in words if word in (ALL, NONE)})
        if len(bases) > 1:
            raise ConfigError("ops: 'all' and 'none' contradict each other; remove one of them")
        switches = tuple(map(_parse, (word for word in words if word not in (ALL, NONE))))
        for one, other in combinations(switches, 2):
            is_same = (one.path, one.operator) == (other.path, other.operator)
            if is_same and one.forms != other.forms:
                raise ConfigError(f"ops: {one.text} and {other.text} contradict each other; remove one of them")
        return Switches(base=bases[0] if bases else "", switches=switches)

    def check(
        self, known: Collection[str], forms: Callable[[str], Collection[str]], required: Mapping[str, str]
    ) -> None:
        """Refuse names of unknown operators and forms, and switches that rule out a required form.

        Args:
            known: every operator.
            forms: returns the names of an operator's forms.
            required: the form that an operator requires on all nodes, by operator.

        Raises:
            ConfigError: a name is unknown (the message suggests the nearest name), or a required form is ruled out.
        """
        for switch in self.switches:
            if switch.operator not in known:
                raise unknown_name("operator", switch.operator, known)
            for form in switch.forms:
                if form not in (names := forms(switch.operator)) and not switch.text.startswith("-"):
                    raise unknown_name(f"form of {switch.operator}", form, names)
            form = required.get(switch.operator, "")
            if form and switch.forms and form not in switch.forms:
                raise ConfigError(
                    f"ops: the operator {switch.operator!r} requires its form {form!r}, so {switch.text} has no "
                    "effect; remove it"
                )

    def check_paths(self, nodes: Iterable[tuple[str, str]]) -> None:
        """Refuse patterns that match no node.

        Args:
            nodes: pairs of an operator and a node's name, for all nodes of a plan and their parts.

        Raises:
            ConfigError: a pattern matches no node of its operator.
        """
        if not any(switch.path for switch in self.switches):
            return
        nodes = list(nodes)
        for switch in self.switches:
            if switch.path and not any(switch.applies_to(*node) for node in nodes):
                of_operator = [name for operator, name in nodes if operator == switch.operator]
                raise ConfigError(f"ops: {switch.text} matches no {switch.operator}; {_hint(switch, of_operator)}")

    def find(self, operator: str, node: str) -> Switch | None:
        """Return the switch that decides about an operator at a node; None if only `base` does."""
        found = [switch for switch in self.switches if switch.applies_to(operator, node)]
        return next(reversed([switch for switch in found if switch.path] or found), None)

    def why_off(self, *, default: str = ALL) -> str:
        """Return the reason why operators without a switch of their own are off; empty if they are on.

        Args:
            default: "all" or "none", used if the switches name neither.
        """
        if (self.base or default) == ALL:
            return ""
        return "switched off by `ops='none'`" if self.base else "off by default with `npu='reference'`"


def _parse(word: str) -> Switch:
    found = _WORD.fullmatch(word)
    sign, forms = (found["sign"], found["forms"]) if found else ("", None)
    if found is None or bool(sign) == bool(forms):
        named = re.fullmatch(r"[+-]*([^=+-][^=]*)=?", word)
        hint = "name an operator"
        if named:
            hint = "write +{0} to switch it on, -{0} to switch it off, {0}=FORM to choose its form".format(named[1])
        raise ConfigError(
            f"ops: {word!r} is not a switch; expected all, none, +name, -name or name=form, where a pattern of modules "
            f"may precede the name; {hint}"
        )
    names = tuple(forms.split("/")) if forms else (REFERENCE,) if sign == "-" else ()
    if "" in names or len(set(names)) < len(names):
        raise ConfigError(f"ops: {word!r} names the forms {forms!r}; separate different names by one '/'")
    return Switch(text=word, path=found["path"] or "", operator=found["operator"], forms=names)


def _hint(switch: Switch, nodes: Sequence[str]) -> str:
    """Return advice for a pattern that matches none of an operator's nodes."""
    if not nodes:
        return "the model has none; omit the switch"
    if any(matches(f"*.{switch.path}", node) for node in nodes):
        return f"write {switch.text.replace(switch.path, '*.' + switch.path, 1)}, because a pattern matches whole paths"
    modules = ", ".join(dict.fromkeys(repr(node.rpartition(".")[0] or node) for node in nodes[:2]))
    return f"a pattern matches paths of modules such as {modules}"
