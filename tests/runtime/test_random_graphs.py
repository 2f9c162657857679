"""A thousand random task graphs on the real executor: every policy gives the bits of the unchunked decoder."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from fake_backend import (
    CONTEXT,
    Array,
    LoneExecutor,
    expected_logits,
    finish,
    make_executables,
    make_plan,
    npu_and_cpu,
    shared_cpu,
    tokens,
    with_second_start,
)

from chunkrt.graph.plan import Plan
from chunkrt.runtime.policy import POLICIES
from chunkrt.runtime.request import Request
from chunkrt.runtime.state import State
from chunkrt.runtime.tasks import Task, TaskEvent

NUM_GRAPHS, NUM_BATCHES = 1000, 50


@pytest.mark.sampled(every=50)
@pytest.mark.parametrize("batch", range(NUM_BATCHES))
def test_random_graphs_give_the_same_bits_under_every_policy(batch: int) -> None:
    for seed in range(batch, NUM_GRAPHS, NUM_BATCHES):
        check_graph(seed)


def check_graph(seed: int) -> None:
    """Request a random graph: layers, devices, chunks, workers and slots, and durations, both estimated and real."""
    random = Random(seed)
    plan = random_plan(random)
    chunk_length = random.randint(1, 8)
    prompt = tokens(random.randint(1, 6 * chunk_length))
    processors = random.choice((npu_and_cpu, shared_cpu))(random.randint(1, 3))
    chunks_in_flight = random.choice((1, 2, 3, 6, None))
    turns = {(s.name, chunk): random.choice((0, 0, 1, 3)) for s in plan.subgraphs for chunk in range(6)}
    estimates = [TaskEvent(Task(i, 0), "any", 0, 0, random.randint(1, 9)) for i in range(len(plan.subgraphs))]
    truth = expected_logits(plan, prompt)
    caches = []

    def give_turns_away(name: str, tag: int, inputs: Mapping[str, Array]) -> None:
        for _ in range(turns[name, tag // chunk_length]):
            time.sleep(0)

    for policy in POLICIES:
        executor = LoneExecutor(
            plan,
            make_executables(plan, before=give_turns_away),
            chunk_length=chunk_length,
            processors=processors,
            policy=policy,
            chunks_in_flight=chunks_in_flight,
        )
        executor.costs.learn(executor.costs.flops([1], [1], position=0), estimates)
        state = State(plan, CONTEXT)
        result = finish(lambda e=executor, s=state: e.run(Request(prompt, s, logits="all")))
        np.testing.assert_array_equal(result.logits, truth, err_msg=f"seed {seed}, {policy}")
        assert set(Counter(event.task for event in result.record.events).values()) == {1}
        caches.append([array.tobytes() for array in state.tensors.values()])
    assert all(cache == caches[0] for cache in caches), f"seed {seed}"


def random_plan(random: Random) -> Plan:
    """Return a toy decoder: half of them have layers that fork and join, some have two independent first subgraphs;
    half have their subgraphs on random devices."""
    layers = random.randint(1, 5)
    shadowed = random.choice((0, 0, random.randint(1, layers + 1), layers + 1))
    plan = make_plan(layers, split_head=random.random() < 0.3, shadowed=shadowed)
    if random.random() < 0.2:
        static = [i for i, part in enumerate(plan.subgraphs) if part.name.startswith("static")]
        plan = with_second_start(plan, random.choice(static))
    plan = in_another_order(plan, random)
    if random.random() < 0.5:
        return plan
    return replace(plan, subgraphs=tuple(replace(s, device=random.choice(("npu", "cpu"))) for s in plan.subgraphs))


def in_another_order(plan: Plan, random: Random) -> Plan:
    """Return the same graph with independent subgraphs in random order."""
    left, ordered = list(plan.subgraphs), []
    while left:
        written = {name for part in left for name in part.outputs}
        ordered.append(random.choice([part for part in left if written.isdisjoint(part.inputs)]))
        left.remove(ordered[-1])
    return replace(plan, subgraphs=tuple(ordered))
