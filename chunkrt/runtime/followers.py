"""The other ranks of a decoder, as whoever leads them sees them: they compute what is computed here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from chunkrt.runtime.job import Segment
from chunkrt.runtime.run import Run

Result = TypeVar("Result")


class Followers(Protocol):
    """All other ranks; `engine/ranks/leader.py` reaches them."""

    def check(self, run: Run) -> None:
        """Raises ConfigError if they do not have the run's state."""
        ...

    def compute(self, lane: str, segments: Sequence[Segment], work: Callable[[int], Result]) -> Result:
        """Have them compute some tokens while this rank does.

        Args:
            lane: the name of the executor that computes them; see `Lanes.name_of`.
            segments: what is left of one run, or those of a chunk.
            work: does it here; given the number by which sums are told apart.

        Returns:
            What `work` returns, once all have done their part.

        Raises:
            BaseException: what `work` raises; nobody goes on then.
            BackendError: it failed on another rank.
            DeviceLostError: a rank is lost.
        """
        ...

    def keep(self, number: int, num_chunks: int) -> None:
        """Have them withdraw all but so many chunks of what has that number; see `Schedule.withdraw`."""
        ...
