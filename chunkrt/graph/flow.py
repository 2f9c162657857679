"""The data flow between a decoder's subgraphs: what waits for what while one chunk passes through them."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Sequence
from functools import reduce
from operator import or_
from typing import NamedTuple


class Route(NamedTuple):
    """What one chunk passes through.

    subgraphs: in order. first: those of them that wait for no other. followers: for every subgraph of the plan, those
    of the route that wait for it.
    """

    subgraphs: tuple[int, ...]
    first: tuple[int, ...]
    followers: tuple[tuple[int, ...], ...]


class Flow:
    """What waits for what.

    Args:
        reads: for every subgraph those whose outputs it reads; each comes before it.
        has_state: for every subgraph whether it owns state.
        sums: those that are sums over ranks.
        hidden: the one that writes the hidden states after the last norm, if that is known.
    """

    def __init__(
        self,
        reads: Sequence[Collection[int]],
        has_state: Sequence[bool],
        sums: Collection[int] = (),
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
        """For every subgraph those that it waits for, less what others imply: one each in a chain."""
        self.num_waits = tuple((len(w) or 1) + owns for w, owns in zip(waits_for, has_state, strict=True))
        """For every subgraph how many things a task of it waits for: tasks of its chunk, or where there are none that
        the chunk enters; and with state its chunk's turn."""
        self.ancestors = tuple(ancestors)
        """For every subgraph the set of all that have ended when it starts: bit i stands for subgraph i."""
        everything = (1 << len(waits_for)) - 1
        state = _union(ancestors[i] | 1 << i for i, owns in enumerate(has_state) if owns)
        self.with_logits = self._route(everything)
        """Of a chunk that has rows whose logits are wanted: everything."""
        self.without_logits = self._route(state or everything & 1)
        """Of any other: what state is made of. Without state it is the first subgraph alone."""
        self.with_sums = self._route(state | _union(ancestors[i] | 1 << i for i in sums) or everything & 1)
        """Of a chunk whose logits another rank wants: what its sums are made of, and state."""

        self.with_hidden = self.with_logits if hidden is None else self._route(state | ancestors[hidden] | 1 << hidden)
        """Of a chunk whose hidden states are wanted, and no logits."""

    @property
    def is_chain(self) -> bool:
        """Whether each waits for the one before it, so that no two tasks of a chunk can overlap."""
        return all(waits == (i - 1,) for i, waits in enumerate(self.waits_for) if i > 0)

    def routes(self, num_chunks: int, logit_chunks: Container[int]) -> list[Route]:
        """What the chunks of a prompt pass through, of which some have rows whose logits are wanted."""
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
    """Some subgraphs as a set: bit i stands for subgraph i."""
    return _union(1 << index for index in subgraphs)


def _union(sets: Iterable[int]) -> int:
    return reduce(or_, sets, 0)
