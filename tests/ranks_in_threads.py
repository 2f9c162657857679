"""Ranks that are threads of the test's process."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from chunkrt.ranks import Communicator
from chunkrt.ranks.local import local_communicators

Result = TypeVar("Result")
TIMEOUT = 120.0
"""Seconds after which a test that waits has deadlocked."""


def on_ranks(size: int, work: Callable[[Communicator], Result]) -> list[Result]:
    """What every rank's `work` returns; the first error of a rank ends the others and comes through."""

    def guarded(communicator: Communicator) -> Result:
        try:
            return work(communicator)
        except BaseException:
            communicator.close()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(guarded, communicator) for communicator in local_communicators(size)]
        return [future.result(TIMEOUT) for future in futures]
