"""Estimated durations: operations counted from the plan, lines learnt from events; and the number of slots."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from fake_backend import (
    CONTEXT,
    LoneExecutor,
    finish,
    make_plan,
    npu_and_cpu,
    shared_cpu,
    subgraph,
    tokens,
)
from hypothesis import given
from hypothesis import strategies as st

from chunkrt.graph.plan import Node, Plan, Tensor
from chunkrt.runtime.buffers import BufferLayout
from chunkrt.runtime.chunk_slots import DEFAULT_SLOT_BYTES, MOST_CHUNKS_IN_FLIGHT, chunk_slots
from chunkrt.runtime.costs import FLOPS_PER_NS, Costs
from chunkrt.runtime.request import Request
from chunkrt.runtime.state import State
from chunkrt.runtime.tasks import Task, TaskEvent

STATIC, DYNAMIC, HEAD = 0, 1, 2


def make_counted_plan() -> Plan:
    """A linear and an addition on the NPU, attention with 2 heads of 3, an LM head of 7 columns."""

    def node(op: str, inputs: list[str], output: str) -> Node:
        is_ours = op == "CachedAttention"
        attributes = {"window": 0, "num_heads": 2, "head_dim": 3} if is_ours else {}
        domain = "chunkrt" if is_ours else ""
        return Node(name=output, op=op, domain=domain, inputs=tuple(inputs), outputs=(output,), attributes=attributes)

    def part(name: str, device: str, rows: str, nodes: list[Node], state: list[str]) -> object:
        empty = subgraph(name, device, [], [], rows=rows, state=state)  # type: ignore[arg-type]
        return replace(empty, nodes=tuple(nodes))

    shapes = {"x": ("T", 4), "w": (4, 5), "y": ("T", 5), "z": ("T", 5), "a": ("T", 6), "v": (6, 7), "logits": ("R", 7)}
    return replace(
        make_plan(),
        subgraphs=(
            part("static.0", "npu", "T", [node("MatMul", ["x", "w"], "y"), node("Add", ["y", "y"], "z")], []),
            part("dynamic.0", "cpu", "T", [node("CachedAttention", ["z"], "a")], ["cache"]),
            part("head", "cpu", "R", [node("MatMul", ["a", "v"], "logits")], []),
        ),
        tensors={name: Tensor(name=name, dtype="float32", shape=shape) for name, shape in shapes.items()},
    )


def events_of(times: dict[tuple[int, int], int]) -> list[TaskEvent]:
    return [TaskEvent(Task(*task), "any", 0, 100, 100 + time) for task, time in times.items()]


def test_operations_are_counted_from_the_plan() -> None:
    flops = Costs(make_counted_plan()).flops([8, 8, 3], [0, 0, 1], position=10)
    pairs = [sum(range(start + 1, start + 1 + count)) for start, count in ((10, 8), (18, 8), (26, 3))]
    assert flops[STATIC].tolist() == [count * (2 * 4 * 5 + 5) for count in (8, 8, 3)]
    assert flops[DYNAMIC].tolist() == [4 * 6 * count for count in pairs]
    assert flops[HEAD].tolist() == [1, 1, 2 * 6 * 7]


def test_estimates_before_measurements_follow_the_devices_speed() -> None:
    costs = Costs(make_counted_plan())
    flops = costs.flops([32] * 100, [0] * 99 + [1], position=0)
    speeds = [[FLOPS_PER_NS["npu"]], [FLOPS_PER_NS["cpu"]], [FLOPS_PER_NS["cpu"]]]
    assert costs.durations(flops) == np.rint(flops / speeds).astype(int).tolist()


def test_attention_is_learnt_as_a_line_and_linears_as_a_mean() -> None:
    costs = Costs(make_counted_plan())
    flops = costs.flops([8] * 4, [0] * 4, position=0)
    times = {(DYNAMIC, chunk): round(1000 + 2 * flops[DYNAMIC, chunk]) for chunk in range(3)}
    times |= {(STATIC, chunk): time for chunk, time in enumerate([300, 500, 400])}
    costs.learn(flops, events_of(times))
    static, dynamic, head = costs.durations(flops)
    assert static == [400] * 4
    assert dynamic == [round(1000 + 2 * flops[DYNAMIC, chunk]) for chunk in range(4)]
    assert head == [0] * 4  # not measured: a guess


def test_later_runs_have_more_weight() -> None:
    costs = Costs(make_counted_plan())
    flops = costs.flops([8], [0], position=0)
    costs.learn(flops, events_of({(STATIC, 0): 1000}))
    costs.learn(flops, events_of({(STATIC, 0): 2000}))
    assert costs.durations(flops)[STATIC] == [round((0.75 * 1000 + 2000) / 1.75)]


@given(
    times=st.lists(st.integers(0, 10**12), min_size=1, max_size=8),
    lengths=st.lists(st.integers(1, 64), min_size=8, max_size=8),
    position=st.integers(0, 10**6),
)
def test_estimates_are_never_negative_and_grow_with_the_position(
    times: list[int], lengths: list[int], position: int
) -> None:
    costs = Costs(make_counted_plan())
    flops = costs.flops(lengths, [0] * 8, position)
    costs.learn(flops, events_of({(DYNAMIC, chunk): time for chunk, time in enumerate(times)}))
    estimates = costs.durations(costs.flops([8] * 50, [0] * 50, position=0))[DYNAMIC]
    assert min(estimates) >= 0
    assert estimates == sorted(estimates)


def test_executor_learns_from_prompts_of_several_chunks() -> None:
    plan = make_plan()
    executor = LoneExecutor(plan, policy="critical_path")
    flops = executor.costs.flops([8] * 3, [0, 0, 1], position=0)
    guesses = executor.costs.durations(flops)
    finish(lambda: executor.run(Request(tokens(1), State(plan, CONTEXT))))
    assert executor.costs.durations(flops) == guesses
    result = finish(lambda: executor.run(Request(tokens(24), State(plan, CONTEXT))))
    measured = [[] for _ in plan.subgraphs]  # type: list[list[int]]
    for event in result.record.events:
        measured[event.task.subgraph].append(event.end_ns - event.start_ns)
    found = executor.costs.durations(flops)
    assert [row[0] for row in found] == [pytest.approx(np.mean(times), abs=1) for times in measured]


def test_slots_are_bounded_by_memory_first() -> None:
    plan = make_plan()
    slot = BufferLayout(plan, 8).num_bytes
    assert chunk_slots(plan, 8, npu_and_cpu(1)) == MOST_CHUNKS_IN_FLIGHT
    assert chunk_slots(plan, 8, npu_and_cpu(99)) == 101
    sizes = (0, slot, 5 * slot - 1, 5 * slot)
    assert [chunk_slots(plan, 8, npu_and_cpu(1), num_bytes=b) for b in sizes] == [1, 1, 4, 5]
    assert chunk_slots(plan, 8, npu_and_cpu(99), num_bytes=5 * slot) == 5


def test_one_processor_gets_two_slots_for_each_worker() -> None:
    plan = make_plan()
    assert [chunk_slots(plan, 8, shared_cpu(workers)) for workers in (1, 2, 4)] == [2, 4, 8]
    assert chunk_slots(plan, 8, shared_cpu(4), num_bytes=3 * BufferLayout(plan, 8).num_bytes) == 3


def test_executor_takes_all_slots_that_fit_the_memory() -> None:
    plan = make_plan()
    executor = LoneExecutor(plan)
    assert len(executor.slots) == MOST_CHUNKS_IN_FLIGHT
    assert executor.num_bytes == MOST_CHUNKS_IN_FLIGHT * BufferLayout(plan, 8).num_bytes <= DEFAULT_SLOT_BYTES
