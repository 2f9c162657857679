"""Who may begin, and in which order."""

import asyncio

import pytest

from chunkrt.errors import BusyError, ClosedError
from chunkrt.server.admission import Admission, Turn


async def settle():
    """Let all go on as far as they can."""
    for _ in range(50):
        await asyncio.sleep(0)


def run(test):
    asyncio.run(asyncio.wait_for(test(), 30))


def begin(admission, turn, number=1):
    """A task that takes places until its event is set; what raised in it is its exception."""
    done = asyncio.Event()

    async def work():
        async with admission.places(number, turn):
            await done.wait()

    return asyncio.create_task(work()), done


def test_a_request_of_many_prompts_is_one_that_waits():
    async def test():
        admission, batch = Admission(1, 2), Turn()
        several = [begin(admission, batch) for _ in range(64)]
        await settle()
        assert (admission.num_active, admission.num_waiting) == (1, 1)
        admission.check()
        other, other_done = begin(admission, Turn())
        await settle()
        assert admission.num_waiting == 2
        with pytest.raises(BusyError, match="1 sequences are under way and 2 requests wait"):
            admission.check()
        for _, done in several[:2]:  # the second of the batch was before the other, the third is behind it
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


def test_none_gets_by_the_bound_because_another_waits_for_more_places():
    async def test():
        admission = Admission(2, 1)
        tasks = [begin(admission, Turn()), begin(admission, Turn(), 2)]
        await settle()
        assert (admission.num_active, admission.num_waiting) == (1, 1)
        with pytest.raises(BusyError, match="1 sequences are under way and 1 requests wait"):
            admission.check()  # there is a place, but for the one that waits
        for _, done in tasks:
            done.set()
        await asyncio.gather(*(task for task, _ in tasks))

    run(test)


def test_who_has_some_places_gets_the_rest_first():
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


def test_closing_ends_what_has_not_begun_and_ending_the_rest():
    async def test():
        admission, batch = Admission(2, 9), Turn()
        first, first_done = begin(admission, batch)
        second, _ = begin(admission, batch)
        third, _ = begin(admission, batch)  # of a request that has begun
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
            with pytest.raises(ClosedError, match="the server ends"):
                await task
        assert (admission.num_active, admission.num_waiting) == (0, 0)

    run(test)


def test_who_goes_while_waiting_leaves_its_place_to_others():
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


def test_a_timeout_of_what_is_done_in_a_place_stays_one():
    async def test():
        with pytest.raises(TimeoutError):
            async with Admission(1, 1).places(1, Turn()):
                raise TimeoutError

    run(test)
