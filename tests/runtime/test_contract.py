"""The executor's contract of docs/architecture.md, point by point; the other runtime tests go deeper."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from threading import Event, Lock

import numpy as np
import pytest
from fake_backend import (
    CONTEXT,
    Array,
    Hook,
    LoneExecutor,
    expected_logits,
    finish,
    make_executables,
    make_plan,
    npu_and_cpu,
    shared_cpu,
    tokens,
    wait_for,
)
from fixture_checkpoints import checkpoint, input_ids

import chunkrt
from chunkrt.backends.native import backend as native
from chunkrt.errors import BackendError, ClosedError
from chunkrt.graph.plan import Plan
from chunkrt.graph.rewrites import merged_on_cpu
from chunkrt.runtime.policy import DEFAULT_POLICY, POLICIES, find_policy
from chunkrt.runtime.request import Request
from chunkrt.runtime.schedule import Schedule
from chunkrt.runtime.state import State
from chunkrt.runtime.tasks import Processor, processors_for

CHUNK = 8
CHECKPOINT = "llama_biased_gguf"


def make_executor(
    plan: Plan,
    *,
    before: Hook | None = None,
    after: Hook | None = None,
    processors: list[Processor] | None = None,
    policy: str = DEFAULT_POLICY,
    chunks_in_flight: int = 4,
    fixed_lengths: Mapping[str, int] | None = None,
) -> LoneExecutor:
    return LoneExecutor(
        plan,
        make_executables(plan, before=before, after=after, fixed_lengths=fixed_lengths),
        chunk_length=CHUNK,
        processors=processors or npu_and_cpu(2),
        policy=find_policy(policy),
        chunks_in_flight=chunks_in_flight,
    )


@pytest.mark.parametrize("shadowed", [0, 3])
@pytest.mark.parametrize("policy", POLICIES)
def test_point_1_tasks_run_once_after_their_predecessor_and_state_takes_its_chunks_in_order(
    policy: str, shadowed: int
) -> None:
    plan = make_plan(layers=3, shadowed=shadowed)
    executor = make_executor(plan, policy=policy, processors=shared_cpu(4))
    events = finish(lambda: executor.run(Request(tokens(6 * CHUNK), State(plan, CONTEXT), logits="all"))).record.events
    assert Counter(e.task for e in events) == {(s, c): 1 for s in range(len(plan.subgraphs)) for c in range(6)}
    spans = {event.task: (event.start_ns, event.end_ns) for event in events}
    for (subgraph, chunk), (start, _) in spans.items():
        for source, part in enumerate(plan.subgraphs):
            if set(part.outputs) & set(plan.subgraphs[subgraph].inputs):
                assert spans[source, chunk][1] <= start  # type: ignore[index]
        assert not plan.subgraphs[subgraph].state or chunk == 0 or spans[subgraph, chunk - 1][1] <= start  # type: ignore[index]


def test_point_2_idle_workers_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that spins would claim tasks during the complete first task."""
    plan, workers = make_plan(), 4
    claim, lock, num_claims = Schedule.claim, Lock(), 0

    def count(schedule: Schedule, processor: Processor) -> object:
        nonlocal num_claims
        with lock:
            num_claims += 1
        return claim(schedule, processor)

    def take_long(name: str, tag: int, inputs: Mapping[str, Array]) -> None:
        if (name, tag) == ("embedding", 0):
            for _ in range(2000):
                time.sleep(0)

    monkeypatch.setattr(Schedule, "claim", count)
    executor = make_executor(plan, before=take_long, processors=shared_cpu(workers), chunks_in_flight=1)
    num_tasks = len(finish(lambda: executor.run(Request(tokens(3 * CHUNK), State(plan, CONTEXT)))).record.events)
    assert num_claims <= workers + num_tasks * (1 + workers)


def test_point_3_chunk_keeps_its_buffers_while_later_ones_run() -> None:
    plan = make_plan()
    others_went_on = Event()

    def hold(name: str, tag: int, inputs: Mapping[str, Array]) -> None:
        if (name, tag) == ("static.1", 0):
            held = {key: array.copy() for key, array in inputs.items()}
            wait_for(others_went_on)
            for key, array in inputs.items():
                np.testing.assert_array_equal(array, held[key])

    def release(name: str, tag: int, inputs: Mapping[str, Array]) -> None:
        if (name, tag) == ("dynamic.0", CHUNK):
            others_went_on.set()

    executor = make_executor(plan, before=hold, after=release, processors=shared_cpu(2), chunks_in_flight=2)
    result = finish(lambda: executor.run(Request(tokens(5 * CHUNK), State(plan, CONTEXT), logits="all")))
    np.testing.assert_array_equal(result.logits, expected_logits(plan, tokens(5 * CHUNK)))


def test_point_3_input_of_a_slow_side_of_a_fork_is_kept() -> None:
    """shadow.0 is held until linear.0, chunk 1 up to its join and chunk 2's embedding are done."""
    plan = make_plan(shadowed=1)
    others_went_on, left = Event(), {("linear.0", 0), ("linear.0", CHUNK), ("embedding", 2 * CHUNK)}

    def hold(name: str, tag: int, inputs: Mapping[str, Array]) -> None:
        if (name, tag) == ("shadow.0", 0):
            held = {key: array.copy() for key, array in inputs.items()}
            wait_for(others_went_on)
            for key, array in inputs.items():
                np.testing.assert_array_equal(array, held[key])

    def release(name: str, tag: int, inputs: Mapping[str, Array]) -> None:
        left.discard((name, tag))
        if not left:
            others_went_on.set()

    executor = make_executor(plan, before=hold, after=release, processors=npu_and_cpu(2), chunks_in_flight=3)
    result = finish(lambda: executor.run(Request(tokens(5 * CHUNK), State(plan, CONTEXT), logits="all")))
    np.testing.assert_array_equal(result.logits, expected_logits(plan, tokens(5 * CHUNK)))


