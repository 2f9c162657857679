"""Admission of sequences: its order, its limits, and the places that ended waits leave."""

import asyncio
import gc
import threading
import time
from contextlib import suppress
from functools import partial
from random import Random

import pytest

from chunkrt.engine.admission import Admission
from chunkrt.errors import BusyError, ClosedError

STATE_BYTES = 10


class Caches:
    """A state of STATE_BYTES bytes."""

    num_bytes = STATE_BYTES

    def fork(self):
        return Caches()


async def settle():
    """Let all tasks proceed as far as they can."""
    for _ in range(20):
        await asyncio.sleep(0)


def run(test):
    asyncio.run(asyncio.wait_for(test(), 60))


def begin(admission, number=1, **options):
    """Return a task that holds places until its event is set, and the event."""
    done = asyncio.Event()

    async def work():
        state = await admission.await_room(Caches, number, **options)
        await done.wait()
        del state

    return asyncio.create_task(work()), done


def counts(admission):
    return admission.num_taken, admission.num_waiting


@pytest.mark.parametrize("by_memory", [False, True], ids=["sequences", "bytes"])
def test_both_limits_admit_in_order_of_arrival(by_memory):
    async def test():
        admission = Admission(2 * STATE_BYTES + 9 if by_memory else None, STATE_BYTES, max_waiting=2)
        if not by_memory:
            admission.max_sequences = 2
        (small, small_done), (large, large_done), (later, later_done) = (begin(admission, n) for n in (1, 2, 1))
        await settle()
        assert counts(admission) == (1, 2)
        name, queue = ("cache_memory", "queue") if by_memory else ("max_sessions", "max_waiting")
        text = rf"^1 of 2 places for sequences \(`{name}`\) and 2 of 2 places in the queue \(`{queue}`\) are taken; "
        text += "close a session" if by_memory else "try again later$"  # a client of a server has no sessions
        for refused in (
            lambda: admission.open(Caches),  # a place is free, but other requests come first
            lambda: admission.wait(Caches),
            lambda: asyncio.run(admission.await_room(Caches)),
        ):
            with pytest.raises(BusyError, match=text):
                await asyncio.to_thread(refused)
        small_done.set()
        await small
        await settle()
        assert counts(admission) == (2, 1)
        large_done.set()
        await large
        await settle()
        assert counts(admission) == (1, 0)
        later_done.set()
        await later
        assert counts(admission) == (0, 0)

    run(test)


def test_later_places_of_a_request_may_exceed_the_queue():
    async def test():
        admission, entries = Admission(STATE_BYTES, STATE_BYTES, max_waiting=1), []
        tasks = [begin(admission, has_entered=n > 1, on_entry=partial(entries.append, n)) for n in range(3)]
        await settle()
        assert (counts(admission), entries) == ((1, 2), [0, 1, 2])
        for task, done in tasks:
            done.set()
            await task
        assert counts(admission) == (0, 0)

    run(test)


def test_copies_use_the_places_of_their_request():
    async def test():
        admission = Admission(4 * STATE_BYTES, STATE_BYTES, max_waiting=1)
        other = admission.open(Caches)
        states = [await admission.await_room(Caches, 3)]
        task, done = begin(admission)
        await settle()
        assert (*counts(admission), admission.num_states, admission.num_bytes) == (4, 1, 2, 2 * STATE_BYTES)
        states += [admission.fork(states[0]), admission.fork(states[0])]
        assert (*counts(admission), admission.num_states, admission.num_bytes) == (4, 1, 4, 4 * STATE_BYTES)
        for state in (*states, other):
            with pytest.raises(BusyError, match=r"^4 of 4 places"):
                admission.fork(state)
        del state, states
        await settle()
        assert counts(admission) == (2, 0)
        done.set()
        await task
        copies = [admission.fork(other) for _ in range(3)]
        with pytest.raises(BusyError, match=r"^4 of 4 places .* and 0 of"):
            admission.fork(other)
        del other, copies
        assert (*counts(admission), admission.num_states) == (0, 0, 0)

    run(test)


def test_failed_allocation_leaves_no_place_while_its_error_lives():
    def fail():
        raise MemoryError

    async def test():
        admission = Admission(2 * STATE_BYTES, STATE_BYTES, max_waiting=1)
        errors = []
        for use in (admission.open, admission.wait, lambda make: asyncio.run(admission.await_room(make, 2))):
            with pytest.raises(MemoryError) as error:
                await asyncio.to_thread(use, fail)
            errors.append(error)
            assert counts(admission) == (0, 0)
        failing = asyncio.create_task(admission.await_room(fail, 2))
        waiting, done = begin(admission, 2)
        done.set()
        await waiting
        assert isinstance(failing.exception(), MemoryError)

    run(test)


def test_failed_copy_leaves_its_place_for_another():
    class Failing(Caches):
        def fork(self):
            raise MemoryError

    async def test():
        admission = Admission(2 * STATE_BYTES, STATE_BYTES, max_waiting=1)
        state = await admission.await_room(Failing, 2)
        for _ in range(2):
            with pytest.raises(MemoryError) as error:
                admission.fork(state)
            assert counts(admission) == (2, 0)
        del state, error
        assert counts(admission) == (0, 0)

    run(test)


