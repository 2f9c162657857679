"""A measured profile whose costs are round numbers."""

from __future__ import annotations

from collections.abc import Mapping

from chunkrt.graph.plan import Plan
from chunkrt.simulate import MeasuredProfile
from chunkrt.simulate.measured import SubgraphCost, ThreadsCost, twins


def toy_profile(
    plan: Plan,
    *,
    threads: int = 1,
    speeds: tuple[float, ...] = (1.0,),
    decode: Mapping[str, SubgraphCost] | None = None,
    has_npu: bool = False,
    graph_lengths: tuple[int, ...] = (),
    **overheads: float,
) -> MeasuredProfile:
    """Every task of a chunk with a prompt takes 10 microseconds, and 2 more for each row; attention also half of one
    for each pair. A prompt takes 100 more, if `overheads` has no other times."""
    costs = {
        name: SubgraphCost(
            subgraph=name, fixed_us=10.0, row_us=2.0, pair_us=0.5 if name.startswith("dynamic") else 0.0, speeds=speeds
        )
        for name in twins(plan).values()
    }
    times = {"prompt_us": 100.0, "task_us": 0.0, "step_us": 0.0, "token_us": 0.0} | overheads
    return MeasuredProfile(
        name="toy",
        model="small",
        scheme="w8a16",
        chunk_length=32,
        has_npu=has_npu,
        conditions="none",
        budgets={threads: ThreadsCost(threads=threads, subgraphs=costs, decode=decode or {}, **times)},
        graph_lengths=graph_lengths,
    )
