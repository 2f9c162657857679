"""Upward ranks: for every task of a run, the longest path from its start to the run's end.

A path follows the dependencies of tasks. It leads from a task to the tasks of its chunk that read its outputs. At a
subgraph that owns state, it leads to the task of the next chunk. At the end of a chunk, it leads to the chunk that
takes over the chunk slot. The next owner of a slot depends on the order in which chunks end. This module assumes that
with N slots chunk c is followed by chunk c + N.
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
    """Return the upward rank of every task, which includes the task's own duration.

    Args:
        durations: duration of every task, [subgraphs][chunks].
        routes: the subgraphs that each chunk passes through, [chunks].
        has_state: True for a subgraph that owns state and therefore processes the chunks in order, [subgraphs].
        chunks_in_flight: number of chunk slots.

    Returns:
        Ranks [chunks][subgraphs]. The rank is 0 for subgraphs that a chunk does not pass through.
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
