"""Registry of forms: the implementations of operators, by canonical operator name and form name.

chunkrt's forms are `reference` (a NumPy function), `native` (an emitter of instructions), `npu` (a lowering to ONNX)
and `link` (sums over ranks). A plug-in adds forms of its own, which are functions or classes. Forms are looked up once,
when a subgraph is compiled (`backends/dispatch.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, TypeVar

from chunkrt.backends import PLUGINS as BACKENDS_OF_PLUGINS
from chunkrt.errors import ConfigError, PartitionError, unknown_name
from chunkrt.graph.operators import find_operator
from chunkrt.graph.plan import Node
from chunkrt.graph.uses import PARTS, SAMPLER, OperatorNode, Use, operator_names

REFERENCE, NATIVE, NPU, LINK = "reference", "native", "npu", "link"

OWN_BACKENDS = ("native", "onnxrt", "qnn", "reference")

RESERVED = frozenset({*OWN_BACKENDS, NPU, LINK, "all", "none"})
"""Names that no form of a plug-in may have; "reference" is allowed for operators that chunkrt's reference lacks."""

OWN_PACKAGE = "chunkrt"

ALL_PARTS = frozenset(part for parts in PARTS.values() for part in parts)
CALLED = (*sorted(ALL_PARTS), SAMPLER)
"""Operators that other code calls as functions, and that no backend implements."""

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True)
class OperatorForm:
    """An implementation of an operator.

    Attributes:
        name: the form's name, by which `ops` chooses it.
        function: `reference` and every plug-in's form: a function of the node's inputs in order and its attributes by
            name, which returns the output or a tuple of outputs; or a class, see `NodeObject`.
        module: the module that defines the function.
        distribution: the installed package that provides the function; empty for chunkrt.
        backends: backends in whose subgraphs the form runs; empty for all.
        parts: operators that the function calls and takes as keyword arguments.
        is_required: True if nothing may replace the form, or a function that returns this for a node.
        refuses: returns the reason why the form does not accept a node; empty or None if it does.
    """

    operator: str
    name: str
    function: Callable[..., Any]
    module: str
    distribution: str = ""
    backends: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    is_required: bool | Callable[[OperatorNode], bool] = False
    refuses: Callable[[Any], str | None] | None = None

    @property
    def is_plugin(self) -> bool:
        """True if a package other than chunkrt defines the form."""
        return bool(self.distribution) or self.module.partition(".")[0] != OWN_PACKAGE

    @property
    def is_class(self) -> bool:
        """True if an object of the class is made for each node. A class of samplers is called for each session."""
        return isinstance(self.function, type) and self.operator != SAMPLER

    @property
    def prepares(self) -> bool:
        """True if an object of the class gets its weights once, before all calls."""
        return self.is_class and hasattr(self.function, "prepare")

    @property
    def provider(self) -> str:
        """Provider, for messages: the distribution, or the module of a form that was registered directly."""
        return self.distribution or self.module

    @property
    def origin(self) -> str:
        """Source, e.g. "chunkrt.backends.reference" or "chunkrt-torch (chunkrt_torch.norms)"."""
        return f"{self.distribution} ({self.module})" if self.distribution else self.module

    def runs_for(self, backend: str) -> bool:
        """Return whether the form may run in subgraphs of a backend."""
        return not self.backends or backend in self.backends

    def refusal(self, node: Node) -> str:
        """Return the reason why the form does not accept a node; empty if it does. Raises PartitionError if a plug-in's
        `refuses` fails.
        """
        if self.refuses is None:
            return ""
        reason = self._ask(self.refuses, node, "whether it accepts")
        if not isinstance(reason, str | None):
            raise PartitionError(
                f"{self.origin}: refuses= of form {self.name!r} of {self.operator!r} returned {reason!r} for node "
                f"{node.name!r}, expected a reason, or '' to accept the node; repair it"
            )
        return " ".join((reason or "").split())  # one line

    def requires(self, node: OperatorNode) -> bool:
        """Return whether nothing may replace the form at a node. Raises PartitionError if a plug-in's `is_required`
        fails.
        """
        if isinstance(self.is_required, bool):
            return self.is_required
        return bool(self._ask(self.is_required, node, "whether it is required for"))

    def _ask(self, question: Callable[[Any], Any], node: Node, what: str) -> Any:
        try:
            return question(node)
        except Exception as error:
            if not self.is_plugin:
                raise
            raise PartitionError(
                f"{self.origin} failed to decide {what} node {node.name!r}: {type(error).__name__}: {error}; repair it"
            ) from error


