"""Ranks in threads: sums over them, the executor that waits for the sums, and complete decoders split over ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from threading import Barrier, Event
from typing import Any

import numpy as np
import pytest
from fake_backend import (
    CONTEXT,
    NUM_RANKS,
    Array,
    LoneExecutor,
    expected_logits,
    finish,
    make_executables,
    make_plan,
    make_schedule,
    npu_and_cpu,
    shared_cpu,
    tokens,
    wait_for,
    with_links,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks_in_threads import on_ranks
from virtual_record import make_record

from chunkrt.backends.base import Executable
from chunkrt.backends.link import Communicator, LinkBackend
from chunkrt.engine_directory.store import WeightStore
from chunkrt.errors import BackendError, ConfigError, DeviceLostError, PartitionError
from chunkrt.graph.plan import Plan
from chunkrt.quant.scheme import SCHEMES
from chunkrt.runtime.chunk_slots import chunk_slots
from chunkrt.runtime.executor import ExecutorSet
from chunkrt.runtime.policy import POLICIES
from chunkrt.runtime.ranks.messages import local_communicators
from chunkrt.runtime.request import Request
from chunkrt.runtime.schedule import Schedule
from chunkrt.runtime.state import State
from chunkrt.runtime.tasks import Processor, TaskEvent, with_link
from chunkrt.runtime.trace.idle import where_time_went
from chunkrt.runtime.virtual_clock import run_on_virtual_clock

SIZES = (1, 2, 3, 4)
PLAN = with_links(make_plan())
LONG_SUM = 3
"""Duration of a sum over ranks relative to other tasks, on the virtual clock."""


@pytest.mark.parametrize("size", SIZES)
def test_every_rank_gets_the_sum_in_the_order_of_ranks(size: int) -> None:
    rng = np.random.default_rng(size)
    partials = [rng.standard_normal((5, 7)).astype(np.float32) * 10 ** rng.uniform(-3, 3) for _ in range(size)]
    expected = partials[0].copy()
    for partial in partials[1:]:
        expected = expected + partial

    def work(communicator: Communicator) -> Array:
        out = np.full((5, 7), np.nan, np.float32)
        communicator.all_reduce(partials[communicator.rank], out, key=(0, 0))
        return out

    for found in on_ranks(size, work):
        np.testing.assert_array_equal(found, expected)


@settings(max_examples=20, deadline=None)
@given(st.permutations(range(4)), st.permutations(range(4)), st.integers(1, 3))
def test_ranks_may_come_to_repeated_sums_in_different_orders(
    first: list[int], second: list[int], num_rounds: int
) -> None:
    """Each key is used in a thread of its own, as in workers; a key is reused as soon as its sum is complete."""

    def work(communicator: Communicator) -> list[list[float]]:
        def sums(key: int) -> list[float]:
            found = []
            for number in range(num_rounds):
                out = np.empty(1, np.float32)
                partial = np.array([100 * communicator.rank + 10 * key + number], np.float32)
                communicator.all_reduce(partial, out, key=(key, 0))
                found.append(float(out[0]))
            return found

        order = (first, second)[communicator.rank]
        return [
            outcome for _, outcome in sorted(zip(order, in_threads([lambda k=k: sums(k) for k in order]), strict=True))
        ]

    expected = [[100.0 + 20 * key + 2 * number for number in range(num_rounds)] for key in range(4)]
    assert on_ranks(2, work) == [expected, expected]


def in_threads(calls: list[Callable[[], Any]]) -> list[Any]:
    """Make calls at the same time, and return their results."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(60) for future in [pool.submit(call) for call in calls]]


@pytest.mark.parametrize("is_waited_for", [True, False])
def test_a_rank_that_leaves_ends_the_others(is_waited_for: bool) -> None:
    communicators = local_communicators(3)
    zeros = np.zeros(1, np.float32)

    def wait(rank: int) -> None:
        with pytest.raises(DeviceLostError, match=f"^rank 2 has left, so rank {rank} of 3 cannot continue$"):
            communicators[rank].all_reduce(zeros, zeros.copy(), key=(0, 0))

    if not is_waited_for:
        communicators[2].close()
    waits = [lambda: wait(0), lambda: wait(1)]
    in_threads([*waits, communicators[2].close] if is_waited_for else waits)
    communicators[2].close()


def test_partial_sums_of_different_shapes_are_an_error_on_every_rank() -> None:
    def work(communicator: Communicator) -> None:
        partial = np.zeros(1 + communicator.rank, np.float32)
        with pytest.raises(BackendError, match=r"different shapes|has left, so rank"):
            communicator.all_reduce(partial, partial.copy(), key=(0, 0))

    on_ranks(2, work)


