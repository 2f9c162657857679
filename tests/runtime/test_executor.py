"""The executor's results: chunking, padding, logits, state, and rejected arguments."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fake_backend import (
    CONTEXT,
    VOCABULARY,
    Array,
    FakeExecutable,
    Hook,
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
from hypothesis import given
from hypothesis import strategies as st

from chunkrt.errors import BackendError, ConfigError, ModelError
from chunkrt.graph.plan import Plan
from chunkrt.runtime.buffers import ChunkBuffers
from chunkrt.runtime.policy import POLICIES
from chunkrt.runtime.request import Logits, Request, Segment
from chunkrt.runtime.state import State
from chunkrt.runtime.stream import compute_alone
from chunkrt.runtime.tasks import Processor


def make_executor(plan: Plan, executables: Mapping[str, FakeExecutable] | None = None, **changes: Any) -> LoneExecutor:
    return LoneExecutor(plan, executables, **{"chunks_in_flight": 3} | changes)


@pytest.mark.parametrize("policy", ["sequential", "in_order"])
def test_request_stops_after_any_chunk_and_continues_later(policy: str) -> None:
    plan, token_ids = make_plan(), tokens(29)
    truth = expected_logits(plan, token_ids)
    executor = make_executor(plan, processors=shared_cpu(2), policy=policy, chunks_in_flight=2)
    for most in range(6):
        state, asked = State(plan, CONTEXT), iter(range(most))
        request = Request(token_ids, state, logits="all")
        request.begin(plan, 1)
        state.begin(29)

        def compute(request: Request = request, asked: Iterator[int] = asked) -> None:
            compute_alone(executor, request, must_stop=lambda: next(asked, None) is None)
            if request.num_left:
                compute_alone(executor, request)

        finish(compute)
        request.commit()
        np.testing.assert_array_equal(request.logits, truth)
        assert sum(record.num_tokens for record in request.records) == state.position == 29


@pytest.mark.parametrize("num_tokens", [1, 7, 8, 9, 24])
def test_executor_computes_only_the_requested_logits(num_tokens: int) -> None:
    plan = make_plan()
    truth = expected_logits(plan, tokens(num_tokens))
    executables = make_executables(plan)
    executor = make_executor(plan, executables)
    last = finish(lambda: executor.run(Request(tokens(num_tokens), State(plan, CONTEXT))))
    assert last.logits is not None
    np.testing.assert_array_equal(last.logits, truth[-1:])
    assert executables["head"].calls == [(num_tokens - 1) // 8 * 8]
    assert executables["static.2"].calls == [(num_tokens - 1) // 8 * 8]
    none = finish(lambda: executor.run(Request(tokens(num_tokens), State(plan, CONTEXT), logits="none")))
    assert none.logits is None
    assert len(executables["head"].calls) == 1


ALL_KINDS = ("cache", "ring", "recurrent")


@pytest.mark.parametrize("chunk_length", [1, 8, 32])
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_every_kind_of_state_continues_over_chunks_and_runs(kind: str, chunk_length: int) -> None:
    """The prompt exceeds the 64 slots of a ring."""
    plan = make_plan(kinds=(kind,))
    truth = expected_logits(plan, tokens(120))
    executor = make_executor(plan, chunk_length=chunk_length)
    state = State(plan, CONTEXT, chunk_length=chunk_length)
    position = 0
    for num_tokens in (1, 63, 1, 40, 15):
        result = finish(lambda n=num_tokens, p=position: executor.run(Request(tokens(n, p), state, logits="all")))
        np.testing.assert_array_equal(result.logits, truth[position : position + num_tokens])
        position += num_tokens


class _Stop(BaseException):
    """Error that is not an Exception, like an interrupt."""


@given(
    num_before=st.integers(0, 90),
    num_tokens=st.integers(1, 30),
    failing=st.integers(0, 29),
    subgraph=st.sampled_from(["static.0", "dynamic.0", "dynamic.1", "dynamic.2", "static.3", "head"]),
    error=st.sampled_from([ValueError, _Stop]),
    is_sequential=st.booleans(),
)
def test_failure_restores_every_kind_of_state(
    num_before: int, num_tokens: int, failing: int, subgraph: str, error: type[BaseException], is_sequential: bool
) -> None:
    """The state is restored bit for bit, however far the other subgraphs had come; and the same tokens then run
    normally."""
    plan, fails = make_plan(3, kinds=ALL_KINDS), False

    def fail(name: str, tag: int, inputs: Mapping[str, Array]) -> None:
        if fails and name == subgraph and tag <= num_before + failing < tag + 8:
            raise error

    policy = "sequential" if is_sequential else "in_order"
    executor = make_executor(plan, make_executables(plan, after=fail), policy=policy)
    state = State(plan, CONTEXT, chunk_length=8)
    if num_before:
        finish(lambda: executor.run(Request(tokens(num_before), state)))
    before = {name: array.copy() for name, array in state.tensors.items()}
    fails = True
    if failing < num_tokens and (subgraph not in ("static.3", "head") or failing >= (num_tokens - 1) // 8 * 8):
        with pytest.raises((BackendError, _Stop)):
            finish(lambda: executor.run(Request(tokens(num_tokens, num_before), state)))
        assert state.position == num_before
        for name, array in before.items():
            seen = state.tensors[name]
            if name.startswith("cache") or (name.startswith("ring") and num_before < 64):
                seen, array = seen[:, :num_before], array[:, :num_before]  # data beyond the position are never read
            np.testing.assert_array_equal(seen, array)
    fails = False
    result = finish(lambda: executor.run(Request(tokens(num_tokens, num_before), state, logits="all")))
    np.testing.assert_array_equal(result.logits, expected_logits(plan, tokens(num_before + num_tokens))[num_before:])


@pytest.mark.parametrize("num_tokens", [1, 20, 21, 60])
def test_rope_position_is_the_position_plus_the_states_offset(num_tokens: int) -> None:
    plan = make_plan(long_context_from=20)
    state = State(plan, CONTEXT)
    state.reset(plan.rope_offset(num_tokens))
    assert state.rope_offset == (CONTEXT if num_tokens > 20 else 0)
    result = finish(lambda: make_executor(plan).run(Request(tokens(num_tokens), state, logits="all")))
    np.testing.assert_array_equal(result.logits, expected_logits(plan, tokens(num_tokens)))


def spy_on_padding(num_tokens: int, chunk_length: int, seen: list[str]) -> Hook:
    """Return a hook that checks the inputs of a fixed-length executable: complete buffers, with zeros in rows without
    tokens."""

    def check(name: str, tag: int, inputs: Mapping[str, Array]) -> None:
        if tag >= 100:  # the previous run, which left its values in all buffers
            return
        valid = min(chunk_length, num_tokens - tag)
        for array in inputs.values():
            if array.ndim == 2 and array.shape[1] == 4:
                assert len(array) == chunk_length
                assert not array[valid:].any()
                seen.append(name)

    return check


@pytest.mark.sampled(every=7)
@pytest.mark.parametrize("num_tokens", [1, 7, 8, 9, 20])
@pytest.mark.parametrize("logits", ["last", "all"])
def test_padding_reaches_neither_state_nor_logits(num_tokens: int, logits: Logits) -> None:
    plan = make_plan()
    seen: list[str] = []
    executables = make_executables(plan)
    for i in range(3):
        hook = spy_on_padding(num_tokens, 8, seen)
        executables[f"static.{i}"] = FakeExecutable(plan.subgraphs[1 + 2 * i], fixed_length=8, before=hook)
    executor, state = make_executor(plan, executables), State(plan, CONTEXT)
    finish(lambda: executor.run(Request(tokens(24, 100), State(plan, CONTEXT), logits="all")))
    result = finish(lambda: executor.run(Request(tokens(num_tokens), state, logits=logits)))
    truth = expected_logits(plan, tokens(num_tokens))
    np.testing.assert_array_equal(result.logits, truth if logits == "all" else truth[-1:])
    assert {"static.0", "static.1", "static.2"} == set(seen)
    for cache in state.tensors.values():
        assert cache[:, :num_tokens].any()
        assert not cache[:, num_tokens:].any()


@pytest.mark.parametrize("num_tokens", [1, 7, 8, 9, 20])
@pytest.mark.parametrize("logits", ["last", "all"])
@pytest.mark.parametrize("head_length", [1, 2, 8])
@pytest.mark.parametrize("split_head", [False, True])
def test_lm_head_of_fixed_length_gets_its_rows_in_groups(
    num_tokens: int, logits: Logits, head_length: int, split_head: bool
) -> None:
    plan = make_plan(split_head=split_head)
    executables = make_executables(plan, fixed_lengths={"head": head_length})
    source, length = ("wanted", head_length) if split_head else ("hidden.2", 8)
    num_calls = 0

    def check_padding(name: str, tag: int, inputs: Mapping[str, Array]) -> None:
        nonlocal num_calls
        if tag < 100:  # not the previous run, which left its values in all buffers
            assert len(inputs[source]) == length
            assert not inputs[source][num_tokens - tag :].any()
            num_calls += 1

    executables["head"].before = check_padding
    executor = make_executor(plan, executables)
    finish(lambda: executor.run(Request(tokens(24, 100), State(plan, CONTEXT), logits="all")))
    result = finish(lambda: executor.run(Request(tokens(num_tokens), State(plan, CONTEXT), logits=logits)))
    truth = expected_logits(plan, tokens(num_tokens))
    np.testing.assert_array_equal(result.logits, truth if logits == "all" else truth[-1:])
    rows = [min(8, num_tokens - start) for start in range(0, num_tokens, 8)] if logits == "all" else [1]
    assert num_calls == sum(-(-count // head_length) for count in rows)


@given(
    num_tokens=st.integers(1, 40),
    chunk_length=st.integers(1, 16),
    layers=st.integers(1, 4),
    chunks_in_flight=st.integers(1, 5),
    workers=st.integers(1, 4),
    is_shared=st.booleans(),
    is_fixed=st.booleans(),
    shadowed=st.sampled_from([0, 1, 3]),
    logits=st.sampled_from(["last", "all", "none"]),
)
def test_results_do_not_depend_on_threads_ring_or_policy(
    num_tokens: int,
    chunk_length: int,
    layers: int,
    chunks_in_flight: int,
    workers: int,
    is_shared: bool,
    is_fixed: bool,
    shadowed: int,
    logits: Logits,
) -> None:
    plan = make_plan(layers, shadowed=shadowed)
    fixed = {s.name: chunk_length for s in plan.subgraphs if is_fixed and s.rows == "T" and not s.state}
    truth = {"last": expected_logits(plan, tokens(num_tokens))[-1:], "none": None}
    truth["all"] = expected_logits(plan, tokens(num_tokens))
    num_always = 1 + max(index for index, subgraph in enumerate(plan.subgraphs) if subgraph.state)
    outcomes = []
    for policy in POLICIES:
        executables = make_executables(plan, fixed_lengths=fixed)
        executor = make_executor(
            plan,
            executables,
            chunk_length=chunk_length,
            processors=shared_cpu(workers) if is_shared else npu_and_cpu(workers),
            policy=policy,
            chunks_in_flight=chunks_in_flight,
        )
        state = State(plan, CONTEXT)
        result = finish(lambda e=executor, s=state: e.run(Request(tokens(num_tokens), s, logits=logits)))
        np.testing.assert_array_equal(result.logits, truth[logits])
        outcomes.append([array[:, :num_tokens].copy() for array in state.tensors.values()])
        assert not any(cache[:, num_tokens:].any() for cache in state.tensors.values())
        tasks = Counter(event.task for event in result.record.events)
        assert set(tasks.values()) == {1}
        chunks = -(-num_tokens // chunk_length)
        with_logits = {"last": 1, "all": chunks, "none": 0}[logits]
        assert len(tasks) == with_logits * len(plan.subgraphs) + (chunks - with_logits) * num_always
        if logits == "all":
            assert state.position == num_tokens
            starts = list(range(0, num_tokens, chunk_length))
            assert all(sorted(e.calls) == starts for e in executables.values())
    for outcome in outcomes[1:]:
        for one, other in zip(outcomes[0], outcome, strict=True):
            np.testing.assert_array_equal(one, other)


def test_single_chunk_single_token_and_sequential_runs_start_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a thread was started")

    monkeypatch.setattr("threading.Thread.start", refuse)
    for shadowed, pipelined_tokens in ((0, 8), (1, 1)):  # the tasks of a fork run at once, except for a single token
        plan = make_plan(shadowed=shadowed)
        pipelined, alone = make_executor(plan), make_executor(plan, processors=shared_cpu(1))
        sequential = make_executor(plan, policy="sequential")
        pipelined.run(Request(tokens(pipelined_tokens), State(plan, CONTEXT)))
        sequential.run(Request(tokens(30), State(plan, CONTEXT)))
        alone.run(Request(tokens(30), State(plan, CONTEXT)))
        make_executor(plan, processors=shared_cpu(4)).run(Request(tokens(8), State(plan, CONTEXT)))
        with pytest.raises(AssertionError, match="a thread was started"):
            pipelined.run(Request(tokens(pipelined_tokens + 1), State(plan, CONTEXT)))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("logits", ["last", "all", "none"])
def test_first_of_several_independent_subgraphs_fills_the_inputs(
    logits: Logits, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values that only the last static subgraph reads are not computed if no logits are requested."""
    plan, loaded, load = with_second_start(make_plan(), 5), [], ChunkBuffers.load

    def note(buffers: ChunkBuffers, segments: Sequence[Segment]) -> None:
        loaded.append(int(segments[0].token_ids[0]))
        load(buffers, segments)

    monkeypatch.setattr(ChunkBuffers, "load", note)
    executables = make_executables(plan)
    executor = make_executor(plan, executables, policy=policy, chunks_in_flight=2)
    for _ in range(2):
        result = finish(lambda: executor.run(Request(tokens(30), State(plan, CONTEXT), logits=logits)))
        truth = expected_logits(plan, tokens(30))
        if result.logits is not None:
            np.testing.assert_array_equal(result.logits, truth if logits == "all" else truth[-1:])
    assert sorted(loaded) == sorted(2 * [0, 8, 16, 24])
    starts = {"last": [24], "all": [0, 8, 16, 24], "none": []}[logits]
    assert sorted(executables["embedding.again"].calls) == sorted(2 * starts)


