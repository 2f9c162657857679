"""The other ranks of a decoder, as the leading rank sees them: they compute the same work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from chunkrt.runtime.job import Segment
from chunkrt.runtime.run import Run

Result = TypeVar("Result")


class Followers(Protocol):
    """All other ranks; implemented in `engine/ranks/leader.py`."""

    def check(self, run: Run) -> None:
        """Check a run. Raises ConfigError if the other ranks do not have its state."""
        ...

    def compute(self, lane: str, segments: Sequence[Segment], work: Callable[[int], Result]) -> Result:
        """Compute some tokens on the other ranks at the same time as on this one.

        Args:
            lane: name of the executor that computes them; see `Lanes.name_of`.
            segments: the rest of one run, or the segments of a chunk.
            work: does the work here; it gets the number that identifies its sums.

        Returns:
            The result of `work`, once all ranks have done their part.

        Raises:
            BaseException: the error of `work`; the other ranks then stop too.
            BackendError: it failed on another rank.
            DeviceLostError: a rank is lost.
        """
        ...

    def keep(self, number: int, num_chunks: int) -> None:
        """Withdraw all except the first `num_chunks` chunks of the run with this number on the other ranks; see
        `Schedule.withdraw`."""
        ...
