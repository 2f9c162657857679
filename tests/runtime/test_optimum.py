"""Distance of the default policy from the best schedule, which OR-tools' CP-SAT solver finds."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import pytest
from fake_backend import make_plan

from chunkrt.graph.plan import Plan
from chunkrt.runtime.policy import DEFAULT_POLICY, find_policy
from chunkrt.runtime.schedule import Schedule
from chunkrt.runtime.tasks import Processor
from chunkrt.runtime.virtual_clock import run_on_virtual_clock

cp_model = pytest.importorskip(
    "ortools.sat.python.cp_model", reason="OR-tools, which has no wheel for this platform, finds the optimum"
)

NUM_INSTANCES = 100
SEARCH_LIMIT = 4.0
"""CP-SAT's deterministic time for an instance; if it runs out, the proven bound is used."""


@dataclass
class Instance:
    """Up to 6 layers and 6 chunks, or up to 2 and 4 that fork and join, with random durations [subgraphs][chunks]."""

    plan: Plan
    durations: list[list[int]]
    lengths: list[int]
    chunks_in_flight: int
    processors: list[Processor]

    @property
    def num_chunks(self) -> int:
        return len(self.lengths)

    def makespan(self, policy: str) -> int:
        logit_chunks = [c for c, length in enumerate(self.lengths) if length == len(self.plan.subgraphs)]
        schedule = Schedule(
            self.plan,
            routes=self.plan.flow.routes(self.num_chunks, logit_chunks),
            chunks_in_flight=self.chunks_in_flight,
            processors=self.processors,
            policy=find_policy(policy),
            durations=self.durations,
        )
        return run_on_virtual_clock(schedule, schedule.duration)[-1].end_ns


pytestmark = pytest.mark.slow


def random_instance(random: Random) -> Instance:
    """Give every task its own duration, or those of a decoder: linears of equal length, attention growing."""
    if random.random() < 0.5:
        plan, num_chunks = make_plan(layers=random.randint(1, 6)), random.randint(2, 6)
    else:
        layers = random.randint(1, 2)
        plan, num_chunks = make_plan(layers, shadowed=random.randint(1, layers + 1)), random.randint(2, 4)
    kind = random.choice(("task by task", "subgraph by subgraph", "decoder"))
    npu, cpu, growth = random.randint(5, 20), random.randint(5, 20), random.choice((0, 1, 2, 3))
    durations = []
    for subgraph in plan.subgraphs:
        if kind == "task by task":
            durations.append([random.randint(1, 20) for _ in range(num_chunks)])
            continue
        own = random.randint(1, 20) if kind == "subgraph by subgraph" else npu if subgraph.device == "npu" else cpu
        durations.append([own + growth * chunk * bool(subgraph.state) for chunk in range(num_chunks)])
    last_state = max(i for i, subgraph in enumerate(plan.subgraphs) if subgraph.state)
    without_logits = len(plan.subgraphs) if random.random() < 0.2 else last_state + 1
    return Instance(
        plan=plan,
        durations=durations,
        lengths=[without_logits] * (num_chunks - 1) + [len(plan.subgraphs)],
        chunks_in_flight=random.choice((2, 3, 4, 6, 6)),
        processors=[
            Processor(name="npu", devices=frozenset({"npu"}), workers=1),
            Processor(name="cpu", devices=frozenset({"cpu"}), workers=random.choice((1, 1, 1, 2))),
        ],
    )


def optimum(instance: Instance) -> float:
    """Return the shortest makespan by the published rules, as far as proven from below.

    Chunks may take the slots in any order, so the bound also holds for schedules that this executor cannot make.
    """
    model = cp_model.CpModel()
    subgraphs, num_chunks = instance.plan.subgraphs, instance.num_chunks
    horizon = sum(map(sum, instance.durations))
    ends: dict[tuple[int, int], object] = {}
    intervals: dict[str, list[object]] = {"npu": [], "cpu": []}
    in_flight = []
    makespan = model.new_int_var(0, horizon, "")
    for chunk, length in enumerate(instance.lengths):
        starts = [model.new_int_var(0, horizon, "") for _ in range(length)]
        for index, start in enumerate(starts):
            end = start + instance.durations[index][chunk]
            intervals[subgraphs[index].device].append(
                model.new_fixed_size_interval_var(start, instance.durations[index][chunk], "")
            )
            for source in range(index):
                if set(subgraphs[source].outputs) & set(subgraphs[index].inputs):
                    model.add(start >= ends[source, chunk])
            if subgraphs[index].state and chunk > 0:
                model.add(start >= ends[index, chunk - 1])
            ends[index, chunk] = end
        stay, left = model.new_int_var(0, horizon, ""), model.new_int_var(0, horizon, "")
        model.add_max_equality(left, [ends[index, chunk] for index in range(length)])
        in_flight.append(model.new_interval_var(starts[0], stay, left, ""))
        model.add(makespan >= left)
    for processor in instance.processors:
        own = intervals[processor.name]
        model.add_cumulative(own, [1] * len(own), processor.workers)
    model.add_cumulative(in_flight, [1] * num_chunks, instance.chunks_in_flight)
    model.minimize(makespan)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_deterministic_time = SEARCH_LIMIT
    assert solver.solve(model) in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    return float(solver.best_objective_bound)


def test_default_policy_is_within_3_percent_of_the_optimum_and_never_slower_than_in_order() -> None:
    random = Random(0)
    excess: dict[bool, list[float]] = {True: [], False: []}
    for number in range(NUM_INSTANCES):
        instance = random_instance(random)
        best, found = optimum(instance), instance.makespan(DEFAULT_POLICY)
        assert best <= found <= instance.makespan("in_order"), f"instance {number}"
        excess[instance.plan.flow.is_chain].append(found / best - 1)
    for of_kind in excess.values():
        assert len(of_kind) > NUM_INSTANCES // 3
        assert sum(of_kind) / len(of_kind) < 0.03
