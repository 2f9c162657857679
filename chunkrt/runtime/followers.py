"""Interface of the leading rank to the other ranks of a decoder, which compute the same work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from chunkrt.runtime.job import Segment
from chunkrt.runtime.run import Run

Result = TypeVar("Result")


class Followers(Protocol):
    """Protocol of all other ranks, which `engine/ranks/leader.py` implements."""

    def check(self, run: Run) -> None:
        """Raise ConfigError if the state of a run does not exist on the other ranks."""
        ...

    def compute(self, lane: str, segments: Sequence[Segment], work: Callable[[int], Result]) -> Result:
        """Compute some tokens on the other ranks and on this rank concurrently.

        Args:
            lane: name of the executor that computes them; see `Lanes.name_of`.
            segments: the remaining tokens of one run, or the segments of a chunk.
            work: does the work on this rank; its argument is the number that identifies its sums.

        Returns:
            The result of `work`, after all ranks have completed the work.

        Raises:
            BaseException: the error of `work`; the other ranks then stop too.
            BackendError: the work failed on another rank.
            DeviceLostError: a rank is lost.
        """
        ...

    def keep(self, number: int, num_chunks: int) -> None:
        """Keep only the first `num_chunks` chunks of the run with this number on the other ranks; see
        `Schedule.withdraw`.
        """
        ...
