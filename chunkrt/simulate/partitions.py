"""Automatic partition: a decoder's graph is cut between NPU and CPU by an optimiser.

The nodes of a decoder, in execution order, are combined into steps: consecutive nodes of one module that move together.
A step costs its time on the processor that runs it. Where the processor changes, the new subgraph costs a task, and
each value that crosses costs a transfer. Dynamic programming over the steps finds the partition with the least weighted
sum of both processors' times, exactly under this model. A state of the programme consists of the current processor, the
devices of modules that occur again later, and the devices of values that are read later.

Weights between the two processors' times yield all vertices of the lower convex hull of (NPU time, CPU time). The hull
bounds every partition from below: a prompt takes at least the time of the busier processor.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache, cached_property
from itertools import groupby, product
from math import prod
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from chunkrt.backends.qnn.htp_support import npu_support
from chunkrt.graph.placement import Placement
from chunkrt.graph.plan import MAIN_SUFFIX, SHADOW_OP, Node, Place, Plan, Rows, Subgraph, read_only_caches
from chunkrt.graph.static_attention import HEAD_NORM_OP, can_be_static, static_slots
from chunkrt.quant.scheme import Scheme
from chunkrt.runtime.record import smallest_graph
from chunkrt.simulate.profile import DeviceProfile
from chunkrt.simulate.work import ChunkWork, ModelledWork

Labels = Mapping[str, Place]
"""Processors by module path, of the modules whose own nodes can move."""

PLACES: tuple[Place, Place] = ("npu", "cpu")

EPSILON = 1e-7
"""Relative difference of costs that count as equal."""

BEFORE, AMID, AFTER = 0, 1, 2
"""Phases of a chunk: before its first step on the NPU, up to its last one, and after it."""

ONCE, ALWAYS = 0, 1
"""Routes of a subgraph: it runs for the chunk with logits only, or for every chunk."""

Float = NDArray[np.float64]
Index = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class _NodeGroup:
    """Consecutive nodes that move together.

    Attributes:
        module: path of their module.
        device: processor by the rule.
        devices: processors that can run them.
        alone: key of a linear with a shadow, or of a shadow, which form subgraphs of their own.
        is_needed: a state depends on them, so every chunk runs them.
        is_serial: every later step depends on them.
    """

    module: str
    nodes: tuple[Node, ...]
    device: Place
    devices: tuple[Place, ...]
    rows: Rows
    alone: str
    is_needed: bool
    is_serial: bool

    @property
    def home(self) -> tuple[str, str]:
        return self.rows, self.alone


class _State(NamedTuple):
    """State of the programme after a step: the phase, the current subgraph's processor and route, whether it contains a
    serial step, the open modules' processors, and for each value that is read later its device, the route of its
    subgraph, and whether its crossing is paid."""

    phase: int
    device: str
    route: int
    has_serial: bool
    labels: tuple[tuple[str, Place], ...]
    values: tuple[tuple[str, str, int, bool], ...]


class Cuts:
    """All partitions of a decoder.

    Args:
        plan: the plan by the rule.
        scheme: quantisation of the linears, on which the support of the NPU depends.
        frees_attention: attention may run on either processor.
    """

    def __init__(self, plan: Plan, scheme: Scheme, *, frees_attention: bool = False) -> None:
        self.plan = plan
        self._frees_attention = frees_attention
        self.steps = self._steps(plan, scheme)
        self.labels: Labels = {s.module: s.device for s in self.steps if len(s.devices) > 1}
        """Modules that can move, with their processors by the rule."""
        self.inherits = self._inheriting()

    def plan_of(self, labels: Labels) -> Plan:
        """Return the plan of a partition, as planning the decoder with `placement_of` does, except for names."""
        groups = groupby(self.steps, key=lambda step: (self._device_of(step, labels), step.home))
        made = [
            (device, rows, [node for step in group for node in step.nodes]) for (device, (rows, _)), group in groups
        ]
        readers: dict[str, int] = {self.plan.output: len(made)}
        for index, (_, _, nodes) in enumerate(made):
            readers |= {name: index for node in nodes for name in node.inputs if name}
        dynamic = {n.name for s in self.plan.subgraphs if not s.is_static for n in s.nodes}
        subgraphs = []
        for index, (device, rows, nodes) in enumerate(made):
            written = [name for node in nodes for name in node.outputs]
            read = dict.fromkeys(name for node in nodes for name in node.inputs if name and name not in set(written))
            kinds: dict[str, list[str]] = defaultdict(list)
            for name in read:
                kinds[self.plan.tensors[name].kind].append(name)
            shared = read_only_caches(nodes)
            subgraphs.append(
                Subgraph(
                    name=f"part.{index}",
                    device=device,
                    is_static=not any(node.name in dynamic for node in nodes),
                    rows=rows,
                    nodes=tuple(nodes),
                    inputs=tuple(kinds["value"]),
                    outputs=tuple(name for name in written if readers.get(name, -1) > index),
                    weights=tuple(kinds["weight"]),
                    state=tuple(name for name in kinds["state"] if name not in shared),
                    shared_state=tuple(name for name in kinds["state"] if name in shared),
                )
            )
        return replace(self.plan, subgraphs=tuple(subgraphs))

    def placement_of(self, labels: Labels) -> Placement:
        """Return a partition as a placement: the modules that differ from the rule, and modules below them that do
        not."""
        listed: dict[str, Place] = {}
        for path in sorted(labels, key=lambda path: path.count(".")):
            above = [other for other in listed if other == "" or path.startswith(f"{other}.")]
            nearest = max(above, key=len, default=None)
            inherited = self.labels[path] if nearest is None or path in self._own_devices else listed[nearest]
            if labels[path] != inherited:
                listed[path] = labels[path]
        return self._shortened(listed)

    @cached_property
    def _own_devices(self) -> set[str]:
        """Movable modules that the rule puts on the CPU: their own setting keeps them there."""
        return {path for path, device in self.labels.items() if device == "cpu"}

    def _shortened(self, listed: Mapping[str, Place]) -> Placement:
        """Replace equal lines of all layers by one line with a pattern."""
        kinds: dict[str, list[str]] = defaultdict(list)
        for path in self.labels:
            kinds[pattern_of(path)].append(path)
        found: dict[str, Place] = {}
        for path, device in listed.items():
            pattern = pattern_of(path)
            same = {listed.get(other) for other in kinds[pattern]}
            is_safe = len(kinds[pattern]) > 1 and {p for p in self._paths if fnmatchcase(p, pattern)} == {
                *kinds[pattern]
            }
            found[pattern if is_safe and same == {device} else path] = device
        return found

    @cached_property
    def _paths(self) -> set[str]:
        """Paths of all modules with nodes, and of the modules above them."""
        names = [node.name.split(".") for step in self.steps for node in step.nodes]
        return {".".join(parts[:length]) for parts in names for length in range(len(parts))}

    def allows(self, labels: Labels) -> bool:
        """Return whether a placement can express a partition: a module with nodes that stay on the CPU follows the
        modules above it."""
        return not any(
            labels[path] == "npu" and any(labels[above] == "cpu" for above in blocked)
            for path, blocked in self.inherits.items()
        )

    def repaired(self, labels: Labels) -> Labels:
        """Return a partition that `allows` accepts: modules that follow a module on the CPU are moved there too."""
        found = dict(labels)
        for path, blocked in self.inherits.items():
            if any(found[above] == "cpu" for above in blocked):
                found[path] = "cpu"
        return found

    def _device_of(self, step: _NodeGroup, labels: Labels) -> Place:
        return labels[step.module] if len(step.devices) > 1 else step.device

    def _inheriting(self) -> dict[str, list[str]]:
        """Map movable modules that contain nodes fixed to the CPU, to the movable modules above them."""
        fixed = {step.module for step in self.steps if step.devices == ("cpu",)}
        found = {}
        for path in self.labels:
            above = [other for other in self.labels if other != path and (not other or path.startswith(f"{other}."))]
            if above and any(other == path or other.startswith(f"{path}.") for other in fixed):
                found[path] = above
        return found

    def _steps(self, plan: Plan, scheme: Scheme) -> list[_NodeGroup]:
        nodes = [(node, subgraph) for subgraph in plan.subgraphs for node in subgraph.nodes]
        by_module: dict[str, list[tuple[Node, Subgraph]]] = defaultdict(list)
        for node, subgraph in nodes:
            by_module[node.name.rpartition(".")[0]].append((node, subgraph))
        able = {
            module
            for module, members in by_module.items()
            if all(
                node.op != HEAD_NORM_OP and npu_support(replace(subgraph, nodes=(node,)), plan, scheme)
                for node, subgraph in members
            )
        }
        needed, serial = _needed(plan, nodes), _serial(plan, nodes)

        def devices(module: str, node: Node, subgraph: Subgraph) -> tuple[Place, ...]:
            if node.op == SHADOW_OP:
                return ("cpu",)
            if self._frees_attention and (can_be_static(node) or node.op == HEAD_NORM_OP):
                return ("cpu", "npu")
            return ("cpu", "npu") if subgraph.device == "npu" or (module and module in able) else ("cpu",)

        def key(member: tuple[Node, Subgraph]) -> tuple[Any, ...]:
            node, subgraph = member
            module = node.name.rpartition(".")[0]
            is_alone = node.op == SHADOW_OP or node.outputs[0].endswith(MAIN_SUFFIX)
            is_free = self._frees_attention and (can_be_static(node) or node.op == HEAD_NORM_OP)
            return (
                f"{module}.{node.op}" if is_free else module,
                subgraph.device,
                devices(module, node, subgraph),
                subgraph.rows,
                node.name if is_alone else "",
                node.name in needed,
                node.name in serial,
            )

        return [
            _NodeGroup(
                module=module,
                nodes=tuple(node for node, _ in group),
                device=cast(Place, device),
                devices=able_devices,
                rows=rows,
                alone=alone,
                is_needed=is_needed,
                is_serial=is_serial,
            )
            for (module, device, able_devices, rows, alone, is_needed, is_serial), group in groupby(nodes, key=key)
        ]


def pattern_of(path: str) -> str:
    """Return a module's path with "*" in place of its layer's number."""
    return ".".join("*" if part.isdigit() else part for part in path.split("."))


def layer_of(path: str) -> int:
    """Return the number of a module's layer; -1 for a module outside the layers."""
    return next((int(part) for part in path.split(".") if part.isdigit()), -1)


