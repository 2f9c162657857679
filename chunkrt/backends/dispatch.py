"""Dispatch: choose a form for each operator of a subgraph, once, when the subgraph is compiled.

The forms of plug-ins come first, then that of the backend that runs the subgraph, then the reference's; a form that
refuses a node passes it to the next. A switch names the form, or the forms, of an operator or of some of its nodes. An
operator that is switched off gets chunkrt's own reference. Adjacent nodes that the backend runs itself are compiled as
one section. If one section contains all nodes of the subgraph, the executable is the backend's own. The other nodes run
as functions, one after another.

A backend's form of an operator with parts (`rope` in `cached_attention`, `quantize` in `linear`) includes the parts. If
a part is switched off or comes from a plug-in, the reference therefore runs the operator and calls the part.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from threading import Lock
from typing import Any
from weakref import WeakValueDictionary

from chunkrt.backends.base import Backend, Executable, Support
from chunkrt.backends.function_executable import FunctionExecutable, NodeObject, constants
from chunkrt.backends.registry import (
    NATIVE,
    NPU,
    REFERENCE,
    OperatorForm,
    OperatorRegistry,
    backend_names,
    operators,
    qualified,
    refused,
)
from chunkrt.backends.sections import SectionedExecutable, cut
from chunkrt.backends.switches import ALL, NONE, Switch, Switches
from chunkrt.engine_directory.store import WeightStore
from chunkrt.errors import ConfigError, PartitionError
from chunkrt.graph.plan import Node, Plan, Subgraph
from chunkrt.graph.uses import PARTS, SAMPLER, OperatorNode, Use, declare, uses, weight_places
from chunkrt.plugins import PluginGroup
from chunkrt.quant.scheme import Scheme

DEVICES = {"native": NATIVE, "reference": REFERENCE, "onnxrt": NPU, "qnn": NPU}
"""Maps each backend to the name of the forms that it compiles. A plug-in's backend has forms of its own."""

IN_NUMPY = ("low_rank_sum",)
"""Operators that every NPU leaves to the CPU. Without a native form the reference's NumPy function runs them, which
computes each row alone.
"""

FALLS_BACK = ("native", "onnxrt")
"""Backends for which the reference runs operators that they lack. Other backends refuse these operators, which must
then run on another device.
"""

