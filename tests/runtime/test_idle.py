"""Idle time by cause: hand-made lists of events with known causes, and properties of any run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from fake_backend import CONTEXT, LoneExecutor, make_plan, make_schedule, npu_and_cpu, shared_cpu, subgraph, tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from virtual_record import make_record

from chunkrt.errors import ConfigError
from chunkrt.graph.plan import Plan
from chunkrt.runtime.policy import POLICIES
from chunkrt.runtime.record import RunRecord
from chunkrt.runtime.request import Request
from chunkrt.runtime.state import State
from chunkrt.runtime.tasks import Processor, Task, TaskEvent
from chunkrt.runtime.trace.idle import CAUSES, idle_gaps, where_time_went
from chunkrt.runtime.virtual_clock import run_on_virtual_clock

PLAN = make_plan(layers=1)
EMBEDDING, STATIC_0, DYNAMIC, STATIC_1, HEAD = range(5)
"""Subgraphs of PLAN; the static ones belong to the NPU."""

FORK = make_plan(layers=1, shadowed=1)
"""embedding, static.0, linear.0 and shadow.0 at once, join.0, dynamic.0, static.1, head."""

Row = tuple[int, int, str, int, int, int]
"""Subgraph, chunk, processor, worker, start, end."""


def record_of(
    rows: Sequence[Row],
    *,
    num_chunks: int = 1,
    slots: int = 8,
    processors: Sequence[Processor] | None = None,
    copies: Sequence[Row] = (),
    plan: Plan = PLAN,
    **fields: Any,
) -> RunRecord:
    events, others = (
        [TaskEvent(Task(s, c), name, worker, begin, stop) for s, c, name, worker, begin, stop in each]
        for each in (rows, copies)
    )
    sizes = {"num_tokens": 4 * num_chunks, "chunk_length": 4, "slots": slots}
    return make_record(events, processors or npu_and_cpu(), plan, copies=others, **sizes, **fields)


def lines(record: RunRecord) -> list[str]:
    """Return one line for each gap: "start-end processor worker: cause"."""
    gaps = sorted(idle_gaps(record), key=lambda gap: (gap.processor, gap.worker, gap.start_ns))
    return [f"{g.start_ns}-{g.end_ns} {g.processor} {g.worker}: {g.cause}" for g in gaps]


def test_single_chunk_alternates_between_processors() -> None:
    rows: list[Row] = [
        (EMBEDDING, 0, "cpu", 0, 2, 5),
        (STATIC_0, 0, "npu", 0, 6, 10),
        (DYNAMIC, 0, "cpu", 0, 10, 17),
        (STATIC_1, 0, "npu", 0, 17, 20),
        (HEAD, 0, "cpu", 0, 20, 22),
    ]
    assert lines(record_of(rows, end_ns=25)) == [
        "0-2 cpu 0: overhead",  # it could have begun at once
        "5-10 cpu 0: linears",
        "17-20 cpu 0: linears",
        "22-25 cpu 0: overhead",  # no task is left, only the run has to end
        "0-5 npu 0: start",
        "5-6 npu 0: overhead",
        "10-17 npu 0: attention",
        "20-22 npu 0: drain",
        "22-25 npu 0: overhead",
    ]


def test_npu_waits_for_attention_of_an_earlier_chunk() -> None:
    """static.1 of chunk 1 waits for its own attention, whose turn comes only after chunk 0's."""
    rows: list[Row] = [
        (EMBEDDING, 0, "cpu", 0, 0, 1),
        (EMBEDDING, 1, "cpu", 0, 1, 2),
        (STATIC_0, 0, "npu", 0, 1, 2),
        (STATIC_0, 1, "npu", 0, 2, 3),
        (DYNAMIC, 0, "cpu", 0, 2, 10),
        (DYNAMIC, 1, "cpu", 0, 10, 19),
        (STATIC_1, 1, "npu", 0, 19, 20),
        (HEAD, 1, "cpu", 0, 20, 21),
    ]
    assert lines(record_of(rows, num_chunks=2)) == [
        "19-20 cpu 0: linears",
        "0-1 npu 0: start",
        "3-19 npu 0: attention",
        "20-21 npu 0: drain",
    ]


