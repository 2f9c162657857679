"""The contract of communicators, which sum values over ranks."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from chunkrt.graph.plan import ALONE, Ranks

Float32 = NDArray[np.float32]


class Key(NamedTuple):
    """Identity of a sum. It is the same on every rank, regardless of the order in which tasks run.

    Attributes:
        subgraph: index of the subgraph that contains the sum.
        position: position of the chunk's first token.
        number: serial number that the leading rank gives to each computation; 0 without a leader.
    """

    subgraph: int
    position: int
    number: int = 0


def ranks_of(communicator: Communicator | None) -> Ranks:
    """Return the rank of a communicator; ALONE without one."""
    return ALONE if communicator is None else Ranks(communicator.rank, communicator.size)


class Communicator(Protocol):
    """A rank's connection to the others.

    After a run that failed or was cancelled on one rank, the ranks may be out of step: close the communicator, so that
    calls that wait for this rank fail. (A leading rank keeps the others in step.)
    """

    rank: int
    size: int

    def all_reduce(self, partial: Float32, out: Float32, *, key: Key) -> None:
        """Sum over all ranks, in the order of ranks, so that every rank gets a bit-identical result.

        Only the calling thread blocks; it releases the GIL and uses no processor time. Several threads may call it with
        different keys at once, and ranks may reach the keys in different orders. A key may be used again once its sum
        has been returned.

        Args:
            partial: float32, C-contiguous, of the same shape on every rank.
            out: float32, of the same shape; every element is written. It shares no memory with `partial`.
            key: identifies the sum.

        Raises:
            DeviceLostError: the connection to a rank was lost, or a communicator was closed.
            BackendError: a rank passed another shape.
        """
        ...

    def close(self) -> None:
        """Disconnect from the other ranks: calls that wait for this rank, here and on other ranks, fail. Closing twice
        is allowed.
        """
        ...
