"""Backends: one with both roles, and two that serve only as the NPU, with grids and in float."""

from chunkrt.backends import Support
from chunkrt.backends.reference import ReferenceBackend
from chunkrt.errors import PartitionError


class TinyBackend(ReferenceBackend):
    """Runs everything that the reference runs, on the executor's threads."""

    name = "tiny"


class TinyNpu(ReferenceBackend):
    """Runs only static subgraphs, one at a time, and under static schemes."""

    name = "tiny_npu"
    concurrency = 1
    cache_dtypes = ()

    def supports(self, subgraph, plan, scheme):
        """Accept subgraphs that are the same for every chunk."""
        if not (subgraph.is_static and scheme.is_static):
            return Support(ok=False, node=subgraph.nodes[0].name, reason="tiny_npu needs grids; use a static scheme")
        return super().supports(subgraph, plan, scheme)

    def compile(self, subgraph, plan, chunk_length, scheme, weights):
        """Compile as the reference does."""
        if not (support := self.supports(subgraph, plan, scheme)):
            raise PartitionError(f"{self.name} cannot run {subgraph.name}: {support.reason}")
        return super().compile(subgraph, plan, chunk_length, scheme, weights)


class TinyFloat(TinyNpu):
    """Runs only static subgraphs, in float, like a GPU library without integer products."""

    name = "tiny_float"

    def supports(self, subgraph, plan, scheme):
        """Accept subgraphs that are the same for every chunk."""
        if not subgraph.is_static or scheme.weight_bits is not None:
            return Support(ok=False, node=subgraph.nodes[0].name, reason="tiny_float has float alone")
        return ReferenceBackend.supports(self, subgraph, plan, scheme)


def make(*, threads):
    """Make the backend `tiny`; its executables have no threads of their own."""
    return TinyBackend()


def make_npu(*, threads):
    """Make the backend `tiny_npu`."""
    return TinyNpu()


def make_float(*, threads):
    """Make the backend `tiny_float`."""
    return TinyFloat()
