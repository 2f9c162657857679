"""Generation in the scheduler's loop: it computes ahead of its caller, and stops anywhere without a trace."""

import asyncio
import sys
import threading
import time
import weakref
from contextlib import nullcontext, suppress

import numpy as np
import pytest
from collector import without_collector
from fixture_checkpoints import checkpoint, input_ids
from server_of_tests import wait_until

import chunkrt
from chunkrt.engine.sequence import TokenSequence
from chunkrt.errors import BackendError, ClosedError, ConfigError
from chunkrt.runtime.executor import Executor
from chunkrt.runtime.request import Request

NAMES = ("llama_gqa", "gemma3_window_5", "qwen3_next")


@pytest.fixture(scope="module", params=NAMES)
def engine(request):
    with chunkrt.load(checkpoint(request.param), npu="native", chunk_length=8, prefix_cache="off") as engine:
        engine.tokens = input_ids(request.param)[:12]
        yield engine


def prefilled(engine):
    session = engine.session()
    session.prefill(engine.tokens)
    return session


def answer_of(engine, number=9):
    return [piece.token_id for piece in prefilled(engine).generate(max_new_tokens=number)]


def check_continues(engine, session, num_generated):
    """Check that a session has exactly its prompt and some tokens of the answer, and continues like a fresh one."""
    assert list(session.tokens) == [*engine.tokens, *answer_of(engine)[:num_generated]]
    with engine.session() as fresh:
        expected = fresh.prefill([*session.tokens, 7, 11]).logits
    found = session.prefill([7, 11]).logits
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("number", [1, 2, 5])
@pytest.mark.parametrize("act", ["close", "rewind", "fork", "prefill", "drop"])
def test_generation_that_shares_chunks_can_be_left_after_any_piece(engine, number, act):
    session = prefilled(engine)
    with engine.loaded.scheduler.sharing():  # the scheduler computes ahead
        pieces = session.generate(max_new_tokens=9)
        found = [next(pieces).token_id for _ in range(number)]
        assert found == answer_of(engine)[:number]
        if act == "close":
            pieces.close()
        elif act == "drop":
            del pieces
        elif act == "fork":
            check_continues(engine, session.fork(), number)
        elif act == "rewind":
            session.rewind(session.position - 1)
            number -= 1
    check_continues(engine, session, number)


def test_generation_continues_after_other_uses_of_the_session(engine):
    session = prefilled(engine)
    with engine.loaded.scheduler.sharing():
        pieces = session.generate(max_new_tokens=9)
        found = [next(pieces).token_id for _ in range(3)]
        assert session.fork().position == session.position
        found += [piece.token_id for piece in pieces]
    assert found == answer_of(engine)


def test_generation_in_a_session_that_was_emptied_reports_that(engine):
    session = prefilled(engine)
    pieces = session.generate(max_new_tokens=9)
    next(pieces)
    session.rewind(0)
    with pytest.raises(ConfigError, match="the session has no tokens to continue; call prefill first"):
        next(pieces)
    assert session.position == 0


def test_asynchronous_generation_can_be_left_after_any_piece(engine):
    async def first(number):
        async with await engine.asession() as session:
            await session.aprefill(engine.tokens)
            pieces = session.agenerate(max_new_tokens=9)
            found = [(await anext(pieces)).token_id for _ in range(number)]
            await pieces.aclose()
            assert found == answer_of(engine)[:number]
            await asyncio.to_thread(check_continues, engine, session, number)

    for number in (1, 4):
        asyncio.run(first(number))


def test_error_of_a_constraint_ends_its_own_generation_only(engine):
    class Breaks:
        num_left = 3

        def allowed(self):
            return np.ones(engine.tokenizer_size, np.bool_)

        def accept(self, token_id):
            self.num_left -= 1
            if not self.num_left:
                raise ValueError("on purpose")

    engine.tokenizer_size = engine.plan.vocab_size
    broken, whole, found = prefilled(engine), prefilled(engine), []

    def work():
        found.extend(piece.token_id for piece in whole.generate(max_new_tokens=9))

    thread = threading.Thread(target=work)
    with engine.loaded.scheduler.sharing():
        thread.start()
        with pytest.raises(ValueError, match="on purpose"):
            list(broken.generate(max_new_tokens=9, constraint=Breaks()))
        thread.join()
    assert found == answer_of(engine)
    check_continues(engine, broken, 2)


