"""The scheduler: sequences that share chunks get the same results as when they run alone, even if others fail."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from fake_backend import (
    CONTEXT,
    VOCABULARY,
    Array,
    Hook,
    expected_logits,
    finish,
    make_executables,
    make_plan,
    npu_and_cpu,
    shared_cpu,
    tokens,
    wait_for,
    wait_until,
)
from gates import at_once
from hypothesis import given, settings
from hypothesis import strategies as st
from trace_checker import CheckedTrace

from chunkrt.errors import BackendError, ClosedError, ConfigError
from chunkrt.gate import Gate
from chunkrt.graph.plan import Plan
from chunkrt.runtime.batcher import BATCHERS, Batcher, Take, Waiting
from chunkrt.runtime.executor import DecodeOn, Executor, ExecutorSet
from chunkrt.runtime.policy import find_policy
from chunkrt.runtime.record import RunRecord
from chunkrt.runtime.request import Logits, Request
from chunkrt.runtime.scheduler import Scheduler
from chunkrt.runtime.state import State
from chunkrt.runtime.trace.file import read_trace, write_trace
from chunkrt.runtime.trace.idle import where_time_went
from chunkrt.runtime.trace.shared import joined, packing

CHUNK = 8
KINDS = [("cache",), ("ring",), ("recurrent",), ("cache", "ring", "recurrent")]
SETS = ["one executor", "npu, decode on cpu", "npu, decode on npu", "npu, auto", "npu, no overlap"]


def make_executors(
    plan: Plan, kind: str = SETS[0], *, before: Hook | None = None, policy: str = "look_ahead"
) -> ExecutorSet:
    if kind == SETS[4]:
        policy = "sequential"

    def executor(has_npu: bool) -> Executor:
        static = {s.name: CHUNK for s in plan.subgraphs if s.device == "npu"} if has_npu else {}
        return Executor(
            plan,
            make_executables(plan, fixed_lengths=static, before=before),
            chunk_length=CHUNK,
            processors=npu_and_cpu() if has_npu else shared_cpu(2),
            policy=find_policy(policy),
            chunks_in_flight=4,
        )

    if kind == SETS[0]:
        one = executor(False)
        return ExecutorSet(prompts=one, tokens=one, many=one, few=one)
    decode_on: DecodeOn = {SETS[2]: "npu", SETS[3]: "auto"}.get(kind, "cpu")  # type: ignore[assignment]
    prompts, few = executor(True), executor(False)
    return ExecutorSet(prompts=prompts, tokens=few, many=prompts, few=few, decode_on=decode_on)


class Haphazard:
    """Batcher that chooses at random."""

    name = "haphazard"

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    def next_chunk(self, waiting: Sequence[Waiting], chunk_length: int) -> Sequence[Take]:
        taken, room = [], chunk_length
        for place in self._random.sample(range(len(waiting)), len(waiting)):
            if room and (not taken or self._random.random() < 0.7):
                taken.append((place, self._random.randint(1, min(waiting[place].num_tokens, room))))
                room -= taken[-1][1]
        return taken


def make_scheduler(plan: Plan, kind: str = SETS[0], *, batcher: Batcher | None = None, **options: Any) -> Scheduler:
    return Scheduler(make_executors(plan, kind, **options), batcher or BATCHERS["packed"])


@dataclass
class Story:
    """One sequence: prompts, tokens drawn after each, and the results."""

    plan: Plan
    steps: Sequence[tuple[int, int, Logits]]
    start: int
    tokens: list[int] = field(default_factory=list)

    def tell(self, scheduler: Scheduler, state: State) -> None:
        """Request the sequence. Check that the logits of every prompt and token are those of all tokens at once."""
        for num_tokens, num_drawn, logits in self.steps:
            prompt = tokens(num_tokens, self.start) % VOCABULARY
            self._run(scheduler, state, prompt, logits)
            for _ in range(num_drawn):
                self._run(scheduler, state, np.array([(self.tokens[-1] * 7 + 3) % VOCABULARY]), "last")

    def _run(self, scheduler: Scheduler, state: State, ids: Array, logits: Logits) -> None:
        result = scheduler.run(Request(ids, state, logits=logits))
        self.tokens += ids.tolist()
        truth = expected_logits(self.plan, np.array(self.tokens))
        wanted = {"last": truth[-1:], "all": truth[-len(ids) :], "none": None}[logits]
        assert (result.logits is None) == (wanted is None)
        if wanted is not None:
            np.testing.assert_array_equal(result.logits, wanted)
        check_records(result, ids.size)


def check_records(result: Request, num_tokens: int) -> None:
    """Check that records contain every token once, in order."""
    assert sum(record.num_tokens for record in result.records) == num_tokens
    position = result.records[0].position
    for record in result.records:
        assert record.position == position
        position += record.num_tokens
        assert {event.task.chunk for event in record.events} == set(range(record.num_chunks))
        if record.chunks:
            assert all(sum(s.num_tokens for s in chunk.segments) <= CHUNK for chunk in record.chunks)


def stories(plan: Plan) -> st.SearchStrategy[list[Story]]:
    step = st.tuples(st.integers(1, 40), st.integers(0, 4), st.sampled_from(["last", "all", "none"]))
    one = st.builds(
        lambda steps, start: Story(plan, steps, start), st.lists(step, min_size=1, max_size=2), st.integers(0, 99)
    )
    return st.lists(one, min_size=2, max_size=12)


@pytest.mark.parametrize("kind", SETS)
@settings(deadline=None, max_examples=settings().max_examples // 10)
@given(data=st.data(), kinds=st.sampled_from(KINDS), batcher=st.sampled_from(["packed", "sequential", "haphazard"]))
def test_sequences_that_share_chunks_get_the_results_of_running_alone(
    kind: str, data: st.DataObject, kinds: tuple[str, ...], batcher: str
) -> None:
    plan = make_plan(2, kinds=kinds)
    chosen = Haphazard(data.draw(st.integers(0, 9))) if batcher == "haphazard" else BATCHERS[batcher]
    scheduler = make_scheduler(plan, kind, batcher=chosen)
    told = data.draw(stories(plan))
    states = [State(plan, CONTEXT, chunk_length=CHUNK) for _ in told]
    raised = at_once(*[partial(story.tell, scheduler, state) for story, state in zip(told, states, strict=True)])
    assert raised == [None] * len(told)
    assert [state.position for state in states] == [len(story.tokens) for story in told]
    assert scheduler.num_waiting == 0


def test_ended_request_does_not_wait() -> None:
    """Its caller may ask for the number as soon as the request has ended."""
    plan = make_plan(2)
    scheduler, found = make_scheduler(plan, SETS[0]), list[int]()
    scheduler.submit(Request(tokens(3), State(plan, CONTEXT)), lambda: found.append(scheduler.num_waiting))
    wait_until(lambda: bool(found))
    assert found == [0]


def begun_together(scheduler: Scheduler, runs: Sequence[Request]) -> list[Request | BaseException]:
    """Begin all runs before any is computed, and return the result or error of each."""
    for run in runs:
        scheduler.submit(run)
    results: list[Request | BaseException] = []
    for run in runs:
        finish(run.wait)
        try:
            run.raise_error()
            results.append(run)
        except BackendError as error:
            results.append(error)
    return results


@pytest.mark.parametrize("kind", SETS)
@settings(deadline=None, max_examples=settings().max_examples // 6)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=2, max_size=8),
    subgraph=st.sampled_from(["embedding", "static.0", "dynamic.0", "dynamic.1", "head"]),
    victim=st.integers(0, 7),
    kinds=st.sampled_from(KINDS),
)
def test_failed_task_fails_only_the_sequences_of_its_chunk(
    kind: str, lengths: list[int], subgraph: str, victim: int, kinds: tuple[str, ...]
) -> None:
    """A token of one sequence makes its chunk fail. Sequences with rows in that chunk fail too, and all states are
    restored."""
    plan, poison, is_poisonous = make_plan(2, kinds=kinds), 150, True
    victim %= len(lengths)

    def fail(name: str, tag: int, inputs: Any) -> None:
        rows = next(iter(inputs.values()))
        if is_poisonous and name == subgraph and np.any(rows.reshape(len(rows), -1)[:, 0] == poison):
            raise ValueError("on purpose")

    scheduler = make_scheduler(plan, kind, before=fail)
    states = [State(plan, CONTEXT, chunk_length=CHUNK) for _ in lengths]
    begun = [tokens(5 + i) for i in range(len(lengths))]
    for state, ids in zip(states, begun, strict=True):
        scheduler.run(Request(ids, state))
    prompts = [(tokens(length) + 10 * i) % 140 for i, length in enumerate(lengths)]
    prompts[victim][lengths[victim] // 2] = poison
    runs = [Request(ids, state, logits="all") for ids, state in zip(prompts, states, strict=True)]
    results = begun_together(scheduler, runs)
    assert isinstance(results[victim], BackendError)
    assert "on purpose" in str(results[victim])
    for result, state, before, prompt in zip(results, states, begun, prompts, strict=True):
        if isinstance(result, Request):
            truth = expected_logits(plan, np.concatenate([before, prompt]))
            np.testing.assert_array_equal(result.logits, truth[len(before) :])
        else:
            assert state.position == len(before)
    is_poisonous = False
    for result, state, before, prompt in zip(results, states, begun, prompts, strict=True):
        if not isinstance(result, Request):
            truth = expected_logits(plan, np.concatenate([before, prompt]))
            again = scheduler.run(Request(prompt, state, logits="all"))
            np.testing.assert_array_equal(again.logits, truth[len(before) :])


@pytest.mark.parametrize("kind", SETS[:2])
def test_long_single_run_gives_way_to_another(kind: str) -> None:
    """The second run, started during the first's first chunk, is done long before the first."""
    plan, order = make_plan(), list[str]()

    def hold(name: str, tag: int, inputs: Any) -> None:
        if name == "embedding" and tag == 0 and not started.is_set():
            started.set()
            wait_until(lambda: scheduler.num_waiting > 0)
        time.sleep(0.002)  # the thread that waits for the chunks notices it

    started = threading.Event()
    scheduler = make_scheduler(plan, kind, before=hold)
    state, other = (State(plan, CONTEXT, chunk_length=CHUNK) for _ in range(2))

    def first() -> None:
        result = scheduler.run(Request(tokens(120), state, logits="all"))
        order.append("first")
        np.testing.assert_array_equal(result.logits, expected_logits(plan, tokens(120)))
        check_records(result, 120)

    def second() -> None:
        wait_for(started)
        result = scheduler.run(Request(tokens(3, 130), other))
        order.append("second")
        np.testing.assert_array_equal(result.logits, expected_logits(plan, tokens(3, 130))[-1:])

    assert at_once(first, second) == [None, None]
    assert order == ["second", "first"]