def _needed(plan: Plan, nodes: Sequence[tuple[Node, Subgraph]]) -> set[str]:
    """Return the nodes that a state depends on."""
    wanted: set[str] = set()
    found = set()
    for node, _ in reversed(nodes):
        owns = any(name and plan.tensors[name].kind == "state" for name in node.inputs)
        if owns or wanted.intersection(node.outputs):
            found.add(node.name)
            wanted.update(node.inputs)
    return found


def _serial(plan: Plan, nodes: Sequence[tuple[Node, Subgraph]]) -> set[str]:
    """Return nodes that form a chain, each of which depends on the one before; of several chains, that with the
    largest weights."""
    makers: dict[str, str] = {}
    before: dict[str, str] = {}
    lengths: dict[str, float] = {}
    for node, _ in nodes:
        sources = {makers[name] for name in node.inputs if name in makers}
        longest = max(sources, key=lengths.__getitem__, default="")
        shapes = [plan.tensors[name].shape for name in node.inputs if name and plan.tensors[name].kind == "weight"]
        before[node.name] = longest
        lengths[node.name] = lengths.get(longest, 0) + 1 + sum(prod(map(int, shape)) for shape in shapes)
        makers |= dict.fromkeys(node.outputs, node.name)
    chain = [makers[plan.output]]
    while before[chain[-1]]:
        chain.append(before[chain[-1]])
    return set(chain)


