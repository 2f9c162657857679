"""The conductor: sequences that share chunks get the same results as when they run alone, even if others fail."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from random import Random
from time import perf_counter_ns
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
from hypothesis import given, settings
from hypothesis import strategies as st
from trace_checker import CheckedTrace

from chunkrt.errors import BackendError, ClosedError, ConfigError
from chunkrt.graph.plan import Plan
from chunkrt.runtime.batcher import BATCHERS, Batcher, Take, Waiting
from chunkrt.runtime.conductor import Conductor
from chunkrt.runtime.executor import Executor
from chunkrt.runtime.lanes import DecodeOn, Lanes
from chunkrt.runtime.policy import find_policy
from chunkrt.runtime.record import RunRecord
from chunkrt.runtime.run import Logits, Run, RunResult
from chunkrt.runtime.state import State
from chunkrt.runtime.ticket_queue import TicketQueue
from chunkrt.runtime.trace.file import read_trace, write_trace
from chunkrt.runtime.trace.idle import where_time_went
from chunkrt.runtime.trace.shared import joined, packing

CHUNK = 8
KINDS = [("cache",), ("ring",), ("recurrent",), ("cache", "ring", "recurrent")]
LANES = ["one executor", "npu, decode on cpu", "npu, decode on npu", "npu, auto", "npu, no overlap"]


def make_lanes(plan: Plan, kind: str = LANES[0], *, before: Hook | None = None, policy: str = "look_ahead") -> Lanes:
    if kind == LANES[4]:
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

    if kind == LANES[0]:
        one = executor(False)
        return Lanes(prompts=one, tokens=one, many=one, few=one)
    decode_on: DecodeOn = {LANES[2]: "npu", LANES[3]: "auto"}.get(kind, "cpu")  # type: ignore[assignment]
    prompts, few = executor(True), executor(False)
    return Lanes(prompts=prompts, tokens=few, many=prompts, few=few, decode_on=decode_on)


class Haphazard:
    """Batcher that chooses at random."""

    name = "haphazard"

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    def next_chunk(self, waiting: Sequence[Waiting], chunk_length: int) -> Sequence[Take]:
        taken, room = [], chunk_length
        for place in self._random.sample(range(len(waiting)), len(waiting)):
            if room and (not taken or self._random.random() < 0.7):
                taken.append(Take(place, self._random.randint(1, min(waiting[place].num_tokens, room))))
                room -= taken[-1].num_tokens
        return taken


def make_conductor(plan: Plan, kind: str = LANES[0], *, batcher: Batcher | None = None, **options: Any) -> Conductor:
    return Conductor(make_lanes(plan, kind, **options), batcher or BATCHERS["packed"])


@dataclass
class Story:
    """One sequence: prompts, tokens drawn after each, and the results."""

    plan: Plan
    steps: Sequence[tuple[int, int, Logits]]
    start: int
    tokens: list[int] = field(default_factory=list)

    def tell(self, conductor: Conductor, state: State) -> None:
        """Run the sequence. Check that the logits of every prompt and token are those of all tokens at once."""
        for num_tokens, num_drawn, logits in self.steps:
            prompt = tokens(num_tokens, self.start) % VOCABULARY
            self._run(conductor, state, prompt, logits)
            for _ in range(num_drawn):
                self._run(conductor, state, np.array([(self.tokens[-1] * 7 + 3) % VOCABULARY]), "last")

    def _run(self, conductor: Conductor, state: State, ids: Array, logits: Logits) -> None:
        result = conductor.run(Run(ids, state, logits=logits))
        self.tokens += ids.tolist()
        truth = expected_logits(self.plan, np.array(self.tokens))
        wanted = {"last": truth[-1:], "all": truth[-len(ids) :], "none": None}[logits]
        assert (result.logits is None) == (wanted is None)
        if wanted is not None:
            np.testing.assert_array_equal(result.logits, wanted)
        check_records(result, ids.size)


def check_records(result: RunResult, num_tokens: int) -> None:
    """Check that records contain every token once, in order."""
    assert sum(record.num_tokens for record in result.records) == num_tokens
    position = result.records[0].position
    for record in result.records:
        assert record.position == position
        position += record.num_tokens
        assert {event.task.chunk for event in record.events} == set(range(record.num_chunks))
        if record.chunks:
            assert all(sum(s.num_tokens for s in chunk.segments) <= CHUNK for chunk in record.chunks)


def in_threads(calls: Sequence[Callable[[], object]]) -> list[BaseException | None]:
    """Make calls at the same time, and return the error of each."""
    raised: list[BaseException | None] = [None] * len(calls)

    def target(index: int) -> None:
        try:
            finish(calls[index])
        except BaseException as error:
            raised[index] = error

    threads = [threading.Thread(target=target, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


def stories(plan: Plan) -> st.SearchStrategy[list[Story]]:
    step = st.tuples(st.integers(1, 40), st.integers(0, 4), st.sampled_from(["last", "all", "none"]))
    one = st.builds(
        lambda steps, start: Story(plan, steps, start), st.lists(step, min_size=1, max_size=2), st.integers(0, 99)
    )
    return st.lists(one, min_size=2, max_size=12)


@pytest.mark.parametrize("kind", LANES)
@settings(deadline=None, max_examples=settings().max_examples // 10)
@given(data=st.data(), kinds=st.sampled_from(KINDS), batcher=st.sampled_from(["packed", "sequential", "haphazard"]))
def test_sequences_that_share_chunks_get_the_results_of_running_alone(
    kind: str, data: st.DataObject, kinds: tuple[str, ...], batcher: str
) -> None:
    plan = make_plan(2, kinds=kinds)
    chosen = Haphazard(data.draw(st.integers(0, 9))) if batcher == "haphazard" else BATCHERS[batcher]
    conductor = make_conductor(plan, kind, batcher=chosen)
    told = data.draw(stories(plan))
    states = [State(plan, CONTEXT, chunk_length=CHUNK) for _ in told]
    raised = in_threads([partial(story.tell, conductor, state) for story, state in zip(told, states, strict=True)])
    assert raised == [None] * len(told)
    assert [state.position for state in states] == [len(story.tokens) for story in told]
    assert conductor.num_waiting == 0


def begun_together(conductor: Conductor, runs: Sequence[Run]) -> list[RunResult | BaseException]:
    """Begin all runs before any is computed, and return the result or error of each."""
    done = [threading.Event() for _ in runs]
    tickets = [conductor.ticket(run, event.set) for run, event in zip(runs, done, strict=True)]
    for ticket in tickets:
        conductor.begin(ticket)
    for event in done:
        wait_for(event)
    results: list[RunResult | BaseException] = []
    for ticket in tickets:
        try:
            results.append(ticket.result())
        except BackendError as error:
            results.append(error)
    return results


@pytest.mark.parametrize("kind", LANES)
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

    conductor = make_conductor(plan, kind, before=fail)
    states = [State(plan, CONTEXT, chunk_length=CHUNK) for _ in lengths]
    begun = [tokens(5 + i) for i in range(len(lengths))]
    for state, ids in zip(states, begun, strict=True):
        conductor.run(Run(ids, state))
    prompts = [(tokens(length) + 10 * i) % 140 for i, length in enumerate(lengths)]
    prompts[victim][lengths[victim] // 2] = poison
    runs = [Run(ids, state, logits="all") for ids, state in zip(prompts, states, strict=True)]
    results = begun_together(conductor, runs)
    assert isinstance(results[victim], BackendError)
    assert "on purpose" in str(results[victim])
    for result, state, before, prompt in zip(results, states, begun, prompts, strict=True):
        if isinstance(result, RunResult):
            truth = expected_logits(plan, np.concatenate([before, prompt]))
            np.testing.assert_array_equal(result.logits, truth[len(before) :])
        else:
            assert state.position == len(before)
    is_poisonous = False
    for result, state, before, prompt in zip(results, states, begun, prompts, strict=True):
        if not isinstance(result, RunResult):
            truth = expected_logits(plan, np.concatenate([before, prompt]))
            again = conductor.run(Run(prompt, state, logits="all"))
            np.testing.assert_array_equal(again.logits, truth[len(before) :])


@pytest.mark.parametrize("kind", LANES[:2])
def test_long_single_run_gives_way_to_another(kind: str) -> None:
    """The second run, started during the first's first chunk, is done long before the first."""
    plan, order = make_plan(), list[str]()

    def hold(name: str, tag: int, inputs: Any) -> None:
        if name == "embedding" and tag == 0 and not started.is_set():
            started.set()
            wait_until(conductor._others_ask)

    started = threading.Event()
    conductor = make_conductor(plan, kind, before=hold)
    state, other = (State(plan, CONTEXT, chunk_length=CHUNK) for _ in range(2))

    def first() -> None:
        result = conductor.run(Run(tokens(120), state, logits="all"))
        order.append("first")
        np.testing.assert_array_equal(result.logits, expected_logits(plan, tokens(120)))
        check_records(result, 120)

    def second() -> None:
        wait_for(started)
        result = conductor.run(Run(tokens(3, 130), other))
        order.append("second")
        np.testing.assert_array_equal(result.logits, expected_logits(plan, tokens(3, 130))[-1:])

    assert in_threads([first, second]) == [None, None]
    assert order == ["second", "first"]


