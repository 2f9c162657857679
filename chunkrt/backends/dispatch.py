"""Dispatch: which implementation each operator of a subgraph gets, bound once, when the subgraph is compiled.

In this order: a plug-in's, the form of the backend that runs the subgraph, the reference's. An operator that is
switched off gets chunkrt's own reference. Neighbours that the backend runs itself are compiled by it as a whole; where
that is all of them, the executable is the backend's and nothing is between. The others are functions, called one after
another.

An operator with parts (`rope` in `cached_attention`, `quantize` in `linear`) has them melted into the backend's form.
Where a part is switched off, or a plug-in's, it is therefore the reference that runs, and calls it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from threading import Lock
from typing import Any

from chunkrt.backends.base import Backend, Executable, Support
from chunkrt.backends.functions import FunctionExecutable
from chunkrt.backends.operands import Prepare, constants, prepare_weight, prepared
from chunkrt.backends.registry import (
    NATIVE,
    NPU,
    OWN_DEVICES,
    REFERENCE,
    Implementation,
    OperatorRegistry,
    operators,
    qualified,
)
from chunkrt.backends.sections import SectionedExecutable, cut
from chunkrt.backends.switches import ALL, NONE, Switches
from chunkrt.engine_directory.store import WeightStore
from chunkrt.errors import ConfigError, PartitionError
from chunkrt.graph.plan import Node, Plan, Subgraph
from chunkrt.graph.uses import PARTS, SAMPLER, Use, uses
from chunkrt.plugins import PluginGroup
from chunkrt.quant.scheme import Scheme

DEVICES = {"native": NATIVE, "reference": REFERENCE, "onnxrt": NPU, "qnn": NPU}
"""Whose forms a backend runs; a plug-in's backend runs its own."""

FALLS_BACK = ("native", "onnxrt")
"""Backends that leave an operator they lack to the reference. Others refuse: it belongs on another device."""