@pytest.mark.parametrize("is_cancelled", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_point_4_failed_or_cancelled_run_restores_the_state_and_the_executor(policy: str, is_cancelled: bool) -> None:
    plan, cancel, is_broken = make_plan(), Event(), True

    def stop(name: str, tag: int, inputs: Mapping[str, Array]) -> None:
        if is_broken and (name, tag) == ("dynamic.1", 2 * CHUNK):
            if not is_cancelled:
                raise ValueError("out of order")
            cancel.set()

    executor, state = make_executor(plan, before=stop, policy=policy), State(plan, CONTEXT)
    finish(lambda: executor.run(Request(tokens(5), state)))
    message = "the request was cancelled" if is_cancelled else r"subgraph dynamic\.1 failed on chunk 1: out of order"
    with pytest.raises(ClosedError if is_cancelled else BackendError, match=message):
        finish(lambda: executor.run(Request(tokens(6 * CHUNK, CHUNK), state, cancel=cancel)))
    assert state.position == 5
    is_broken = False
    result = finish(lambda: executor.run(Request(tokens(6 * CHUNK, 5), state)))
    np.testing.assert_array_equal(result.logits, expected_logits(plan, tokens(5 + 6 * CHUNK))[-1:])


@pytest.mark.parametrize("shadowed", [0, 1, 3])
@pytest.mark.parametrize("num_tokens", [1, CHUNK, CHUNK + 1, 3 * CHUNK - 1])
def test_point_5_chunk_count_is_minimal_and_padding_reaches_neither_state_nor_logits(
    num_tokens: int, shadowed: int
) -> None:
    plan = make_plan(shadowed=shadowed)
    fixed = plan.static_subgraphs if shadowed < 3 else [s for s in plan.subgraphs if s.rows == "T" and not s.state]
    executor = make_executor(plan, fixed_lengths={s.name: CHUNK for s in fixed})
    finish(
        lambda: executor.run(Request(tokens(3 * CHUNK, 100), State(plan, CONTEXT), logits="all"))
    )  # fills all buffers
    state = State(plan, CONTEXT)
    result = finish(lambda: executor.run(Request(tokens(num_tokens), state)))
    num_chunks = -(-num_tokens // CHUNK)
    runs = Counter(event.task.subgraph for event in result.record.events)
    last_state = max(index for index, subgraph in enumerate(plan.subgraphs) if subgraph.state)
    assert runs == {s: num_chunks if s <= last_state else 1 for s in range(len(plan.subgraphs))}
    np.testing.assert_array_equal(result.logits, expected_logits(plan, tokens(num_tokens))[-1:])
    assert not any(cache[:, num_tokens:].any() for cache in state.tensors.values())


@pytest.mark.parametrize("shadowed", [0, 2])
def test_point_6_results_do_not_depend_on_policy_threads_or_slots(shadowed: int) -> None:
    plan = make_plan(layers=3, shadowed=shadowed)
    truth = expected_logits(plan, tokens(50))
    for policy in POLICIES:
        for workers in (1, 2, 4):
            for slots in (1, 3, 8):
                executor = make_executor(plan, policy=policy, processors=shared_cpu(workers), chunks_in_flight=slots)
                result = finish(lambda e=executor: e.run(Request(tokens(50), State(plan, CONTEXT), logits="all")))
                np.testing.assert_array_equal(result.logits, truth, err_msg=f"{policy}, {workers}, {slots}")


def test_point_7_subgraphs_are_compiled_once_for_all_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    compile_one = native.NativeBackend.compile

    def count(backend: native.NativeBackend, subgraph: object, *rest: object) -> object:
        compiled.append(subgraph.name)  # type: ignore[attr-defined]
        return compile_one(backend, subgraph, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(native.NativeBackend, "compile", count)
    with chunkrt.load(checkpoint(CHECKPOINT), npu="native", chunk_length=8) as engine:
        for length in (1, 8, 9, 30):
            engine.session().prefill(input_ids(CHECKPOINT)[:length])
        parts = {subgraph.name for subgraph in engine.plan.subgraphs}
        merged = {subgraph.name for subgraph in merged_on_cpu(engine.plan).subgraphs}  # subgraphs for single tokens
        assert sorted(compiled) == sorted(parts | merged)


def test_point_8_one_thread_budget_covers_workers_and_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    budgets: list[int] = []
    thread_pool = native.ThreadPool

    def note(budget: int) -> object:
        budgets.append(budget)
        return thread_pool(budget)

    monkeypatch.setattr(native, "ThreadPool", note)
    with chunkrt.load(checkpoint(CHECKPOINT), npu="native", threads=3) as engine:
        assert budgets == [3]
        assert [processor.workers for processor in processors_for(engine.loaded.npu_backend.concurrency, 3)] == [3]