@pytest.mark.parametrize(("kind", "expected"), [(LANES[1], "few"), (LANES[2], "many"), (LANES[4], "few")])
def test_single_tokens_run_on_the_chosen_processor(kind: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, together, and with a prompt, because their bits may depend on it."""
    plan, where = make_plan(), dict[str, set[str]]()
    lanes = make_lanes(plan, kind)

    def note(lane: Executor, name: str) -> None:
        stream = lane.stream

        def noted(chunks: Any) -> Any:
            made = stream(chunks)
            compute = made.compute

            def noted_compute(task: Any, slot: int) -> None:
                for segment in made.chunks[task.chunk].segments:
                    size = segment.job.run.token_ids.size
                    where.setdefault("token" if size == 1 else "prompt", set()).add(name)
                compute(task, slot)

            made.compute = noted_compute
            return made

        monkeypatch.setattr(lane, "stream", noted)

    note(lanes.many, "many")
    note(lanes.few, "few")
    conductor = Conductor(lanes, BATCHERS["packed"])
    states = [State(plan, CONTEXT, chunk_length=CHUNK) for _ in range(4)]
    runs = [Run(tokens(60), states[0]), *(Run(tokens(1, 100 + i), states[i]) for i in (1, 2, 3))]
    for run, result in zip(runs, begun_together(conductor, runs), strict=True):
        assert isinstance(result, RunResult)
        np.testing.assert_array_equal(result.logits, expected_logits(plan, run.token_ids)[-1:])
    assert where == {"prompt": {"many"}, "token": {expected}}


@pytest.mark.parametrize("kind", LANES)
def test_traces_of_sequences_that_share_chunks(kind: str, tmp_path: Path) -> None:
    """While an NPU's stream runs, another thread computes single tokens at the same time."""
    plan = make_plan(layers=2)
    conductor = make_conductor(plan, kind)
    states = [State(plan, CONTEXT) for _ in range(4)]
    prompts = [Run(tokens(count), state) for count, state in zip((60, 45, 9, 2), states, strict=True)]
    records: list[RunRecord] = []
    for result in begun_together(conductor, prompts):
        assert isinstance(result, RunResult)
        records.extend(result.records)

    def go_on(state: State) -> None:
        for count in [1] * 6 + [20] + [1] * 6:
            records.extend(conductor.run(Run(tokens(count), state)).records)

    assert in_threads([partial(go_on, state) for state in states]) == [None] * 4
    path = tmp_path / "out.json"
    write_trace(path, records, "toy")
    CheckedTrace(path)
    back = read_trace(path)
    assert packing(records) is not None
    assert packing(back) == packing(records)
    chunks = {(id(r.pipeline), chunk.number) for r in back for chunk in r.chunks}
    assert sum(len(joint.chunks) for joint in joined(back)) == len(chunks)
    for record in (*joined(back), *back):
        for time in where_time_went([record]):
            assert sum(time.busy_ns.values()) + sum(time.idle_ns.values()) == time.total_ns


def test_single_run_stays_in_the_callers_thread() -> None:
    plan, threads = make_plan(), set[int]()
    lanes = make_lanes(plan, before=lambda *_: threads.add(threading.get_ident()), policy="sequential")
    conductor = Conductor(lanes, BATCHERS["packed"])
    state = State(plan, CONTEXT, chunk_length=CHUNK)
    conductor.run(Run(tokens(50), state))
    conductor.run(Run(tokens(1), state))
    assert threads == {threading.get_ident()}
    assert conductor.num_chunks == 0


@pytest.mark.parametrize("kind", LANES)
def test_cancelled_run_leaves_and_the_others_continue(kind: str) -> None:
    plan, cancel, reached = make_plan(kinds=("recurrent",)), threading.Event(), threading.Event()

    def hold(name: str, tag: int, inputs: Any) -> None:
        if name == "dynamic.0" and tag // CHUNK == 2:
            reached.set()
            wait_for(cancel)

    conductor = make_conductor(plan, kind, before=hold)
    states = [State(plan, CONTEXT, chunk_length=CHUNK) for _ in range(3)]
    for state in states:
        conductor.run(Run(np.array([140]), state))
    runs = [Run(tokens(100), states[0], cancel=cancel), *(Run(tokens(9, 100 + i), states[i]) for i in (1, 2))]
    done = [threading.Event() for _ in runs]
    tickets = [conductor.ticket(run, event.set) for run, event in zip(runs, done, strict=True)]
    for ticket in tickets:
        conductor.begin(ticket)
    wait_for(reached)
    cancel.set()
    for event in done:
        wait_for(event)
    with pytest.raises(ClosedError, match="the run was cancelled"):
        tickets[0].result()
    assert states[0].position == 1
    for i in (1, 2):
        truth = expected_logits(plan, np.array([140, *tokens(9, 100 + i)]))
        np.testing.assert_array_equal(tickets[i].result().logits, truth[-1:])
    again = conductor.run(Run(tokens(100), states[0]))
    np.testing.assert_array_equal(again.logits, expected_logits(plan, np.array([140, *tokens(100)]))[-1:])


@pytest.mark.parametrize("kind", LANES)
def test_state_of_an_abandoned_run_waits_for_its_tasks(kind: str) -> None:
    """Imitate a cancelled task of an event loop: the run ends at once, and the state is used right after."""
    plan = make_plan(kinds=("cache", "recurrent"))
    conductor = make_conductor(plan, kind)
    for length in (5, 40, 90):
        state = State(plan, CONTEXT, chunk_length=CHUNK)
        conductor.run(Run(tokens(7), state))
        ticket = conductor.ticket(Run(tokens(length, 50) % VOCABULARY, state), lambda: None)
        conductor.begin(ticket)
        conductor.abandon(ticket)
        result = conductor.run(Run(tokens(20, 90), state))
        truth = expected_logits(plan, np.concatenate([tokens(7), tokens(20, 90)]))
        np.testing.assert_array_equal(result.logits, truth[-1:])


@pytest.mark.parametrize("kind", LANES)
def test_close_ends_shared_runs(kind: str) -> None:
    plan, reached = make_plan(), threading.Event()

    def hold(name: str, tag: int, inputs: Any) -> None:
        if name == "dynamic.0":
            reached.set()
            wait_until(lambda: conductor._queue._is_closed)

    conductor = make_conductor(plan, kind, before=hold)
    states = [State(plan, CONTEXT, chunk_length=CHUNK) for _ in range(2)]
    done = [threading.Event() for _ in states]
    tickets = [conductor.ticket(Run(tokens(100), s), e.set) for s, e in zip(states, done, strict=True)]
    for ticket in tickets:
        conductor.begin(ticket)
    wait_for(reached)
    finish(conductor.close)
    for ticket, state in zip(tickets, states, strict=True):
        with pytest.raises(ClosedError, match="the engine was closed"):
            ticket.result()
        assert state.position == 0
    with pytest.raises(ClosedError, match="the engine is closed"):
        conductor.run(Run(tokens(3), states[0]))


@pytest.mark.parametrize("kind", LANES)
def test_close_ends_a_single_run_at_the_next_chunk(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The closing thread does not wait for a long prompt of another thread, which gets ClosedError."""
    plan, reached, asked, last = make_plan(kinds=("recurrent",)), threading.Event(), threading.Event(), list[int]()

    def hold(name: str, tag: int, inputs: Any) -> None:
        last.append(tag)
        reached.set()
        wait_for(asked)

    close = TicketQueue.close
    monkeypatch.setattr(TicketQueue, "close", lambda self: (close(self), asked.set()))
    conductor = make_conductor(plan, kind, before=hold)
    state = State(plan, CONTEXT, chunk_length=CHUNK)

    def closing() -> None:
        wait_for(reached)
        conductor.close()

    error, nothing = in_threads([lambda: conductor.run(Run(tokens(120), state)), closing])
    assert nothing is None
    assert isinstance(error, ClosedError)
    assert str(error) == "the engine is closed; load the model again"
    assert state.position == 0
    assert max(last) < 120 - CHUNK


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
        ([], "took no tokens although 2 wait"),
        ([(2, 1)], "took 1 tokens of sequence 2, which do not exist"),
        ([(0, 0)], "took 0 tokens of sequence 0"),
        ([(0, 6), (1, 3)], "for a chunk of 8 rows"),
        ([(0, 1), (0, 1)], "for a chunk of 8 rows"),
        ([3], "batcher 'faulty' failed: TypeError"),
    ],
)
def test_batcher_error_reaches_all_runs_and_the_engine_recovers(taken: object, message: str) -> None:
    plan = make_plan()
    conductor = make_conductor(plan, batcher=_Faulty(taken))
    states = [State(plan, CONTEXT, chunk_length=CHUNK) for _ in range(2)]
    tickets = [conductor.ticket(Run(tokens(9), state), lambda: None) for state in states]
    with conductor._turn:  # both are queued before the thread looks
        for ticket in tickets:
            conductor.begin(ticket)
    for ticket, state in zip(tickets, states, strict=True):
        finish(ticket.wait)
        with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
            ticket.result()
        assert state.position == 0
    result = finish(lambda: conductor.run(Run(tokens(9), states[0])))  # a single run does not use the batcher
    np.testing.assert_array_equal(result.logits, expected_logits(plan, tokens(9))[-1:])


def test_interrupt_of_a_waiting_caller_restores_the_state() -> None:
    """Ctrl-C reaches the main thread while it waits for its share, and the others continue."""
    import signal

    plan, seen = make_plan(kinds=("recurrent",)), threading.Event()
    main = threading.main_thread().ident
    assert main is not None

    def interrupt(name: str, tag: int, inputs: Any) -> None:
        rows = next(iter(inputs.values()))
        if name == "dynamic.1" and np.any(rows.reshape(len(rows), -1)[:, 0] == 110) and not seen.is_set():
            seen.set()
            signal.pthread_kill(main, signal.SIGINT)

    conductor = make_conductor(plan, before=interrupt)
    state, other = (State(plan, CONTEXT, chunk_length=CHUNK) for _ in range(2))
    done = threading.Event()
    ticket = conductor.ticket(Run(tokens(60), other), done.set)
    with conductor._turn:
        conductor.begin(ticket)
        blocked = conductor.ticket(Run(np.array([1]), State(plan, CONTEXT, chunk_length=CHUNK)), lambda: None)
        conductor.begin(blocked)
    with pytest.raises(KeyboardInterrupt):
        conductor.run(Run(tokens(30, 100), state))
    assert state.position == 0
    wait_for(done)
    np.testing.assert_array_equal(ticket.result().logits, expected_logits(plan, tokens(60))[-1:])
    result = finish(lambda: conductor.run(Run(tokens(30, 100), state)))
    np.testing.assert_array_equal(result.logits, expected_logits(plan, tokens(30, 100))[-1:])


class _OwnError(ConfigError):
    def __init__(self, code: int, what: str) -> None:
        super().__init__(f"{what} ({code})")


def test_plugin_error_of_its_own_type_reaches_all_waiting_runs() -> None:
    plan = make_plan()
    conductor = make_conductor(plan, batcher=_Faulty(_OwnError(7, "no rows today")))
    tickets = [conductor.ticket(Run(tokens(9), State(plan, CONTEXT, chunk_length=CHUNK)), lambda: None) for _ in "ab"]
    with conductor._turn:
        for ticket in tickets:
            conductor.begin(ticket)
    for ticket in tickets:
        finish(ticket.wait)
        with pytest.raises(ConfigError, match="no rows today"):
            ticket.result()


def test_error_in_making_a_record_reaches_the_waiting_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan()
    conductor = make_conductor(plan)
    state = State(plan, CONTEXT, chunk_length=CHUNK)
    ticket = conductor.ticket(Run(tokens(9), state), lambda: None)

    def record(*_: object, **__: object) -> None:
        raise MemoryError("none left")

    monkeypatch.setattr(ticket.job, "record", record)
    conductor.begin(ticket)
    finish(ticket.wait)
    with pytest.raises(MemoryError, match="none left"):
        ticket.result()
    assert state.position == 0


class Inbox:
    """A `SimpleQueue` whose `get` takes no timeout: before Python 3.13 it could wait forever if the timeout had expired
    before the wait began."""

    def __init__(self) -> None:
        queue: SimpleQueue[Any] = SimpleQueue()
        self.put, self.empty = queue.put, queue.empty
        self._get = queue.get

    def get(self) -> Any:
        return self._get()


def test_queue_stops_waiting_for_returning_sequences_after_any_timeout() -> None:
    queue = TicketQueue()
    queue._inbox = Inbox()  # type: ignore[assignment]
    queue._last_states = frozenset((-1, -2))  # states of no sequence
    for count in range(3000):
        queue.wake()
        queue.wait()
        queue._linger_until_ns = perf_counter_ns() + count * 100
        assert not queue.somebody_waits()
        assert perf_counter_ns() >= queue._linger_until_ns


def test_message_ends_the_wait_for_returning_sequences() -> None:
    queue = TicketQueue()
    queue._last_states = frozenset((-1, -2))
    queue._linger_until_ns = perf_counter_ns() + 10**12
    timer = threading.Timer(0.05, lambda: (setattr(queue, "_linger_until_ns", 0), queue.wake()))
    timer.start()
    assert not queue.somebody_waits()
    timer.join()
