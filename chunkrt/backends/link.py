"""The device "link", which computes sums over ranks (`chunkrt::AllReduce`): the contract of communicators, which sum
the values, and the backend that calls them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from chunkrt.backends.base import Array, Executable, Support
from chunkrt.backends.registry import LINK, operators
from chunkrt.engine_directory.store import WeightStore
from chunkrt.graph.plan import ALL_REDUCE_OP, ALONE, Plan, Ranks, Subgraph
from chunkrt.quant.scheme import Scheme

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


class LinkBackend:
    """Backend that compiles the subgraphs on the device "link" for one rank.

    Args:
        communicator: connects to the other ranks, which run plans with the same subgraphs.
    """

    name = LINK
    concurrency: int | None = None
    cache_dtypes: tuple[str, ...] = ()

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator

    def supports(self, subgraph: Subgraph, plan: Plan, scheme: Scheme) -> Support:
        """Accept a subgraph that consists of one sum over ranks."""
        for node in subgraph.nodes:
            if (node.domain, node.op) != ("chunkrt", ALL_REDUCE_OP) or len(subgraph.nodes) > 1:
                return Support(ok=False, node=node.name, reason=f"the link runs one chunkrt::{ALL_REDUCE_OP} at a time")
        return Support(ok=True)

    def compile(
        self, subgraph: Subgraph, plan: Plan, chunk_length: int, scheme: Scheme, weights: WeightStore
    ) -> Executable:
        """Bind the subgraph to the communicator, for any number of rows.

        Raises:
            PartitionError: see `supports`.
        """
        self.supports(subgraph, plan, scheme).require(self.name, subgraph)
        return SumExecutable(subgraph, plan.subgraphs.index(subgraph), self._communicator)


@operators.register("all_reduce", LINK, is_required=True)
class SumExecutable:
    """One sum over ranks."""

    fixed_length: int | None = None

    def __init__(self, subgraph: Subgraph, index: int, communicator: Communicator) -> None:
        (node,) = subgraph.nodes
        self._partial, self._position = node.inputs
        (self._sum,) = node.outputs
        self._index, self._communicator = index, communicator

    def run(self, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> None:
        """Run the sum as in `Executable.run`; wait until all ranks have contributed.

        Raises:
            DeviceLostError, BackendError: see `Communicator.all_reduce`.
        """
        self.run_sum(inputs, outputs, 0)

    def run_sum(self, inputs: Mapping[str, Array], outputs: Mapping[str, Array], number: int) -> None:
        """Run the sum with a serial number that is the same on all ranks (`Key.number`). Raises as `run`."""
        key = Key(self._index, int(inputs[self._position][0]), number)
        self._communicator.all_reduce(inputs[self._partial], outputs[self._sum], key=key)