def test_events_contain_worker_task_and_time() -> None:
    plan = make_plan()
    result = finish(lambda: make_executor(plan).run(Request(tokens(30), State(plan, CONTEXT))))
    for event in result.record.events:
        assert event.processor == plan.subgraphs[event.task.subgraph].device
        assert event.worker == 0
        assert event.start_ns <= event.end_ns
    ends = [e.end_ns for e in result.record.events if e.processor == "npu"]
    assert ends == sorted(ends)


@pytest.mark.parametrize(
    ("token_ids", "options", "message"),
    [
        (tokens(0), {}, "the prompt is empty"),
        (tokens(4).astype(np.int32), {}, r"int32 of shape \[4\], expected int64 \[n\]"),
        (tokens(4).reshape(2, 2), {}, r"int64 of shape \[2, 2\], expected int64 \[n\]"),
        (tokens(2) - 1, {}, f"token id -1 is outside the vocabulary, 0..{VOCABULARY - 1}"),
        (tokens(2) + VOCABULARY - 1, {}, f"token id {VOCABULARY} is outside the vocabulary"),
        (tokens(4), {"logits": "lsat"}, "unknown choice of logits 'lsat'; did you mean 'last'"),
    ],
)
def test_bad_runs_are_rejected(token_ids: Array, options: dict[str, Any], message: str) -> None:
    plan = make_plan()
    with pytest.raises(ConfigError, match=message):
        make_executor(plan).run(Request(token_ids, State(plan, CONTEXT), **options))


