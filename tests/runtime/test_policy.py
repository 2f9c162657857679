"""The policies on a virtual clock: exact orders of events in hand-made cases, and their gain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from random import Random
from typing import Any

import pytest
from fake_backend import make_plan, make_schedule, npu_and_cpu, shared_cpu, subgraph
from hypothesis import given
from hypothesis import strategies as st

from chunkrt.graph.flow import Flow
from chunkrt.graph.plan import Plan
from chunkrt.runtime.policy import MOST_TASKS_FORESEEN, POLICIES, find_policy
from chunkrt.runtime.schedule import Schedule, upward_ranks
from chunkrt.runtime.tasks import Task
from chunkrt.runtime.virtual_clock import run_on_virtual_clock

CONCURRENT = sorted(name for name, policy in POLICIES.items() if policy.is_concurrent)


def schedule_of(
    policy: str, plan: Plan, durations: Mapping[str, Sequence[int]], *, in_flight: int = 8, **options: Any
) -> Schedule:
    """Return a schedule with `durations` by subgraph name or kind, for each chunk."""
    table = [list(durations.get(s.name) or durations[s.name.partition(".")[0]]) for s in plan.subgraphs]
    return make_schedule(plan, len(table[0]), policy=policy, in_flight=in_flight, durations=table, **options)


def lines(schedule: Schedule, plan: Plan) -> list[str]:
    """Return one line for each task, "start-end processor subgraph/chunk", by start; the schedule's estimates are
    exact."""
    events = sorted(run_on_virtual_clock(schedule, schedule.duration), key=lambda event: event.start_ns)
    return [
        f"{e.start_ns}-{e.end_ns} {e.processor} {plan.subgraphs[e.task.subgraph].name}/{e.task.chunk}" for e in events
    ]


def makespan(schedule: Schedule) -> int:
    return run_on_virtual_clock(schedule, schedule.duration)[-1].end_ns


HEAVY_ATTENTION = {"embedding": [1, 1, 1], "static": [1, 1, 1], "dynamic": [4, 5, 6], "head": [4, 4, 4]}
"""The CPU is the bottleneck: from 2 to 11 all policies agree."""

HEAVY_ATTENTION_UP_TO_11 = [
    "0-1 cpu embedding/0",
    "1-2 npu static.0/0",
    "1-2 cpu embedding/1",
    "2-3 npu static.0/1",
    "2-6 cpu dynamic.0/0",
    "6-7 npu static.1/0",
    "6-11 cpu dynamic.0/1",
    "11-12 npu static.1/1",
]

OUT_OF_ORDER = [
    *HEAVY_ATTENTION_UP_TO_11,
    "11-12 cpu embedding/2",  # gives the NPU 1 to do; dynamic.1/0 is its chunk's last task and gives it none
    "12-13 npu static.0/2",
    "12-16 cpu dynamic.1/0",
    "16-22 cpu dynamic.0/2",  # gives the NPU 1 to do, dynamic.1/1 none
    "22-23 npu static.1/2",
    "22-27 cpu dynamic.1/1",
    "27-33 cpu dynamic.1/2",
    "33-34 npu static.2/2",
    "34-38 cpu head/2",
]


def test_in_order_takes_the_earliest_chunk_regardless_of_durations() -> None:
    plan = make_plan(layers=2)
    assert lines(schedule_of("in_order", plan, HEAVY_ATTENTION), plan) == [
        *HEAVY_ATTENTION_UP_TO_11,
        "11-15 cpu dynamic.1/0",
        "15-20 cpu dynamic.1/1",
        "20-21 cpu embedding/2",
        "21-22 npu static.0/2",
        "22-28 cpu dynamic.0/2",
        "28-29 npu static.1/2",
        "29-35 cpu dynamic.1/2",
        "35-36 npu static.2/2",
        "36-40 cpu head/2",
    ]


def test_out_of_order_prefers_the_task_that_unlocks_most_npu_work() -> None:
    plan = make_plan(layers=2)
    assert lines(schedule_of("out_of_order", plan, HEAVY_ATTENTION), plan) == OUT_OF_ORDER


def test_out_of_order_subtracts_the_npus_own_tasks() -> None:
    """With two consecutive static subgraphs, the first makes 7 ready for the NPU in chunk 0, 2 in chunk 1."""
    plan = make_plan(layers=1)
    row = [
        subgraph("first", "npu", ["input_ids"], ["hidden.0"]),
        subgraph("second", "npu", ["hidden.0"], ["hidden.1"]),
        subgraph("dynamic.0", "cpu", ["hidden.1"], ["attention.0"], state=["cache.0"]),
    ]
    plan = replace(plan, subgraphs=tuple(row))
    schedule = Schedule(
        plan,
        routes=plan.flow.routes(2, ()),
        chunks_in_flight=2,
        processors=npu_and_cpu(),
        policy=find_policy("out_of_order"),
        durations=[[1, 1], [7, 2], [1, 1]],
    )
    events = run_on_virtual_clock(schedule, schedule.duration)
    assert [e.task for e in events if e.processor == "npu"] == [Task(0, 1), Task(1, 1), Task(0, 0), Task(1, 0)]


def test_critical_path_prefers_the_task_with_the_longest_path() -> None:
    plan = make_plan(layers=1)
    durations = {"embedding": [1] * 3, "static.0": [1] * 3, "dynamic": [1, 2, 3], "static.1": [3] * 3, "head": [1] * 3}
    up_to_6 = [
        "0-1 cpu embedding/0",
        "1-2 npu static.0/0",
        "1-2 cpu embedding/1",
        "2-3 npu static.0/1",
        "2-3 cpu dynamic.0/0",
        "3-5 cpu dynamic.0/1",
        "3-6 npu static.1/0",
        "5-6 cpu embedding/2",
    ]
    assert lines(schedule_of("critical_path", plan, durations, all_logits=True), plan) == [
        *up_to_6,
        "6-7 npu static.0/2",  # 1 + 3 + 3 + 1 must wait for it, for static.1/1 only 3 + 1
        "6-7 cpu head/0",
        "7-10 npu static.1/1",
        "7-10 cpu dynamic.0/2",
        "10-11 cpu head/1",
        "10-13 npu static.1/2",
        "13-14 cpu head/2",
    ]
    for policy in ("in_order", "out_of_order"):
        assert lines(schedule_of(policy, plan, durations, all_logits=True), plan) == [
            *up_to_6,
            "6-7 cpu head/0",
            "6-9 npu static.1/1",
            "9-10 npu static.0/2",
            "9-10 cpu head/1",
            "10-13 cpu dynamic.0/2",
            "13-16 npu static.1/2",
            "16-17 cpu head/2",
        ]


FORKING = {
    "embedding": [1] * 3,
    "static": [1] * 3,
    "linear": [2] * 3,
    "shadow": [3] * 3,
    "join": [1] * 3,
    "dynamic": [1] * 3,
    "head": [1] * 3,
}
"""linear.0 and shadow.0 read the output of static.0; join.0 reads both."""

FORKING_ORDERS = {
    "out_of_order": [
        "0-1 cpu embedding/0",
        "1-2 npu static.0/0",
        "1-2 cpu embedding/1",
        "2-3 cpu embedding/2",  # gives the NPU 1 to do; shadow.0/0 nothing, since linear.0/0 has not ended
        "2-4 npu linear.0/0",
        "3-6 cpu shadow.0/0",
        "4-5 npu static.0/1",
        "5-7 npu linear.0/1",
        "6-9 cpu shadow.0/1",
        "7-8 npu join.0/0",  # gives the NPU nothing; static.0/2 gives it 2, which counts against it
        "8-9 npu static.0/2",
        "9-10 npu join.0/1",
        "9-10 cpu dynamic.0/0",
        "10-11 cpu dynamic.0/1",
        "10-12 npu linear.0/2",
        "11-14 cpu shadow.0/2",
        "14-15 npu join.0/2",
        "15-16 cpu dynamic.0/2",
        "16-17 npu static.1/2",
        "17-18 cpu head/2",
    ],
    "critical_path": [
        "0-1 cpu embedding/0",
        "1-2 npu static.0/0",
        "1-2 cpu embedding/1",
        "2-3 npu static.0/1",  # 9 must wait for it, by way of its shadow; 8 for linear.0/0
        "2-5 cpu shadow.0/0",
        "3-5 npu linear.0/0",
        "5-6 cpu embedding/2",
        "5-7 npu linear.0/1",
        "6-9 cpu shadow.0/1",
        "7-8 npu static.0/2",
        "8-9 npu join.0/0",  # 6, as for linear.0/2
        "9-11 npu linear.0/2",
        "9-12 cpu shadow.0/2",  # 7; for dynamic.0/0 it is 5
        "11-12 npu join.0/1",
        "12-13 npu join.0/2",
        "12-13 cpu dynamic.0/0",
        "13-14 cpu dynamic.0/1",
        "14-15 cpu dynamic.0/2",
        "15-16 npu static.1/2",
        "16-17 cpu head/2",
    ],
}


@pytest.mark.parametrize("policy", [*FORKING_ORDERS, "look_ahead"])
def test_chunks_that_fork_and_join(policy: str) -> None:
    plan = make_plan(layers=1, shadowed=1)
    order = FORKING_ORDERS["critical_path" if policy == "look_ahead" else policy]
    assert lines(schedule_of(policy, plan, FORKING), plan) == order


def test_look_ahead_follows_the_policy_that_ends_first() -> None:
    plan = make_plan(layers=2)
    schedule = schedule_of("look_ahead", plan, HEAVY_ATTENTION)
    ends = {name: schedule.makespan(find_policy(name)) for name in ("critical_path", "out_of_order", "in_order")}
    assert ends == {"critical_path": 39, "out_of_order": 38, "in_order": 40}
    assert lines(schedule, plan) == OUT_OF_ORDER


def test_look_ahead_uses_the_critical_path_in_long_runs() -> None:
    plan = make_plan(layers=8)
    durations = {"embedding": [1] * 16, "static": [200] * 16, "dynamic": range(50, 370, 20), "head": [40] * 16}
    schedule = schedule_of("look_ahead", plan, durations)
    assert schedule.num_tasks > MOST_TASKS_FORESEEN
    assert lines(schedule, plan) == lines(schedule_of("critical_path", plan, durations), plan)


@given(
    layers=st.integers(1, 4),
    shadowed=st.sampled_from([0, 0, 1, 5]),
    num_chunks=st.integers(1, 6),
    in_flight=st.integers(1, 6),
    workers=st.integers(1, 3),
    is_shared=st.booleans(),
    data=st.data(),
)
def test_look_ahead_is_never_slower_than_its_candidates(
    layers: int, shadowed: int, num_chunks: int, in_flight: int, workers: int, is_shared: bool, data: st.DataObject
) -> None:
    plan = make_plan(layers, shadowed=shadowed)
    times = st.lists(st.integers(0, 20), min_size=num_chunks, max_size=num_chunks)
    durations = {subgraph.name: data.draw(times) for subgraph in plan.subgraphs}
    processors = shared_cpu(workers) if is_shared else npu_and_cpu(workers)
    ends = {
        name: makespan(schedule_of(name, plan, durations, in_flight=in_flight, processors=processors))
        for name in POLICIES
    }
    others = ["critical_path"] if is_shared else ["critical_path", "out_of_order", "in_order"]
    assert ends["look_ahead"] == min(ends[name] for name in others)


@pytest.mark.parametrize("policy", CONCURRENT)
def test_more_slots_save_time_if_attention_grows(policy: str) -> None:
    """In 16 chunks the NPU has work of 25800, the CPU of 25720, most of it for late chunks: more slots help."""
    plan = make_plan(layers=8)
    durations = {"embedding": [5] * 16, "static": [200] * 16, "dynamic": range(50, 370, 20), "head": [40] * 16}
    expected = {
        "in_order": [51520, 31780, 32165, 32565, 32565],
        "out_of_order": [51520, 32370, 31585, 31165, 31165],
        "critical_path": [51520, 32370, 31170, 30940, 28525],
        "look_ahead": [51520, 32370, 31170, 30940, 28525],
    }
    found = [makespan(schedule_of(policy, plan, durations, in_flight=slots)) for slots in (1, 2, 4, 8, 16)]
    assert found == expected[policy]


@given(num_chunks=st.integers(1, 4), in_flight=st.integers(1, 4), data=st.data())
def test_upward_ranks_are_the_longest_paths(num_chunks: int, in_flight: int, data: st.DataObject) -> None:
    """Compare with every path over the inputs of all subgraphs."""
    flags = data.draw(st.lists(st.booleans(), min_size=1, max_size=6))
    reads = [data.draw(st.sets(st.integers(0, i - 1))) if i else set() for i in range(len(flags))]
    times = st.lists(st.integers(0, 9), min_size=num_chunks, max_size=num_chunks)
    durations = data.draw(st.lists(times, min_size=len(flags), max_size=len(flags)))
    has_logits = data.draw(st.lists(st.booleans(), min_size=num_chunks, max_size=num_chunks))

    def feeds_state(index: int) -> bool:
        return flags[index] or any(index in reads[i] and feeds_state(i) for i in range(len(flags)))

    part = {i for i in range(len(flags)) if feeds_state(i)} or {0}
    passed = [set(range(len(flags))) if wanted else part for wanted in has_logits]

    @cache
    def longest(index: int, chunk: int) -> int:
        later = [longest(i, chunk) for i in passed[chunk] if index in reads[i]]
        if not later and chunk + in_flight < num_chunks:
            later = [longest(i, chunk + in_flight) for i in passed[chunk + in_flight]]
        if flags[index] and chunk + 1 < num_chunks:
            later.append(longest(index, chunk + 1))
        return durations[index][chunk] + max(later, default=0)

    flow = Flow(reads, flags)
    routes = [flow.with_logits if wanted else flow.without_logits for wanted in has_logits]
    assert upward_ranks(durations, routes, flags, in_flight) == [
        [longest(i, chunk) if i in passed[chunk] else 0 for i in range(len(flags))] for chunk in range(num_chunks)
    ]


@given(policy=st.sampled_from(CONCURRENT), shadowed=st.integers(0, 3), seed=st.integers(0, 1000))
def test_policy_does_not_depend_on_the_order_of_ready_tasks(policy: str, shadowed: int, seed: int) -> None:
    """A policy is a function of the set of ready tasks, so that racing threads cannot change the schedule."""
    plan, random = make_plan(layers=2, shadowed=shadowed), Random(seed)
    schedule = schedule_of(policy, plan, FORKING | HEAVY_ATTENTION, processors=shared_cpu(1))
    (everyone,) = schedule.processors
    while ready := schedule.ready:
        random.shuffle(ready)
        chosen = find_policy(policy).select(ready, schedule)
        task = schedule.claim(everyone)
        assert task is not None
        assert task == chosen
        schedule.complete(task)
    assert schedule.is_finished