PLUGINS: PluginGroup[Callable[[OperatorRegistry], object]] = PluginGroup("chunkrt.operators", error=ConfigError)
"""Each is a function that registers its operators. A name stands for the plug-in, and is no operator's."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Runner:
    """What runs an operator.

    `runs_on`: the backend, "reference", or a plug-in's device. `origin`: where that comes from; `reason`: why it is it.
    `function`: what is called, with its `parts` bound; None where the backend compiles the operator. `prepare`: what it
    has made of weights before.
    """

    operator: str
    runs_on: str
    origin: str
    reason: str
    function: Callable[..., Any] | None = None
    parts: Mapping[str, Runner] = field(default_factory=dict)
    is_plugin: bool = False
    prepare: Prepare | None = None


@dataclass(frozen=True, kw_only=True)
class Section:
    """Neighbours of a subgraph that run together: `runners` are all functions, or all the backend's.

    `subgraph`: of their nodes alone; `plan`: the one in which it is a subgraph.
    """

    subgraph: Subgraph
    plan: Plan
    runners: Sequence[tuple[Use, Runner]]

    @property
    def steps(self) -> list[tuple[Node, Callable[..., Any]]]:
        """What is called, and for which node; empty where the backend compiles the section."""
        return [(use.node, runner.function) for use, runner in self.runners if runner.function is not None]


class Dispatcher:
    """Chooses for one plan under one scheme.

    Args:
        registry: all implementations; see `registered_operators`.
        switches: what a person switched on and off.
        default: "all" or "none", where the switches say neither.
        warns: whether an operator that is left to the reference is told in a warning.

    Raises:
        ConfigError: a switch names an operator that nobody has, or one that cannot be switched off.
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

    def for_plan(self, plan: Plan) -> Dispatcher:
        """One that chooses the same for another plan of the decoder, and does not repeat its warnings."""
        other = copy(self)
        other._plan = plan
        return other

    def compile(self, subgraph: Subgraph, backend: Backend, chunk_length: int, weights: WeightStore) -> Executable:
        """Choose, and bind what was chosen: nothing is looked up when the executable runs.

        Raises:
            PartitionError: an operator that nobody has, or that the backend does not run under the scheme.
            CompileError: the backend's compiler failed.
        """
        sections = self.sections(subgraph, backend.name)
        compiled = [(section.subgraph, self._compile(section, backend, chunk_length, weights)) for section in sections]
        if len(compiled) == 1:
            return compiled[0][1]
        return SectionedExecutable(subgraph, compiled, self._plan, chunk_length)

    def sections(self, subgraph: Subgraph, backend: str) -> list[Section]:
        """A subgraph cut where functions and the backend take turns; one section, the whole, where they do not.

        Args:
            backend: the name of the one that runs the subgraph.

        Raises:
            PartitionError: an operator that nobody has.
        """
        runners = self.runners(subgraph, backend)
        groups = [list(group) for _, group in groupby(runners, key=lambda runner: runner[1].function is None)]
        if len(groups) == 1:
            return [Section(subgraph=subgraph, plan=self._plan, runners=runners)]
        parts = cut(subgraph, self._plan, [[node for use, _ in group for node in use.nodes] for group in groups])
        index = self._plan.subgraphs.index(subgraph)
        before, after = self._plan.subgraphs[:index], self._plan.subgraphs[index + 1 :]
        plan = replace(self._plan, subgraphs=(*before, *parts, *after))
        return [Section(subgraph=part, plan=plan, runners=group) for part, group in zip(parts, groups, strict=True)]

    def runners(self, subgraph: Subgraph, backend: str) -> list[tuple[Use, Runner]]:
        """What runs each operator of a subgraph, in the order in which they run; raises as `sections`."""
        return [(use, self._choose(use, backend)) for use in uses(subgraph, self._plan)]

    def compiles_whole(self, backend: str) -> bool:
        """Whether a backend compiles every subgraph of the plan but sums as one, with no function between."""
        subgraphs = [subgraph for subgraph in self._plan.subgraphs if subgraph.device != "link"]
        return all(runner.function is None for s in subgraphs for _, runner in self.runners(s, backend))

    def part_names(self, operator: str) -> Sequence[str]:
        """An operator's parts under the scheme.

        Activations are measured row by row under dynamic schemes, and by routed experts under all but "float".
        """
        is_static = self._scheme.is_static and operator != "routed_experts"
        is_measured = self._scheme.weight_bits is not None and not is_static
        return [part for part in PARTS.get(operator, ()) if part != "quantize" or is_measured]

    def sampler(self) -> Runner:
        """What makes the samplers of sessions."""
        return self._part_runner(SAMPLER, SAMPLER)

    def check(self, section: Section, backend: str, supports: Callable[[Subgraph, Plan, Scheme], Support]) -> None:
        """Raises PartitionError if a backend, by its `supports`, does not run a section under the scheme."""
        if not section.steps and not (support := supports(section.subgraph, section.plan, self._scheme)):
            raise PartitionError(
                f"{backend} cannot run subgraph {section.subgraph.name} under scheme {self._scheme.name}"
                f"{f' (node {support.node})' if support.node else ''}: {support.reason}"
            )

    def _compile(self, section: Section, backend: Backend, chunk_length: int, weights: WeightStore) -> Executable:
        self.check(section, backend.name, backend.supports)
        subgraph, plan, scheme = section.subgraph, section.plan, self._scheme
        if section.steps:
            wanted = [(use.node, runner.prepare) for use, runner in section.runners]
            nodes, arrays = prepared(wanted, constants(subgraph, plan, scheme, weights))
            steps = [(node, function) for node, (_, function) in zip(nodes, section.steps, strict=True)]
            return FunctionExecutable(subgraph.name, steps, arrays, plan.tensors)
        return backend.compile(subgraph, plan, chunk_length, scheme, weights)

    def _choose(self, use: Use, backend: str) -> Runner:
        device = DEVICES.get(backend, backend)
        reason, refusal = self._why_off(use.operator), ""
        has_no_other = not self._switches.names(use.operator) and not self._registry.own_takes(use)
        if not reason or has_no_other:  # "none" chooses chunkrt's own reference, if there is one
            plugin, refusal = self._registry.pick_plugin(use.operator, device, use.node)
            if plugin:
                return self._call(plugin, f"plug-in {plugin.provider} has it")
        if not reason:
            reason = self._why_not_melted(use.operator) or self._why_missing(use, backend, device)
            if not reason:
                own = self._registry.find_own(use.operator, device)
                origin = own.origin if own else f"the backend {backend!r}"
                return Runner(operator=use.operator, runs_on=backend, origin=origin, reason="native form" + refusal)
            reason += refusal
            reference = self._registry.find(use.operator, REFERENCE)
            if reference is not None and reference.is_plugin and reference.refusal(use.node):
                reference = self._own_reference(use.operator)
        else:
            reference = self._own_reference(use.operator)
        if lack := self._why_not_called(reference, use):
            what = qualified(use.node.domain, use.node.op)
            is_off = self._why_off(use.operator) != ""
            remedy = f"switch it on with --ops +{use.operator}, or install" if is_off else "install"
            raise PartitionError(
                f"node {use.node.name!r}: nothing is left to run {what}: {reason}, and {lack}; {remedy} what brings it"
            )
        assert reference is not None
        if device == REFERENCE and not reference.is_plugin and not self._has_other_parts(use.operator):
            return Runner(operator=use.operator, runs_on=backend, origin=reference.origin, reason=reason)
        return self._call(reference, reason)

    def _call(self, implementation: Implementation, reason: str) -> Runner:
        """A function, with the parts that it calls."""
        parts = {part: self._part_runner(part, implementation.operator) for part in implementation.parts}
        bound = {part: runner.function for part, runner in parts.items()}
        is_in_place = implementation.is_plugin and implementation.device in OWN_DEVICES
        return Runner(
            operator=implementation.operator,
            runs_on="plug-in" if is_in_place else implementation.device,
            origin=implementation.origin,
            reason=reason,
            function=partial(implementation.function, **bound) if bound else implementation.function,
            parts=parts,
            is_plugin=implementation.is_plugin,
            prepare=partial(prepare_weight, implementation) if implementation.prepare else None,
        )

    def _part_runner(self, part: str, operator: str) -> Runner:
        """What a part is, where it is called by itself: it goes with its operator unless it is named."""
        is_named = self._switches.names(part) or self._registry.is_required(part)
        reason = self._why_off(part if is_named else operator)
        plugin = None if reason else self._registry.find_plugin(part, REFERENCE)
        if plugin:
            return self._call(plugin, f"plug-in {plugin.provider} has it")
        reference = self._own_reference(part)
        assert reference is not None, part
        return self._call(reference, reason or f"there is no other form of {part}")

    def _why_off(self, operator: str) -> str:
        if self._registry.is_required(operator):
            return ""
        return self._switches.why_off(operator, default=self._default)

    def _why_not_melted(self, operator: str) -> str:
        """Why an operator that is on cannot take its backend's form, because of its parts."""
        for part in self.part_names(operator):
            if part in self._switches.off:
                return f"its part {part} is switched off by --ops -{part}"
            if plugin := self._registry.find_plugin(part, REFERENCE):
                return f"plug-in {plugin.provider} has its part {part}"
        return ""

    def _why_not_called(self, reference: Implementation | None, use: Use) -> str:
        if reference is None:
            return f"the reference has no {use.operator!r}"
        return reference.refusal(use.node)

    def _why_missing(self, use: Use, backend: str, device: str) -> str:
        is_standard = device == NPU and not use.node.domain
        if backend not in FALLS_BACK or is_standard or not (reason := self._registry.missing(use, device)):
            return ""
        reason = f"{backend} has none: {reason}"
        is_told = not self._warns or use.operator in self._warned
        if not is_told and not self._why_not_called(self._registry.find(use.operator, REFERENCE), use):
            self._warned.add(use.operator)
            log.warning("the reference runs the operator %s, slowly: %s", use.operator, reason)
        return reason

    def _has_other_parts(self, operator: str) -> bool:
        """Whether the reference calls a plug-in's parts in an operator."""
        return any(self._part_runner(part, operator).is_plugin for part in self.part_names(operator))

    def _own_reference(self, operator: str) -> Implementation | None:
        """chunkrt's own, or that of the plug-in that brings the operator."""
        return self._registry.find_own(operator, REFERENCE) or self._registry.find(operator, REFERENCE)


