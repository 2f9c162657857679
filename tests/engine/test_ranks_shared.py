"""Sessions that share chunks on several ranks: each has the same bits as when it runs alone on the same ranks."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from contextlib import suppress
from functools import partial

import numpy as np
import pytest
from fake_backend import wait_until
from fixture_checkpoints import ONE_OF_EACH_STATE, checkpoint, input_ids
from gates import asked_before_any_is_computed
from led_ranks import led
from ranks_in_threads import on_ranks
from states import make_state, state_bytes

import chunkrt
from chunkrt.errors import BackendError, BusyError, ConfigError, DeviceLostError
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


def in_threads(*calls):
    """Make calls at the same time, and return the result or error of each."""
    found, together = [None] * len(calls), threading.Barrier(len(calls), timeout=HANGS)

    def target(index):
        try:
            together.wait()
            found[index] = calls[index]()
        except Exception as error:
            found[index] = error

    threads = [threading.Thread(target=target, args=(index,), daemon=True) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANGS)
        assert not thread.is_alive(), "deadlock"
    return found


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


def test_single_prompt_takes_one_command_for_each_filling_of_the_slots(ranks, sent):
    session = ranks.engine.session()
    sent.clear()
    session.prefill(IDS[:60])
    others, executor = len(ranks.communicators) - 1, ranks.engine.loaded.scheduler.executors.prompts
    num_commands = -(-60 // (len(executor.slots) * executor.chunk_length))
    assert (sent[Channel.DONE], sent[Channel.ABORT]) == (num_commands * others, 0)
    assert sent[Channel.COMMAND] <= (num_commands + 2) * others


def test_tasks_of_an_event_loop_share_chunks_and_are_cancelled(ranks):
    engine = ranks.engine
    long = (IDS * 3)[:100]

    async def use(prompt):
        async with await engine.asession() as session:
            await session.aprefill(prompt)
            return "".join([piece.text async for piece in session.agenerate(max_new_tokens=9)])

    async def cancelled(number):
        async with await engine.asession() as session:
            await session.aprefill(PROMPTS[3])
            task = asyncio.create_task(session.aprefill(long))
            for _ in range(number):
                await asyncio.sleep(0)
            await asyncio.sleep(number * 1e-3)
            task.cancel()
            with suppress(asyncio.CancelledError):  # it may come too late
                await task
            session.rewind(len(PROMPTS[3]))
            return (await session.aprefill(PROMPTS[4])).logits

    async def main():
        return await asyncio.gather(*map(use, PROMPTS), *map(cancelled, range(6)))

    found = asyncio.run(main())
    assert found[: len(PROMPTS)] == [answer(engine, prompt) for prompt in PROMPTS]
    session = engine.session()
    session.prefill(PROMPTS[3])
    expected = session.prefill(PROMPTS[4]).logits
    for logits in found[len(PROMPTS) :]:
        np.testing.assert_array_equal(logits, expected)


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

        found = in_threads(lambda: prefill(ids), second)
        for here, there in zip(found, expected, strict=True):
            np.testing.assert_array_equal(here, there)
        assert order == [5, 100]
        np.testing.assert_array_equal(engine.session().prefill(ids, logits="all").logits, expected[0])


def fail_at(loaded, poison):
    """Make a loaded model's last task with state fail, after its writes, on chunks that hold a token."""
    lanes = loaded.scheduler.executors
    for lane in {id(lane): lane for lane in (lanes.prompts, lanes.tokens, lanes.many, lanes.few)}.values():
        last = [subgraph for subgraph in lane.subgraphs if subgraph.subgraph.state][-1]

        def fail(slot, segments, num_tokens, number=0, run=last.run):
            run(slot, segments, num_tokens, number)
            if any(poison in segment.token_ids for segment in segments):
                raise ValueError("made to fail")

        last.run = fail


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("name", STATES)
def test_failed_task_on_a_rank_fails_the_sequences_of_its_chunk(name, failing):
    ids = [token for token in input_ids(name) if token != input_ids(name)[-1]] * 3
    poison = input_ids(name)[-1]
    with led(name, 2, chunk_length=16) as ranks:
        engine = ranks.engine
        starts = [ids[i : i + 2 + 3 * i] for i in range(6)]
        expected = []
        for start in starts:
            session = engine.session()
            session.prefill(start)
            expected.append([session.prefill(ids[:n], logits="all").logits for n in (1, 9, 30, 1)])
        fail_at(engine.loaded if failing == 0 else ranks.of_followers[1], poison)
        num_failed, told = Counter(), set()

        def work(index):
            session = engine.session()
            while True:
                try:
                    session.prefill(starts[index])
                    break
                except BackendError:
                    assert session.position == 0
            for number, n in enumerate((1, 9, 30, 1)):
                position = session.position
                for attempt in range(1000):
                    tokens = [*ids[: n - 1], poison] if index < 2 and attempt < 2 else ids[:n]
                    try:
                        found = session.prefill(tokens, logits="all").logits
                        break
                    except BackendError as error:
                        told.add(str(error))
                        assert session.position == position
                        num_failed[index] += 1
                np.testing.assert_array_equal(found, expected[index][number])

        assert in_threads(*(lambda i=i: work(i) for i in range(6))) == [None] * 6
        assert min(num_failed[0], num_failed[1]) >= 8
        assert all("made to fail" in message for message in told)


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

        *errors, nothing = in_threads(work, work, work, lambda: asyncio.run(in_loop()), lose)
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


def test_options_of_many_sequences_apply_on_ranks(caplog):
    with led(NAME, 2, chunk_length=8, batcher="sequential") as ranks:
        engine, one = ranks.engine, state_bytes(ranks.engine)
        expected = [answer(engine, prompt) for prompt in PROMPTS]
        assert in_threads(*(lambda p=p: answer(engine, p) for p in PROMPTS)) == expected
        stats = engine.stats()
        assert stats.shared_rows >= stats.shared_chunks > 0
    with led(NAME, 2, chunk_length=8, cache_memory=2 * one, queue=1) as ranks:
        engine = ranks.engine
        first, second = engine.session(), engine.session()
        with pytest.raises(BusyError, match="the caches of 2 sessions leave no room"):
            engine.session()

        async def main():
            waiting = asyncio.create_task(engine.asession())
            await asyncio.sleep(0)
            with pytest.raises(BusyError, match="1 sequences already wait for cache memory"):
                await engine.asession()
            second.close()
            (await waiting).close()

        asyncio.run(main())
        first.close()
        assert engine.generate(PROMPTS, max_new_tokens=9) == expected
    with (
        pytest.raises(ConfigError, match=rf"cache_memory is {one - 1} bytes, but .* take {one}"),
        led(NAME, 2, chunk_length=8, cache_memory=one - 1),
    ):
        pass
    for decode_on in ("cpu", "npu", "auto"):
        with led(NAME, 2, chunk_length=8, decode_on=decode_on) as ranks:
            assert in_threads(*(lambda p=p: answer(ranks.engine, p) for p in PROMPTS[:3])) == expected[:3]


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
