"""Sessions that share chunks on several ranks: each has the same bits as when it runs alone on the same ranks."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from functools import partial

import numpy as np
import pytest
from fake_backend import wait_until
from fixture_checkpoints import ONE_OF_EACH_STATE, checkpoint, input_ids
from gates import asked_before_any_is_computed, at_once
from led_ranks import led
from ranks_in_threads import on_ranks
from states import make_state, state_bytes

import chunkrt
from chunkrt.errors import ConfigError, DeviceLostError
from chunkrt.runtime.ranks.mailbox import Channel
from chunkrt.runtime.request import Request
from chunkrt.runtime.state import State

NAME = "llama_biased_gguf"
IDS = input_ids(NAME)
PROMPTS = [IDS[i : i + 3 + 5 * i] for i in range(9)]
STATES = ONE_OF_EACH_STATE
HANGS = 60.0


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def ranks(request):
    with led(NAME, request.param, chunk_length=8) as ranks:
        yield ranks


@pytest.fixture
def sent(ranks, monkeypatch):
    """Count the messages of each kind that the ranks send."""
    counted = Counter()
    for communicator in ranks.communicators:

        def count(envelope, payload=b"", *, to=None, send=communicator.send, others=communicator.others):
            counted[envelope.channel] += len(others if to is None else to)
            send(envelope, payload, to=to)

        monkeypatch.setattr(communicator, "send", count)
    return counted


def answer(engine, prompt, num_tokens=9):
    with engine.session() as session:
        session.prefill(prompt)
        return "".join(piece.text for piece in session.generate(max_new_tokens=num_tokens))


def test_threads_share_chunks_on_all_ranks(ranks, sent, monkeypatch):
    engine, follower, prompts = ranks.engine, ranks.of_followers[1], [IDS[5:7], IDS[6:8], *PROMPTS]
    expected = [answer(engine, prompt) for prompt in prompts]
    before, run_lengths, take_part = engine.stats(), [], follower.take_part

    def note(executor, requests, number):
        run_lengths.append([request.token_ids.size for request in requests])
        take_part(executor, requests, number)

    monkeypatch.setattr(follower, "take_part", note)
    sent.clear()
    calls = [partial(answer, engine, prompt) for prompt in prompts]
    assert asked_before_any_is_computed(engine, calls) == expected
    assert max(map(len, run_lengths)) > 2, "sequences share chunks, and the follower computes the same"
    assert sum(map(sum, run_lengths)) == sum(map(len, prompts)) + len(prompts) * 8
    assert engine.stats().shared_chunks > before.shared_chunks
    assert sent[Channel.DONE] == len(run_lengths) * (len(ranks.communicators) - 1)


def test_token_takes_two_messages_for_every_other_rank_in_addition_to_the_sums(ranks, sent):
    """One contains the command, and the advance of the preceding states; the other reports that it is done."""
    others = len(ranks.communicators) - 1
    session = ranks.engine.session()
    session.prefill(PROMPTS[2])
    pieces = session.generate(max_new_tokens=6)
    next(pieces)  # its logits are the prompt's
    for _ in range(5):
        sent.clear()
        next(pieces)
        del sent[Channel.SUM]
        assert sent == {Channel.COMMAND: others, Channel.DONE: others}


@pytest.mark.parametrize("name", ["gemma2", "gemma4", "qwen3_5_moe"])
def test_leader_gets_the_logits_and_hidden_states_of_one_rank(name):
    """The vocabularies are odd, so that 3 ranks pad them; Gemma 2 caps its logits, Gemma 4 has a second table."""
    options = {"scheme": "float", "npu": "reference", "chunk_length": 8}
    ids = np.array(input_ids(name)[:13])
    pairs = [(ids[:3].tolist(), ids[3:6].tolist()), (ids[:4].tolist(), ids[5:9].tolist())]

    def results(engine):
        runs = [(ids, "all"), (ids, "last"), (ids, "hidden"), (ids[:1], "last")]
        found = [engine.loaded.run(Request(part, make_state(engine), logits=wanted)) for part, wanted in runs]
        return [run.hidden if wanted == "hidden" else run.logits for run, (_, wanted) in zip(found, runs, strict=True)]

    with chunkrt.load(checkpoint(name), **options) as engine:
        expected = results(engine)
        scores = [score.log_probability for score in engine.score(pairs)]
    with led(name, 3, **options) as ranks:
        for found, wanted in zip(results(ranks.engine), expected, strict=True):
            assert found.shape == wanted.shape
            np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())
        np.testing.assert_allclose([s.log_probability for s in ranks.engine.score(pairs)], scores, rtol=0, atol=1e-4)


def test_single_prompt_takes_one_command_for_each_filling_of_the_slots(ranks, sent):
    session = ranks.engine.session()
    sent.clear()
    session.prefill(IDS[:60])
    others, executor = len(ranks.communicators) - 1, ranks.engine.loaded.scheduler.executors.prompts
    num_commands = -(-60 // (len(executor.slots) * executor.chunk_length))
    assert (sent[Channel.DONE], sent[Channel.ABORT]) == (num_commands * others, 0)
    assert sent[Channel.COMMAND] <= (num_commands + 2) * others


@pytest.mark.parametrize("name", STATES)
def test_single_prompt_gives_way_on_all_ranks(name):
    """Its first sum of the third chunk waits until another prompt has come: the chunks after the next two are shared,
    and the second prompt ends first."""
    ids = (input_ids(name) * 4)[:100]
    with led(name, 2, chunk_length=8, chunks_in_flight=2) as ranks:
        engine, is_there, order = ranks.engine, threading.Event(), []
        expected = [engine.session().prefill(prompt, logits="all").logits for prompt in (ids, ids[:5])]
        leader = ranks.communicators[0]
        sums = leader.all_reduce

        def all_reduce(partial, out, *, key):
            if key.position == 16 and not is_there.is_set():
                is_there.set()
                wait_until(lambda: engine.loaded.scheduler.num_waiting > 0)
            sums(partial, out, key=key)

        leader.all_reduce = all_reduce

        def prefill(prompt):
            logits = engine.session().prefill(prompt, logits="all").logits
            order.append(len(prompt))
            return logits

        def second():
            assert is_there.wait(HANGS)
            return prefill(ids[:5])

        found = at_once(lambda: prefill(ids), second)
        for here, there in zip(found, expected, strict=True):
            np.testing.assert_array_equal(here, there)
        assert order == [5, 100]
        np.testing.assert_array_equal(engine.session().prefill(ids, logits="all").logits, expected[0])


@pytest.mark.parametrize("size", [2, 4])
def test_lost_rank_ends_all_ranks(size):
    with led(NAME, size, chunk_length=8) as ranks:
        engine, has_begun = ranks.engine, threading.Barrier(5, timeout=HANGS)
        lost = ranks.communicators[-1]

        def lose():
            has_begun.wait()
            lost.leave(f"rank {size - 1} was lost: made to; start all ranks again")

        def work():
            session = engine.session()
            has_begun.wait()
            while True:
                session.prefill(PROMPTS[4])
                session.rewind(0)

        async def in_loop():
            session = await engine.asession()
            has_begun.wait()
            while True:
                await session.aprefill(PROMPTS[4])
                session.rewind(0)

        *errors, nothing = at_once(work, work, work, lambda: asyncio.run(in_loop()), lose)
        assert nothing is None
        for error in errors:
            assert isinstance(error, DeviceLostError)
            assert str(error).endswith(f"rank {size - 1} was lost: made to; start all ranks again")
        with pytest.raises(DeviceLostError):
            engine.session().prefill(PROMPTS[0])


def test_follower_out_of_step_ends_all_ranks():
    with led(NAME, 2, chunk_length=8) as ranks:
        state = make_state(ranks.engine, PROMPTS[1])
        ranks.of_followers[1].take_part = lambda *_: pytest.fail("nothing is computed")
        State.rewind(state, 2)  # the followers do not repeat it
        with pytest.raises(DeviceLostError, match=r"rank 1 failed: BackendError: its state is at position 8, .* at 2"):
            ranks.engine.loaded.run(Request(np.array([5]), state))


@pytest.mark.parametrize(
    "options", [{"batcher": "sequential"}, *({"decode_on": place} for place in ("cpu", "npu", "auto"))], ids=str
)
def test_options_of_shared_chunks_change_no_answer_on_ranks(ranks, options):
    expected = [answer(ranks.engine, prompt) for prompt in PROMPTS[:4]]
    with led(NAME, len(ranks.communicators), chunk_length=8, **options) as others:
        calls = [partial(answer, others.engine, prompt) for prompt in PROMPTS[:4]]
        assert asked_before_any_is_computed(others.engine, calls) == expected
        stats = others.engine.stats()
        assert stats.shared_rows >= stats.shared_chunks > 0


def test_error_of_a_loading_follower_reaches_the_leaders_caller(ranks):
    one = state_bytes(ranks.engine)
    with (
        pytest.raises(ConfigError, match=rf"cache_memory is {one - 1} bytes, but .* take {one}"),
        led(NAME, len(ranks.communicators), chunk_length=8, cache_memory=one - 1),
    ):
        pass


@pytest.mark.parametrize(
    ("of_others", "message"),
    [
        (
            {"chunks_in_flight": 3},
            "rank 1 computes differently from rank 0: it has another NPU, or other chunks in flight;",
        ),
        ({"context_length": 64}, "rank 1 has loaded a different model from rank 0's: its context length differ;"),
    ],
)
def test_ranks_with_other_executors_are_rejected(of_others, message):
    """The chunks that a single prompt withdraws are known without a query, because all ranks have the same number in
    flight."""
    with (
        pytest.raises(ConfigError, match=message),
        led(NAME, 2, of_others=of_others, chunk_length=8, chunks_in_flight=2),
    ):
        pass


def test_state_of_the_first_rank_alone_is_rejected(ranks):
    engine = ranks.engine
    state = State(engine.plan, engine.context_length, engine.cache_dtype, chunk_length=engine.chunk_length)
    with pytest.raises(ConfigError, match="the state belongs to this rank alone; use the state of a session"):
        engine.loaded.run(Request(np.array([5]), state))


def test_ranks_without_a_leader_take_one_run_at_a_time():
    """Each has its own caller; they compute the same as long as all callers do the same, in one order."""

    def work(communicator):
        options = {"npu": "native", "chunk_length": 8, "threads": 1}
        with chunkrt.load(checkpoint(NAME), communicator=communicator, **options) as engine:
            with pytest.raises(ConfigError, match="ranks without a leader cannot compute asynchronously"):
                asyncio.run(engine.session().aprefill(PROMPTS[1]))
            with pytest.raises(ConfigError, match="outside the vocabulary"):
                engine.generate([*PROMPTS[:2], [10**9]], max_new_tokens=2)
            expected = [answer(engine, prompt) for prompt in PROMPTS]
            assert engine.generate(PROMPTS, max_new_tokens=9) == expected
            assert engine.stats().shared_chunks == 0
            return expected

    first, second = on_ranks(2, work)
    assert first == second