PLUGINS: PluginGroup[Callable[[OperatorRegistry], object]] = PluginGroup("chunkrt.operators", error=ConfigError)
"""Plug-ins' functions that register operators. A name identifies a plug-in, not an operator."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Runner:
    """The form that runs an operator at a node.

    Attributes:
        name: name of the form: the backend, "reference", or that of a plug-in's form.
        origin: source of the form.
        reason: why the form was chosen, and which forms refused the node.
        form: the function or class; None if the backend compiles the operator.
        parts: the runners of the operators that the function calls.
    """

    operator: str
    name: str
    origin: str
    reason: str
    form: OperatorForm | None = None
    parts: Mapping[str, Runner] = field(default_factory=dict)

    @property
    def is_plugin(self) -> bool:
        """True if a plug-in provides the form."""
        return self.form is not None and self.form.is_plugin


@dataclass(frozen=True, kw_only=True)
class Section:
    """Adjacent nodes of a subgraph that run together, either all as functions or all by the backend.

    `subgraph` consists of these nodes alone; `plan` is the plan that contains it.
    """

    subgraph: Subgraph
    plan: Plan
    runners: Sequence[tuple[Use, Runner]]

    @property
    def is_called(self) -> bool:
        """True if functions run the section, False if the backend compiles it."""
        return self.runners[0][1].form is not None


@dataclass(frozen=True, kw_only=True)
class _Choice:
    """Choice of the user for an operator at a node.

    Attributes:
        forms: names of the forms that may run; empty if the order of preference decides.
        reason: reason of a choice by name, or why the operator is off; empty if it is on.
        is_off: True if the operator is off, by a switch or by default.
        switch: the switch that decides; None for `all`, `none` and the default.
    """

    forms: tuple[str, ...] = ()
    reason: str = ""
    is_off: bool = False
    switch: Switch | None = None


class Dispatcher:
    """Chooses forms for one plan under one scheme.

    Args:
        registry: all available forms; see `registered_operators`.
        switches: the user's choices.
        default: "all" or "none", used if the switches name neither.
        warns: whether a warning reports operators that are left to the reference.

    Raises:
        ConfigError: a switch names an unknown operator or form, rules out a required form, or matches no node.
    """

    def __init__(
        self,
        plan: Plan,
        scheme: Scheme,
        registry: OperatorRegistry,
        switches: Switches,
        *,
        default: str = ALL,
        warns: bool = True,
    ) -> None:
        check_switches(switches, registry)
        self._plan, self._scheme = plan, scheme
        self._registry, self._switches, self._default = registry, switches, default
        self._warns, self._warned = warns, set[str]()
        self._are_required = frozenset(
            operator for operator, form in registry.required().items() if registry.find_own(operator, form)
        )
        self._objects: WeakValueDictionary[tuple[str, str, str], NodeObject] = WeakValueDictionary()
        self._chosen: dict[tuple[str, str], Sequence[tuple[Use, Runner]]] = {}
        """Results of `runners`, by names of subgraphs and backends."""
        switches.check_paths(self._names())

    @property
    def scheme(self) -> Scheme:
        """The scheme of the plan."""
        return self._scheme

    def _names(self) -> Iterator[tuple[str, str]]:
        """Return the operators and parts of the plan with the names of their nodes."""
        for subgraph in self._plan.subgraphs:
            for use in uses(subgraph, self._plan):
                for operator in (use.operator, *PARTS.get(use.operator, ())):
                    yield operator, use.node.name

    def for_plan(self, plan: Plan) -> Dispatcher:
        """Return a dispatcher with the same settings for another plan of the decoder; it repeats no warnings."""
        other = copy(self)
        other._plan, other._chosen = plan, {}
        return other

    def compile(self, subgraph: Subgraph, backend: Backend, chunk_length: int, weights: WeightStore) -> Executable:
        """Choose forms and bind them, so that the executable needs no look-ups when it runs.

        An object of a plug-in's class is made once for each node, and shared by all executables that run the node.

        Raises:
            PartitionError: no form of an operator exists, or the backend does not run it under the scheme.
            ConfigError: see `runners`.
            CompileError: the backend's compiler failed.
        """
        sections = self.sections(subgraph, backend.name)
        compiled = [(section.subgraph, self._compile(section, backend, chunk_length, weights)) for section in sections]
        if len(compiled) == 1:
            return compiled[0][1]
        return SectionedExecutable(subgraph, compiled, self._plan, chunk_length)

    def sections(self, subgraph: Subgraph, backend: str) -> list[Section]:
        """Split a subgraph into sections that run either as functions or by the backend; without functions the subgraph
        is one section.

        Args:
            backend: the name of the backend that runs the subgraph.

        Raises:
            PartitionError, ConfigError: see `runners`.
        """
        runners = self.runners(subgraph, backend)
        groups = [list(group) for _, group in groupby(runners, key=lambda runner: runner[1].form is None)]
        if len(groups) == 1:
            return [Section(subgraph=subgraph, plan=self._plan, runners=runners)]
        parts = cut(subgraph, self._plan, [[node for use, _ in group for node in use.nodes] for group in groups])
        index = self._plan.subgraphs.index(subgraph)
        before, after = self._plan.subgraphs[:index], self._plan.subgraphs[index + 1 :]
        plan = replace(self._plan, subgraphs=(*before, *parts, *after))
        return [Section(subgraph=part, plan=plan, runners=group) for part, group in zip(parts, groups, strict=True)]

    def runners(self, subgraph: Subgraph, backend: str) -> Sequence[tuple[Use, Runner]]:
        """Return the runner of each operator of a subgraph, in execution order.

        Raises:
            PartitionError: no form of an operator exists.
            ConfigError: forms of several packages accept a node, the forms that a switch names refuse it, or a switch
                rules out a form that is required for it.
        """
        key = (subgraph.name, backend)
        if (chosen := self._chosen.get(key)) is None:
            chosen = self._chosen[key] = [
                (use, self._choose(use, declare(use, subgraph, self._plan, self._scheme.name), backend))
                for use in uses(subgraph, self._plan)
            ]
        return chosen

    def compiles_whole(self, backend: str) -> bool:
        """Return whether a backend compiles every subgraph of the plan, except sums over ranks, as a single section
        without functions.
        """
        subgraphs = [subgraph for subgraph in self._plan.subgraphs if subgraph.device != "link"]
        return all(runner.form is None for s in subgraphs for _, runner in self.runners(s, backend))

    def part_names(self, operator: str) -> Sequence[str]:
        """Return an operator's parts under the scheme.

        Activations are measured row by row under dynamic schemes, and for routed experts under every scheme except
        "float".
        """
        is_static = self._scheme.is_static and operator != "routed_experts"
        is_measured = self._scheme.weight_bits is not None and not is_static
        return [part for part in PARTS.get(operator, ()) if part != "quantize" or is_measured]

    def sampler(self) -> Runner:
        """Return the runner that makes the samplers of sessions."""
        node = OperatorNode(
            name=SAMPLER,
            op=SAMPLER,
            domain="",
            inputs=(),
            outputs=(),
            attributes={},
            operator=SAMPLER,
            input_shapes=(),
            output_shapes=(),
            device="cpu",
            scheme=self._scheme.name,
        )
        return self._part_runner(SAMPLER, node, "")

    def check(self, section: Section, backend: str, supports: Callable[[Subgraph, Plan, Scheme], Support]) -> None:
        """Raise PartitionError if a backend's `supports` refuses a section under the scheme."""
        if not section.is_called and not (support := supports(section.subgraph, section.plan, self._scheme)):
            raise PartitionError(
                f"{backend} cannot run subgraph {section.subgraph.name} under scheme {self._scheme.name}"
                f"{f' (node {support.node})' if support.node else ''}: {support.reason}"
            )

    def _compile(self, section: Section, backend: Backend, chunk_length: int, weights: WeightStore) -> Executable:
        self.check(section, backend.name, backend.supports)
        subgraph, plan, scheme = section.subgraph, section.plan, self._scheme
        if not section.is_called:
            return backend.compile(subgraph, plan, chunk_length, scheme, weights)
        steps = [self._step(use, runner, section, weights) for use, runner in section.runners]
        taken = {name for node, _ in steps for name in node.inputs}
        arrays = constants([name for name in subgraph.weights if name in taken], plan, scheme, weights)
        if subgraph.weights:
            weights.forget_pages()  # the functions have copies
        packages = {use.node.name: runner.form.distribution for use, runner in section.runners if runner.form}
        return FunctionExecutable(subgraph.name, steps, arrays, plan.tensors, packages)

    def _step(
        self, use: Use, runner: Runner, section: Section, weights: WeightStore
    ) -> tuple[Node, Callable[..., Any]]:
        """Return the function of an operator, and the node that determines its arguments."""
        assert runner.form is not None
        places = weight_places(use) if runner.form.prepares else ()

        def stored() -> list[Any]:
            names = [use.node.inputs[place] for place in places]
            for place, name in zip(places, names, strict=True):
                if name and section.plan.tensors[name].kind != "weight":
                    raise PartitionError(
                        f"node {use.node.name!r}: input {place} of {qualified(use.node.domain, use.node.op)} is no "
                        f"weight but {name!r}; correct `weights` in the operator's row"
                    )
            found = constants(filter(None, names), section.plan, self._scheme, weights)
            return [found.get(name) for name in names]

        function = self._function(runner, declare(use, section.subgraph, section.plan, self._scheme.name), stored)
        if not runner.form.is_class:
            return use.node, function
        inputs = tuple(name for place, name in enumerate(use.node.inputs) if place not in places)
        return replace(use.node, inputs=inputs, attributes={}), function

    def _function(
        self, runner: Runner, node: OperatorNode, weights: Callable[[], Sequence[Any]] = tuple
    ) -> Callable[..., Any]:
        """Return a form's function, or the node's object of its class, with its parts."""
        form = runner.form
        assert form is not None
        parts = {part: self._function(each, node) for part, each in runner.parts.items()}
        if not form.is_class:
            return partial(form.function, **parts) if parts else form.function
        key = (form.operator, form.name, node.name)
        made = self._objects.get(key)
        if made is None or made.node != node:
            made = self._objects[key] = NodeObject(form, node, parts, weights)
        return made

    def _choose(self, use: Use, node: OperatorNode, backend: str) -> Runner:
        choice = self._choice(use.operator, node.name)
        if required := self._required(use.operator, node, backend, choice):
            return self._call(required, node, backend, f"required by plug-in {required.provider}")
        if choice.forms:
            return self._named(use, node, backend, choice)
        refusals: list[str] = []
        is_off = choice.is_off and self._registry.own_takes(use)
        if not is_off:  # Under "none" chunkrt's own reference runs, if there is one.
            plugin, refusals = self._registry.pick_plugin(use.operator, node, backend)
            if plugin:
                return self._call(plugin, node, backend, f"form of plug-in {plugin.provider}", refusals)
        reason = choice.reason if choice.is_off else self._why_divided(use, node, backend)
        lacks = "" if reason else self._why_missing(use, backend)
        if not (reason or lacks):
            return self._compiled(use, backend, "native form", refusals)
        reference = self._registry.find(use.operator, REFERENCE)
        if lack := self._why_not_called(reference, use, node):
            remedy = f"switch it on with `ops='+{use.operator}'`, or install" if choice.is_off else "install"
            raise PartitionError(
                f"node {node.name!r}: no form of {qualified(node.domain, node.op)} can run: "
                f"{'; '.join([reason or lacks, *refusals])}, and {lack}; {remedy} a package that provides it"
            )
        assert reference is not None
        if reference.is_plugin:
            reason = f"only plug-in {reference.provider} has it"
        elif lacks:
            self._warn(use.operator, lacks)
        return self._refer(reference, node, backend, reason or lacks, refusals)

    def _named(self, use: Use, node: OperatorNode, backend: str, choice: _Choice) -> Runner:
        """Return the runner of the first form that a switch names and that accepts the node."""
        refusals: list[str] = []
        for name in choice.forms:
            form = self._registry.find(use.operator, name)
            if name == REFERENCE:
                refusal = self._why_not_called(form, use, node)
                if form is not None and not refusal:
                    return self._refer(form, node, backend, choice.reason, refusals)
                refusals.append(refusal)
            elif form is not None and form.is_plugin:
                if not (refusal := _plugin_refusal(form, node, backend)):
                    return self._call(form, node, backend, choice.reason, refusals)
                refusals.append(refusal)
            elif name == backend:
                refusal = self._why_divided(use, node, backend) or self._why_missing(use, backend)
                if not refusal:
                    return self._compiled(use, backend, choice.reason, refusals)
                refusals.append(refusal)
            else:
                refusals.append(f"{name} does not run the node, but {backend} does")
        assert choice.switch is not None
        hint = f"switch it on with `ops='+{use.operator}'`, or install a package that provides it"
        if not choice.switch.text.startswith("-"):
            others = f"{choice.switch.text}/{REFERENCE if backend in choice.forms else backend}"
            hint = f"limit the switch to other modules, or name another form for such nodes: `ops='{others}'`"
        raise _refused_by_all(use.operator, node, choice, refusals, hint)

    def _required(self, operator: str, node: OperatorNode, backend: str, choice: _Choice) -> OperatorForm | None:
        """Return the form that is required for a node. Raises ConfigError if a switch rules it out, if it refuses the
        node, or if several packages require theirs.
        """
        forms = [
            form for form in self._registry.plugin_forms(operator) if form.runs_for(backend) and form.requires(node)
        ]
        for form in forms:
            if refusal := form.refusal(node):
                raise ConfigError(
                    f"node {node.name!r} requires the form {form.name!r} of {form.origin}, which refuses it: "
                    f"{refusal}; repair is_required= or refuses="
                )
        if len({form.provider for form in forms}) > 1:
            several = " and ".join(f"{form.name!r} of {form.origin}" for form in forms)
            raise ConfigError(f"node {node.name!r} requires several forms: {several}; uninstall all packages but one")
        if forms and choice.switch and choice.forms and forms[0].name not in choice.forms:
            raise ConfigError(
                f"ops: node {node.name!r} requires the form {forms[0].name!r} of {forms[0].origin}, which "
                f"{choice.switch.text} rules out; limit the switch to other modules"
            )
        return forms[0] if forms else None

    def _choice(self, operator: str, node: str) -> _Choice:
        if operator in self._are_required:
            return _Choice()
        if switch := self._switches.find(operator, node):
            if not switch.forms:
                return _Choice(switch=switch)
            return _Choice(forms=switch.forms, reason=switch.reason, is_off=switch.is_off, switch=switch)
        reason = self._switches.why_off(default=self._default)
        return _Choice(reason=reason, is_off=bool(reason))

    def _compiled(self, use: Use, backend: str, reason: str, refusals: Sequence[str]) -> Runner:
        own = self._registry.find_own(use.operator, DEVICES.get(backend, backend))
        origin = own.origin if own else f"the backend {backend!r}"
        return Runner(operator=use.operator, name=backend, origin=origin, reason="; ".join([reason, *refusals]))

    def _call(
        self, form: OperatorForm, node: OperatorNode, backend: str, reason: str, refusals: Sequence[str] = ()
    ) -> Runner:
        """Return a runner of a function or class, with the parts that it calls."""
        return Runner(
            operator=form.operator,
            name=form.name,
            origin=form.origin,
            reason="; ".join([reason, *refusals]),
            form=form,
            parts={part: self._part_runner(part, node, backend, form.operator) for part in form.parts},
        )

    def _refer(
        self, reference: OperatorForm, node: OperatorNode, backend: str, reason: str, refusals: Sequence[str]
    ) -> Runner:
        """Return a runner of the reference, which the backend `reference` compiles itself if no part is a plug-in's."""
        runner = self._call(reference, node, backend, reason, refusals)
        parts = (runner.parts[part] for part in self.part_names(node.operator) if part in runner.parts)
        if backend != REFERENCE or reference.is_plugin or any(part.is_plugin for part in parts):
            return runner
        return replace(runner, form=None, parts={})

    def _part_runner(self, part: str, node: OperatorNode, backend: str, operator: str = "") -> Runner:
        """Return the runner of a part that is called as a function; a switch for its operator applies unless the part
        is named."""
        choice = self._part_choice(part, node, operator)
        if required := self._required(part, node, backend, choice):
            return self._call(required, node, backend, f"required by plug-in {required.provider}")
        if choice.forms:
            return self._named_part(part, node, backend, choice)
        plugin, refusals = (None, []) if choice.is_off else self._registry.pick_plugin(part, node, backend)
        if plugin:
            return self._call(plugin, node, backend, f"form of plug-in {plugin.provider}", refusals)
        own = self._registry.find_own(part, REFERENCE)
        assert own is not None, part
        return self._call(own, node, backend, choice.reason or f"there is no other form of {part}", refusals)

    def _part_choice(self, part: str, node: OperatorNode, operator: str) -> _Choice:
        if operator and self._switches.find(part, node.name) is None:
            choice = self._choice(operator, node.name)
            return _Choice(reason=choice.reason, is_off=True) if choice.is_off else _Choice()
        return self._choice(part, node.name)

    def _named_part(self, part: str, node: OperatorNode, backend: str, choice: _Choice) -> Runner:
        refusals: list[str] = []
        for name in choice.forms:
            form = self._registry.find(part, name)
            if form is None:
                refusals.append(f"{name} runs {part} only inside its own form of {node.operator}")
            elif refusal := _plugin_refusal(form, node, backend):
                refusals.append(refusal)
            else:
                return self._call(form, node, backend, choice.reason, refusals)
        raise _refused_by_all(part, node, choice, refusals, "limit the switch to other modules")

    def _why_divided(self, use: Use, node: OperatorNode, backend: str) -> str:
        """Return the reason why the backend's own form, which includes the parts, may not run; empty if it may."""
        for part in self.part_names(use.operator):
            required = self._required(part, node, backend, self._part_choice(part, node, use.operator))
            if required:
                return f"plug-in {required.provider} requires its part {part}"
            switch = self._switches.find(part, node.name)
            if switch and switch.forms:
                accepted = (
                    name for name in switch.forms if name == backend or self._accepts(part, name, node, backend)
                )
                if next(accepted, "") != backend:
                    return f"its part {part} is {switch.reason}"
                continue
            plugin, _ = self._registry.pick_plugin(part, node, backend)
            if plugin:
                return f"plug-in {plugin.provider} has its part {part}"
        return ""

    def _accepts(self, part: str, name: str, node: OperatorNode, backend: str) -> bool:
        """Return whether a separate form of a part exists and accepts a node."""
        form = self._registry.find(part, name)
        return form is not None and not _plugin_refusal(form, node, backend)

    def _why_missing(self, use: Use, backend: str) -> str:
        """Return the reason why the backend has no form of an operator, if the reference runs it instead."""
        name = DEVICES.get(backend, backend)
        if backend not in (*FALLS_BACK, REFERENCE) or (name == NPU and not use.node.domain):
            return ""
        reason = self._registry.missing(use, name)
        return f"{backend} has no form: {reason}" if reason else ""

    def _why_not_called(self, reference: OperatorForm | None, use: Use, node: OperatorNode) -> str:
        return f"the reference has no {use.operator!r}" if reference is None else reference.refusal(node)

    def _warn(self, operator: str, reason: str) -> None:
        if self._warns and operator not in self._warned and operator not in IN_NUMPY:
            self._warned.add(operator)
            log.warning("the reference, which is slow, runs the operator %s: %s", operator, reason)


