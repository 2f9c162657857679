"""What a rank is, and the contract of what sums over ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from chunkrt.errors import ConfigError

Float32 = NDArray[np.float32]
Key = tuple[int, int]
"""What names a sum: the index of the subgraph that asks for it, and the position of the chunk's first token. It is the
same on every rank, whatever the order in which tasks run."""

MOST_RANKS = 1024


@dataclass(frozen=True)
class Ranks:
    """Which of how many ranks this process is: `rank` counts from 0 to `size` - 1; rank 0 speaks.

    Raises:
        ConfigError: there is no such rank.
    """

    rank: int
    size: int

    def __post_init__(self) -> None:
        if any(type(number) is not int for number in (self.rank, self.size)):
            raise ConfigError(f"rank {self.rank!r} of {self.size!r}: expected whole numbers")
        if not 1 <= self.size <= MOST_RANKS:
            raise ConfigError(f"{self.size} ranks, expected 1 to {MOST_RANKS}")
        if not 0 <= self.rank < self.size:
            raise ConfigError(f"rank {self.rank} of {self.size}: expected 0 to {self.size - 1}")

    @property
    def are_alone(self) -> bool:
        """Whether there is one only, which has all of the decoder."""
        return self.size == 1

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.size}"


ALONE = Ranks(0, 1)
"""One process that has the whole decoder."""


def ranks_of(communicator: Communicator | None) -> Ranks:
    """Which rank a communicator is of; ALONE without one."""
    return ALONE if communicator is None else Ranks(communicator.rank, communicator.size)


class Communicator(Protocol):
    """How one rank reaches the others.

    After a run that failed or was cancelled on one rank the ranks may be out of step: close the communicator, so that
    those who wait for this rank are told. (`ranks/mpi.py` keeps them in step by itself.)
    """

    rank: int
    size: int

    def all_reduce(self, partial: Float32, out: Float32, *, key: Key) -> None:
        """The sum over all ranks, added in the order of ranks, so that every rank gets the same bits.

        Blocks the calling thread alone, without the GIL and without using the processor. Several threads may call it
        with different keys at once, and ranks may come to the keys in different orders. A key may be used again when
        its sum has been returned.

        Args:
            partial: float32, C-contiguous; of the same shape on every rank.
            out: written in full; shares no memory with `partial`.
            key: names the sum.

        Raises:
            DeviceLostError: a rank is lost, or a communicator was closed.
            BackendError: a rank gave another shape.
        """
        ...

    def close(self) -> None:
        """Leave: what waits for this rank, here and elsewhere, fails. Closing twice is allowed."""
        ...
