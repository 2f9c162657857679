"""Upward ranks: for every task of a run, the longest path from its start to the run's end.

A path follows what waits for what: a chunk's next subgraph; the next chunk's turn at a subgraph that owns state; and,
when a chunk has ended, the one that takes over its ring slot. Which one that is depends on the order in which chunks
end; here it is the one that comes as many chunks later as there are slots.
"""

from __future__ import annotations

from collections.abc import Sequence


def upward_ranks(
    durations: Sequence[Sequence[int]],
    lengths: Sequence[int],
    is_ordered: Sequence[bool],
    chunks_in_flight: int,
) -> list[list[int]]:
    """The rank of every task, its own duration included.

    Args:
        durations: of every task, [subgraphs][chunks].
        lengths: subgraphs that a chunk passes through, [chunks].
        is_ordered: whether a subgraph takes the chunks in order, [subgraphs].
        chunks_in_flight: ring slots.

    Returns:
        Ranks [chunks][subgraphs that the chunk passes through].
    """
    num_chunks = len(lengths)
    ranks: list[list[int]] = [[] for _ in lengths]
    for chunk in reversed(range(num_chunks)):
        heir = chunk + chunks_in_flight
        longest = ranks[heir][0] if heir < num_chunks else 0
        following = ranks[chunk + 1] if chunk + 1 < num_chunks else []
        own = [0] * lengths[chunk]
        for subgraph in reversed(range(lengths[chunk])):
            if is_ordered[subgraph] and subgraph < len(following):
                longest = max(longest, following[subgraph])
            longest += durations[subgraph][chunk]
            own[subgraph] = longest
        ranks[chunk] = own
    return ranks
