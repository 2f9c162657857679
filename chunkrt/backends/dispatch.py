"""Dispatch: choose an implementation for each operator of a subgraph, once, when the subgraph is compiled.

The preferred implementation is a plug-in's, then that of the backend that runs the subgraph, then the reference's. An
operator that is switched off gets chunkrt's own reference. Adjacent nodes that the backend runs itself are compiled as
one section. If one section contains all nodes of the subgraph, the executable is the backend's own. The other nodes run
as functions, one after another.

A backend's implementation of an operator with parts (`rope` in `cached_attention`, `quantize` in `linear`) includes the
parts. If a part is switched off or comes from a plug-in, the reference therefore runs the operator and calls the part.
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
from chunkrt.backends.function_executable import FunctionExecutable, Prepare, constants, prepare_weight, prepared
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
"""Maps each backend to the device whose implementations it runs. A plug-in's backend is its own device."""

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
    """The implementation that runs an operator.

    Attributes:
        runs_on: the backend, "reference", or a plug-in's device.
        origin: source of the implementation.
        reason: why the implementation was chosen.
        function: the callable, with its `parts` bound; None if the backend compiles the operator.
        prepare: converts the weights for `function` beforehand.
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
    """Adjacent nodes of a subgraph that run together, either all as functions or all by the backend.

    `subgraph` consists of these nodes alone; `plan` is the plan that contains it.
    """

    subgraph: Subgraph
    plan: Plan
    runners: Sequence[tuple[Use, Runner]]

    @property
    def steps(self) -> list[tuple[Node, Callable[..., Any]]]:
        """Functions with their nodes, in order; empty if the backend compiles the section."""
        return [(use.node, runner.function) for use, runner in self.runners if runner.function is not None]


class Dispatcher:
    """Chooses implementations for one plan under one scheme.

    Args:
        registry: all available implementations; see `registered_operators`.
        switches: operators that the user switched on or off.
        default: "all" or "none", used if the switches name neither.
        warns: whether a warning reports operators that are left to the reference.

    Raises:
        ConfigError: a switch names an unknown operator, or one that cannot be switched off.
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
        """Return a dispatcher with the same settings for another plan of the decoder; it repeats no warnings."""
        other = copy(self)
        other._plan = plan
        return other

    def compile(self, subgraph: Subgraph, backend: Backend, chunk_length: int, weights: WeightStore) -> Executable:
        """Choose implementations and bind them, so that the executable needs no look-ups when it runs.

        Raises:
            PartitionError: no implementation of an operator exists, or the backend does not run it under the scheme.
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
            PartitionError: no implementation of an operator exists.
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
        """Return the runner of each operator of a subgraph, in execution order; raises as `sections`."""
        return [(use, self._choose(use, backend)) for use in uses(subgraph, self._plan)]

    def compiles_whole(self, backend: str) -> bool:
        """Return whether a backend compiles every subgraph of the plan, except sums over ranks, as a single section
        without functions.
        """
        subgraphs = [subgraph for subgraph in self._plan.subgraphs if subgraph.device != "link"]
        return all(runner.function is None for s in subgraphs for _, runner in self.runners(s, backend))

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
        return self._part_runner(SAMPLER, SAMPLER)

    def check(self, section: Section, backend: str, supports: Callable[[Subgraph, Plan, Scheme], Support]) -> None:
        """Raise PartitionError if a backend's `supports` refuses a section under the scheme."""
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
        if not reason or has_no_other:  # Under "none" chunkrt's own reference is chosen, if there is one.
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
            if reference is not None and reference.is_plugin and not self._registry.own_takes(use):
                reason = f"only plug-in {reference.provider} has it"
            if reference is not None and reference.is_plugin and reference.refusal(use.node):
                reference = self._own_reference(use.operator)
        else:
            reference = self._own_reference(use.operator)
        if lack := self._why_not_called(reference, use):
            what = qualified(use.node.domain, use.node.op)
            is_off = self._why_off(use.operator) != ""
            remedy = f"switch it on with `ops='+{use.operator}'`, or install" if is_off else "install"
            raise PartitionError(
                f"node {use.node.name!r}: no implementation of {what} can run: {reason}, and {lack}; {remedy} a "
                "package that provides it"
            )
        assert reference is not None
        if device == REFERENCE and not reference.is_plugin and not self._has_other_parts(use.operator):
            return Runner(operator=use.operator, runs_on=backend, origin=reference.origin, reason=reason)
        return self._call(reference, reason)

    def _call(self, implementation: Implementation, reason: str) -> Runner:
        """Return a runner of a function, with the parts that it calls."""
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
        """Return the runner of a part that is called as a function; a switch for its operator applies unless the part
        is named."""
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
        """Return the reason why the parts of an operator that is on rule out its backend's implementation; empty if
        they do not.
        """
        for part in self.part_names(operator):
            if part in self._switches.off:
                return f"its part {part} is switched off by `ops='-{part}'`"
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
        reason = f"{backend} has no form: {reason}"
        reference = self._registry.find(use.operator, REFERENCE)
        is_of_plugin = reference is not None and reference.is_plugin
        is_told = not self._warns or use.operator in self._warned or use.operator in IN_NUMPY
        if not (is_told or is_of_plugin or self._why_not_called(reference, use)):
            self._warned.add(use.operator)
            log.warning("the reference, which is slow, runs the operator %s: %s", use.operator, reason)
        return reason

    def _has_other_parts(self, operator: str) -> bool:
        """Return whether the reference's implementation of an operator calls plug-ins' parts."""
        return any(self._part_runner(part, operator).is_plugin for part in self.part_names(operator))

    def _own_reference(self, operator: str) -> Implementation | None:
        """Return chunkrt's own reference, or that of the plug-in that provides the operator."""
        return self._registry.find_own(operator, REFERENCE) or self._registry.find(operator, REFERENCE)


def check_switches(switches: Switches, registry: OperatorRegistry) -> None:
    """Raise ConfigError if a switch names an unknown operator, or one that cannot be switched off."""
    names = registry.names()
    switches.check(names, [name for name in names if registry.is_required(name)])


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
