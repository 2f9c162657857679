"""A backend that serves as the NPU without one: its graphs take the time of the native kernels on one thread.

It takes one chunk at a time, always of the complete length or of one of several lengths, and static subgraphs alone,
like an NPU. It shares the memory's bandwidth with the CPU, but uses a thread of the CPU, so it predicts the speed of no
device. Benchmarks select it with `register`.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import EntryPoint

import numpy as np

from chunkrt.backends import PLUGINS, Support
from chunkrt.backends.base import Array, Executable
from chunkrt.backends.native.backend import NativeBackend
from chunkrt.engine_directory.store import WeightStore
from chunkrt.errors import PartitionError
from chunkrt.graph.plan import Plan, Subgraph
from chunkrt.plugins import Plugin
from chunkrt.quant.scheme import Scheme
from chunkrt.runtime.record import smallest_graph

NAME = "fake"
SEVERAL = "fake-several"
SHORTER = (1, 8)
"""Lengths of the graphs that the backend SEVERAL has in addition to that of chunks."""


class FakeNpu(NativeBackend):
    """The native kernels on one thread, with chunks of one length, or with graphs of several lengths.

    Attributes:
        rows_run: number of rows of each call, including padding, if there are several lengths.
    """

    concurrency: int | None = 1
    cache_dtypes: tuple[str, ...] = ()

    def __init__(self, shorter: tuple[int, ...] = ()) -> None:
        super().__init__(threads=1)
        self.name = SEVERAL if shorter else NAME
        self._shorter = shorter
        self.rows_run: list[int] = []

    def graph_lengths(self, chunk_length: int, scheme: Scheme) -> tuple[int, ...]:
        """See `SeveralGraphsBackend`."""
        return (*(length for length in self._shorter if length < chunk_length), chunk_length)

    def supports(self, subgraph: Subgraph, plan: Plan, scheme: Scheme) -> Support:
        """Accept static subgraphs that the native backend accepts."""
        if not subgraph.is_static:
            return Support(ok=False, node=subgraph.nodes[0].name, reason="it depends on the position")
        return super().supports(subgraph, plan, scheme)

    def compile(
        self, subgraph: Subgraph, plan: Plan, chunk_length: int, scheme: Scheme, weights: WeightStore
    ) -> Executable:
        """Compile for chunks of exactly `chunk_length` rows, or for several lengths.

        Raises:
            PartitionError: see `supports`.
        """
        if not (support := self.supports(subgraph, plan, scheme)):
            raise PartitionError(f"{self.name} cannot run {subgraph.name}: {support.reason}")
        executable = super().compile(subgraph, plan, chunk_length, scheme, weights)
        lengths = self.graph_lengths(chunk_length, scheme)
        if len(lengths) > 1:
            return Padding(executable, lengths, self.rows_run)
        executable.fixed_length = chunk_length
        return executable


class Padding:
    """An executable that pads the rows of a call to the smallest graph that holds them.

    Args:
        lengths: numbers of rows of the graphs, shortest first.
        rows_run: receives the number of rows of each call.
    """

    fixed_length: int | None = None

    def __init__(self, executable: Executable, lengths: tuple[int, ...], rows_run: list[int]) -> None:
        self._executable, self._lengths, self._rows_run = executable, lengths, rows_run

    def run(self, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> None:
        """See `Executable.run`."""
        num_rows = max(map(len, inputs.values()))
        rows = smallest_graph(num_rows, self._lengths, self._lengths[-1])
        self._rows_run.append(rows)

        def padded(array: Array) -> Array:
            return np.concatenate([array, np.zeros((rows - len(array), *array.shape[1:]), array.dtype)])

        computed = {name: padded(array) for name, array in outputs.items()}
        self._executable.run({name: padded(array) for name, array in inputs.items()}, computed)
        for name, array in outputs.items():
            array[...] = computed[name][: len(array)]


def make(*, threads: int) -> FakeNpu:
    """Return the backend; it does not use the CPU's thread budget."""
    return FakeNpu()


def make_several(*, threads: int) -> FakeNpu:
    """Return the backend with graphs of several lengths."""
    return FakeNpu(SHORTER)


def register() -> None:
    """Make the backends available as `--npu fake` and `--npu fake-several` in this process."""
    for name, function in ((NAME, make), (SEVERAL, make_several)):
        entry_point = EntryPoint(name, f"{__name__}:{function.__name__}", PLUGINS.name)
        PLUGINS.plugins = [*PLUGINS.plugins, Plugin(PLUGINS, entry_point, "")]
