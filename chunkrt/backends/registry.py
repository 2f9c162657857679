"""Registry of implementations, by canonical operator name and device.

chunkrt's devices are `reference` (a NumPy function), `native` (an emitter of instructions), `npu` (a lowering to ONNX)
and `link` (sums over ranks). A plug-in adds functions for its own devices, or replaces chunkrt's. Implementations are
looked up once, when a subgraph is compiled (`backends/dispatch.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from chunkrt.errors import ConfigError, PartitionError
from chunkrt.graph.operators import find_operator
from chunkrt.graph.plan import Node
from chunkrt.graph.uses import PARTS, SAMPLER, Use

REFERENCE, NATIVE, NPU, LINK = "reference", "native", "npu", "link"
OWN_DEVICES = (REFERENCE, NATIVE, NPU, LINK)

OWN_PACKAGE = "chunkrt"

ALL_PARTS = frozenset(part for parts in PARTS.values() for part in parts)
CALLED = (*sorted(ALL_PARTS), SAMPLER)
"""Operators that other code calls as functions, and that no backend implements."""


def nothing_refused(node: Node) -> str:
    """Return an empty reason: the default of `refuses`, for implementations that accept every node."""
    return ""


PREPARED = ("linear", "logits", "routed_experts", "shadow_linear")
"""Operators whose implementations may convert the weights of linears to their own form."""

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True)
class Implementation:
    """A device's implementation of an operator.

    Attributes:
        function: on `reference` and in every plug-in, it takes the node's inputs in order and its attributes by name,
            and returns its output or a tuple of outputs.
        module: the module that defines the function.
        distribution: the installed package that provides the function; empty for chunkrt.
        parts: operators that the function calls and takes as keyword arguments.
        is_required: True if the operator cannot be switched off.
        refuses: returns the reason why the function does not accept a node of the operator; empty if it does.
        prepare: converts a weight to the form that the function takes; None if no conversion is needed.
    """

    operator: str
    device: str
    function: Callable[..., Any]
    module: str
    distribution: str = ""
    parts: tuple[str, ...] = ()
    is_required: bool = False
    refuses: Callable[[Node], str] = nothing_refused
    prepare: Callable[[Any], Any] | None = None

    @property
    def is_plugin(self) -> bool:
        """True if a package other than chunkrt defines the implementation."""
        return bool(self.distribution) or self.module.partition(".")[0] != OWN_PACKAGE

    @property
    def provider(self) -> str:
        """Provider, for messages: the distribution, or the module of an implementation that was registered directly."""
        return self.distribution or self.module

    @property
    def origin(self) -> str:
        """Source, e.g. "chunkrt.backends.reference" or "chunkrt-torch (chunkrt_torch.norms)"."""
        return f"{self.distribution} ({self.module})" if self.distribution else self.module

    def refusal(self, node: Node) -> str:
        """Return the result of `refuses` for a node. Raises PartitionError if a plug-in's `refuses` raises an
        exception.
        """
        try:
            return self.refuses(node)
        except Exception as error:
            if not self.is_plugin:
                raise
            what = f"{type(error).__name__}: {error}"
            raise PartitionError(
                f"{self.origin} failed to decide whether it accepts node {node.name!r}: {what}; repair it"
            ) from error


class OperatorRegistry:
    """Implementations of operators, at most one for each name and device."""

    def __init__(self) -> None:
        self._entries: dict[tuple[str, str], Implementation] = {}
        self._own: dict[tuple[str, str], Implementation] = {}
        self._distribution = ""

    def register(
        self,
        operator: str,
        device: str,
        *,
        replaces: bool = False,
        parts: tuple[str, ...] = (),
        is_required: bool = False,
        refuses: Callable[[Node], str] = nothing_refused,
        prepare: Callable[[Any], Any] | None = None,
    ) -> Callable[[Function], Function]:
        """Register a callable as a device's implementation of an operator (a decorator).

        Args:
            operator: its canonical name, such as "rms_norm"; `chunkrt ops MODEL` lists them.
            device: "reference", "native", "npu", or a plug-in's own.
            replaces: whether the callable replaces chunkrt's implementation. A plug-in's replacement is a function.
            parts: "rope" or "quantize", if the callable takes it as a keyword argument, like the reference's attention.
            is_required: whether the operator cannot be switched off.
            refuses: returns the reason why the implementation does not accept a node, which then runs as if the
                implementation were not registered; empty if it accepts the node.
            prepare: for an operator in PREPARED: called with each weight of a node once, when its subgraph is compiled;
                the callable gets the result instead of the weight.

        Raises:
            ConfigError: the operator is already registered on the device; or the operator to replace does not exist, or
                a plug-in already replaced it; or the registered implementation would never be called, or is not
                callable.
        """

        def add(function: Function) -> Function:
            implementation = Implementation(
                operator=operator,
                device=device,
                function=function,
                module=getattr(function, "__module__", None) or type(function).__module__,
                distribution=self._distribution,
                parts=parts,
                is_required=is_required,
                refuses=refuses,
                prepare=prepare,
            )
            self._check(implementation, replaces=replaces)
            self._entries[operator, device] = implementation
            if not implementation.is_plugin:
                self._own[operator, device] = implementation
            return function

        return add

    def _check(self, new: Implementation, *, replaces: bool) -> None:
        what, old = f"{new.operator!r} on {new.device!r}", self._entries.get((new.operator, new.device))
        if old is None and replaces:
            raise ConfigError(f"{new.origin} replaces the operator {what}, which does not exist; omit replaces=True")
        if old is not None and (old.is_plugin or not replaces):
            hint = "pass replaces=True to replace it on purpose"
            if old.is_plugin:
                hint = "register it once" if old.provider == new.provider else "uninstall one of them"
            raise ConfigError(f"{new.origin} registers the operator {what}, which {old.origin} already has; {hint}")
        if not callable(new.function):
            raise ConfigError(f"{new.origin} registers the operator {what} as {new.function!r}, expected a function")
        if new.prepare is not None and not (callable(new.prepare) and new.operator in PREPARED):
            raise ConfigError(
                f"{new.origin} registers the operator {what} with prepare={new.prepare!r}, expected a function; "
                f"operators with weights to prepare are {', '.join(PREPARED)}"
            )
        if new.operator in CALLED and new.device in (NATIVE, NPU, LINK):
            raise ConfigError(
                f"{new.origin} registers the operator {what}, where it is never called; name a device of your own, or "
                "'reference' with replaces=True"
            )
        parts = () if new.operator in CALLED else ALL_PARTS
        if unknown := [part for part in new.parts if part not in parts]:
            known = f"known parts: {', '.join(sorted(parts))}" if parts else f"{new.operator!r} takes no parts"
            raise ConfigError(f"{new.origin} registers the operator {what} with the part {unknown[0]!r}; {known}")

    @contextmanager
    def from_distribution(self, name: str) -> Iterator[None]:
        """Attribute the registrations inside the context to an installed plug-in; if the plug-in fails, all of them are
        undone.
        """
        with self.all_or_nothing():
            self._distribution = name
            try:
                yield
            finally:
                self._distribution = ""

    @contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """Undo the registrations made inside the context if an exception is raised."""
        before = self._entries.copy()
        try:
            yield
        except BaseException:
            self._entries = before
            raise

    def copy(self, *, without: Collection[tuple[str, str]] = ()) -> OperatorRegistry:
        """Return an independent registry with the same implementations, except those of pairs (operator, device)."""
        other = OperatorRegistry()
        for entries, copied in ((self._entries, other._entries), (self._own, other._own)):
            copied.update((key, entry) for key, entry in entries.items() if key not in without)
        return other

    def find(self, operator: str, device: str) -> Implementation | None:
        """Return the implementation for a device: the plug-in's if a plug-in replaced chunkrt's."""
        return self._entries.get((operator, device))

    def find_own(self, operator: str, device: str) -> Implementation | None:
        """Return chunkrt's own implementation, even if a plug-in replaced it."""
        return self._own.get((operator, device))

    def find_plugin(self, operator: str, device: str) -> Implementation | None:
        """Return a plug-in's implementation of an operator that would run on `device`, regardless of its refusals.

        Raises:
            ConfigError: several implementations exist.
        """
        found = self._plugins(operator, device)
        if len(found) > 1:
            raise _several(found)
        return found[0] if found else None

    def pick_plugin(self, operator: str, device: str, node: Node) -> tuple[Implementation | None, str]:
        """Return the plug-in's implementation that accepts a node, or None, and the reasons of the implementations that
        refuse the node.

        Raises:
            ConfigError: several implementations accept the node.
            PartitionError: the `refuses` of an implementation fails.
        """
        refusals = [(form, form.refusal(node)) for form in self._plugins(operator, device)]
        takers = [form for form, refusal in refusals if not refusal]
        if len(takers) > 1:
            raise _several(takers, node)
        reasons = [f"; plug-in {form.provider} refuses it: {refusal}" for form, refusal in refusals if refusal]
        return (takers[0] if takers else None), "".join(reasons)

    def _plugins(self, operator: str, device: str) -> list[Implementation]:
        """Return plug-ins' implementations of an operator that would run on `device`: replacements of chunkrt's, and
        those on plug-ins' own devices.
        """
        return [
            entry
            for (name, where), entry in self._entries.items()
            if name == operator and entry.is_plugin and (where == device or where not in OWN_DEVICES)
        ]

    def check_plugins(self, distribution: str) -> None:
        """Raise ConfigError if a plug-in has several forms of an operator, and none of them ever refuses a node."""
        mine = [entry for entry in self._entries.values() if entry.distribution == distribution]
        for entry in mine:
            for device in OWN_DEVICES if entry.device not in OWN_DEVICES else (entry.device,):
                found = self._plugins(entry.operator, device)
                is_chosen_by_node = any(form.refuses is not nothing_refused for form in found)
                if len(found) > 1 and (entry.operator in CALLED or not is_chosen_by_node):
                    raise _several(found)

    def is_required(self, operator: str) -> bool:
        """Return whether an implementation of an operator is required, so that the operator cannot be switched off."""
        return any(entry.is_required for (name, _), entry in self._entries.items() if name == operator)

    def names(self) -> list[str]:
        """Return the canonical names of all registered operators."""
        return sorted({name for name, _ in self._entries})

    def own_takes(self, use: Use) -> bool:
        """Return whether chunkrt's own reference has an operator and accepts the node."""
        return not self.missing(use, REFERENCE)

    def missing(self, use: Use, device: str) -> str:
        """Return a message if chunkrt itself has no implementation for a use on a device; empty if it has one.

        On `npu`, the expansion of a plug-in's operator into standard ONNX counts as chunkrt's.
        """
        row = find_operator(use.node.domain, use.node.op)
        if device == NPU and row is not None and row.expansion:
            return ""
        if own := self._own.get((use.operator, device)):
            return own.refuses(use.node)
        known = ", ".join(sorted(name for name, where in self._own if where == device))
        return f"{device} has no operator {qualified(use.node.domain, use.node.op)}; it has: {known}"


def _several(forms: Sequence[Implementation], node: Node | None = None) -> ConfigError:
    """Return the error for several implementations of one operator with equal priority."""
    operator, where = forms[0].operator, f", and node {node.name!r} is accepted by each" if node else ""
    share = "" if operator in CALLED else "; or let refuses= of each leave nodes to the others"
    if len({form.provider for form in forms}) == 1:
        count = "two" if len(forms) == 2 else len(forms)
        devices = " and ".join(repr(form.device) for form in forms)
        what = f"{count} forms of one operator in package {forms[0].provider}: {operator!r} on {devices}"
        return ConfigError(f"{what}{where}; register one of them{share}")
    several = " and ".join(f"{form.origin} on {form.device!r}" for form in forms)
    return ConfigError(
        f"the operator {operator!r} is registered several times, by {several}{where}; uninstall all but one{share}"
    )


operators = OperatorRegistry()
"""All implementations. chunkrt's are registered when their modules are imported, plug-ins' before the first dispatch.
"""


def qualified(domain: str, op: str) -> str:
    """Return an operator's qualified name in ONNX: "MatMul", "chunkrt::CachedAttention"."""
    return f"{domain}::{op}" if domain else op