def test_the_link_runs_sums_alone() -> None:
    backend = LinkBackend(local_communicators(1)[0])
    link, other = (next(s for s in PLAN.subgraphs if s.name == name) for name in ("link.0", "head"))
    scheme, weights = SCHEMES["float"], WeightStore({}, {})
    assert backend.supports(link, PLAN, scheme)
    node = replace(link.nodes[0], op="MatMul")
    for wrong in (replace(other, nodes=(node,)), replace(link, nodes=(node, *link.nodes))):
        with pytest.raises(
            PartitionError, match="the link runs one chunkrt::AllReduce or chunkrt::AllGather at a time"
        ):
            backend.compile(wrong, PLAN, 8, scheme, weights)


def make_executor(
    communicator: Communicator | None, plan: Plan = PLAN, *, before: Any = None, after: Any = None, **changes: Any
) -> LoneExecutor:
    """Return one rank's executor, with the toy's arithmetic and real sums."""
    executables: dict[str, Executable] = dict(make_executables(plan, before=before, after=after))
    if communicator is not None:
        link = LinkBackend(communicator)
        for part in plan.subgraphs:
            if part.device == "link":
                weights = WeightStore({}, {})
                executables[part.name] = link.compile(part, plan, 8, SCHEMES["float"], weights)
    return LoneExecutor(plan, executables, **{"processors": shared_cpu(1)} | changes)


