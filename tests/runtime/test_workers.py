"""Threads: order, slot safety, failures, cancelling and interrupts. Tests use gates and events, never sleeps."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from threading import Event, Lock
from typing import Any

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

from chunkrt.errors import BackendError, ClosedError, ConfigError, DeviceLostError
from chunkrt.graph.plan import Plan
from chunkrt.runtime.executor import Executor
from chunkrt.runtime.policy import POLICIES
from chunkrt.runtime.request import Chunk, Request
from chunkrt.runtime.schedule import Schedule
from chunkrt.runtime.state import State
from chunkrt.runtime.stream import Stream
from chunkrt.runtime.tasks import Processor, Task

CHUNK = 8


@pytest.fixture(autouse=True)
def _no_thread_is_left_behind() -> Iterator[None]:
    yield
    deadline = time.monotonic() + 10  # a finished thread may have a few instructions left
    while (left := chunkrt_threads()) and time.monotonic() < deadline:
        time.sleep(0.001)
    assert left == []


def chunkrt_threads() -> list[str]:
    """Return the names of chunkrt's threads, except that of the NPU's calls, which stays after other tests."""
    names = (thread.name for thread in threading.enumerate())
    return [name for name in names if name.startswith("chunkrt") and name != "chunkrt-npu-calls"]


def make_executor(plan: Plan, *, before: Hook | None = None, after: Hook | None = None, **options: Any) -> LoneExecutor:
    return LoneExecutor(plan, make_executables(plan, before=before, after=after), **{"chunks_in_flight": 3} | options)


def check_result(plan: Plan, result: Request, num_tokens: int) -> None:
    np.testing.assert_array_equal(result.logits, expected_logits(plan, tokens(num_tokens))[-1:])


@pytest.mark.parametrize(
    ("shadowed", "processors", "num_tokens", "together"),
    [
        *((1, npu_and_cpu(), n, {("linear.0", 0), ("shadow.0", 0)}) for n in (2, CHUNK, 2 * CHUNK)),
        (0, shared_cpu(2), 2 * CHUNK, {("static.0", 0), ("static.0", CHUNK)}),
        (0, npu_and_cpu(), 2 * CHUNK, {("static.0", CHUNK), ("dynamic.0", 0)}),
    ],
    ids=["a chunk of two tokens", "one chunk", "two chunks", "one static subgraph", "NPU and CPU"],
)
def test_two_tasks_run_at_the_same_time(
    shadowed: int, processors: list[Processor], num_tokens: int, together: set[tuple[str, int]]
) -> None:
    plan, both_run = make_plan(shadowed=shadowed), threading.Barrier(2)

    def meet(name: str, tag: int, inputs: Mapping[str, Array]) -> None:
        if (name, tag) in together:
            both_run.wait(60)

    executor = make_executor(plan, before=meet, processors=processors)
    check_result(plan, finish(lambda: executor.run(Request(tokens(num_tokens), State(plan, CONTEXT)))), num_tokens)


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_dynamic_subgraphs_take_the_chunks_in_order_one_at_a_time(workers: int) -> None:
    plan = make_plan(layers=3)
    log: list[tuple[str, int, str]] = []
    lock = Lock()

    def note(what: str) -> Hook:
        def hook(name: str, tag: int, inputs: Mapping[str, Array]) -> None:
            with lock:
                log.append((name, tag // CHUNK, what))

        return hook

    executor = make_executor(
        plan, before=note("start"), after=note("end"), processors=shared_cpu(workers), chunks_in_flight=4
    )
    check_result(plan, finish(lambda: executor.run(Request(tokens(48), State(plan, CONTEXT)))), 48)
    for layer in range(3):
        own = [(chunk, what) for name, chunk, what in log if name == f"dynamic.{layer}"]
        assert own == [(chunk, what) for chunk in range(6) for what in ("start", "end")]


@pytest.mark.parametrize(
    ("shadowed", "slow", "others"),
    [
        (0, "static.1", {("dynamic.0", CHUNK), ("dynamic.0", 2 * CHUNK)}),
        (1, "shadow.0", {("linear.0", 0), ("linear.0", CHUNK), ("embedding", 2 * CHUNK)}),
    ],
    ids=["a chain", "a side of a fork"],
)
def test_slow_reader_keeps_its_buffers(shadowed: int, slow: str, others: set[tuple[str, int]]) -> None:
    """The slow subgraph is held on chunk 0 until other tasks are done."""
    plan, left, others_went_on = make_plan(shadowed=shadowed), set(others), Event()

    def hold(name: str, tag: int, inputs: Mapping[str, Array]) -> None:
        if (name, tag) == (slow, 0):
            held = {key: array.copy() for key, array in inputs.items()}
            wait_for(others_went_on)
            for key, array in inputs.items():
                np.testing.assert_array_equal(array, held[key])

    def release(name: str, tag: int, inputs: Mapping[str, Array]) -> None:
        left.discard((name, tag))
        if not left:
            others_went_on.set()

    processors = npu_and_cpu(2) if shadowed else shared_cpu(3)
    executor = make_executor(plan, before=hold, after=release, processors=processors)
    check_result(plan, finish(lambda: executor.run(Request(tokens(40), State(plan, CONTEXT)))), 40)


def test_idle_workers_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
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


FAILING = ["embedding", "static.0", "static.1", "dynamic.0", "dynamic.1", "static.2", "head"]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("failing", FAILING)
def test_failure_is_raised_once_with_its_task_and_the_executor_recovers(failing: str, policy: str) -> None:
    plan = make_plan()
    last = 5 * CHUNK
    chunk_start = last if failing in ("static.2", "head") else 2 * CHUNK
    is_broken = True

    def fail(name: str, tag: int, inputs: Mapping[str, Array]) -> None:
        if is_broken and (name, tag) == (failing, chunk_start):
            raise ValueError("the device is on fire")

    executor = make_executor(plan, before=fail, policy=policy, processors=npu_and_cpu(2))
    state = State(plan, CONTEXT)
    finish(lambda: executor.run(Request(tokens(CHUNK), state)))
    state.rewind(0)
    message = f"subgraph {failing} failed on chunk {chunk_start // CHUNK}: the device is on fire"
    with pytest.raises(BackendError, match=message) as caught:
        finish(lambda: executor.run(Request(tokens(last + 1), state)))
    assert isinstance(caught.value.__cause__, ValueError)
    assert state.position == 0
    is_broken = False
    check_result(plan, finish(lambda: executor.run(Request(tokens(last + 1), state))), last + 1)
    assert state.position == last + 1


def test_failure_wakes_waiting_threads_and_waits_for_running_tasks() -> None:
    plan = make_plan()
    static_runs, has_failed, finished = Event(), Event(), []

    def before(name: str, tag: int, inputs: Mapping[str, Array]) -> None:
        if (name, tag) == ("static.0", CHUNK):
            static_runs.set()
            wait_for(has_failed)
            finished.append(name)
        if (name, tag) == ("dynamic.0", 0):
            wait_for(static_runs)
            has_failed.set()
            raise ValueError("first")

    executor = make_executor(plan, before=before, processors=npu_and_cpu(4))
    with pytest.raises(BackendError, match=r"subgraph dynamic\.0 failed on chunk 0: first"):
        finish(lambda: executor.run(Request(tokens(40), State(plan, CONTEXT))))
    assert finished == ["static.0"]


def test_first_of_two_failures_is_raised() -> None:
    plan = make_plan()
    both_run = threading.Barrier(2)

    def before(name: str, tag: int, inputs: Mapping[str, Array]) -> None:
        if name == "static.0":
            both_run.wait(60)
            raise ValueError(f"failure of chunk {tag // CHUNK}")

    executor = make_executor(plan, before=before, processors=shared_cpu(2))
    with pytest.raises(BackendError, match=r"on chunk (\d): failure of chunk \1$"):
        finish(lambda: executor.run(Request(tokens(16), State(plan, CONTEXT))))


def test_lost_device_error_keeps_its_type() -> None:
    plan = make_plan()

    def lose(name: str, tag: int, inputs: Mapping[str, Array]) -> None:
        raise DeviceLostError("the NPU does not answer")

    with pytest.raises(DeviceLostError, match="subgraph embedding failed on chunk 0: the NPU does not answer"):
        make_executor(plan, before=lose).run(Request(tokens(1), State(plan, CONTEXT)))


@pytest.mark.parametrize("policy", POLICIES)
def test_cancel_from_another_thread_ends_the_run(policy: str) -> None:
    plan = make_plan()
    cancel, is_running, was_cancelled = Event(), Event(), Event()

    def hold(name: str, tag: int, inputs: Mapping[str, Array]) -> None:
        if (name, tag) == ("dynamic.1", CHUNK) and not was_cancelled.is_set():
            is_running.set()
            wait_for(was_cancelled)

    def cancel_it() -> None:
        wait_for(is_running)
        cancel.set()
        was_cancelled.set()

    executor, state = make_executor(plan, before=hold, policy=policy), State(plan, CONTEXT)
    other = threading.Thread(target=cancel_it)
    other.start()
    with pytest.raises(ClosedError, match=r"the request was cancelled after \d+ of 40 tokens"):
        finish(lambda: executor.run(Request(tokens(40), state, cancel=cancel)))
    other.join(60)
    assert state.position == 0
    check_result(plan, finish(lambda: executor.run(Request(tokens(40), state, cancel=Event()))), 40)


@pytest.mark.parametrize("num_tokens", [1, 40])
def test_run_cancelled_before_its_start_runs_no_task(num_tokens: int) -> None:
    plan = make_plan()
    started = []
    cancel = Event()
    cancel.set()
    executor = make_executor(plan, before=lambda name, tag, inputs: started.append(name))
    with pytest.raises(ClosedError):
        finish(lambda: executor.run(Request(tokens(num_tokens), State(plan, CONTEXT), cancel=cancel)))
    assert not started


class _Interrupts:
    """SIGINT for the main thread; each one is sent until it has been received, and received once."""

    def __init__(self) -> None:
        self._expected = Event()

    def receive(self, number: int, frame: object) -> None:
        if not self._expected.is_set():
            self._expected.set()
            raise KeyboardInterrupt

    def send(self) -> None:
        self._expected.clear()
        main = threading.main_thread().ident
        assert main is not None
        for _ in range(600):  # one that comes just before the thread blocks stays pending
            signal.pthread_kill(main, signal.SIGINT)
            if self._expected.wait(0.1):
                return
        raise AssertionError("the main thread never took the interrupt")


@pytest.fixture
def interrupts() -> Iterator[_Interrupts]:
    if not hasattr(signal, "pthread_kill"):
        pytest.skip("this system cannot signal one thread")
    interrupts = _Interrupts()
    previous = signal.signal(signal.SIGINT, interrupts.receive)
    yield interrupts
    signal.signal(signal.SIGINT, previous)


@pytest.mark.parametrize("num_tokens", [CHUNK, 40])
def test_interrupt_reaches_the_caller_and_ends_the_threads(num_tokens: int, interrupts: _Interrupts) -> None:
    plan = make_plan()
    is_interrupted = False

    def interrupt(name: str, tag: int, inputs: Mapping[str, Array]) -> None:
        nonlocal is_interrupted
        if name == "dynamic.1" and not is_interrupted:
            is_interrupted = True
            interrupts.send()

    executor, state = make_executor(plan, before=interrupt), State(plan, CONTEXT)
    with pytest.raises(KeyboardInterrupt):
        executor.run(Request(tokens(num_tokens), state))
    assert chunkrt_threads() == []
    assert state.position == 0
    check_result(plan, executor.run(Request(tokens(num_tokens), state)), num_tokens)


def test_interrupt_at_the_end_of_the_construction_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(Stream):
        def __init__(self, executor: Executor, on_end: Callable[[], None], chunks: Sequence[Chunk]) -> None:
            super().__init__(executor, on_end, chunks)
            raise KeyboardInterrupt

    plan = make_plan()
    executor, state = make_executor(plan), State(plan, CONTEXT)
    with monkeypatch.context() as patch:
        patch.setattr("chunkrt.runtime.stream.Stream", Interrupted)
        with pytest.raises(KeyboardInterrupt):
            executor.run(Request(tokens(40), state))
    assert chunkrt_threads() == []
    check_result(plan, executor.run(Request(tokens(40), state)), 40)


def test_run_after_a_second_interrupt_waits_for_running_tasks(
    interrupts: _Interrupts, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan()
    left, log = Event(), []

    def interrupt(name: str, tag: int, inputs: Mapping[str, Array]) -> None:
        if not log:
            log.append("first run started")
            interrupts.send()
            interrupts.send()
            wait_for(left)
            log.append("first run ended")
        elif name == "embedding" and tag == 0:
            log.append("second run started")

    close, may_end = Stream.close, False

    def let_go_and_close(stream: Stream) -> None:
        if may_end:
            left.set()
        close(stream)

    monkeypatch.setattr(Stream, "close", let_go_and_close)
    executor, state = make_executor(plan, before=interrupt), State(plan, CONTEXT)
    with pytest.raises(KeyboardInterrupt):
        executor.run(Request(tokens(40), state))
    assert log == ["first run started"]
    may_end = True
    check_result(plan, executor.run(Request(tokens(40), state)), 40)
    assert log == ["first run started", "first run ended", "second run started"]


class _Stubborn:
    """Policy that runs chunk 0 and then chooses nothing."""

    name = "stubborn"
    is_concurrent = True

    def select(self, ready: Sequence[Task], schedule: Schedule) -> Task | None:
        return next((task for task in ready if task.chunk == 0), None)


def test_policy_that_would_deadlock_is_an_error() -> None:
    plan = make_plan()
    executor, state = make_executor(plan, policy=_Stubborn()), State(plan, CONTEXT)
    with pytest.raises(ConfigError, match="policy 'stubborn' chose none"):
        finish(lambda: executor.run(Request(tokens(40), state)))
    assert state.position == 0


def test_runs_from_two_threads_follow_one_another() -> None:
    plan = make_plan()
    first_runs, second_runs = Event(), Event()

    def hold(name: str, tag: int, inputs: Mapping[str, Array]) -> None:
        if name == "embedding" and tag == 0:
            if not first_runs.is_set():
                first_runs.set()
                assert not second_runs.wait(0.2), "two runs at once"
            else:
                second_runs.set()

    executor = make_executor(plan, before=hold)
    results: list[Request] = []

    def call() -> None:
        results.append(executor.run(Request(tokens(40), State(plan, CONTEXT))))

    callers = [threading.Thread(target=call, daemon=True) for _ in range(2)]
    callers[0].start()
    wait_for(first_runs)
    callers[1].start()
    for caller in callers:
        caller.join(60)
    assert len(results) == 2
    for result in results:
        check_result(plan, result, 40)