class Edges(NamedTuple):
    """Transitions of one step: the states before and after, the processors, and the features that each costs.

    Attributes:
        costs, serial, apart: for each transition, the features that count for the processors' times, for the path of a
            chunk, and for the time of the CPU before and after all work of the NPU.
    """

    before: Index
    after: Index
    on_npu: NDArray[np.bool_]
    costs: tuple[Index, Index]
    serial: tuple[Index, Index]
    apart: tuple[Index, Index]
    num_after: int


class Trellis:
    """The states of all steps, and the transitions between them. It does not depend on costs."""

    def __init__(self, cuts: Cuts) -> None:
        self.cuts = cuts
        self.features: dict[tuple[str, str, int, int], int] = {}
        """Kind ("task", "step", "take" or "give"), processor, step or value, and route, in the order of costs."""
        steps = cuts.steps
        self.values: dict[str, int] = {}
        """Values that cross between steps, numbered."""
        last_read = {name: index for index, step in enumerate(steps) for n in step.nodes for name in n.inputs if name}
        self._reads, self._writes = [], []
        for index, step in enumerate(steps):
            written = [name for node in step.nodes for name in node.outputs]
            read = dict.fromkeys(name for node in step.nodes for name in node.inputs if name not in set(written))
            self._reads.append([n for n in read if n and cuts.plan.tensors[n].kind == "value"])
            self._writes.append([n for n in written if last_read.get(n, -1) > index])
            for name in (*self._reads[-1], *self._writes[-1]):
                self.values.setdefault(name, len(self.values))
        self._last_read = last_read
        last_use = {step.module: index for index, step in enumerate(steps) if len(step.devices) > 1}
        for path, above in cuts.inherits.items():
            for other in above:
                first = {step.module: index for index, step in reversed([*enumerate(steps)])}
                last_use[path] = max(last_use[path], first[other])
                last_use[other] = max(last_use[other], first[path])
        self._last_use = last_use
        self.edges = list(self._expand())

    def _expand(self) -> Iterator[Edges]:
        states = {_State(BEFORE, "", ALWAYS, False, (), ()): 0}
        for index in range(len(self.cuts.steps)):
            found: dict[_State, int] = {}
            rows: list[tuple[int, int, bool]] = []
            costs: list[list[int]] = []
            serial: list[list[int]] = []
            apart: list[list[int]] = []
            is_last = index == len(self.cuts.steps) - 1
            for state, number in states.items():
                for device in self._choices(state, index):
                    for after, paid, on_path in self._moves(state, index, device):
                        for phase in _phases(state.phase, device, is_last=is_last):
                            reached = after._replace(phase=phase)
                            rows.append((number, found.setdefault(reached, len(found)), device == "npu"))
                            costs.append(paid)
                            serial.append(on_path)
                            apart.append([] if phase == AMID else paid)
            before, after_, on_npu = (np.array(column) for column in zip(*rows, strict=True))
            yield Edges(before, after_, on_npu, _joined(costs), _joined(serial), _joined(apart), len(found))
            states = found

    def _choices(self, state: _State, index: int) -> Iterable[Place]:
        step, labels = self.cuts.steps[index], dict(state.labels)
        if len(step.devices) == 1:
            return step.devices
        if step.module in labels:
            return (labels[step.module],)
        inherits = self.cuts.inherits
        if any(labels.get(above) == "cpu" for above in inherits.get(step.module, ())):
            return ("cpu",)
        if any(step.module in above and labels.get(path) == "npu" for path, above in inherits.items()):
            return ("npu",)
        return step.devices

    def _moves(self, state: _State, index: int, device: Place) -> Iterator[tuple[_State, list[int], list[int]]]:
        """Return the states after a step on a processor, with their costs: it continues a subgraph or begins one."""
        step = self.cuts.steps[index]
        previous = self.cuts.steps[index - 1] if index else None
        if previous is not None and state.device == device and previous.home == step.home and not step.alone:
            if state.route == ALWAYS or not step.is_needed:
                yield self._move(state, index, device, state.route, begins=False)
            return
        yield self._move(state, index, device, ALWAYS, begins=True)
        if not step.is_needed:
            yield self._move(state, index, device, ONCE, begins=True)

    def _move(
        self, state: _State, index: int, device: Place, route: int, *, begins: bool
    ) -> tuple[_State, list[int], list[int]]:
        step = self.cuts.steps[index]
        values = {name: (home, of, is_paid) for name, home, of, is_paid in state.values}
        costs, serial = [], []

        def pay(kind: str, on: str, which: int, of: int, *, is_serial: bool) -> None:
            feature = self.features.setdefault((kind, on, which, of), len(self.features))
            costs.append(feature)
            if is_serial:
                serial.append(feature)

        has_serial = step.is_serial or (state.has_serial and not begins)
        if begins:
            values = {n: (home, of, is_paid and home == "npu") for n, (home, of, is_paid) in values.items()}
            pay("task", device, 0, route, is_serial=step.is_serial)
        elif step.is_serial and not state.has_serial:
            serial.append(self.features.setdefault(("task", device, 0, route), len(self.features)))
        pay("step", device, index, route, is_serial=has_serial)
        for name in self._reads[index]:
            home, of, is_paid = values.get(name, ("cpu", ALWAYS, False))
            if home != device and not is_paid:
                kind, owner = ("take", route) if device == "npu" else ("give", of)
                pay(kind, "npu", self.values[name], owner, is_serial=kind == "take" and has_serial)
                is_paid = True
            values[name] = home, of, is_paid
        for name in self._writes[index]:
            values[name] = device, route, False
        labels = dict(state.labels)
        if len(step.devices) > 1:
            labels[step.module] = device
        after = _State(
            phase=state.phase,
            device=device,
            route=route,
            has_serial=has_serial,
            labels=tuple(item for item in labels.items() if self._last_use[item[0]] > index),
            values=tuple((n, *v) for n, v in values.items() if self._last_read.get(n, -1) > index),
        )
        return after, costs, serial