def check_switches(switches: Switches, registry: OperatorRegistry) -> None:
    """Raises ConfigError if a switch names an operator that nobody has, or one that cannot be switched off."""
    names = registry.names()
    switches.check(names, [name for name in names if registry.is_required(name)])


def default_base(npu: str) -> str:
    """The switch of an engine that is given neither "all" nor "none": npu "reference" runs the reference alone."""
    return NONE if npu == REFERENCE else ALL


_loading = Lock()
_is_loaded = False


def registered_operators() -> OperatorRegistry:
    """Every operator's implementations, ours and those of plug-ins, which are loaded at the first call."""
    global _is_loaded
    with _loading:
        if not _is_loaded:
            with operators.all_or_nothing():  # Ctrl-C in the middle leaves the next call all to do
                _load()
            _is_loaded = True
    return operators


def _load() -> None:
    from chunkrt.backends import link, reference  # noqa: F401
    from chunkrt.backends.onnx import lowering  # noqa: F401

    try:
        from chunkrt.backends.native import operators as _  # noqa: F401
    except ImportError as error:
        log.info("the native kernels are not built (%s): no operator has a native form", error)
    load_operators(operators)


def load_operators(registry: OperatorRegistry) -> None:
    """Let every plug-in register its operators; of one that fails none are, and it is told in one warning."""
    for plugin in PLUGINS.plugins:
        if register := plugin.load_or_tell():
            try:
                with registry.from_distribution(plugin.distribution):
                    register(registry)
            except (Exception, SystemExit) as error:  # whatever another's code raises
                plugin.fail(error)
