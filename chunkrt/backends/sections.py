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
    """Executable that runs sections in order. The values between sections exist during a call only.

    Args:
        subgraph: the subgraph that the sections form.
        sections: the subgraph's parts, each with an executable for up to `chunk_length` rows.
    """

    def __init__(
        self, subgraph: Subgraph, sections: Sequence[tuple[Subgraph, Executable]], plan: Plan, chunk_length: int
    ) -> None:
        self.fixed_length = next((e.fixed_length for _, e in sections if e.fixed_length is not None), None)
        self._steps = [((*part.inputs, *part.all_state), part.outputs, executable.run) for part, executable in sections]
        self._inner = [
            plan.tensors[name] for part, _ in sections for name in part.outputs if name not in subgraph.outputs
        ]
        outside = (plan.tensors[name] for name in (*subgraph.inputs, *subgraph.outputs))
        self._counted_by = {t.shape[0]: t.name for t in outside if t.shape and isinstance(t.shape[0], str)}
        self._symbols = {"T": chunk_length, "R": chunk_length}

    def run(self, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> None:
        """See `Executable.run`."""
        values = {**inputs, **outputs}
        sizes = self._symbols | {symbol: len(values[name]) for symbol, name in self._counted_by.items()}
        values |= {t.name: np.empty(resolve(t.shape, sizes), t.dtype) for t in self._inner}
        for reads, writes, run in self._steps:
            run({name: values[name] for name in reads}, {name: values[name] for name in writes})
