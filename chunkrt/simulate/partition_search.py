"""Search for the partition with the best simulated figures, and a lower bound of these figures.

The optimiser of `partitions.py` knows the work of both processors, and not their schedule. The search simulates its
partitions, and improves the best one by moving modules of one or all layers. If a decoder has few partitions, all of
them are considered: one is simulated unless its lower bound exceeds the best found.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, product
from math import ceil, inf, prod
from statistics import geometric_mean
from typing import Literal, NamedTuple

from chunkrt.backends.qnn.htp_support import npu_support
from chunkrt.errors import ConfigError
from chunkrt.graph.placement import Placement
from chunkrt.graph.plan import Plan
from chunkrt.quant.scheme import Scheme
from chunkrt.runtime.policy import DEFAULT_POLICY
from chunkrt.simulate.experiments import near_plans_of
from chunkrt.simulate.partitions import PLACES, Cuts, Labels, PartitionCosts, Split, Trellis, layer_of, pattern_of
from chunkrt.simulate.profile import DeviceProfile
from chunkrt.simulate.queue import Queue, percentile
from chunkrt.simulate.simulator import graphs_of, simulate
from chunkrt.simulate.work import ChunkWork, cut

Objective = Literal["time", "energy", "edp", "p95"]
"""Quantity to minimise: "time" is the time to first token, in exchange for energy at ENERGY_EXPONENT; "energy" is the
energy; "edp" is their product; "p95" is the 95th percentile of the time to first token over the given prompt lengths,
or over the requests of a queue.
"""

ENERGY_EXPONENT = 0.1
"""Exchange rate of the objective "time": 1 % of the time to first token is worth 10 % of the energy. The objective is
time * energy ** ENERGY_EXPONENT. Without power figures, it is the time."""

TIE = 0.01
"""Relative tolerance: choices that are worse than the best by at most this share count as equally good, and the one
with the least memory wins. A search ends when it is as near to the lower bound.
"""

MOST_PARTITIONS = 2**11
"""Largest number of partitions of a decoder for which the search is exact."""

MOST_SIMULATIONS = 100
"""Number of partitions that are simulated for one chunk length if there are more."""

NUM_SEEDS = 8
"""Number of the optimiser's partitions that are simulated first."""

ON_CPU = "cpu"

Lengths = tuple[int, ...]
"""Lengths of the NPU's graphs in tokens, shortest first; the last is that of chunks."""


def cost_of(objective: Objective, times_ms: Sequence[float], joules: float | None, queue: Queue | None = None) -> float:
    """Return the quantity to minimise. Without power figures, also if all are 0, it is the time.

    Args:
        times_ms: time to the first token of every prompt.
        joules: sum over all prompts.
        queue: for "p95", requests with these prompts that wait for each other; the cost is infinite if the queue grows
            without bound.
    """
    if objective == "p95":
        waiting_ms = percentile(times_ms, 0.95) if queue is None else queue.p95_ms(times_ms)
        return inf if waiting_ms is None else waiting_ms
    time_ms = geometric_mean(times_ms)
    if not joules:
        return time_ms
    exponents = {"time": (1.0, ENERGY_EXPONENT), "energy": (0.0, 1.0), "edp": (1.0, 1.0)}
    of_time, of_energy = exponents[objective]
    return float(time_ms**of_time * joules**of_energy)


class CutSize(NamedTuple):
    """Numbers of a plan's subgraphs on NPU and CPU, and of the values that a chunk moves between them."""

    npu: int
    cpu: int
    values: int


@dataclass(frozen=True, kw_only=True)
class Found:
    """Result of a search for one attention and chunk length.

    Attributes:
        placement: the best partition.
        cost: its cost with the default policy and number of chunks in flight; infinite if none fits the memory.
        is_exact: no partition is better.
    """

    labels: Labels
    placement: Placement
    cost: float
    num_simulated: int
    is_exact: bool