class OperatorRegistry:
    """Forms of operators by name, those of one operator in the order of their registration."""

    def __init__(self) -> None:
        self._forms: dict[str, dict[str, OperatorForm]] = {}
        self._distribution = ""

    def register(
        self,
        operator: str,
        name: str,
        *,
        backends: tuple[str, ...] = (),
        parts: tuple[str, ...] = (),
        is_required: bool | Callable[[OperatorNode], bool] = False,
        refuses: Callable[[OperatorNode], str | None] | None = None,
    ) -> Callable[[Function], Function]:
        """Register a function or a class as a form of an operator (a decorator).

        A package may register several forms of an operator. Each node runs in the first one that accepts it.

        Args:
            operator: its canonical name, such as "rms_norm"; `chunkrt ops MODEL` lists them.
            name: the form's name, which is free for the operator.
            backends: names of the backends in whose subgraphs the form runs; all if it is empty.
            parts: "rope" or "quantize", if the function takes it as a keyword argument, like the reference's attention.
            is_required: whether the operator may run in this form alone; or a function of a node that returns this.
            refuses: a function of a node that returns the reason why the form does not accept it; the node then runs in
                the next form. It returns an empty text or None if the form accepts the node.

        Raises:
            ConfigError: the operator has a form of that name; or the form would never be called, or is not callable.
        """

        def add(function: Function) -> Function:
            form = OperatorForm(
                operator=operator,
                name=name,
                function=function,
                module=getattr(function, "__module__", None) or type(function).__module__,
                distribution=self._distribution,
                backends=backends,
                parts=parts,
                is_required=is_required,
                refuses=refuses,
            )
            self._check(form)
            self._forms.setdefault(operator, {})[name] = form
            return function

        return add

    def _check(self, new: OperatorForm) -> None:
        start = f"{new.origin} registers the form {new.name!r} of {new.operator!r}"
        if (old := self.find(new.operator, new.name)) is not None:
            hint = "choose another name"
            if old.is_plugin:
                hint = "register it once" if old.provider == new.provider else "uninstall one of them"
            raise ConfigError(f"{start}, which {old.origin} already has; {hint}")
        if not new.is_plugin:
            return
        if new.name in RESERVED - {REFERENCE} or not re.fullmatch(r"\w[\w.-]*", new.name):
            hint = "for the subgraphs of one backend, pass backends=" if new.name in RESERVED else "use letters and '_'"
            raise ConfigError(f"{start}, a name that is reserved or malformed; choose another name, {hint}")
        if not callable(new.function) or (new.is_class and "__call__" not in dir(new.function)):
            raise ConfigError(f"{start} as {new.function!r}, expected a function, or a class with a method __call__")
        for what, found in (("refuses", new.refuses), ("is_required", new.is_required)):
            if not (found is None or isinstance(found, bool) or callable(found)):
                raise ConfigError(f"{start} with {what}={found!r}, expected a function of a node")
        if not isinstance(new.backends, tuple | list) or not all(isinstance(name, str) for name in new.backends):
            raise ConfigError(f"{start} with backends={new.backends!r}, expected names such as ('native',)")
        for name in (name for name in new.backends if name not in OWN_BACKENDS):
            if name not in BACKENDS_OF_PLUGINS.names:
                raise ConfigError(f"{start} for {unknown_name('backend', name, backend_names())}")
        is_own = any(not form.is_plugin for form in self._forms.get(new.operator, {}).values())
        parts = () if new.operator in CALLED else PARTS.get(new.operator, ()) if is_own else ALL_PARTS
        if unknown := [part for part in new.parts if part not in parts]:
            known = f"known parts: {', '.join(sorted(parts))}" if parts else f"{new.operator!r} takes no parts"
            raise ConfigError(f"{start} with the part {unknown[0]!r}; {known}")

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
        before = {operator: dict(forms) for operator, forms in self._forms.items()}
        try:
            yield
        except BaseException:
            self._forms = before
            raise

    def copy(self, *, without: Collection[tuple[str, str]] = ()) -> OperatorRegistry:
        """Return an independent registry with the same forms, except those of pairs (operator, name)."""
        other = OperatorRegistry()
        for operator, forms in self._forms.items():
            kept = {name: form for name, form in forms.items() if (operator, name) not in without}
            if kept:
                other._forms[operator] = kept
        return other

    def find(self, operator: str, name: str) -> OperatorForm | None:
        """Return the form of an operator with a name."""
        return self._forms.get(operator, {}).get(name)

    def find_own(self, operator: str, name: str) -> OperatorForm | None:
        """Return chunkrt's form of an operator with a name."""
        form = self.find(operator, name)
        return None if form is None or form.is_plugin else form

    def plugin_forms(self, operator: str) -> list[OperatorForm]:
        """Return plug-ins' forms of an operator that precede those of backends, in the order of their preference."""
        forms = self._forms.get(operator, {}).values()
        return [form for form in forms if form.is_plugin and form.name != REFERENCE]

    def pick_plugin(self, operator: str, node: OperatorNode, backend: str) -> tuple[OperatorForm | None, list[str]]:
        """Return the plug-in's form that runs a node in a subgraph of a backend, or None, and the reasons of the forms
        that refuse the node before.

        Raises:
            ConfigError: forms of several packages accept the node.
            PartitionError: the `refuses` of a form fails.
        """
        found: dict[str, OperatorForm] = {}
        reasons: list[str] = []
        for form in self.plugin_forms(operator):
            if form.provider in found or (form.backends and backend not in form.backends):
                continue
            if reason := form.refusal(node):
                reasons.append(refused(form, reason))
            else:
                found[form.provider] = form
        if len(found) > 1:
            forms = " and ".join(f"{form.name!r} of {form.origin}" for form in found.values())
            names = " or ".join(f"`ops='{operator}={form.name}'`" for form in found.values())
            raise ConfigError(
                f"node {node.name!r}: forms of {len(found)} packages accept it: {forms}; choose one by {names}, or "
                "uninstall all packages but one"
            )
        return next(iter(found.values()), None), reasons

    def check_plugins(self, distribution: str) -> None:
        """Raise ConfigError if a plug-in has forms of an unknown operator; or if another package has forms of an
        operator that the plug-in also has, and no form of either ever refuses a node. Load decoder families before,
        because they may add operators.
        """
        known = {form.operator for form in self._all() if not form.is_plugin or form.name == REFERENCE}
        known |= {*CALLED, *operator_names()}
        for operator in self._forms:
            for form in self.plugin_forms(operator):
                if form.distribution == distribution and operator not in known:
                    hint = "correct the name, or install the package whose decoders use it"
                    if nearest := get_close_matches(operator, known, n=1):
                        hint = f"did you mean {nearest[0]!r}? {hint}"
                    raise ConfigError(
                        f"the form {form.name!r} of {form.origin} never runs, because no operator has the name "
                        f"{operator!r}; {hint}"
                    )
            forms = {form.provider: form for form in self.plugin_forms(operator) if form.refuses is None}
            if distribution in forms:
                own = set(forms[distribution].backends)
                forms = {
                    provider: form
                    for provider, form in forms.items()
                    if provider == distribution or not own or not form.backends or own.intersection(form.backends)
                }
            if len(forms) > 1 and distribution in forms:
                several = " and ".join(f"{form.origin} as {form.name!r}" for form in forms.values())
                raise ConfigError(
                    f"the operator {operator!r} is registered by {several}; choose one by `ops='{operator}=NAME'`, or "
                    "uninstall all packages but one"
                )

    def required(self) -> dict[str, str]:
        """Return the form that may not be replaced at any node, for each operator that has one."""
        return {form.operator: form.name for form in self._all() if form.is_required is True}

    def names(self) -> list[str]:
        """Return the canonical names of all registered operators."""
        return sorted(self._forms)

    def own_takes(self, use: Use) -> bool:
        """Return whether chunkrt's own reference has an operator and accepts the node."""
        return not self.missing(use, REFERENCE)

    def missing(self, use: Use, name: str) -> str:
        """Return a message if chunkrt itself has no form of a use with a name; empty if it has one.

        For `npu`, the expansion of a plug-in's operator into standard ONNX counts as chunkrt's.
        """
        row = find_operator(use.node.domain, use.node.op)
        if name == NPU and row is not None and row.expansion:
            return ""
        if own := self.find_own(use.operator, name):
            return own.refusal(use.node)
        known = ", ".join(sorted(form.operator for form in self._all() if form.name == name and not form.is_plugin))
        return f"{name} has no operator {qualified(use.node.domain, use.node.op)}; it has: {known}"

    def _all(self) -> Iterator[OperatorForm]:
        return (form for forms in self._forms.values() for form in forms.values())


def backend_names() -> tuple[str, ...]:
    """Return the names of all backends, chunkrt's and those of plug-ins."""
    return (*OWN_BACKENDS, *BACKENDS_OF_PLUGINS.names)


def refused(form: OperatorForm, reason: str) -> str:
    """Return the text of a refusal, with the form and its package."""
    return f"{form.name} ({form.provider}) refuses it: {reason}"


operators = OperatorRegistry()
"""All forms. chunkrt's are registered when their modules are imported, plug-ins' before the first dispatch."""


def qualified(domain: str, op: str) -> str:
    """Return an operator's qualified name in ONNX: "MatMul", "chunkrt::CachedAttention"."""
    return f"{domain}::{op}" if domain else op
