"""Sessions that share chunks: logits and state of each are, bit for bit, the same as when it runs alone."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import time
from contextlib import suppress

import numpy as np
import pytest
from collector import without_collector
from fixture_checkpoints import checkpoint, input_ids
from server_of_tests import wait_until
from states import note_runs, saved_arrays, state_bytes

import chunkrt
from chunkrt.engine.scoring import encode_pair
from chunkrt.errors import BusyError, ClosedError, ConfigError

NAME = "llama_biased_gguf"


@pytest.fixture(scope="module")
def engine():
    with chunkrt.load(checkpoint(NAME), npu="native", chunk_length=8, threads=2) as engine:
        yield engine


@pytest.fixture(scope="module")
def one(engine):
    """Return the bytes of one state."""
    return state_bytes(engine)


PROMPTS = [input_ids(NAME)[i : i + 3 + 5 * i] for i in range(9)]


def answers_alone(engine, prompts, **options):
    texts = []
    for prompt in prompts:
        with engine.session() as session:
            session.prefill(prompt)
            texts.append("".join(piece.text for piece in session.generate(**options)))
    return texts


@pytest.mark.parametrize("most", [1, 2, 16])
def test_many_prompts_are_answered_as_alone(engine, most):
    expected = answers_alone(engine, PROMPTS, max_new_tokens=9)
    assert engine.generate(PROMPTS, max_new_tokens=9, max_sessions=most) == expected
    pieces = list(engine.stream(iter(PROMPTS), max_new_tokens=9, max_sessions=most))
    texts = ["".join(piece.text for i, piece in pieces if i == index) for index in range(len(PROMPTS))]
    assert texts == expected
    assert {index for index, piece in pieces if piece.finish_reason} == set(range(len(PROMPTS)))


def test_generate_of_one_text_gives_one_answer(engine):
    assert engine.generate("a b c", max_new_tokens=5) == answers_alone(engine, ["a b c"], max_new_tokens=5)[0]
    assert engine.generate([]) == []
    with pytest.raises(ConfigError, match="prompts is a single text"):
        next(engine.stream("a b c"))


def test_scores_equal_those_of_all_logits_at_once(engine):
    """Compute them in float64 from the logits of context and continuation in one prefill."""
    random = np.random.default_rng(0)
    ids = input_ids(NAME)
    pairs = [(ids[:n], [int(i) for i in random.choice(ids, k)]) for n, k in [(1, 1), (5, 3), (20, 1), (40, 9), (2, 30)]]
    scores = engine.score(pairs)
    for (context, continuation), score in zip(pairs, scores, strict=True):
        logits = engine.session().prefill([*context, *continuation], logits="all").logits[len(context) - 1 : -1]
        shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
        log_probabilities = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
        expected = log_probabilities[np.arange(len(continuation)), continuation].sum()
        assert score.log_probability == pytest.approx(expected, abs=1e-9)
        assert score.is_greedy == (logits.argmax(axis=1).tolist() == list(continuation))
    assert engine.score([("a b", " c")]) == engine.score([encode_pair(engine.tokenizer, "a b", " c")])


def test_invalid_prompt_ends_all_and_the_engine_recovers(engine):
    with pytest.raises(ConfigError, match="outside the vocabulary"):
        engine.generate([*PROMPTS, [10**9]], max_new_tokens=5)
    for pieces in (engine.stream(PROMPTS, max_new_tokens=50), engine.stream(PROMPTS, max_new_tokens=50)):
        next(pieces)
        pieces.close()
    deadline = time.monotonic() + 60
    while engine.stats().waiting_runs:  # an abandoned run ends with its chunk
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert engine.generate(PROMPTS[:2], max_new_tokens=4) == answers_alone(engine, PROMPTS[:2], max_new_tokens=4)


def test_failed_prompts_release_their_sessions(engine):
    """The garbage collector may not run before the next prompts wait for memory."""
    with without_collector():
        before = engine.stats().sessions
        for _ in range(5):
            with suppress(ConfigError):  # pytest.raises would keep the error
                engine.generate(["a", "a" * 5000, "b"], max_new_tokens=2)
        wait_until(lambda: engine.stats().sessions == before)  # the scheduler's thread may still end a request


def test_event_loop_answers_many_at_once(engine):
    async def answer(prompt):
        async with await engine.asession() as session:
            result = await session.aprefill(prompt)
            assert result.num_tokens == len(prompt)
            return "".join([piece.text async for piece in session.agenerate(max_new_tokens=9)])

    async def main():
        return await asyncio.gather(*map(answer, PROMPTS))

    assert asyncio.run(main()) == answers_alone(engine, PROMPTS, max_new_tokens=9)


def test_closed_event_loop_leaves_the_engine_usable(engine):
    session = engine.session()

    async def main():
        task = asyncio.create_task(session.aprefill(input_ids(NAME)))
        await asyncio.sleep(0)
        return task

    asyncio.run(main())
    assert session.position == 0
    np.testing.assert_array_equal(session.prefill(PROMPTS[4]).logits, engine.session().prefill(PROMPTS[4]).logits)


def test_caches_have_a_budget(one):
    with chunkrt.load(checkpoint(NAME), npu="native", chunk_length=8, cache_memory=2 * one, queue=2) as engine:
        first, second = engine.session(), engine.session()
        first.prefill(PROMPTS[1])
        for refused in (engine.session, first.fork):
            with pytest.raises(BusyError, match=r"^2 of 2 places for sequences \(`cache_memory`\) and 0 of"):
                refused()
        assert engine.stats().cache_bytes == 2 * one
        second.close()
        third = first.fork()
        assert third.tokens == tuple(PROMPTS[1])
        del third
        gc.collect()
        assert engine.stats().sessions == 1
        # One place is left: answers come one after the other.
        assert engine.generate(PROMPTS[:4], max_new_tokens=3) == answers_alone(engine, PROMPTS[:4], max_new_tokens=3)

        async def main():
            held = await engine.asession()
            waiting = [asyncio.create_task(engine.asession()) for _ in range(2)]
            await asyncio.sleep(0)
            with pytest.raises(BusyError, match=r"and 2 of 2 places in the queue"):
                await engine.asession()
            held.close()
            (await waiting[0]).close()
            (await waiting[1]).close()

        asyncio.run(main())
    with pytest.raises(ConfigError, match=rf"cache_memory is {one - 1} bytes, but .* take {one}"):
        chunkrt.load(checkpoint(NAME), npu="native", chunk_length=8, cache_memory=one - 1)


def test_room_without_a_limit_needs_no_wait(engine):
    """No sequence is rejected because others come at the same time."""
    is_over = threading.Event()

    async def come():
        while not is_over.is_set():
            (await engine.asession()).close()

    coming = threading.Thread(target=lambda: asyncio.run(come()))
    coming.start()
    try:
        with engine.session() as session:
            session.prefill(PROMPTS[2])
            for _ in range(200):
                session.fork().close()
    finally:
        is_over.set()
        coming.join()


def test_closed_session_leaves_room_for_the_next(one):
    """Neither the thread that computed its last run nor an error in it keeps its caches alive."""
    with chunkrt.load(checkpoint(NAME), npu="native", chunk_length=8, cache_memory=2 * one) as engine:
        errors = []

        def work():
            try:
                for _ in range(40):
                    with engine.session() as session:
                        session.prefill(PROMPTS[2])
            except BaseException as error:
                errors.append(error)

        async def cancelled():
            async with await engine.asession() as session:
                await session.aprefill(input_ids(NAME))

        async def main():
            for _ in range(5):
                held = await engine.asession()
                task = asyncio.create_task(cancelled())
                await asyncio.sleep(0.002)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                del task
                (await asyncio.wait_for(engine.asession(), 60)).close()
                held.close()

        with without_collector():
            threads = [threading.Thread(target=work) for _ in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(120)
            assert not errors, errors
            asyncio.run(main())


def test_close_ends_the_wait_for_room(one):
    engine = chunkrt.load(checkpoint(NAME), npu="native", chunk_length=8, cache_memory=one)
    held, errors = engine.session(), []

    def work():
        try:
            engine.generate([[1, 2]], max_new_tokens=1)
        except ClosedError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=work, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    while engine.stats().waiting_sessions < 2:
        threading.Event().wait(0.01)
    engine.close()
    for thread in threads:
        thread.join(60)
    assert errors == ["the engine is closed; load the model again"] * 2
    held.close()


def test_session_in_use_cannot_be_used_by_others(engine):
    async def main():
        session = await engine.asession()
        task = asyncio.create_task(session.aprefill(input_ids(NAME)))
        await asyncio.sleep(0)
        for use in (lambda: session.rewind(0), session.fork):
            with pytest.raises(ConfigError, match="in use by another"):
                use()
        with pytest.raises(ConfigError, match="the session is in use by another thread or task; create one for each"):
            await session.aprefill([1])
        return (await task).logits

    expected = engine.session().prefill(input_ids(NAME)).logits
    np.testing.assert_array_equal(asyncio.run(main()), expected)


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda engine: engine.generate(5), "prompts is of type int, expected a list"),
        (lambda engine: engine.generate(b"ab"), "prompts is of type bytes, expected a list"),
        (lambda engine: list(engine.stream(None)), "prompts is of type NoneType, expected a list"),
        (lambda engine: engine.score(5), "pairs is of type int, expected a list"),
        (lambda engine: engine.score(("ab", "cd")), "a pair is 'ab', expected a context and its continuation"),
        (lambda engine: engine.score([([1], [2], [3])]), "expected a context and its continuation"),
        (lambda engine: engine.score([([1], [99999])]), "token id 99999 is outside the vocabulary"),
        (lambda engine: engine.score([([1], [-1])]), "token id -1 is outside the vocabulary"),
    ],
)
def test_invalid_input_is_one_clear_line(engine, use, message):
    with pytest.raises(ConfigError, match=message):
        use(engine)


def test_closed_engine_rejects_every_call(engine):
    with chunkrt.load(checkpoint(NAME), npu="native", chunk_length=8) as closed:
        session = closed.session()
        session.prefill([1])
    closed.close()
    assert closed.loaded.is_closed
    for use in (
        lambda: closed.generate("a"),
        lambda: list(closed.stream(["a"])),
        lambda: closed.score([([1], [2])]),
        closed.session,
        closed.stats,
        lambda: session.prefill([1]),
        session.generate,
        lambda: asyncio.run(session.aprefill([1])),
        lambda: asyncio.run(closed.asession()),
    ):
        with pytest.raises(ClosedError, match="the engine is closed; load the model again"):
            use()


def test_pairs_with_one_context_run_it_once_in_any_order(engine, monkeypatch):
    ran = note_runs(engine, monkeypatch)
    context, other = input_ids(NAME)[:30], input_ids(NAME)[1:20]
    pairs = [(context, [5, 6]), (context, [7]), (other, [8]), (context, [9, 9, 9])]
    scores = engine.score(pairs)
    assert sum(ran) == (29 + 2) + 1 + (18 + 1) + 3
    monkeypatch.undo()
    assert scores == [engine.session().score(*pair) for pair in pairs]


def test_contexts_with_a_shared_beginning_run_it_once(monkeypatch):
    """Many at a time: the others wait until the first has put the shared part into the prefix cache."""
    shared = input_ids(NAME)[:48]
    pairs = [([*shared, *range(n, n + 9)], [ending, 7]) for n in range(5) for ending in (3, 4)]
    with chunkrt.load(checkpoint(NAME), npu="native", threads=2, prefix_cache="memory") as cached:
        ran = note_runs(cached, monkeypatch)
        scores = cached.score(pairs)
        assert cached.stats().cached_tokens == 4 * 48
        assert sum(ran) == 48 + 5 * (8 + 2 + 2)
        assert scores == [cached.session().score(*pair) for pair in pairs]


def test_scores_come_once_each_as_they_are_ready(engine):
    ids = input_ids(NAME)
    pairs = [(ids[: 5 + n % 3], [n, 2]) for n in range(9)]
    found = list(engine.scores(pairs, max_sessions=2))
    assert sorted(index for index, _ in found) == list(range(9))
    assert dict(found) == dict(enumerate(engine.score(pairs)))


def test_pairs_that_do_not_fit_are_rejected_before_anything_runs(engine, monkeypatch):
    monkeypatch.setattr(engine.loaded.scheduler, "run", None)
    with pytest.raises(ConfigError, match="do not fit the context"):
        engine.score([([1], [2]), ([1] * 10**6, [2])])


AT_EXIT = """
import sys, threading
import chunkrt
engine = chunkrt.load(sys.argv[1], npu="native", threads=2)
def use():
    while True:
        engine.session().prefill(range(3, 90))
for _ in range(int(sys.argv[2])):
    threading.Thread(target=use, daemon=True).start()
import time
time.sleep(0.3)
print("over", flush=True)
"""


@pytest.mark.parametrize("times", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("num_threads", [1, 4])
def test_process_may_end_while_others_run(num_threads, times):
    """Its daemon threads are in a kernel or wait for their share when the interpreter exits."""
    for _ in range(times):
        finished = subprocess.run(
            [sys.executable, "-P", "-c", AT_EXIT, str(checkpoint(NAME)), str(num_threads)],
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert (finished.returncode, finished.stdout) == (0, "over\n"), finished.stderr


def test_on_run_may_use_its_session(engine):
    session, expected = engine.session(), engine.session()

    def go_on(record):
        session.on_run = None
        session.prefill([3])

    session.on_run = go_on
    session.prefill([1, 2])
    expected.prefill([1, 2, 3])
    assert session.tokens == expected.tokens
    np.testing.assert_array_equal(*(saved_arrays(each)["session.logits"] for each in (session, expected)))