def test_a_worker_waits_for_its_chunks_turn() -> None:
    rows: list[Row] = [
        (EMBEDDING, 0, "cpu", 0, 0, 1),
        (EMBEDDING, 1, "cpu", 1, 0, 1),
        (STATIC_0, 0, "cpu", 0, 1, 8),
        (STATIC_0, 1, "cpu", 1, 1, 3),
        (DYNAMIC, 0, "cpu", 0, 8, 12),
        (DYNAMIC, 1, "cpu", 1, 12, 20),
        (STATIC_1, 1, "cpu", 1, 20, 21),
        (HEAD, 1, "cpu", 1, 21, 22),
    ]
    assert lines(record_of(rows, num_chunks=2, processors=shared_cpu(2))) == [
        "12-22 cpu 0: drain",
        "3-12 cpu 1: order",
    ]


def test_chunk_waits_for_a_slot() -> None:
    rows: list[Row] = [
        (EMBEDDING, 0, "cpu", 0, 0, 1),
        (STATIC_0, 0, "npu", 0, 1, 5),
        (DYNAMIC, 0, "cpu", 0, 5, 6),
        (EMBEDDING, 1, "cpu", 0, 6, 7),
        (STATIC_0, 1, "npu", 0, 7, 8),
        (DYNAMIC, 1, "cpu", 0, 8, 9),
        (STATIC_1, 1, "npu", 0, 9, 10),
        (HEAD, 1, "cpu", 0, 10, 11),
    ]
    record = record_of(rows, num_chunks=2, slots=1)
    assert "5-6 npu 0: buffer" in lines(record)  # chunk 1 may not enter before chunk 0 is done
    assert "6-7 npu 0: embedding" in lines(record)
    assert "1-5 cpu 0: linears" in lines(record)
    wider = record_of(rows, num_chunks=2, slots=2)  # now chunk 1 could have entered, and did not
    assert "1-5 cpu 0: overhead" in lines(wider)
    assert "5-7 npu 0: embedding" in lines(wider)


def test_task_waits_for_a_copy() -> None:
    rows: list[Row] = [
        (EMBEDDING, 0, "cpu", 0, 0, 1),
        (STATIC_0, 0, "npu", 0, 3, 5),
        (DYNAMIC, 0, "cpu", 0, 8, 9),
        (STATIC_1, 0, "npu", 0, 11, 12),
        (HEAD, 0, "cpu", 0, 12, 13),
    ]
    copies: list[Row] = [
        (STATIC_0, 0, "copies", 0, 1, 3),
        (DYNAMIC, 0, "copies", 0, 5, 8),
        (STATIC_1, 0, "copies", 0, 9, 11),
    ]
    assert lines(record_of(rows, copies=copies)) == [
        "1-3 cpu 0: copy",  # static.0 waits for it, and so do later tasks
        "3-5 cpu 0: linears",
        "5-8 cpu 0: copy",
        "9-11 cpu 0: copy",
        "11-12 cpu 0: linears",
        "0-3 npu 0: start",
        "5-8 npu 0: copy",
        "8-9 npu 0: attention",
        "9-11 npu 0: copy",
        "12-13 npu 0: drain",
    ]


def fork_rows(linear_end: int, shadow_end: int) -> list[Row]:
    """One chunk of FORK: both sides start at 2, everything else takes 1."""
    join = max(linear_end, shadow_end)
    return [
        (0, 0, "cpu", 0, 0, 1),
        (1, 0, "npu", 0, 1, 2),
        (2, 0, "npu", 0, 2, linear_end),
        (3, 0, "cpu", 0, 2, shadow_end),
        (4, 0, "npu", 0, join, join + 1),
        (5, 0, "cpu", 0, join + 1, join + 2),
        (6, 0, "npu", 0, join + 2, join + 3),
        (7, 0, "cpu", 0, join + 3, join + 4),
    ]


def test_first_side_of_a_fork_waits_for_the_other_at_the_join() -> None:
    """The cause is linears in both cases: a shadow is a part of a linear."""
    around = ["1-2 cpu 0: linears", "0-1 npu 0: start"]
    assert lines(record_of(fork_rows(5, 9), plan=FORK)) == [
        around[0],
        "9-10 cpu 0: linears",
        "11-12 cpu 0: linears",
        around[1],
        "5-9 npu 0: linears",
        "10-11 npu 0: attention",
        "12-13 npu 0: drain",
    ]
    assert lines(record_of(fork_rows(9, 5), plan=FORK)) == [
        around[0],
        "5-10 cpu 0: linears",
        "11-12 cpu 0: linears",
        around[1],
        "10-11 npu 0: attention",
        "12-13 npu 0: drain",
    ]