def _plugin_refusal(form: OperatorForm, node: OperatorNode, backend: str) -> str:
    """Return the reason why a form does not run a node in a subgraph of a backend; empty if it does."""
    if not form.runs_for(backend):
        return f"{form.name} ({form.provider}) is for {' and '.join(form.backends)}, not {backend}"
    refusal = form.refusal(node)
    return refused(form, refusal) if refusal else ""


def _refused_by_all(
    operator: str, node: OperatorNode, choice: _Choice, refusals: Sequence[str], hint: str
) -> ConfigError:
    """Return the error for a node that no form named by a switch accepts."""
    assert choice.switch is not None
    names = " or ".join(map(repr, choice.forms))
    return ConfigError(
        f"ops: {choice.switch.text}: node {node.name!r} cannot run {operator} as {names}: {'; '.join(refusals)}; {hint}"
    )


def check_switches(switches: Switches, registry: OperatorRegistry) -> None:
    """Raise ConfigError if a switch names an unknown operator or form, or rules out a required form."""

    def forms(operator: str) -> list[str]:
        reference = [REFERENCE] if registry.find(operator, REFERENCE) else []
        backends = [name for name in backend_names() if name != REFERENCE and operator != SAMPLER]
        return [*(form.name for form in registry.plugin_forms(operator)), *backends, *reference]

    switches.check(registry.names(), forms, registry.required())


