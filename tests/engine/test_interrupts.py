"""Ctrl-C at any point leaves a session consistent with its tokens: its next answer equals that of a fresh session."""

import _thread
import signal
import subprocess
import sys
import threading
import time
from functools import cache
from itertools import count

import numpy as np
import pytest
from fixture_checkpoints import checkpoint, input_ids
from interrupt_at import CALLER, WORKERS, InterruptAt
from states import make_state

import chunkrt
from chunkrt.runtime.executor import Executor
from chunkrt.runtime.request import Request

MODELS = ("llama_gqa", "qwen3_next", "gemma3_window_5")
CONTEXT, FIRST, SECOND = 24, 9, 5
NEXT = [7, 11]


@cache
def load(name, context_shift=False, threads=1):
    """Load a model with several threads and short chunks: a prompt has several, which workers share."""
    options = {"context_length": CONTEXT, "context_shift": True} if context_shift else {}
    options |= {"chunk_length": 8 if threads == 1 else 2, "threads": threads}
    return chunkrt.load(checkpoint(name), npu="reference", scheme="float", **options)


def begin(engine, tokens):
    opened = engine.session()
    opened.prefill(tokens[:FIRST])
    list(opened.generate(max_new_tokens=2))
    return opened


@cache
def fresh_logits(name, tokens):
    opened = load(name).session()
    return opened.prefill([*tokens, *NEXT]).logits


def assert_says_what_its_tokens_say(opened, name, where):
    tokens = opened.tokens
    assert opened.position == len(tokens)
    found = opened.prefill(NEXT).logits
    expected = fresh_logits(name, tokens)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4 * np.abs(expected).max(), err_msg=where)


def prefill(opened, tokens, path):
    opened.prefill(tokens[FIRST : FIRST + SECOND])


def generate(opened, tokens, path):
    list(opened.generate(max_new_tokens=2))


def rewind(opened, tokens, path):
    opened.rewind(FIRST - 2)


def rewind_and_generate(opened, tokens, path):
    opened.rewind(FIRST)
    list(opened.generate(max_new_tokens=1))


def fork(opened, tokens, path):
    opened.fork().prefill(tokens[:2])


def save(opened, tokens, path):
    opened.save(path)