@pytest.mark.sampled(every=7)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("num_tokens", [1, 8, 33, 95])
@pytest.mark.parametrize("slots", [(1, 1), (3, 3), (2, 5)])
def test_ranks_with_different_task_orders_agree(policy: str, num_tokens: int, slots: tuple[int, int]) -> None:
    """Prefill and decode; one rank has an NPU in addition to its CPU, and perhaps more chunks in flight."""

    def work(communicator: Communicator) -> list[Array]:
        executor = make_executor(
            communicator,
            policy=policy,
            processors=(npu_and_cpu(2), shared_cpu(2))[communicator.rank],
            chunks_in_flight=slots[communicator.rank],
        )
        state = State(PLAN, CONTEXT)
        runs = [
            executor.run(Request(tokens(num_tokens), state, logits="all")),
            executor.run(Request(tokens(1, num_tokens), state)),
        ]
        assert len(runs[0].record.events) == -(-num_tokens // 8) * len(PLAN.subgraphs)
        return [run.logits for run in runs if run.logits is not None]

    expected = expected_logits(PLAN, tokens(num_tokens + 1))
    for found in finish(lambda: on_ranks(NUM_RANKS, work)):
        np.testing.assert_array_equal(np.concatenate(found), expected)


def test_next_chunk_is_computed_while_one_waits_for_its_sum() -> None:
    """The only worker of the CPU continues; the sum comes when it has."""
    has_gone_on = Event()

    class Slow:
        rank, size = 0, NUM_RANKS

        def all_reduce(self, partial: Array, out: Array, *, key: tuple[int, int]) -> None:
            if key[1] == 0:
                wait_for(has_gone_on)
            out[...] = partial * NUM_RANKS

        def close(self) -> None:
            """Do nothing: no thread waits."""

    def before(name: str, tag: int, inputs: object) -> None:
        if (name, tag) == ("dynamic.0", 8):
            has_gone_on.set()

    executor = make_executor(Slow(), before=before, chunks_in_flight=2)
    result = finish(lambda: executor.run(Request(tokens(16), State(PLAN, CONTEXT), logits="all")))
    np.testing.assert_array_equal(result.logits, expected_logits(PLAN, tokens(16)))
    assert {event.processor for event in result.record.events} == {"link", "cpu"}


def run_virtually(plan: Plan, slots: int, policy: str = "in_order") -> tuple[Schedule, list[TaskEvent]]:
    """Request two chunks on one worker and the link."""
    processors = with_link(shared_cpu(1), plan, slots)
    schedule = make_schedule(plan, 2, policy=policy, in_flight=slots, all_logits=True, processors=processors)
    events = run_on_virtual_clock(
        schedule, lambda task: LONG_SUM if plan.subgraphs[task.subgraph].device == "link" else 1
    )
    return schedule, events


def lines(slots: int, policy: str = "in_order") -> list[str]:
    """Return the order of tasks, of one layer."""
    plan = with_links(make_plan(layers=1))
    _, events = run_virtually(plan, slots, policy)
    names = [f"{plan.subgraphs[event.task.subgraph].name}/{event.task.chunk}" for event in events]
    return [f"{e.start_ns}-{e.end_ns} {e.processor} {name}" for e, name in zip(events, names, strict=True)]


CHUNK_BY_CHUNK = [
    "0-1 cpu embedding/0",
    "1-2 cpu static.0/0",
    "2-3 cpu dynamic.0/0",
    "3-6 link link.0/0",
    "6-7 cpu static.1/0",
    "7-8 cpu head/0",
    "8-9 cpu embedding/1",
    "9-10 cpu static.0/1",
    "10-11 cpu dynamic.0/1",
    "11-14 link link.0/1",
    "14-15 cpu static.1/1",
    "15-16 cpu head/1",
]


def test_one_chunk_in_flight_waits_for_every_sum() -> None:
    assert lines(1) == CHUNK_BY_CHUNK


def test_sum_of_one_chunk_overlaps_with_the_next_chunk() -> None:
    assert lines(2) == [
        "0-1 cpu embedding/0",
        "1-2 cpu static.0/0",
        "2-3 cpu dynamic.0/0",
        "3-4 cpu embedding/1",
        "4-5 cpu static.0/1",
        "3-6 link link.0/0",
        "5-6 cpu dynamic.0/1",
        "6-7 cpu static.1/0",
        "7-8 cpu head/0",
        "6-9 link link.0/1",
        "9-10 cpu static.1/1",
        "10-11 cpu head/1",
    ]


def test_sums_of_two_chunks_run_at_once() -> None:
    """Two workers are on the link, as many as chunks are in flight."""
    plan = with_links(make_plan(layers=1))
    (link, cpu) = with_link(shared_cpu(2), plan, 2)
    assert (link.name, link.devices, link.workers) == ("link", {"link"}, 2)
    assert cpu == shared_cpu(2)[0]
    assert with_link(shared_cpu(2), make_plan(), 2) == tuple(shared_cpu(2))


def test_sequential_finishes_a_chunk_before_the_next() -> None:
    """The order holds as far as possible: each processor claims in turn, and the link's comes first."""
    assert lines(2, "sequential") == CHUNK_BY_CHUNK


def test_lost_rank_fails_the_run_and_restores_the_state() -> None:
    together = Barrier(NUM_RANKS)

    def work(communicator: Communicator) -> tuple[str, int, Array]:
        def before(name: str, tag: int, inputs: object) -> None:
            if (communicator.rank, name, tag) == (1, "static.1", 27):
                communicator.close()

        executor = make_executor(communicator, before=before, chunks_in_flight=3)
        state = State(PLAN, CONTEXT)
        executor.run(Request(tokens(11), state))
        kept = {name: array.copy() for name, array in state.tensors.items()}
        together.wait(60)
        with pytest.raises(
            DeviceLostError, match=r"^subgraph link\.\d failed on chunk \d+: rank 1 has left, "
        ) as caught:
            executor.run(Request(tokens(95, 11), state))
        for name, array in state.tensors.items():
            np.testing.assert_array_equal(array[:, : state.position], kept[name][:, : state.position])
        return str(caught.value), state.position, kept["cache.0"]

    assert [position for _, position, _ in finish(lambda: on_ranks(NUM_RANKS, work))] == [11, 11]


def test_shared_chunks_run_one_at_a_time_over_ranks() -> None:
    """With an NPU the chunks of one rank overlap; with several ranks the followers compute one after the other."""

    def overlaps(plan: Plan) -> bool:
        prompts = make_executor(None, plan, processors=npu_and_cpu(), policy="look_ahead")
        few = make_executor(None, plan)
        return ExecutorSet(prompts=prompts, tokens=few, many=prompts, few=few).overlaps

    assert overlaps(make_plan())
    assert not overlaps(PLAN)


def test_the_link_has_workers_of_its_own() -> None:
    processors = [*shared_cpu(1), Processor(name="wire", devices=frozenset({"link"}), workers=1)]
    with pytest.raises(ConfigError, match="'wire' is for the link, which has its own workers"):
        make_executor(None, processors=processors)


@pytest.mark.parametrize(("slots", "waited"), [(1, 6), (2, 1)])
def test_record_contains_the_cpus_wait_for_sums(slots: int, waited: int) -> None:
    plan = with_links(make_plan(layers=1))
    schedule, events = run_virtually(plan, slots)
    record = make_record(events, schedule.processors, plan, num_tokens=16, slots=slots)
    link, cpu = where_time_went([record])
    assert link.busy_ns == {"sums": 2 * LONG_SUM}
    assert cpu.idle_ns == {"sums": waited}


def test_chunks_in_flight_do_not_depend_on_a_ranks_workers() -> None:
    assert {chunk_slots(PLAN, 8, shared_cpu(workers)) for workers in (1, 4, 64)} == {16}
    assert chunk_slots(make_plan(), 8, shared_cpu(4)) == 8