@pytest.mark.parametrize(("kind", "expected"), [(SETS[1], "few"), (SETS[2], "many"), (SETS[4], "few")])
def test_single_tokens_run_on_the_chosen_processor(kind: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, together, and with a prompt, because their bits may depend on it."""
    plan, where = make_plan(), dict[str, set[str]]()
    lanes = make_executors(plan, kind)

    def note(lane: Executor, name: str) -> None:
        run_task = lane.run_task

        def noted(index: int, chunk: Any, slot: int) -> Any:
            for segment in chunk.segments:
                where.setdefault("token" if segment.request.is_decode else "prompt", set()).add(name)
            return run_task(index, chunk, slot)

        monkeypatch.setattr(lane, "run_task", noted)

    note(lanes.many, "many")
    note(lanes.few, "few")
    scheduler = Scheduler(lanes, BATCHERS["packed"])
    states = [State(plan, CONTEXT, chunk_length=CHUNK) for _ in range(4)]
    runs = [Request(tokens(60), states[0]), *(Request(tokens(1, 100 + i), states[i]) for i in (1, 2, 3))]
    for run, result in zip(runs, begun_together(scheduler, runs), strict=True):
        assert isinstance(result, Request)
        np.testing.assert_array_equal(result.logits, expected_logits(plan, run.token_ids)[-1:])
    assert where == {"prompt": {"many"}, "token": {expected}}


@pytest.mark.parametrize("kind", SETS)
def test_traces_of_sequences_that_share_chunks(kind: str, tmp_path: Path) -> None:
    """While an NPU's stream runs, another thread computes single tokens at the same time."""
    plan = make_plan(layers=2)
    scheduler = make_scheduler(plan, kind)
    states = [State(plan, CONTEXT) for _ in range(4)]
    prompts = [Request(tokens(count), state) for count, state in zip((60, 45, 9, 2), states, strict=True)]
    records: list[RunRecord] = []
    for result in begun_together(scheduler, prompts):
        assert isinstance(result, Request)
        records.extend(result.records)

    def go_on(state: State) -> None:
        for count in [1] * 6 + [20] + [1] * 6:
            records.extend(scheduler.run(Request(tokens(count), state)).records)

    assert at_once(*[partial(go_on, state) for state in states]) == [None] * 4
    path = tmp_path / "out.json"
    write_trace(path, records, "toy")
    CheckedTrace(path)
    back = read_trace(path)
    assert packing(records) is not None
    assert packing(back) == packing(records)
    chunks = {(id(r.pipeline), chunk.number) for r in back for chunk in r.chunks}
    assert sum(len(joint.chunks) for joint in joined(back)) == len(chunks)
    for record in (*joined(back), *back):
        for spent in where_time_went([record]):
            assert sum(spent.busy_ns.values()) + sum(spent.idle_ns.values()) == spent.total_ns


def test_single_run_stays_in_the_callers_thread() -> None:
    plan, threads = make_plan(), set[int]()
    lanes = make_executors(plan, before=lambda *_: threads.add(threading.get_ident()), policy="sequential")
    scheduler = Scheduler(lanes, BATCHERS["packed"])
    state = State(plan, CONTEXT, chunk_length=CHUNK)
    scheduler.run(Request(tokens(50), state))
    scheduler.run(Request(tokens(1), state))
    assert threads == {threading.get_ident()}
    assert scheduler.num_chunks == 0


@pytest.mark.parametrize("kind", SETS)
def test_cancelled_run_leaves_and_the_others_continue(kind: str) -> None:
    plan, cancel, reached = make_plan(kinds=("recurrent",)), threading.Event(), threading.Event()

    def hold(name: str, tag: int, inputs: Any) -> None:
        if name == "dynamic.0" and tag // CHUNK == 2:
            reached.set()
            wait_for(cancel)

    scheduler = make_scheduler(plan, kind, before=hold)
    states = [State(plan, CONTEXT, chunk_length=CHUNK) for _ in range(3)]
    for state in states:
        scheduler.run(Request(np.array([140]), state))
    runs = [Request(tokens(100), states[0], cancel=cancel), *(Request(tokens(9, 100 + i), states[i]) for i in (1, 2))]
    for run in runs:
        scheduler.submit(run)
    wait_for(reached)
    cancel.set()
    for run in runs:
        finish(run.wait)
    with pytest.raises(ClosedError, match="the request was cancelled"):
        runs[0].raise_error()
    assert states[0].position == 1
    for i in (1, 2):
        runs[i].raise_error()
        truth = expected_logits(plan, np.array([140, *tokens(9, 100 + i)]))
        np.testing.assert_array_equal(runs[i].logits, truth[-1:])
    again = scheduler.run(Request(tokens(100), states[0]))
    np.testing.assert_array_equal(again.logits, expected_logits(plan, np.array([140, *tokens(100)]))[-1:])


@pytest.mark.parametrize("kind", SETS)
def test_state_of_a_dropped_request_waits_for_its_tasks(kind: str) -> None:
    """Imitate a cancelled task of an event loop: the run ends at once, and the state is used right after."""
    plan = make_plan(kinds=("cache", "recurrent"))
    scheduler = make_scheduler(plan, kind)
    for length in (5, 40, 90):
        state = State(plan, CONTEXT, chunk_length=CHUNK)
        scheduler.run(Request(tokens(7), state))
        dropped = Request(tokens(length, 50) % VOCABULARY, state)
        scheduler.submit(dropped)
        scheduler.drop(dropped)
        result = scheduler.run(Request(tokens(20, 90), state))
        computed = tokens(length, 50) % VOCABULARY if state.position == 7 + length + 20 else tokens(0)
        truth = expected_logits(plan, np.concatenate([tokens(7), computed, tokens(20, 90)]))
        np.testing.assert_array_equal(result.logits, truth[-1:])


@pytest.mark.parametrize("kind", SETS)
def test_close_ends_shared_runs(kind: str) -> None:
    plan, reached = make_plan(), threading.Event()

    def hold(name: str, tag: int, inputs: Any) -> None:
        if name == "dynamic.0":
            reached.set()
            wait_until(lambda: scheduler.is_closed)

    scheduler = make_scheduler(plan, kind, before=hold)
    states = [State(plan, CONTEXT, chunk_length=CHUNK) for _ in range(2)]
    requests = [Request(tokens(100), state) for state in states]
    for request in requests:
        scheduler.submit(request)
    wait_for(reached)
    finish(scheduler.close)
    for request, state in zip(requests, states, strict=True):
        with pytest.raises(ClosedError, match="the engine was closed"):
            request.raise_error()
        assert state.position == 0
    with pytest.raises(ClosedError, match="the engine is closed"):
        scheduler.run(Request(tokens(3), states[0]))


@pytest.mark.parametrize("kind", SETS)
def test_close_ends_a_single_run_at_the_next_chunk(kind: str) -> None:
    """The closing thread does not wait for a long prompt of another thread, which gets ClosedError."""
    plan, reached, last = make_plan(kinds=("recurrent",)), threading.Event(), list[int]()

    def hold(name: str, tag: int, inputs: Any) -> None:
        last.append(tag)
        reached.set()
        wait_until(lambda: scheduler.is_closed)
        time.sleep(0.005)  # the caller notices the end of a chunk

    scheduler = make_scheduler(plan, kind, before=hold)
    state = State(plan, CONTEXT, chunk_length=CHUNK)

    def closing() -> None:
        wait_for(reached)
        scheduler.close()

    error, nothing = at_once(lambda: scheduler.run(Request(tokens(120), state)), closing)
    assert nothing is None
    assert isinstance(error, ClosedError)
    assert str(error) == "the engine is closed; load the model again"
    assert state.position == 0
    assert max(last) < 120 - CHUNK


class _OwnError(ConfigError):
    """Error of a plug-in, which cannot be copied."""

    def __init__(self, code: int, what: str) -> None:
        super().__init__(f"{what} ({code})")


class _Faulty:
    name = "faulty"

    def __init__(self, taken: object) -> None:
        self._taken = taken

    def next_chunk(self, waiting: Sequence[Waiting], chunk_length: int) -> Any:
        if isinstance(self._taken, Exception):
            raise self._taken
        return self._taken


@pytest.mark.parametrize(
    ("taken", "message"),
    [
        (ValueError("oh no"), "batcher 'faulty' failed: ValueError: oh no; choose another"),
        (_OwnError(7, "no rows today"), "no rows today (7)"),
        ([], "took no tokens although 2 wait"),
        ([(2, 1)], "took 1 tokens of sequence 2, which do not exist"),
        ([(0, 0)], "took 0 tokens of sequence 0"),
        ([(0, 6), (1, 3)], "for a chunk of 8 rows"),
        ([(0, 1), (0, 1)], "for a chunk of 8 rows"),
        ([3], "batcher 'faulty' failed: TypeError"),
        ([(0.0, 3)], "batcher 'faulty' failed: TypeError"),
        ([(0, None)], "batcher 'faulty' failed: TypeError"),
    ],
)
def test_batcher_error_reaches_all_runs_and_the_engine_recovers(taken: object, message: str) -> None:
    plan = make_plan()
    scheduler = make_scheduler(plan, batcher=_Faulty(taken))
    states = [State(plan, CONTEXT, chunk_length=CHUNK) for _ in range(2)]
    requests = [Request(tokens(9), state) for state in states]
    with scheduler.held():  # both are queued before the thread looks
        for request in requests:
            scheduler.submit(request)
    for request, state in zip(requests, states, strict=True):
        finish(request.wait)
        with pytest.raises(ConfigError, match=re.escape(message)):
            request.raise_error()
        assert state.position == 0
    result = finish(lambda: scheduler.run(Request(tokens(9), states[0])))  # a single run does not use the batcher
    np.testing.assert_array_equal(result.logits, expected_logits(plan, tokens(9))[-1:])


def test_error_in_advancing_the_state_reaches_the_waiting_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan()
    scheduler = make_scheduler(plan)
    state = State(plan, CONTEXT, chunk_length=CHUNK)
    request = Request(tokens(9), state)

    def advance(*_: object) -> None:
        raise MemoryError("none left")

    monkeypatch.setattr(State, "advance", advance)
    scheduler.submit(request)
    finish(request.wait)
    with pytest.raises(MemoryError, match="none left"):
        request.raise_error()
    assert state.position == 0


def test_ended_request_calls_its_own_listener(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that waited queues the request again, with another listener, as soon as its gate is open."""
    plan, told = make_plan(), list[str]()
    request = Request(tokens(9), State(plan, CONTEXT, chunk_length=CHUNK))
    open_gate = Gate.open

    def open_and_queue_again(gate: Gate) -> None:
        open_gate(gate)
        request.queue(partial(told.append, "second"))

    monkeypatch.setattr(Gate, "open", open_and_queue_again)
    request.queue(partial(told.append, "first"))
    request.release()
    assert told == ["first"]