def interrupted_at(act, engine, name, at, path):
    """Return True if the interrupt came before the act had ended, after checking the session's logits."""
    tokens = input_ids(name)
    opened = begin(engine, tokens)
    try:
        with InterruptAt(at, CALLER if engine.options.num_threads == 1 else WORKERS):
            act(opened, tokens, path)
    except KeyboardInterrupt:
        assert_says_what_its_tokens_say(opened, name, f"{act.__name__} of {name}, place {at}")
        return True
    return False


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # an interrupt may come between open and with
@pytest.mark.parametrize("step", [307, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("act", [prefill, generate, rewind, rewind_and_generate, fork, save])
def test_interrupt_at_any_point_leaves_the_session_consistent(act, name, step, tmp_path):
    engine, at = load(name), 1
    while interrupted_at(act, engine, name, at, tmp_path / "state.npz"):
        at += step
    assert at > step


@pytest.mark.parametrize(
    ("first", "step"), [(1, 607), *(pytest.param(first, 8, marks=pytest.mark.slow) for first in range(1, 9))]
)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("act", [prefill, generate])
def test_interrupt_at_any_point_of_a_waiting_thread_leaves_the_session_consistent(act, name, first, step, tmp_path):
    before = set(threading.enumerate())  # other tests may have used the emulated NPU, whose thread stays
    engine, at = load(name, threads=2), first
    assert engine.loaded.scheduler.executors.prompts.is_concurrent
    while interrupted_at(act, engine, name, at, tmp_path):
        at += step
        new = set(threading.enumerate()) - before
        assert not [thread for thread in new if thread.name.startswith("chunkrt-")]
    assert at > step


def test_tokens_after_an_interrupt_include_a_token_that_is_being_drawn():
    name, begun, goes_on = "llama_gqa", threading.Event(), threading.Event()
    engine = load(name)
    opened = begin(engine, input_ids(name))

    class WaitsAtSecondToken:
        """Allows every token. The scheduler's thread draws the second one, while the caller waits."""

        num_drawn = 0

        def allowed(self):
            if self.num_drawn == 1:
                begun.set()
                goes_on.wait(60)
            return np.ones(engine.plan.vocab_size, np.bool_)

        def accept(self, token_id):
            self.num_drawn += 1

    def interrupt():
        begun.wait(60)
        _thread.interrupt_main()
        time.sleep(0.3)
        goes_on.set()

    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    with engine.loaded.scheduler.sharing(), pytest.raises(KeyboardInterrupt):
        list(opened.generate(max_new_tokens=3, constraint=WaitsAtSecondToken()))
    tokens = opened.tokens
    interrupting.join()
    opened.prefill(NEXT)
    assert opened.tokens == (*tokens, *NEXT)


def test_interrupt_before_a_garbage_collection_is_not_lost():
    """The functions are called from C, so Python sees the interrupt in the collector or after it."""
    program = """
import _thread, gc, operator, signal
import chunkrt
signal.signal(signal.SIGINT, signal.default_int_handler)
chunkrt.Session
try:
    list(map(operator.call, [_thread.interrupt_main, gc.collect]))
except KeyboardInterrupt:
    print("interrupted")
"""
    command = [sys.executable, "-P", "-c", program]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (finished.stdout, finished.stderr) == ("interrupted\n", "")


def test_interrupt_between_queueing_and_sending_a_request_leaves_the_session_consistent(monkeypatch):
    name, queue = "llama_gqa", Request.queue
    engine, tokens = load(name), input_ids("llama_gqa")
    opened = begin(engine, tokens)

    def interrupted(request, *arguments):
        queue(request, *arguments)
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(Request, "queue", interrupted)
    with engine.loaded.scheduler.sharing(), pytest.raises(KeyboardInterrupt):
        list(opened.generate(max_new_tokens=1))
    checking = threading.Thread(
        target=assert_says_what_its_tokens_say, args=(opened, name, "between queueing and sending"), daemon=True
    )
    checking.start()
    checking.join(60)
    assert not checking.is_alive()


@pytest.mark.parametrize(
    ("first", "step"), [(1, 607), *(pytest.param(first, 8, marks=pytest.mark.slow) for first in range(1, 9))]
)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("act", [prefill, generate])
def test_interrupt_at_any_point_with_shared_chunks_leaves_the_session_consistent(act, name, first, step, tmp_path):
    """The other sequences get the same results as alone."""
    engine, tokens = load(name), input_ids(name)[:12]
    expected, found = fresh_logits(name, tuple(tokens[:-2])), []
    has_found, is_over = threading.Event(), threading.Event()

    def work():
        while not is_over.is_set():
            with engine.session() as opened:
                found.append(opened.prefill([*tokens[:-2], *NEXT]).logits)
            has_found.set()

    shared = engine.stats().shared_chunks
    other = threading.Thread(target=work)
    other.start()
    try:
        assert has_found.wait(60)
        at = first
        with engine.loaded.scheduler.sharing():
            while interrupted_at(act, engine, name, at, tmp_path):
                at += step
    finally:
        is_over.set()
        other.join()
    assert at > step
    assert engine.stats().shared_chunks > shared
    for logits in found:
        np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4 * np.abs(expected).max())


@pytest.mark.skipif(sys.platform == "win32", reason="a thread cannot be sent a signal")
@pytest.mark.parametrize("step", [23, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("act", [prefill, generate])
def test_interrupt_during_any_task_leaves_the_session_consistent(act, name, threads, step, tmp_path, monkeypatch):
    """The signal reaches the main thread, which waits for the workers or computes the task itself."""
    tokens, run_task, at, is_through = input_ids(name), Executor.run_task, 1, False
    while not is_through:
        opened, tasks = begin(load(name, threads=threads), tokens), count(1)

        def interrupting(self, *task, tasks=tasks, at=at):
            if next(tasks) == at:
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            return run_task(self, *task)

        monkeypatch.setattr(Executor, "run_task", interrupting)
        try:
            act(opened, tokens, tmp_path)
            if next(tasks) > at:
                time.sleep(10)  # the signal has been sent
            is_through = True
        except KeyboardInterrupt:
            at += step
        monkeypatch.setattr(Executor, "run_task", run_task)
        assert_says_what_its_tokens_say(opened, name, f"{act.__name__} of {name}, task {at}")
    assert at > step


@pytest.mark.parametrize("step", [53, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("change", ["reset", "load", "restore"])
def test_state_after_an_aborted_change_is_the_old_or_the_new_one(name, change, step, tmp_path):
    engine, tokens, path = load(name), np.array(input_ids(name)), tmp_path / "state.npz"

    def state_of(count):
        return make_state(engine, tokens[:count])

    def logits_of(tried):
        return engine.loaded.run(Request(tokens[-3:], tried, logits="last")).logits

    other = state_of(4)
    other.save(path)
    snapshot = other.snapshot()
    after = state_of({"reset": 0, "load": 4, "restore": 4}[change])
    changes = {
        "reset": lambda tried: tried.reset(),
        "load": lambda tried: tried.load(path),
        "restore": lambda tried: tried.restore(snapshot),
    }
    expected = {9: logits_of(state_of(9)), after.position: logits_of(after)}
    at, is_through = 1, False
    while not is_through:
        tried = state_of(9)
        try:
            with InterruptAt(at):
                changes[change](tried)
            is_through = True
        except KeyboardInterrupt:
            at += step
        position = tried.position
        np.testing.assert_array_equal(logits_of(tried), expected[position], err_msg=f"place {at}")
    assert at > step


def test_error_of_a_listener_keeps_tokens_and_state_consistent():
    tokens = input_ids("llama_gqa")
    opened = load("llama_gqa").session()
    opened.prefill(tokens[:4])

    def fail(record):
        raise ValueError("made to fail")

    opened.on_run = fail
    with pytest.raises(ValueError, match="made to fail"):
        opened.prefill(tokens[4:7])
    opened.on_run = None
    assert opened.tokens == tuple(tokens[:7])
    assert_says_what_its_tokens_say(opened, "llama_gqa", "on_run")


@pytest.mark.parametrize("step", [23, pytest.param(1, marks=pytest.mark.slow)])
def test_tokens_of_an_interrupted_shift_are_run_again(step):
    """A shifted state has seen the dropped tokens, so only a state after an aborted shift equals a fresh one."""
    tokens, at, is_through = input_ids("llama_gqa"), 1, False
    whole = tuple(tokens[:CONTEXT])
    while not is_through:
        opened = load("llama_gqa", context_shift=True).session()
        opened.prefill(whole[:-1])
        try:
            with InterruptAt(at):
                opened.prefill(whole[-1:])
            is_through = True
        except KeyboardInterrupt:
            at += step
            if opened.position == len(whole) - 1:
                expected = load("llama_gqa").session().prefill(whole).logits
                found = opened.prefill(whole[-1:]).logits
                np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4 * np.abs(expected).max())
    assert at > step