def test_join_waits_for_the_side_that_ends_last() -> None:
    """The join waits for two paths: one through linears that end at 6, one through attention that ends at 9."""
    parts = [
        subgraph("start", "npu", ["input_ids"], ["a"]),
        subgraph("linear", "npu", ["a"], ["b"]),
        subgraph("attention", "cpu", ["a"], ["c"], state=["cache.0"]),
        subgraph("join", "npu", ["b", "c"], ["d"]),
        subgraph("head", "cpu", ["d"], ["logits"], rows="R"),
    ]
    plan = replace(FORK, subgraphs=tuple(parts))
    processors = [replace(npu_and_cpu()[0], workers=2), npu_and_cpu()[1]]
    rows: list[Row] = [
        (0, 0, "npu", 1, 0, 1),
        (1, 0, "npu", 0, 1, 6),
        (2, 0, "cpu", 0, 1, 9),
        (3, 0, "npu", 1, 9, 10),
        (4, 0, "cpu", 0, 10, 11),
    ]
    assert lines(record_of(rows, plan=plan, processors=processors)) == [
        "0-1 cpu 0: start",
        "9-10 cpu 0: linears",
        "0-1 npu 0: start",
        "6-11 npu 0: drain",
        "1-9 npu 1: attention",
        "10-11 npu 1: drain",
    ]


def test_task_that_starts_before_a_side_of_its_fork_ends_is_rejected() -> None:
    rows = fork_rows(5, 9)
    rows[4] = (4, 0, "npu", 0, 8, 10)
    with pytest.raises(ConfigError, match=r"join\.0 of chunk 0 started 1 ns before it was ready"):
        idle_gaps(record_of(rows, plan=FORK))
    del rows[3]
    with pytest.raises(ConfigError, match="chunk 0 has 7 of 8 tasks, and some are missing"):
        idle_gaps(record_of(rows, plan=FORK))


def test_wait_by_the_policy_is_overhead() -> None:
    """`sequential` takes one task at a time: chunk 1 is ready during all of it."""
    record = virtual_record("sequential", npu_and_cpu(), 2, 8, lambda task: 10)
    (cpu,) = (time for time in where_time_went([record]) if time.name == "cpu")
    assert cpu.idle_ns == {"overhead": 10, "linears": 20}  # static.0 of chunk 0; then of chunk 1, which is alone


def virtual_record(
    policy: str, processors: Sequence[Processor], num_chunks: int, slots: int, duration: object, plan: Plan = PLAN
) -> RunRecord:
    schedule = make_schedule(plan, num_chunks, policy=policy, in_flight=slots, processors=processors)
    events = run_on_virtual_clock(schedule, duration)  # type: ignore[arg-type]
    rows = [(e.task.subgraph, e.task.chunk, e.processor, e.worker, e.start_ns, e.end_ns) for e in events]
    return record_of(rows, num_chunks=num_chunks, slots=slots, processors=processors, policy=policy, plan=plan)


def check_cover(record: RunRecord) -> None:
    """Check that tasks and gaps fill every worker's run exactly, and that the figures add up to it."""
    pieces: dict[tuple[str, int], list[tuple[int, int]]] = {
        (processor.name, worker): [] for processor in record.pipeline.processors for worker in range(processor.workers)
    }
    for piece in (*record.events, *idle_gaps(record)):
        if piece.end_ns > piece.start_ns:
            pieces[piece.processor, piece.worker].append((piece.start_ns, piece.end_ns))
    for spans in pieces.values():
        at = record.start_ns
        for start, end in sorted(spans):
            assert start == at
            at = end
        assert at == record.end_ns
    for time in where_time_went([record]):
        assert time.total_ns == time.workers * (record.end_ns - record.start_ns)
        assert sum(time.busy_ns.values()) + sum(time.idle_ns.values()) == time.total_ns
        assert time.idle_ns.keys() <= CAUSES.keys()


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_every_moment_has_one_cause(data: st.DataObject) -> None:
    num_chunks = data.draw(st.integers(1, 5))
    plan = make_plan(layers=1, shadowed=data.draw(st.integers(0, 2)))
    size = len(plan.subgraphs) * num_chunks
    processors = data.draw(st.sampled_from([npu_and_cpu(), npu_and_cpu(2), shared_cpu(1), shared_cpu(3)]))
    table = data.draw(st.lists(st.integers(0, 9), min_size=size, max_size=size))
    record = virtual_record(
        data.draw(st.sampled_from(sorted(POLICIES))),
        processors,
        num_chunks,
        data.draw(st.integers(1, 6)),
        lambda task: table[task.subgraph * num_chunks + task.chunk],
        plan,
    )
    check_cover(record)
    causes = {gap.cause for gap in idle_gaps(record)}
    if record.pipeline.num_slots >= num_chunks:
        assert "buffer" not in causes
    if record.pipeline.policy == "in_order" and len(processors) == 1:
        assert "overhead" not in causes  # it takes any ready task at once