def test_state_that_is_deleted_while_bytes_are_counted_leaves_its_place():
    admission = Admission(None, STATE_BYTES, max_waiting=1)
    found = []

    class Deleting:
        @property
        def num_bytes(self):
            states.clear()
            found.append(counts(admission))
            return STATE_BYTES

    kept = admission.open(Deleting)
    states = [admission.open(Caches)]
    assert admission.num_bytes == STATE_BYTES
    assert found == [(1, 0)]
    del kept


def test_request_of_a_closed_event_loop_does_not_block_the_queue():
    admission = Admission(STATE_BYTES, STATE_BYTES, max_waiting=2)
    state = admission.open(Caches)
    loop = asyncio.new_event_loop()
    task = loop.create_task(admission.await_room(Caches))
    loop.run_until_complete(asyncio.sleep(0.01))
    loop.close()
    assert not task.done()
    assert admission.num_waiting == 1
    found = []
    thread = threading.Thread(target=lambda: found.append(admission.wait(Caches)), daemon=True)
    thread.start()
    while admission.num_waiting == 1:
        time.sleep(0.001)
    del state
    thread.join(30)
    assert len(found) == 1
    assert counts(admission) == (1, 0)


def test_close_ends_every_wait_and_no_place():
    async def test():
        admission = Admission(STATE_BYTES, STATE_BYTES, max_waiting=9)
        held, errors = admission.open(Caches), []

        def wait():
            try:
                admission.wait(Caches)
            except ClosedError as error:
                errors.append(str(error))

        threads = [threading.Thread(target=wait, daemon=True) for _ in range(2)]
        for thread in threads:
            thread.start()
        tasks = [begin(admission)[0] for _ in range(2)]
        while admission.num_waiting < 4:
            await asyncio.sleep(0.001)
        admission.close()
        for task in tasks:
            with pytest.raises(ClosedError, match="the engine is closed"):
                await task
        for thread in threads:
            await asyncio.to_thread(thread.join, 30)
        assert errors == ["the engine is closed; load the model again"] * 2
        assert counts(admission) == (1, 0)
        del held

    run(test)


@pytest.mark.parametrize("seed", range(8))
def test_random_order_agrees_with_a_model_of_the_queue(seed):
    """Requests arrive, end, and are cancelled while they run or wait."""

    async def test():
        random = Random(seed)
        most, max_waiting = random.randint(1, 5), random.randint(0, 4)
        admission = Admission(most * STATE_BYTES, STATE_BYTES, max_waiting)
        requests, admitted = {}, []
        running, waiting, expected = {}, {}, []  # numbers of places by request, and the order of admissions

        async def work(name, number, done):
            states = [await admission.await_room(Caches, number)]
            admitted.append(name)
            states += [admission.fork(states[0]) for _ in range(random.randrange(number))]
            await done.wait()

        for name in range(200):
            if random.random() < 0.6:
                number, done = random.randint(1, most), asyncio.Event()
                task = asyncio.create_task(work(name, number, done))
                must_wait = waiting or sum(running.values()) + number > most
                if must_wait and len(waiting) == max_waiting:
                    with pytest.raises(BusyError):
                        await task
                else:
                    waiting[name], requests[name] = number, (task, done)
                del task
            elif requests:
                ended = random.choice(list(requests))
                task, done = requests.pop(ended)
                if ended in running and random.random() < 0.7:
                    done.set()
                else:
                    task.cancel()
                del task
                running.pop(ended, None)
                waiting.pop(ended, None)
            while waiting and sum(running.values()) + next(iter(waiting.values())) <= most:
                first = next(iter(waiting))
                running[first] = waiting.pop(first)
                expected.append(first)
            await settle()
            assert (*counts(admission), admitted) == (sum(running.values()), len(waiting), expected)
        for task, _ in requests.values():
            task.cancel()
            del task
        requests.clear()
        await settle()
        assert (*counts(admission), admission.num_states) == (0, 0, 0)

    run(test)


@pytest.mark.parametrize("seed", range(4))
def test_no_interleaving_leaks_a_place(seed):
    """Tasks that are cancelled at any step, and threads, take places at the same time."""
    admission = Admission(3 * STATE_BYTES, STATE_BYTES, max_waiting=1000)
    errors = []

    async def work(random):
        states = [await admission.await_room(Caches, random.randint(1, 3))]
        try:
            await asyncio.sleep(random.choice((0, 0, 0.001)))
            if random.random() < 0.2:
                with suppress(BusyError):  # without a place for a copy
                    states.append(admission.fork(states[0]))
            assert 1 <= admission.num_taken <= 3
        finally:
            del states  # a cancelled task keeps its frame

    async def test():
        random = Random(seed)
        tasks = []
        for _ in range(400):
            tasks.append(asyncio.create_task(work(random)))
            for _ in range(random.randrange(3)):
                await asyncio.sleep(0)
            if random.random() < 0.5:
                random.choice(tasks).cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if not isinstance(result, asyncio.CancelledError | None):
                errors.append(result)

    def take(random):
        try:
            for _ in range(200):
                state = admission.wait(Caches)
                if random.random() < 0.1:
                    time.sleep(0.001)
                del state
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=take, args=(Random(10 * seed + i),), daemon=True) for i in range(3)]
    threads += [threading.Thread(target=run, args=(test,), daemon=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert errors == []
    gc.collect()
    assert (*counts(admission), admission.num_states) == (0, 0, 0)