def test_cancelled_generation_keeps_its_pieces(engine):
    session = prefilled(engine)
    with engine.loaded.scheduler.sharing():
        pieces = session.generate(max_new_tokens=9)
        next(pieces)
        session.cancel()
        with pytest.raises(ClosedError, match="cancelled"):
            list(pieces)
    check_continues(engine, session, session.position - len(engine.tokens))


class Calls:
    """Constraint that allows every token, and calls a function with the number of tokens after each."""

    def __init__(self, engine, call):
        self._size, self._call, self._num_tokens = engine.plan.vocab_size, call, 0

    def allowed(self):
        return np.ones(self._size, np.bool_)

    def accept(self, token_id):
        self._num_tokens += 1
        self._call(self._num_tokens)


def test_cancel_ends_a_generation_with_a_waiting_caller(engine):
    """Another generation delays each step, so the caller waits for a piece before the logits for it are computed."""
    session, other, begun = prefilled(engine), prefilled(engine), threading.Event()
    slow = Calls(engine, lambda number: (begun.set(), time.sleep(0.03)))
    options = {"max_new_tokens": 12, "ignore_eos": True}
    thread = threading.Thread(target=lambda: list(other.generate(constraint=slow, **options)))
    cancels = Calls(engine, lambda number: number == 3 and session.cancel())
    with engine.loaded.scheduler.sharing():
        thread.start()
        begun.wait()
        try:
            with pytest.raises(ClosedError, match="the generation was cancelled after 3 tokens"):
                list(session.generate(constraint=cancels, **options))
        finally:
            thread.join()
    check_continues(engine, session, 3)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_second_generation_waits_for_the_one_before(engine, number):
    """The first one may still compute ahead when it is left."""
    session = prefilled(engine)
    with engine.loaded.scheduler.sharing():
        pieces = session.generate(max_new_tokens=9)
        found = [next(pieces).token_id for _ in range(number)]
        pieces.close()
        found += [piece.token_id for piece in session.generate(max_new_tokens=9 - number)]
    assert found == answer_of(engine)
    check_continues(engine, session, 9)


@pytest.mark.parametrize("number", [3, 9])
@pytest.mark.parametrize("how", ["alone", "shared", "asynchronous"])
def test_memory_of_a_generation_is_freed_when_it_is_left(engine, how, number):
    session = prefilled(engine)

    async def first(constraint):
        pieces = session.agenerate(max_new_tokens=9, constraint=constraint, ignore_eos=True)
        for _ in range(number):
            await anext(pieces)
        await pieces.aclose()

    with without_collector(), engine.loaded.scheduler.sharing() if how == "shared" else nullcontext():
        constraint = Calls(engine, bool)
        freed = weakref.ref(constraint)
        if how == "asynchronous":
            asyncio.run(first(constraint))
        else:
            for count, _ in enumerate(session.generate(max_new_tokens=9, constraint=constraint, ignore_eos=True), 1):
                if count == number:
                    break
        del constraint
        wait_until(lambda: freed() is None)  # the scheduler's thread may still end the request
    check_continues(engine, session, number)


@pytest.mark.parametrize("fails", ["constraint", "backend"])
def test_memory_of_a_failed_generation_is_freed(engine, monkeypatch, fails):
    """The session is not closed, and the garbage collector does not run."""

    def fail(*_):
        raise ValueError("broken")

    def third(number):
        if number == 3:
            fail() if fails == "constraint" else monkeypatch.setattr(Executor, "run_task", fail)

    with without_collector(), engine.loaded.scheduler.sharing():
        before, session = engine.stats().sessions, prefilled(engine)
        with suppress(ValueError, BackendError):  # pytest.raises would keep the error
            list(session.generate(max_new_tokens=9, constraint=Calls(engine, third), ignore_eos=True))
        assert session.position == len(engine.tokens) + (2 if fails == "constraint" else 3)
        del session
        wait_until(lambda: engine.stats().sessions == before)