@pytest.mark.parametrize("plan", [PLAN, FORK])
def test_in_order_leaves_no_ready_task_to_an_idle_worker(plan: Plan) -> None:
    for processors in (npu_and_cpu(), npu_and_cpu(2), shared_cpu(2)):
        record = virtual_record(
            "in_order", processors, 6, 3, lambda task: 1 + (task.subgraph * 7 + task.chunk * 3) % 5, plan
        )
        assert "overhead" not in {gap.cause for gap in idle_gaps(record)}


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("num_tokens", [1, 7, 40])
@pytest.mark.parametrize("shadowed", [0, 2])
def test_gaps_explain_real_runs_completely(policy: str, num_tokens: int, shadowed: int) -> None:
    plan = make_plan(layers=2, shadowed=shadowed)
    executor = LoneExecutor(plan, processors=npu_and_cpu(2), policy=policy, chunks_in_flight=3)
    state = State(plan, CONTEXT)
    for position in (0, num_tokens):
        record = executor.run(Request(tokens(num_tokens), state)).record
        assert (record.position, record.num_tokens) == (position, num_tokens)
        assert record.position_bytes == 2 * 3 * 4  # two caches, three columns of float32
        check_cover(record)


def test_runs_without_threads_have_one_worker() -> None:
    """A single chunk runs in the calling thread, so there is no idle worker."""
    plan = make_plan(layers=2)
    executor = LoneExecutor(plan, processors=shared_cpu(4))
    state = State(plan, CONTEXT)
    alone, together = executor.run(Request(tokens(8), state)).record, executor.run(Request(tokens(9), state)).record
    assert [processor.workers for processor in alone.pipeline.processors] == [1]
    assert [processor.workers for processor in together.pipeline.processors] == [4]


SOUND: list[Row] = [
    (EMBEDDING, 0, "cpu", 0, 0, 1),
    (STATIC_0, 0, "npu", 0, 1, 3),
    (DYNAMIC, 0, "cpu", 0, 3, 5),
    (STATIC_1, 0, "npu", 0, 5, 6),
    (HEAD, 0, "cpu", 0, 6, 7),
]


def changed(index: int, row: Row) -> list[Row]:
    return [row if i == index else old for i, old in enumerate(SOUND)]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (changed(1, (STATIC_0, 0, "npu", 0, 0, 3)), "static.0 of chunk 0 started 1 ns before it was ready"),
        (changed(1, (STATIC_0, 0, "cpu", 0, 1, 3)), "which no worker 0 of processor 'cpu' runs"),
        (changed(1, (STATIC_0, 0, "npu", 1, 1, 3)), "which no worker 1 of processor 'npu' runs"),
        (changed(1, (STATIC_0, 0, "tpu", 0, 1, 3)), "of processor 'tpu' runs"),
        (changed(1, (STATIC_0, 0, "npu", 0, 3, 1)), "is not between"),
        (changed(1, (STATIC_0, 1, "npu", 0, 1, 3)), "task (1, 1) does not exist"),
        (changed(1, (9, 0, "npu", 0, 1, 3)), "task (9, 0) does not exist"),
        (changed(1, (EMBEDDING, 0, "cpu", 0, 1, 3)), "a task has two events"),
        (SOUND[:2], "chunk 0 has 2 of 5 tasks"),
        (changed(4, (HEAD, 0, "cpu", 0, 4, 7)), "overlaps"),
    ],
)
def test_events_that_contradict_the_rules_are_rejected(rows: list[Row], message: str) -> None:
    with pytest.raises(ConfigError, match="the events are not those of a run") as raised:
        idle_gaps(record_of(rows, end_ns=7))
    assert message in str(raised.value)


def test_more_chunks_than_tasks_are_rejected_before_they_take_memory() -> None:
    with pytest.raises(ConfigError, match="5 tasks for 100000000000 chunks"):
        idle_gaps(record_of(SOUND, num_chunks=10**11))