def _phases(phase: int, device: Place, *, is_last: bool) -> Iterable[int]:
    """Return the phases that a step on a processor can be in, given that of the step before."""
    if device == "npu":
        return () if phase == AFTER else (AMID,)
    if phase == AMID:
        return (AFTER,) if is_last else (AMID, AFTER)
    return (phase,)


def _joined(lists: Sequence[Sequence[int]]) -> tuple[Index, Index]:
    """Return the row and the feature of each entry."""
    rows = [row for row, features in enumerate(lists) for _ in features]
    return np.array(rows, np.int64), np.array([feature for features in lists for feature in features], np.int64)


@dataclass(frozen=True, kw_only=True)
class Split:
    """A partition, and the times of both processors for a prompt, in nanoseconds without contention.

    Attributes:
        apart_ns: time of the CPU before the first and after the last work of the NPU.
    """

    labels: Labels
    npu_ns: float
    cpu_ns: float
    apart_ns: float

    @property
    def least_ns(self) -> float:
        """Time that the prompt takes at least."""
        return max(self.npu_ns + self.apart_ns, self.cpu_ns)


class PartitionCosts:
    """Costs of a decoder's partitions for one prompt.

    Args:
        trellis: the partitions.
        scheme: quantisation of the linears.
        device: costs of operators.
        chunks: chunks of the prompt.
        graph_lengths: see `Pipeline.graph_lengths`.
        near: a plan with attention on the NPU, whose chunks run one after another.
    """

    def __init__(
        self,
        trellis: Trellis,
        scheme: Scheme,
        device: DeviceProfile,
        *,
        chunk_length: int,
        chunks: Sequence[ChunkWork],
        graph_lengths: Sequence[int] = (),
        near: Plan | None = None,
    ) -> None:
        self._trellis = trellis
        plan, steps = trellis.cuts.plan, trellis.cuts.steps
        near_nodes = {} if near is None else {node.name: node for s in near.subgraphs for node in s.nodes}
        probes: dict[tuple[str, int], int] = {}
        doubled: dict[int, int] = {}
        subgraphs: list[Subgraph] = []
        for on, (index, step) in product(PLACES, enumerate(steps)):
            nodes = tuple(near_nodes.get(n.name, n) for n in step.nodes) if on == "npu" else step.nodes
            probes[on, index] = len(subgraphs)
            subgraphs.append(_alone(f"{on}.{index}", on, nodes, step.rows, plan))
            if any(map(static_slots, nodes)):  # masks are shared with other layers: count an additional layer alone
                doubled[index] = len(subgraphs)
                subgraphs.append(_alone(f"{on}.{index}.doubled", on, nodes * 2, step.rows, plan))
        of_route = {ALWAYS: chunks, ONCE: [chunk for chunk in chunks if chunk.num_rows]}
        on_path = of_route if near is not None else {ALWAYS: chunks[-1:], ONCE: of_route[ONCE]}
        work = ModelledWork(
            replace(plan, subgraphs=tuple(subgraphs)),
            scheme,
            device,
            chunk_length=chunk_length,
            chunks=chunks,
            graph_lengths=graph_lengths,
        )
        task_ns = {on: 1000 * device.processor_cost(on).task_us for on in PLACES}
        names = [*trellis.values]

        @cache
        def crossing_ns(which: int, tokens: int, rows: int) -> float:
            num_bytes = plan.tensors[names[which]].num_bytes(T=tokens, R=rows)
            return 1000 * device.transfer.fixed_us + num_bytes / device.transfer.gb_per_s

        def ns(kind: str, on: Place, which: int, chunk: ChunkWork) -> float:
            if kind == "task":
                return task_ns[on]
            if kind != "step":
                numbers = chunk.num_tokens, chunk.num_rows
                return crossing_ns(which, *(smallest_graph(n, graph_lengths, chunk_length) for n in numbers))
            alone = work.of(probes[on, which], chunk).ns
            return (
                work.of(doubled[which], chunk).ns - alone if on == "npu" and which in doubled else alone - task_ns[on]
            )

        size = len(trellis.features)
        self._ns, self._serial, apart = np.zeros((2, size)), np.zeros(size), np.zeros(size)
        for (kind, processor, which, route), feature in trellis.features.items():
            place: Place = "npu" if processor == "npu" else "cpu"
            of_each = {chunk: ns(kind, place, which, chunk) for chunk in chunks}
            self._ns[PLACES.index(place), feature] = sum(of_each[chunk] for chunk in of_route[route])
            self._serial[feature] = sum(of_each[chunk] for chunk in on_path[route])
            apart[feature] = min((of_each[chunk] for chunk in of_route[route]), default=0.0) * (place == "cpu")
        self.num_bytes = sum(
            min(work.of(probes[on, index], chunk).num_bytes for on in step.devices)
            for index, step in enumerate(steps)
            for chunk in of_route[ALWAYS if step.is_needed else ONCE]
        )
        """Bytes that every partition moves from and to shared memory, at least."""
        self._edge_ns = [
            np.stack(
                [
                    *(_sums(edges.costs, row, len(edges.before)) for row in self._ns),
                    _sums(edges.apart, apart, len(edges.before)),
                ]
            )
            for edges in trellis.edges
        ]
        self._edge_serial_ns = [_sums(edges.serial, self._serial, len(edges.before)) for edges in trellis.edges]

    def serial(self, labels: Labels | None = None) -> tuple[float, Labels]:
        """Return the least time of the last chunk that runs by itself, or with attention on the NPU that of all chunks;
        and the partition with this time.

        Args:
            labels: a partition whose time is wanted instead.
        """
        total, split = self._best(self._edge_serial_ns, labels)
        return total, split.labels

    def split(self, labels: Labels) -> Split:
        """Return the times of one partition."""
        return self._weighted((1.0, 1.0), labels)

    def least(self, npu: float, cpu: float) -> float:
        """Return the least weighted sum of the processors' times."""
        return self._best([npu * edge_ns[0] + cpu * edge_ns[1] for edge_ns in self._edge_ns])[0]

    def hull(self) -> list[Split]:
        """Return the vertices of the lower convex hull of (NPU time and time apart, CPU time), in this order."""
        ends = self._weighted((1.0, EPSILON)), self._weighted((EPSILON, 1.0))
        return [ends[0], *self._between(*ends), ends[1]]

    def _between(self, left: Split, right: Split) -> list[Split]:
        weights = left.cpu_ns - right.cpu_ns, right.npu_ns + right.apart_ns - left.npu_ns - left.apart_ns
        if min(weights) <= 0:
            return []
        found = self._weighted(weights)

        def cost(split: Split) -> float:
            return weights[0] * (split.npu_ns + split.apart_ns) + weights[1] * split.cpu_ns

        if cost(found) >= cost(left) * (1 - EPSILON):
            return []
        return [*self._between(left, found), found, *self._between(found, right)]

    def _weighted(self, weights: tuple[float, float], fixed: Labels | None = None) -> Split:
        return self._best([weights[0] * (ns[0] + ns[2]) + weights[1] * ns[1] for ns in self._edge_ns], fixed)[1]

    def _best(self, edge_costs: Sequence[Float], fixed: Labels | None = None) -> tuple[float, Split]:
        """Return the least sum of costs, and its partition, among all or with fixed processors."""
        steps = self._trellis.cuts.steps
        best, chosen = np.zeros(1), []
        for step, edges, edge_cost in zip(steps, self._trellis.edges, edge_costs, strict=True):
            costs = best[edges.before] + edge_cost
            if fixed is not None and len(step.devices) > 1:
                costs[edges.on_npu != (fixed[step.module] == "npu")] = np.inf
            order = np.lexsort((costs, edges.after))
            firsts = order[np.searchsorted(edges.after[order], np.arange(edges.num_after))]
            best = costs[firsts]
            chosen.append(firsts)
        return float(best.min()), self._traced(chosen, int(best.argmin()))

    def _traced(self, chosen: Sequence[Index], state: int) -> Split:
        """Return the partition whose transitions end in a state, given the best transition into each state."""
        labels: dict[str, Place] = {}
        total = np.zeros(3)
        steps = [*zip(self._trellis.cuts.steps, self._trellis.edges, self._edge_ns, chosen, strict=True)]
        for step, edges, edge_ns, firsts in reversed(steps):
            edge = int(firsts[state])
            if len(step.devices) > 1:
                labels[step.module] = "npu" if edges.on_npu[edge] else "cpu"
            total += edge_ns[:, edge]
            state = int(edges.before[edge])
        return Split(labels=labels, npu_ns=float(total[0]), cpu_ns=float(total[1]), apart_ns=float(total[2]))

    def front(self, most_points: int = 128) -> list[Split]:
        """Return partitions that no other one exceeds in both coordinates of the hull, in the same order.

        If a state has more than `most_points` such partitions, some are dropped, at even distances.
        """
        points: list[Float] = [np.zeros((2, 1))]
        kept: list[list[Index]] = []
        for edges, edge_ns in zip(self._trellis.edges, self._edge_ns, strict=True):
            pair = np.stack([edge_ns[0] + edge_ns[2], edge_ns[1]])
            of_state: list[list[int]] = [[] for _ in range(edges.num_after)]
            for edge, after in enumerate(edges.after):
                of_state[after].append(edge)
            found, parents = [], []
            for into in of_state:
                times = np.concatenate([points[edges.before[e]] + pair[:, e, None] for e in into], axis=1)
                sources = np.concatenate(
                    [np.stack([np.full(points[edges.before[e]].shape[1], e), *_numbers(points[edges.before[e]])])
                     for e in into],
                    axis=1,
                )  # fmt: skip
                best = _undominated(times, most_points)
                found.append(times[:, best])
                parents.append(sources[:, best])
            points, kept = found, [*kept, parents]
        times = np.concatenate(points, axis=1)
        ends = [(state, point) for state, of in enumerate(points) for point in range(of.shape[1])]
        return [self._followed(kept, *ends[index]) for index in _undominated(times, most_points)]

    def _followed(self, kept: Sequence[Sequence[Index]], state: int, point: int) -> Split:
        labels: dict[str, Place] = {}
        total = np.zeros(3)
        steps = [*zip(self._trellis.cuts.steps, self._trellis.edges, self._edge_ns, kept, strict=True)]
        for step, edges, edge_ns, parents in reversed(steps):
            edge, point = (int(number) for number in parents[state][:, point])
            if len(step.devices) > 1:
                labels[step.module] = "npu" if edges.on_npu[edge] else "cpu"
            total += edge_ns[:, edge]
            state = int(edges.before[edge])
        return Split(labels=labels, npu_ns=float(total[0]), cpu_ns=float(total[1]), apart_ns=float(total[2]))


def _numbers(points: Float) -> tuple[Index]:
    return (np.arange(points.shape[1]),)


def _undominated(times: Float, most: int) -> Index:
    """Return the columns that no other column exceeds in both rows, ordered by the first row; at most `most`."""
    order = np.lexsort((times[1], times[0]))
    seconds = times[1, order]
    least = np.minimum.accumulate(seconds)
    kept: Index = order[np.concatenate([[True], seconds[1:] < least[:-1]])]
    return kept if len(kept) <= most else kept[np.linspace(0, len(kept) - 1, most).round().astype(int)]


def _sums(entries: tuple[Index, Index], costs: Float, size: int) -> Float:
    rows, features = entries
    sums: Float = np.bincount(rows, costs[features], size).astype(np.float64)
    return sums


def _alone(name: str, device: Place, nodes: tuple[Node, ...], rows: Rows, plan: Plan) -> Subgraph:
    """Return a subgraph of some nodes without values that cross."""
    state = dict.fromkeys(n for node in nodes for n in node.inputs if n and plan.tensors[n].kind == "state")
    return Subgraph(
        name=name, device=device, is_static=True, rows=rows, nodes=nodes, inputs=(), outputs=(), weights=(),
        state=tuple(state),
    )  # fmt: skip