def test_prompt_that_exceeds_the_capacity_is_rejected_with_the_counts() -> None:
    plan = make_plan()
    executor, state = make_executor(plan), State(plan, 32)
    finish(lambda: executor.run(Request(tokens(20), state)))
    with pytest.raises(ConfigError, match="13 tokens do not fit at position 20 of a state of 32"):
        executor.run(Request(tokens(13), state))
    finish(lambda: executor.run(Request(tokens(12, 20), state)))
    assert state.position == 32


def test_state_of_another_kind_is_rejected() -> None:
    plan = make_plan(2)
    executor = make_executor(plan)
    with pytest.raises(ConfigError, match="the state belongs to another decoder"):
        executor.run(Request(tokens(4), State(make_plan(3), CONTEXT)))
    with pytest.raises(ConfigError, match=r"chunk length 8 is outside 1\.\.4, the state's capacity"):
        executor.run(Request(tokens(4), State(plan, 4)))
    windowed = make_plan(2, kinds=("ring",))
    with pytest.raises(ConfigError, match="the state belongs to another decoder"):
        make_executor(windowed.with_raw_keys()).run(Request(tokens(4), State(windowed, CONTEXT)))
    with pytest.raises(ConfigError, match="chunk length 8 exceeds the chunk length of the state, 4"):
        make_executor(windowed).run(Request(tokens(4), State(windowed, CONTEXT, chunk_length=4)))
    finish(lambda: executor.run(Request(tokens(4), State(make_plan(2), CONTEXT))))


