"""The contract of what sums over ranks."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from chunkrt.graph.ranks import ALONE, Ranks

Float32 = NDArray[np.float32]


class Key(NamedTuple):
    """What names a sum. It is the same on every rank, whatever the order in which tasks run.

    `subgraph`: the index of that which asks for it. `position`: of the chunk's first token. `number`: by which the
    leading rank tells one thing that it has computed from the next; 0 where none leads.
    """

    subgraph: int
    position: int
    number: int = 0


def ranks_of(communicator: Communicator | None) -> Ranks:
    """Which rank a communicator is of; ALONE without one."""
    return ALONE if communicator is None else Ranks(communicator.rank, communicator.size)


class Communicator(Protocol):
    """How one rank reaches the others.

    After a run that failed or was cancelled on one rank the ranks may be out of step: close the communicator, so that
    those who wait for this rank are told. (Where a rank leads, it keeps the others in step.)
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
