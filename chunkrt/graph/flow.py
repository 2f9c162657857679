"""The data flow between a decoder's subgraphs: the dependencies of one chunk's tasks."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Sequence
from functools import reduce
from operator import or_
from typing import NamedTuple


class Route(NamedTuple):
    """Subgraphs that one chunk passes through.

    Attributes:
        subgraphs: the subgraphs in order.
        first: the subgraphs that depend on no other subgraph of the route.
        followers: for every subgraph of the plan, the subgraphs of the route that depend on it.
    """

    subgraphs: tuple[int, ...]
    first: tuple[int, ...]
    followers: tuple[tuple[int, ...], ...]


class Flow:
    """Dependencies between subgraphs.

    Args:
        reads: for every subgraph, the earlier subgraphs whose outputs it reads.
        has_state: for every subgraph, whether it owns state.
        sums: the subgraphs on the link between ranks.
        of_logits: those of them that run on the rows of logits.
        hidden: the subgraph that writes the hidden states after the last norm; None if unknown.
    """

    def __init__(
        self,
        reads: Sequence[Collection[int]],
        has_state: Sequence[bool],
        sums: Collection[int] = (),
        of_logits: Collection[int] = (),
        hidden: int | None = None,
    ) -> None:
        self.has_state = tuple(has_state)
        self.sums = frozenset(sums)
        self.hidden = hidden
        waits_for: list[tuple[int, ...]] = []
        ancestors: list[int] = []
        for sources in reads:
            implied = _union(ancestors[source] for source in sources)
            waits_for.append(tuple(source for source in sorted(set(sources)) if not implied >> source & 1))
            ancestors.append(implied | as_set(sources))
        self.waits_for = tuple(waits_for)
        """Direct dependencies of every subgraph, without those that other dependencies imply. In a chain, every
        subgraph has one.
        """
        self.ancestors = tuple(ancestors)
        """For each subgraph, the set of subgraphs that have ended when it starts; bit i stands for subgraph i."""
        everything = (1 << len(waits_for)) - 1
        state = _union(ancestors[i] | 1 << i for i, owns in enumerate(has_state) if owns)
        self.with_logits = self._route(everything)
        """Route of a chunk with rows that need logits: all subgraphs."""
        self.without_logits = self._route(state or everything & 1)
        """Route of a chunk without rows that need logits: the subgraphs that update state. Without state it is the
        first subgraph alone.
        """
        self.with_sums = self._route(state | _union(ancestors[i] | 1 << i for i in sums) or everything & 1)
        """Route of a chunk whose logits another rank collects: the subgraphs that are needed for the link and for
        state.
        """
        inner = sorted(set(sums) - set(of_logits))
        self.with_inner_sums = self._route(state | _union(ancestors[i] | 1 << i for i in inner) or everything & 1)
        """Route of a chunk whose hidden states another rank requests: as `with_sums`, without parts of logits."""

        self.with_hidden = self.with_logits if hidden is None else self._route(state | ancestors[hidden] | 1 << hidden)
        """Route of a chunk that needs hidden states but no logits."""

    @property
    def is_chain(self) -> bool:
        """True if each subgraph depends on the previous one, so that no two tasks of a chunk can overlap."""
        return all(waits == (i - 1,) for i, waits in enumerate(self.waits_for) if i > 0)

    def routes(self, num_chunks: int, logit_chunks: Container[int]) -> list[Route]:
        """Return the route of each chunk of a prompt, depending on whether the chunk has rows that need logits."""
        return [self.with_logits if chunk in logit_chunks else self.without_logits for chunk in range(num_chunks)]

    def _route(self, members: int) -> Route:
        followers: list[list[int]] = [[] for _ in self.waits_for]
        subgraphs = tuple(index for index in range(len(followers)) if members >> index & 1)
        for index in subgraphs:
            for source in self.waits_for[index]:
                followers[source].append(index)
        return Route(
            subgraphs=subgraphs,
            first=tuple(index for index in subgraphs if not self.waits_for[index]),
            followers=tuple(map(tuple, followers)),
        )


def as_set(subgraphs: Iterable[int]) -> int:
    """Encode some subgraphs as a set: bit i stands for subgraph i."""
    return _union(1 << index for index in subgraphs)


def _union(sets: Iterable[int]) -> int:
    return reduce(or_, sets, 0)
