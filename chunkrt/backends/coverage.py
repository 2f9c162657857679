"""Support of backends for a plan's operators, and the subgraphs that the NPU refuses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from chunkrt.backends import BACKENDS, Backend, make_backend
from chunkrt.backends.dispatch import Dispatcher, registered_operators
from chunkrt.backends.qnn.htp_support import npu_support
from chunkrt.backends.switches import Switches
from chunkrt.errors import BackendUnavailableError, PartitionError
from chunkrt.graph.plan import Node, Plan, Subgraph
from chunkrt.quant.scheme import DEFAULT_NPU_SCHEME, DEFAULT_SCHEME, find_scheme

NPU = "npu"
QNN = "qnn"


@dataclass(frozen=True, kw_only=True)
class OperatorCoverage:
    """Support for one operator of a plan.

    `refusals` maps each queried backend to its reason for refusing the operator, or to an empty string.
    """

    name: str
    num_nodes: int
    refusals: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class RefusedSubgraph:
    """A subgraph on the NPU that the NPU does not support, and the first unsupported node."""

    name: str
    node: str
    reason: str


def available_backends() -> tuple[Sequence[Backend], dict[str, str]]:
    """Return the backends that are available on this machine, and the reasons why the others are not."""
    available: list[Backend] = []
    unavailable: dict[str, str] = {}
    for name in sorted(BACKENDS, key=lambda name: name != "reference"):
        try:
            available.append(make_backend(name, threads=1))
        except BackendUnavailableError as error:
            unavailable[name] = str(error)
    return available, unavailable


def operators_of(plan: Plan, backends: Sequence[Backend]) -> list[OperatorCoverage]:
    """Return every operator with the support of each backend; the NPU is queried only for nodes that are placed on it.

    An operator that a backend lacks counts as supported if a plug-in provides it.
    """
    dispatcher, npu_dispatcher = _dispatcher(plan, DEFAULT_SCHEME), _dispatcher(plan, DEFAULT_NPU_SCHEME)
    scheme, npu_scheme = find_scheme(DEFAULT_SCHEME), find_scheme(DEFAULT_NPU_SCHEME)
    counts: Counter[str] = Counter()
    refusals: dict[str, dict[str, str]] = {}
    for subgraph in plan.subgraphs:
        for node in subgraph.nodes:
            alone, name = replace(subgraph, nodes=(node,)), _operator_name(node)
            counts[name] += 1
            verdicts = {backend.name: backend.supports(alone, plan, scheme).reason for backend in backends}
            verdicts = {
                backend: reason and ("" if _is_plugins(alone, dispatcher, backend) else reason)
                for backend, reason in verdicts.items()
            }
            if subgraph.is_static and subgraph.device == NPU:
                reason = npu_support(alone, plan, npu_scheme).reason
                verdicts[NPU] = reason and ("" if _is_plugins(alone, npu_dispatcher, QNN) else reason)
            known = refusals.setdefault(name, {})
            known.update({backend: known.get(backend) or reason for backend, reason in verdicts.items()})
    return [OperatorCoverage(name=name, num_nodes=counts[name], refusals=refusals[name]) for name in sorted(counts)]


def _operator_name(node: Node) -> str:
    kind = node.attributes.get("attn_type")
    return f"{node.op}[{kind}]" if kind else node.op


def refused_subgraphs(plan: Plan) -> list[RefusedSubgraph]:
    """Return the subgraphs placed on the NPU that the NPU refuses under its default scheme."""
    scheme, dispatcher = find_scheme(DEFAULT_NPU_SCHEME), _dispatcher(plan, DEFAULT_NPU_SCHEME)
    refused: dict[str, RefusedSubgraph] = {}
    for subgraph in (s for s in plan.subgraphs if s.is_static and s.device == NPU):
        for section in dispatcher.sections(subgraph, QNN):
            if not section.is_called and not (verdict := npu_support(section.subgraph, section.plan, scheme)):
                found = RefusedSubgraph(name=subgraph.name, node=verdict.node, reason=verdict.reason)
                refused.setdefault(subgraph.name, found)
    return list(refused.values())


def _dispatcher(plan: Plan, scheme: str) -> Dispatcher:
    return Dispatcher(plan, find_scheme(scheme), registered_operators(), Switches.parse(None), warns=False)


def _is_plugins(subgraph: Subgraph, dispatcher: Dispatcher, backend: str) -> bool:
    """Return whether plug-ins provide every operator of a subgraph that a backend would run."""
    try:
        return all(choice.is_plugin for _, choice in dispatcher.runners(subgraph, backend))
    except PartitionError:
        return False
