"""Ranks that run as threads of the test's process."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

from fake_backend import happens

from chunkrt.backends.link import Communicator
from chunkrt.errors import DeviceLostError
from chunkrt.runtime.ranks.messages import local_communicators

Result = TypeVar("Result")


def on_ranks(size: int, work: Callable[[Communicator], Result]) -> list[Result]:
    """Run `work` on each rank and return the results; an error or deadlock of a rank ends the others and is raised."""
    communicators = local_communicators(size)

    def guarded(communicator: Communicator) -> Result:
        try:
            return work(communicator)
        except BaseException:
            communicator.close()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(guarded, communicator) for communicator in communicators]
        if not happens(lambda seconds: not wait(futures, seconds).not_done):
            communicators[0].close()
    errors = [error for error in (future.exception() for future in futures) if error is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, DeviceLostError)):
        raise error
    return [future.result() for future in futures]
