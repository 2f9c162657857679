"""Admission of requests, and its order."""

import asyncio

import pytest

from chunkrt.errors import BusyError, ClosedError
from chunkrt.server.admission import Admission, Turn


async def settle():
    """Let all tasks proceed as far as they can."""
    for _ in range(50):
        await asyncio.sleep(0)


def run(test):
    asyncio.run(asyncio.wait_for(test(), 30))


def begin(admission, turn, number=1):
    """A task that holds places until its event is set; errors inside are its exception."""
    done = asyncio.Event()

    async def work():
        async with admission.places(number, turn):
            await done.wait()

    return asyncio.create_task(work()), done


def test_request_with_many_prompts_counts_as_one_waiting():
    async def test():
        admission, batch = Admission(1, 2), Turn()
        several = [begin(admission, batch) for _ in range(64)]
        await settle()
        assert (admission.num_active, admission.num_waiting) == (1, 1)
        admission.check()
        other, other_done = begin(admission, Turn())
        await settle()
        assert admission.num_waiting == 2
        with pytest.raises(BusyError, match="1 sequences are in progress and 2 requests wait"):
            admission.check()
        # the second prompt of the batch was before the other request, the third is behind it
        for _, done in several[:2]:
            done.set()
        await settle()
        other_done.set()
        await other
        assert sum(task.done() for task, _ in several) == 2
        for _, done in several:
            done.set()
        await asyncio.gather(*(task for task, _ in several))
        assert (admission.num_active, admission.num_waiting) == (0, 0)

    run(test)


def test_waiting_bound_holds_while_a_request_waits_for_more_places():
    async def test():
        admission = Admission(2, 1)
        tasks = [begin(admission, Turn()), begin(admission, Turn(), 2)]
        await settle()
        assert (admission.num_active, admission.num_waiting) == (1, 1)
        with pytest.raises(BusyError, match="1 sequences are in progress and 1 requests wait"):
            admission.check()  # a place is free, but another request waits for more
        for _, done in tasks:
            done.set()
        await asyncio.gather(*(task for task, _ in tasks))

    run(test)


def test_request_with_some_places_gets_the_rest_first():
    async def test():
        admission = Admission(2, 9)
        small, small_done = begin(admission, Turn())
        large, large_done = begin(admission, Turn(), 2)
        later, later_done = begin(admission, Turn())
        await settle()
        assert admission.num_active == 1
        small_done.set()
        await settle()
        assert admission.num_active == 2
        large_done.set()
        later_done.set()
        await asyncio.gather(small, large, later)
        assert admission.num_active == 0

    run(test)


def test_close_ends_waiting_requests_and_end_the_others():
    async def test():
        admission, batch = Admission(2, 9), Turn()
        first, first_done = begin(admission, batch)
        second, _ = begin(admission, batch)
        third, _ = begin(admission, batch)  # in a request that has begun
        waits, _ = begin(admission, Turn())
        await settle()
        admission.close()
        with pytest.raises(ClosedError):
            await waits
        with pytest.raises(ClosedError):
            admission.check()
        with pytest.raises(ClosedError):
            await begin(admission, Turn())[0]
        first_done.set()
        await first
        await settle()
        assert (admission.num_active, admission.num_waiting) == (2, 0)
        admission.end()
        admission.end()
        for task in (second, third):
            with pytest.raises(ClosedError, match="the server is shutting down"):
                await task
        assert (admission.num_active, admission.num_waiting) == (0, 0)

    run(test)


def test_cancelled_waiting_request_frees_its_place():
    async def test():
        admission = Admission(2, 9)
        small, small_done = begin(admission, Turn())
        large, _ = begin(admission, Turn(), 2)
        later, later_done = begin(admission, Turn())
        await settle()
        large.cancel()
        with pytest.raises(asyncio.CancelledError):
            await large
        later_done.set()
        await later
        small_done.set()
        await small
        assert (admission.num_active, admission.num_waiting) == (0, 0)

    run(test)


def test_timeout_within_a_place_stays_a_timeout():
    async def test():
        with pytest.raises(TimeoutError):
            async with Admission(1, 1).places(1, Turn()):
                raise TimeoutError

    run(test)