NPU = Processor(name="npu", devices=frozenset({"npu"}), workers=1)
CPU = Processor(name="cpu", devices=frozenset({"cpu"}), workers=1)


@pytest.mark.parametrize(
    ("changes", "fixed", "message"),
    [
        ({"chunk_length": 0}, {}, r"chunk length 0 is outside 1\.\.128"),
        ({"chunk_length": 129}, {}, r"chunk length 129 is outside 1\.\.128"),
        ({"chunks_in_flight": 0}, {}, "0 chunks in flight"),
        ({"processors": []}, {}, "no processor runs 'cpu', which embedding needs; available devices: none"),
        ({"processors": [CPU]}, {}, "no processor runs 'npu', which static.0 needs; available devices: cpu"),
        ({"processors": [CPU, NPU, CPU]}, {}, "two processors share a name"),
        ({"processors": npu_and_cpu(0)}, {}, "'cpu' has 0 workers"),
        ({}, {"static.1": 16}, "static.1 was compiled for 16 rows and cannot take chunks of 8"),
        ({}, {"head": 3}, "head was compiled for 3 rows of logits at a time"),
        ({}, {"dynamic.0": 8}, "dynamic.0 keeps state and always takes 8 rows"),
    ],
)
def test_bad_arguments_are_rejected(changes: dict[str, Any], fixed: dict[str, int], message: str) -> None:
    plan = make_plan()
    with pytest.raises(ConfigError, match=message):
        make_executor(plan, make_executables(plan, fixed_lengths=fixed), **changes)


def test_executables_must_match_the_plan() -> None:
    plan = make_plan()
    executables = make_executables(plan)
    with pytest.raises(ConfigError, match=r"'static\.3' is not a subgraph of the plan"):
        make_executor(plan, executables | {"static.3": executables["static.2"]})
    del executables["static.2"]
    with pytest.raises(ConfigError, match=r"'static\.2' has no executable"):
        make_executor(plan, executables)


def test_plan_without_logits_at_its_end_is_rejected() -> None:
    plan = make_plan()
    without_head = replace(plan, subgraphs=plan.subgraphs[:-1])
    with pytest.raises(ModelError, match="last subgraph does not compute 'logits'"):
        make_executor(without_head)
