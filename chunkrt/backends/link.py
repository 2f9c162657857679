"""The backend of the device "link", which computes sums over ranks (`chunkrt::AllReduce`) by a communicator."""

from __future__ import annotations

from collections.abc import Mapping

from chunkrt.backends.base import Array, Executable, Support
from chunkrt.backends.communicator import Communicator, Key
from chunkrt.backends.registry import LINK, operators
from chunkrt.engine_directory.store import WeightStore
from chunkrt.graph.plan import ALL_REDUCE_OP, Plan, Subgraph
from chunkrt.quant.scheme import Scheme


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
        return LinkExecutable(subgraph, plan.subgraphs.index(subgraph), self._communicator)


@operators.register("all_reduce", LINK, is_required=True)
class LinkExecutable:
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
        """See `SumExecutable.run_sum`. Raises as `run`."""
        key = Key(self._index, int(inputs[self._position][0]), number)
        self._communicator.all_reduce(inputs[self._partial], outputs[self._sum], key=key)
