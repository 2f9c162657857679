"""Execution of a subgraph as consecutive sections, each with its own executable."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from chunkrt.backends.base import Array, Executable
from chunkrt.graph.plan import Node, Plan, Subgraph, read_only_caches, resolve


def cut(subgraph: Subgraph, plan: Plan, groups: Sequence[Sequence[Node]]) -> tuple[Subgraph, ...]:
    """Split a subgraph into consecutive subgraphs; values that later parts read become outputs.

    Args:
        groups: the nodes of each part, in an order in which they can run; each node is in one group.
    """
    order = {node.name: index for index, node in enumerate(subgraph.nodes)}
    groups = [sorted(group, key=lambda node: order[node.name]) for group in groups]
    made = [{name for node in group for name in node.outputs} for group in groups]
    read = [{name for node in group for name in node.inputs if name} for group in groups]
    parts = []
    for index, group in enumerate(groups):
        wanted = {*subgraph.outputs, *(name for later in read[index + 1 :] for name in later)}
        shared = read_only_caches(group)
        outside = dict.fromkeys(n for node in group for n in node.inputs if n and n not in made[index])
        parts.append(
            Subgraph(
                name=f"{subgraph.name}.part{index}",
                device=subgraph.device,
                is_static=subgraph.is_static,
                rows=subgraph.rows,
                nodes=tuple(group),
                inputs=tuple(n for n in outside if plan.tensors[n].kind == "value"),
                outputs=tuple(n for node in group for n in node.outputs if n in wanted),
                weights=tuple(n for n in outside if plan.tensors[n].kind == "weight"),
                state=tuple(n for n in outside if plan.tensors[n].kind == "state" and n not in shared),
                shared_state=tuple(n for n in outside if n in shared),
            )
        )
    return tuple(parts)


class SectionedExecutable:
    """Executable that runs sections in order. Each call uses its own set of buffers for the values between sections.

    Args:
        subgraph: the subgraph that the sections form.
        sections: the subgraph's parts, each with an executable for up to `chunk_length` rows.
    """

    def __init__(
        self, subgraph: Subgraph, sections: Sequence[tuple[Subgraph, Executable]], plan: Plan, chunk_length: int
    ) -> None:
        self.fixed_length = next((e.fixed_length for _, e in sections if e.fixed_length is not None), None)
        self._steps = [((*part.inputs, *part.all_state), part.outputs, executable.run) for part, executable in sections]
        self._inner = {
            name: plan.tensors[name] for part, _ in sections for name in part.outputs if name not in subgraph.outputs
        }
        outside = (*subgraph.inputs, *subgraph.outputs)
        self._counted_by = {plan.tensors[name].shape[0]: name for name in outside if plan.tensors[name].shape}
        self._symbols = {"T": chunk_length, "R": chunk_length}
        self._free: list[dict[str, Array]] = []

    def run(self, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> None:
        """See `Executable.run`."""
        values = {**inputs, **outputs}
        buffers = self._take()
        try:
            for name, tensor in self._inner.items():
                counter = self._counted_by.get(tensor.shape[0]) if tensor.shape else None
                values[name] = buffers[name] if counter is None else buffers[name][: len(values[counter])]
            for reads, writes, run in self._steps:
                run({name: values[name] for name in reads}, {name: values[name] for name in writes})
        finally:
            self._free.append(buffers)

    def _take(self) -> dict[str, Array]:
        """Provide a set of buffers that no other thread uses."""
        try:
            return self._free.pop()
        except IndexError:
            return {n: np.empty(resolve(t.shape, self._symbols), t.dtype) for n, t in self._inner.items()}
