"""Placement by capability: operators that the NPU's backend cannot compile go to the CPU.

The plan is adapted when an engine is loaded, because the same engine directory is used with any NPU, and without one.
If a placement puts an unsupported operator on the NPU by name, this is an error. With `npu_strict` every unsupported
operator is an error.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path

from chunkrt.backends import Support
from chunkrt.backends.coverage import QNN
from chunkrt.backends.dispatch import IN_NUMPY, Dispatcher, default_base, registered_operators
from chunkrt.backends.sections import cut
from chunkrt.backends.switches import Switches
from chunkrt.engine.model_options import with_cached_keys
from chunkrt.engine.options import EngineOptions
from chunkrt.engine.resolve import options_placement
from chunkrt.engine.roles import Supports, check_runs, linear_refusal, npu_under
from chunkrt.engine_directory.adapter_targets import read_targets
from chunkrt.engine_directory.manifest import Manifest, read_plan
from chunkrt.errors import PartitionError
from chunkrt.graph.adaptable import adaptable
from chunkrt.graph.placement import Placement, placed_by_name
from chunkrt.graph.plan import Device, Plan, Subgraph
from chunkrt.graph.static_attention import can_be_static
from chunkrt.graph.uses import Use
from chunkrt.quant.scheme import Scheme

log = logging.getLogger(__name__)


Moved = tuple[str, str, str]
"""An operator that moves to the CPU: its name, its last node, and the NPU's reason for refusing it."""


def plan_by_capability(
    plan: Plan, scheme: Scheme, options: EngineOptions, placement: Placement
) -> tuple[Plan, list[Moved]]:
    """Move operators that the NPU cannot compile to the CPU by cutting their subgraphs.

    The plan is returned unchanged if the NPU supports all operators, if no NPU is used, or if the NPU does not support
    linear layers under the scheme. With `npu_strict` only attention that a near plan computes on the NPU is moved;
    `check_runs` then rejects operators that cannot run.

    Args:
        placement: the placement of the plan.

    Raises:
        PartitionError: no backend supports an operator, or the placement puts an operator on the NPU that the NPU
            cannot compile.
        ConfigError, BackendUnavailableError: see `check_runs`.
    """
    supports = npu_under(options, scheme)
    if supports is None or linear_refusal(supports, scheme):
        return plan, []
    name = "qnn" if options.npu == "auto" else options.npu
    dispatcher = Dispatcher(
        plan,
        scheme,
        registered_operators(),
        Switches.parse(options.ops),
        default=default_base(options.npu),
        warns=False,
    )
    subgraphs: list[Subgraph] = []
    moved: list[Moved] = []
    for subgraph in plan.subgraphs:
        if subgraph.device != "npu" or _is_taken(dispatcher, subgraph, name, supports, scheme):
            subgraphs.append(subgraph)
            continue
        uses = _checked_alone(dispatcher, subgraph, plan, name, supports, scheme)
        refused = [each for use, each in uses if each and use.operator not in IN_NUMPY]
        near = _near(plan, options, name)
        for _, node, reason in refused:
            if placed_by_name(placement, node) == "npu" and node not in near:
                raise PartitionError(f"{name} cannot run node {node}, which is placed on the NPU: {reason}")
        subgraphs += _cut(subgraph, plan, uses)
        moved += [(operator, node, reason) for operator, node, reason in refused if node not in near]
    if options.npu_strict and moved:
        return plan, []
    return (plan if tuple(subgraphs) == plan.subgraphs else replace(plan, subgraphs=tuple(subgraphs))), moved


def plan_to_run(folder: Path, manifest: Manifest, options: EngineOptions) -> Plan:
    """Return the plan of an engine directory with the changes for an engine. With adapters, the CPU computes their
    products for the linears of the NPU. Raise ModelError, and the errors of `plan_by_capability`.
    """
    plan = read_plan(folder)
    plan = with_cached_keys(plan, options)
    if options.adapters:
        plan = adaptable(plan, read_targets(folder).linears)
    plan, moved = plan_by_capability(plan, manifest.scheme, options, manifest.placement)
    if moved:
        log.warning("%s", told(moved))
    return plan


def check_plan(plan: Plan, scheme: Scheme, options: EngineOptions) -> None:
    """Check that an engine could run a plan, before it is compiled. The errors of the called functions propagate."""
    check_runs(plan_by_capability(plan, scheme, options, options_placement(options))[0], scheme, options)


def told(moved: Sequence[Moved]) -> str:
    """Return one line with the number of operators of each name that move to the CPU, the first one, and the reason."""
    by_operator = itemgetter(0)
    groups = [list(group) for _, group in groupby(sorted(moved, key=by_operator), key=by_operator)]
    parts = [f"{len(group)} {name} (first {node}: {reason})" for group in groups for name, node, reason in group[:1]]
    what = "; ".join(parts)
    return f"the CPU runs operators that the NPU does not support: {what}; `npu_strict=True` makes this an error"


def _near(plan: Plan, options: EngineOptions, npu: str) -> set[str]:
    """Return the attention and convolution nodes that the NPU computes in another plan; see `npu_attention`. For
    attention this applies only to short histories.
    """
    if npu != QNN or options.attention == "cpu":
        return set()
    return {node.name for s in plan.subgraphs for node in s.nodes if can_be_static(node)}


def _is_taken(dispatcher: Dispatcher, subgraph: Subgraph, name: str, supports: Supports, scheme: Scheme) -> bool:
    sections = dispatcher.sections(subgraph, name)
    return all(section.is_called or supports(section.subgraph, section.plan, scheme) for section in sections)


def _checked_alone(
    dispatcher: Dispatcher, subgraph: Subgraph, plan: Plan, name: str, supports: Supports, scheme: Scheme
) -> list[tuple[Use, Moved | None]]:
    """Return the operators of a subgraph. For an operator that a backend does not support by itself, include the
    reason.
    """
    runners = dispatcher.runners(subgraph, name)
    parts = cut(subgraph, plan, [use.nodes for use, _ in runners])
    alone = _with_parts(plan, subgraph, parts)
    found: list[tuple[Use, Moved | None]] = []
    for (use, runner), part in zip(runners, parts, strict=True):
        support = supports(part, alone, scheme) if runner.form is None else Support(ok=True)
        moved = use.operator, support.node or use.node.name, support.reason
        found.append((use, None if support else moved))
    return found


def _cut(subgraph: Subgraph, plan: Plan, uses: Sequence[tuple[Use, Moved | None]]) -> list[Subgraph]:
    """Cut a subgraph between adjacent nodes on different devices."""
    groups = [(is_moved, list(group)) for is_moved, group in groupby(uses, key=lambda use: use[1] is not None)]
    if len(groups) == 1:
        return [replace(subgraph, device="cpu") if groups[0][0] else subgraph]
    parts = cut(subgraph, plan, [[node for use, _ in group for node in use.nodes] for _, group in groups])
    devices: list[Device] = ["cpu" if is_moved else "npu" for is_moved, _ in groups]
    return [replace(part, device=device) for part, device in zip(parts, devices, strict=True)]


def _with_parts(plan: Plan, subgraph: Subgraph, parts: Sequence[Subgraph]) -> Plan:
    index = plan.subgraphs.index(subgraph)
    return replace(plan, subgraphs=(*plan.subgraphs[:index], *parts, *plan.subgraphs[index + 1 :]))