def default_base(npu: str) -> str:
    """Return the default switch, "all" or "none": with npu "reference", only the reference runs."""
    return NONE if npu == REFERENCE else ALL


_loading = Lock()
_is_loaded = False


def registered_operators() -> OperatorRegistry:
    """Return all implementations, chunkrt's and those of plug-ins. Plug-ins are loaded at the first call."""
    global _is_loaded
    with _loading:
        if not _is_loaded:
            with operators.all_or_nothing():  # if Ctrl-C interrupts, the next call starts over
                _load()
            _is_loaded = True
    return operators


def _load() -> None:
    from chunkrt.backends import link, low_rank, reference  # noqa: F401
    from chunkrt.backends.onnx import lowering  # noqa: F401

    try:
        from chunkrt.backends.native import operators as _  # noqa: F401
    except ImportError as error:
        log.info("the native kernels are not built (%s): no operator has a native form", error)
    load_operators(operators)


def load_operators(registry: OperatorRegistry) -> None:
    """Call every plug-in to register its operators. A plug-in that fails registers none; one warning reports it."""
    for plugin in PLUGINS.plugins:
        if register := plugin.load_or_tell():
            try:
                with registry.from_distribution(plugin.distribution):
                    register(registry)
            except (Exception, SystemExit) as error:  # third-party code may raise any exception
                plugin.fail(error)