class PartitionSearch:
    """Search over the partitions of one decoder.

    Args:
        plan: the plan by the rule.
        prompt_lengths: numbers of tokens; a length that occurs several times counts several times.
        memory_bytes: limit of the peak memory; None for no limit.
        queue: requests with these prompts that wait for each other; None if they do not wait.
    """

    def __init__(
        self,
        plan: Plan,
        scheme: Scheme,
        device: DeviceProfile,
        prompt_lengths: Sequence[int],
        objective: Objective,
        memory_bytes: int | None = None,
        queue: Queue | None = None,
    ) -> None:
        self.queue = queue
        self.plan, self.scheme, self.device = plan, scheme, device
        self.prompt_lengths, self.objective, self.memory_bytes = prompt_lengths, objective, memory_bytes
        self.cuts = Cuts(plan, scheme)

    @cached_property
    def _trellis(self) -> Trellis:
        return Trellis(self.cuts)

    @cached_property
    def _free_trellis(self) -> Trellis:
        return Trellis(Cuts(self.plan, self.scheme, frees_attention=True))

    def bound(self, attention: str, lengths: Lengths) -> float:
        """Return a cost that no partition and no order of tasks is below.

        Both processors have to do the work of some partition, one chunk has to pass through it, and the memory has to
        deliver its bytes. Transitions between tasks and contention for memory only add to this.
        """
        bounds = {length: self._bound(attention, lengths, length) for length in set(self.prompt_lengths)}
        times_ms, joules = zip(*(bounds[length] for length in self.prompt_lengths), strict=True)
        return cost_of(self.objective, times_ms, sum(joules), self.queue)

    def _bound(self, attention: str, lengths: Lengths, prompt_length: int) -> tuple[float, float]:
        """Return the least time in milliseconds and the least energy in joules of one prompt."""
        device = self.device
        total_ns, joules = 1000.0 * device.prompt_us, 0.0
        for _, costs in self._costs(attention, lengths, prompt_length):
            serial_ns, _ = costs.serial()
            busier_ns = _least_busier_ns(costs.hull())
            total_ns += max(serial_ns, busier_ns, costs.num_bytes / device.memory.gb_per_s)
            joules += costs.least(device.npu.busy_watts, device.cpu.busy_watts) / 1e9
            joules += costs.num_bytes * device.memory.pj_per_byte / 1e12
        return total_ns / 1e6, joules + device.idle_watts * total_ns / 1e9

    def _costs(self, attention: str, lengths: Lengths, prompt_length: int) -> Iterator[tuple[bool, PartitionCosts]]:
        """Return the costs of the chunks that one plan serves, and whether it has attention on the NPU."""
        chunk_length, graphs = lengths[-1], graphs_of(lengths, lengths[-1], self.scheme)
        chunks = cut(prompt_length, chunk_length)
        near = {} if attention == ON_CPU else near_plans_of(self.plan, {}, attention)
        groups: dict[int | None, list[ChunkWork]] = defaultdict(list)
        for chunk in chunks:
            groups[min((reach for reach in near if chunk.position <= reach), default=None)].append(chunk)
        for reach, group in groups.items():
            trellis, plan = (self._trellis, None) if reach is None else (self._free_trellis, near[reach])
            yield (
                reach is not None,
                PartitionCosts(
                    trellis,
                    self.scheme,
                    self.device,
                    chunk_length=chunk_length,
                    chunks=group,
                    graph_lengths=graphs,
                    near=plan,
                ),
            )

    def search(self, attention: str, lengths: Lengths) -> Found:
        """Search the best partition, with the default policy and number of chunks in flight."""
        trial = _Trial(self, attention, lengths)
        for labels in self._seeds(attention, lengths):
            trial.cost(labels)
        near_enough = (1 + TIE) * self.bound(attention, lengths)
        num_partitions = prod(len(step.devices) for step in {s.module: s for s in self.cuts.steps}.values())
        if num_partitions <= MOST_PARTITIONS:
            trial.search_all()
        else:
            trial.climb(near_enough)
        return Found(
            labels=trial.best,
            placement=self.cuts.placement_of(trial.best),
            cost=trial.best_cost,
            num_simulated=len(trial.costs),
            is_exact=num_partitions <= MOST_PARTITIONS,
        )

    def _seeds(self, attention: str, lengths: Lengths) -> Iterator[Labels]:
        """Return partitions to begin with: the rule's, and those that the optimiser expects to be the best."""
        yield self.cuts.labels
        if self.memory_bytes is not None:
            yield dict.fromkeys(self.cuts.labels, "cpu")
        longest = max(self.prompt_lengths)
        num_chunks = ceil(longest / lengths[-1])
        for is_near, costs in self._costs(attention, lengths, longest):
            if is_near:
                free = costs.serial()[1]
                yield self.allowed({path: free[path] for path in self.cuts.labels})
                continue

            def expected(split: Split) -> float:
                """Return the cost if the less busy processor waits once for a chunk."""
                ns = split.least_ns + min(split.npu_ns, split.cpu_ns) / num_chunks
                watts = self.device.npu.busy_watts, self.device.cpu.busy_watts
                joules = self.device.idle_watts * ns + watts[0] * split.npu_ns + watts[1] * split.cpu_ns
                return cost_of(self.objective, [ns], joules)

            front = sorted([*costs.hull(), *costs.front()], key=expected)
            yield from (split.labels for split in front[:NUM_SEEDS])

    def size_of(self, labels: Labels, attention: str) -> CutSize:
        """Return the size of a partition; with attention on the NPU, that of the plan for the first chunk."""
        plan = self.cuts.plan_of(labels)
        if attention != ON_CPU:
            near = near_plans_of(plan, self.cuts.placement_of(labels), attention)
            plan = near[min(near)]
        homes = {name: s.device for s in plan.subgraphs for name in s.outputs}
        values = {
            (name, s.device) for s in plan.subgraphs for name in s.inputs if homes.get(name, s.device) != s.device
        }
        on_npu = sum(s.device == "npu" for s in plan.subgraphs)
        return CutSize(npu=on_npu, cpu=len(plan.subgraphs) - on_npu, values=len(values))

    def allowed(self, labels: Labels) -> Labels:
        """Return the nearest partition that a placement can express."""
        return labels if self.cuts.allows(labels) else self.cuts.repaired(labels)


