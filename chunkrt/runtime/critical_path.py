"""Upward ranks: for every task of a run, the longest path from its start to the run's end.

A path follows the dependencies: from a task to the tasks of its chunk that read its outputs; to the next chunk's turn
at a subgraph that owns state; and, at the end of a chunk, to the chunk that takes over its chunk slot. The latter
depends on the order in which chunks end; here it is the chunk that comes as many chunks later as there are slots.
"""

from __future__ import annotations

from collections.abc import Sequence

from chunkrt.graph.flow import Route


def upward_ranks(
    durations: Sequence[Sequence[int]],
    routes: Sequence[Route],
    has_state: Sequence[bool],
    chunks_in_flight: int,
) -> list[list[int]]:
    """Return the rank of every task, including its own duration.

    Args:
        durations: duration of every task, [subgraphs][chunks].
        routes: the subgraphs that every chunk passes through, [chunks].
        has_state: True for a subgraph that owns state and so takes the chunks in order, [subgraphs].
        chunks_in_flight: number of chunk slots.

    Returns:
        Ranks [chunks][subgraphs]; 0 for subgraphs that a chunk does not pass.
    """
    num_chunks, num_subgraphs = len(routes), len(durations)
    ranks = [[0] * num_subgraphs for _ in routes]
    for chunk in reversed(range(num_chunks)):
        route, own = routes[chunk], ranks[chunk]
        heir = chunk + chunks_in_flight
        after_chunk = max(ranks[heir][first] for first in routes[heir].first) if heir < num_chunks else 0
        following = ranks[chunk + 1] if chunk + 1 < num_chunks else own
        for subgraph in reversed(route.subgraphs):
            followers = route.followers[subgraph]
            longest = 0 if followers else after_chunk
            for follower in followers:
                longest = max(longest, own[follower])
            if has_state[subgraph]:
                longest = max(longest, following[subgraph])
            own[subgraph] = longest + durations[subgraph][chunk]
    return ranks