def test_close_that_is_interrupted_frees_the_memory(engine, monkeypatch):
    """Ctrl-C arrives while the session waits for a generation that computed ahead."""
    session, wait = prefilled(engine), Request.wait

    def interrupt(request):
        monkeypatch.setattr(Request, "wait", wait)
        raise KeyboardInterrupt

    with without_collector(), engine.loaded.scheduler.sharing():
        before, pieces = engine.stats().sessions, session.generate(max_new_tokens=9, ignore_eos=True)
        for _ in range(2):
            next(pieces)
        del pieces
        monkeypatch.setattr(Request, "wait", interrupt)
        with suppress(KeyboardInterrupt):  # pytest.raises would keep the interrupt
            session.close()
        assert Request.wait is wait
        wait_until(lambda: engine.stats().sessions == before - 1)  # the scheduler's thread may still end the request


@pytest.mark.parametrize("line", [1, 2, 3, 4, 5])
def test_session_can_be_closed_while_its_generation_ends(engine, line):
    """The thread that closes the session stops at a line of the release until the generation has ended."""
    session, begun, reached, ended = prefilled(engine), threading.Event(), threading.Event(), threading.Event()
    num_lines = 0

    def stop(frame, event, argument):
        nonlocal num_lines
        if frame.f_code is not TokenSequence.release.__code__:
            return None
        if event == "line":
            num_lines += 1
            if num_lines == line:
                reached.set()
                ended.wait(60)
        return stop

    def generate():
        waits = Calls(engine, lambda number: number == 2 and (begun.set(), reached.wait(60)))
        with suppress(ClosedError), engine.loaded.scheduler.sharing():
            list(session.generate(max_new_tokens=4, constraint=waits, ignore_eos=True))
        ended.set()

    thread = threading.Thread(target=generate)
    thread.start()
    begun.wait()
    before = sys.gettrace()
    sys.settrace(stop)
    try:
        session.close()
    finally:
        sys.settrace(before)
        reached.set()
        thread.join()
    assert num_lines >= line


class Asks:
    """Constraint that uses the engine."""

    def __init__(self, engine):
        self._engine, self._size = engine, engine.plan.vocab_size

    def allowed(self):
        with self._engine.session() as other:
            other.prefill([1, 2, 3])
        return np.ones(self._size, np.bool_)

    def accept(self, token_id):
        """Accept every token."""


def test_constraint_that_uses_the_engine_gets_an_error_instead_of_a_deadlock(engine):
    session = prefilled(engine)
    assert [p.token_id for p in session.generate(max_new_tokens=3, constraint=Asks(engine))] == answer_of(engine)[:3]
    with engine.loaded.scheduler.sharing(), pytest.raises(ConfigError, match="cannot use the engine"):
        list(prefilled(engine).generate(max_new_tokens=9, constraint=Asks(engine)))


def test_abandoned_streams_do_not_hold_up_others(engine):
    """Their generators are parts of reference cycles, so the garbage collector ends them in any thread."""
    import gc

    before = gc.get_threshold()
    gc.set_threshold(200)
    try:
        for _ in range(5):
            pieces = engine.stream([engine.tokens] * 3, max_new_tokens=9)
            next(pieces)
            cycle = [pieces]
            cycle.append(cycle)
            del pieces, cycle
            assert len(engine.generate([engine.tokens] * 2, max_new_tokens=9)) == 2
    finally:
        gc.set_threshold(*before)


def test_constraint_that_closes_the_engine_ends_its_generation():
    class Closing:
        """Constraint that closes the engine with its third token, in the scheduler's thread."""

        num_tokens = 0

        def allowed(self):
            return np.ones(engine.loaded.plan.vocab_size, bool)

        def accept(self, token_id):
            self.num_tokens += 1
            if self.num_tokens == 3:
                engine.close()

    engine = chunkrt.load(checkpoint("llama_biased_gguf"), chunk_length=8, threads=1)
    session = engine.session()
    session.prefill([1, 2, 3])
    with engine.loaded.scheduler.sharing(), pytest.raises(ClosedError, match="closed"):
        list(session.generate(constraint=Closing(), max_new_tokens=10, ignore_eos=True))