class _Trial:
    """Simulated partitions for one attention and chunk length, with their costs."""

    def __init__(self, search: PartitionSearch, attention: str, lengths: Lengths) -> None:
        self._search, self._attention, self._lengths = search, attention, lengths
        self.costs: dict[tuple[tuple[str, str], ...], float] = {}
        self.best: Labels = search.cuts.labels
        self.best_cost = inf

    def cost(self, labels: Labels) -> float:
        """Return the cost of a partition, and keep the best one."""
        key = tuple(sorted(labels.items()))
        if key not in self.costs:
            found = self.costs[key] = self._simulated(labels)
            if found < self.best_cost:
                self.best, self.best_cost = labels, found
        return self.costs[key]

    def _simulated(self, labels: Labels) -> float:
        search = self._search
        plan, placement = search.cuts.plan_of(labels), search.cuts.placement_of(labels)
        near: Mapping[int, Plan] = {}
        if self._attention != ON_CPU:
            try:
                near = near_plans_of(plan, placement, self._attention)
            except ConfigError:  # the NPU cannot compute any attention next to these linears
                return inf
            parts = [(part, each) for each in near.values() for part in each.subgraphs if part.device == "npu"]
            if not all(npu_support(part, each, search.scheme) for part, each in parts):
                return inf
        found = {
            length: simulate(
                plan,
                search.device,
                prompt_length=length,
                chunk_length=self._lengths[-1],
                graph_lengths=self._lengths,
                policy=DEFAULT_POLICY,
                scheme=search.scheme,
                near=near,
            )
            for length in set(search.prompt_lengths)
        }
        simulations = [found[length] for length in search.prompt_lengths]
        if search.memory_bytes is not None and max(s.peak_memory_bytes for s in simulations) > search.memory_bytes:
            return inf
        joules = [s.energy_joules for s in simulations if s.energy_joules is not None]
        times_ms = [s.time_to_first_token_ms for s in simulations]
        return cost_of(search.objective, times_ms, sum(joules), search.queue)

    def search_all(self) -> None:
        """Simulate every partition that can be better than the best, the most promising first."""
        search, device = self._search, self._search.device
        modules = {step.module: step.devices for step in search.cuts.steps if len(step.devices) > 1}
        every = (dict(zip(modules, devices, strict=True)) for devices in product(*modules.values()))
        able = [labels for labels in every if search.cuts.allows(labels)]
        bounds = [0.0] * len(able)
        if self._attention == ON_CPU:
            costs = {
                length: next(search._costs(ON_CPU, self._lengths, length))[1] for length in set(search.prompt_lengths)
            }
            for index, labels in enumerate(able):
                times_ms, joules = [], 0.0
                for length in search.prompt_lengths:
                    split, of = costs[length].split(labels), costs[length]
                    ns = max(split.least_ns, of.serial(labels)[0], of.num_bytes / device.memory.gb_per_s)
                    ns += 1000 * device.prompt_us
                    times_ms.append(ns / 1e6)
                    watts = device.npu.busy_watts * split.npu_ns + device.cpu.busy_watts * split.cpu_ns
                    joules += (watts + device.idle_watts * ns) / 1e9 + of.num_bytes * device.memory.pj_per_byte / 1e12
                bounds[index] = cost_of(search.objective, times_ms, joules, search.queue)
        for bound, labels in sorted(zip(bounds, able, strict=True), key=lambda pair: pair[0]):
            if bound >= self.best_cost:
                break
            self.cost(labels)

    def climb(self, near_enough: float) -> None:
        """Move consecutive modules of one or of all layers, as long as this improves the best partition and its cost
        exceeds `near_enough`."""
        while len(self.costs) < MOST_SIMULATIONS and self.best_cost > near_enough:
            before = self.best_cost
            for labels in self._neighbours(self.best):
                if self.cost(labels) < before or len(self.costs) >= MOST_SIMULATIONS:
                    break
            if self.best_cost >= before:
                return

    def _neighbours(self, labels: Labels) -> Iterator[Labels]:
        """Return partitions with other processors for one kind of module, then for two adjacent kinds, and so on."""
        kinds: dict[str, list[str]] = defaultdict(list)
        for path in labels:
            kinds[pattern_of(path)].append(path)
        of_kind = list(kinds.values())
        for length in range(1, len(of_kind) + 1):
            for start, device in product(range(len(of_kind) - length + 1), PLACES):
                paths = [path for kind in of_kind[start : start + length] for path in kind]
                others = [path for path in paths if labels[path] != device]
                layers = sorted({layer_of(path) for path in others})
                for moved in (layers, layers[:1], layers[-1:], layers[: len(layers) // 2]):
                    found = {p: device if p in others and layer_of(p) in moved else labels[p] for p in labels}
                    if found != labels:
                        yield self._search.allowed(found)


def _least_busier_ns(hull: Sequence[Split]) -> float:
    """Return the least time of the busier processor over the hull, which bounds all partitions."""
    points = [(split.npu_ns + split.apart_ns, split.cpu_ns) for split in hull]
    least = min(map(max, points))
    for left, right in pairwise(points):
        before, after = left[0] - left[1], right[0] - right[1]
        if before < 0 < after:  # at this point of the edge, both coordinates are equal
            least = min(least, left[0] + (right[0] - left[0]) * before / (before - after))
    return least
