"""The device "link", which computes sums over ranks (`chunkrt::AllReduce`) and collects the ranks' columns
(`chunkrt::AllGather`): the contract of communicators, which exchange the values, and the backend that calls them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from chunkrt.backends.base import Array, Executable, Support
from chunkrt.backends.registry import LINK, operators
from chunkrt.engine_directory.store import WeightStore
from chunkrt.graph.operators import column_ranges
from chunkrt.graph.plan import ALL_GATHER_OP, ALL_REDUCE_OP, ALONE, LINK_OPS, Plan, Ranks, Subgraph
from chunkrt.quant.scheme import Scheme

Float32 = NDArray[np.float32]


class Key(NamedTuple):
    """Identity of an exchange. It is the same on every rank, regardless of the order in which tasks run.

    Attributes:
        subgraph: index of the subgraph that contains the operator.
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

    def all_gather(self, part: Float32, *, key: Key, to: int | None = None) -> Sequence[Float32] | None:
        """Return the parts of all ranks, in the order of ranks. Like `all_reduce`, it may be called by several threads.

        Args:
            part: float32, C-contiguous, of the same shape on every rank.
            key: identifies the exchange.
            to: the only rank that receives the parts; None for all. The others return None at once.

        Raises:
            DeviceLostError, BackendError: see `all_reduce`.
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
        """Accept a subgraph that consists of one exchange between ranks."""
        for node in subgraph.nodes:
            if node.domain != "chunkrt" or node.op not in LINK_OPS or len(subgraph.nodes) > 1:
                known = " or ".join(f"chunkrt::{op}" for op in LINK_OPS)
                return Support(ok=False, node=node.name, reason=f"the link runs one {known} at a time")
        return Support(ok=True)

    def compile(
        self, subgraph: Subgraph, plan: Plan, chunk_length: int, scheme: Scheme, weights: WeightStore
    ) -> Executable:
        """Bind the subgraph to the communicator, for any number of rows.

        Raises:
            PartitionError: see `supports`.
        """
        self.supports(subgraph, plan, scheme).require(self.name, subgraph)
        kinds = {ALL_REDUCE_OP: SumExecutable, ALL_GATHER_OP: GatherExecutable}
        return kinds[subgraph.nodes[0].op](subgraph, plan.subgraphs.index(subgraph), self._communicator)


class LinkExecutable(ABC):
    """One exchange between ranks."""

    fixed_length: int | None = None

    def __init__(self, subgraph: Subgraph, index: int, communicator: Communicator) -> None:
        (node,) = subgraph.nodes
        self._part, self._position = node.inputs
        (self._result,) = node.outputs
        self._index, self._communicator = index, communicator

    def run(self, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> None:
        """Run the exchange as in `Executable.run`; wait until all ranks have contributed.

        Raises:
            DeviceLostError, BackendError: see `Communicator.all_reduce`.
        """
        self.run_link(inputs, outputs, 0)

    def run_link(self, inputs: Mapping[str, Array], outputs: Mapping[str, Array], number: int) -> None:
        """Run the exchange with a serial number that is the same on all ranks (`Key.number`), 0 without a leading rank.
        Raises as `run`.

        Args:
            outputs: the result; logits are missing on ranks that do not receive them.
        """
        self._exchange(inputs[self._part], outputs, Key(self._index, int(inputs[self._position][0]), number))

    @abstractmethod
    def _exchange(self, part: Array, outputs: Mapping[str, Array], key: Key) -> None:
        """Write the result to the outputs."""


@operators.register("all_reduce", LINK, is_required=True)
class SumExecutable(LinkExecutable):
    """One sum over ranks."""

    def _exchange(self, part: Array, outputs: Mapping[str, Array], key: Key) -> None:
        self._communicator.all_reduce(part, outputs[self._result], key=key)


@operators.register("all_gather", LINK, is_required=True)
class GatherExecutable(LinkExecutable):
    """One collection of all ranks' columns: of hidden values on every rank, of logits on the leading rank."""

    def __init__(self, subgraph: Subgraph, index: int, communicator: Communicator) -> None:
        super().__init__(subgraph, index, communicator)
        self._columns = column_ranges(str(subgraph.nodes[0].attributes["columns"]))
        self._is_of_logits = subgraph.rows == "R"

    def _exchange(self, part: Array, outputs: Mapping[str, Array], key: Key) -> None:
        to = 0 if self._is_of_logits and key.number else None
        parts = self._communicator.all_gather(part, key=key, to=to)
        if parts is None:
            return
        result, width, column = outputs[self._result], part.shape[1], 0
        for columns in self._columns:
            while columns:
                rank, begin = divmod(columns.start, width)
                piece = columns[: width - begin]
                result[:, column : column + len(piece)] = parts[rank][:, begin : begin + len(piece)]
                column, columns = column + len(piece), columns[len(piece) :]
