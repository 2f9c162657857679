"""A backend that serves as the NPU without one: its graphs take the time of the native kernels on one thread.

It takes one chunk at a time, always of the complete length, and static subgraphs alone, like an NPU. It shares the
memory's bandwidth with the CPU, but uses a thread of the CPU, so it predicts the speed of no device. Benchmarks select
it with `register`.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint

from chunkrt.backends import PLUGINS, Support
from chunkrt.backends.base import Executable
from chunkrt.backends.native.backend import NativeBackend
from chunkrt.engine_directory.store import WeightStore
from chunkrt.errors import PartitionError
from chunkrt.graph.plan import Plan, Subgraph
from chunkrt.plugins import Plugin
from chunkrt.quant.scheme import Scheme

NAME = "fake"


class FakeNpu(NativeBackend):
    """The native kernels on one thread, with chunks of one length."""

    name = NAME
    concurrency: int | None = 1
    cache_dtypes: tuple[str, ...] = ()

    def __init__(self) -> None:
        super().__init__(threads=1)

    def supports(self, subgraph: Subgraph, plan: Plan, scheme: Scheme) -> Support:
        """Accept static subgraphs that the native backend accepts."""
        if not subgraph.is_static:
            return Support(ok=False, node=subgraph.nodes[0].name, reason="it depends on the position")
        return super().supports(subgraph, plan, scheme)

    def compile(
        self, subgraph: Subgraph, plan: Plan, chunk_length: int, scheme: Scheme, weights: WeightStore
    ) -> Executable:
        """Compile for chunks of exactly `chunk_length` rows.

        Raises:
            PartitionError: see `supports`.
        """
        if not (support := self.supports(subgraph, plan, scheme)):
            raise PartitionError(f"{self.name} cannot run {subgraph.name}: {support.reason}")
        executable = super().compile(subgraph, plan, chunk_length, scheme, weights)
        executable.fixed_length = chunk_length
        return executable


def make(*, threads: int) -> FakeNpu:
    """Return the backend; it does not use the CPU's thread budget."""
    return FakeNpu()


def register() -> None:
    """Make the backend available as `--npu fake` in this process."""
    entry_point = EntryPoint(NAME, f"{__name__}:make", PLUGINS.name)
    PLUGINS.plugins = [*PLUGINS.plugins, Plugin(PLUGINS, entry_point, "")]
