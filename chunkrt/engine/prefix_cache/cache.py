"""The prefix cache of an engine: what its sessions have computed, for those that begin with the same tokens.

Exact: what a hit gives is bit for bit what a prefill from nothing would have made. `Exactness` says which states are
such, and where a hit may end.

Any thread may use it. The lock is held to walk the tree, never while anything is copied. What is evicted while somebody
copies it lives until that is done.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from threading import Lock
from typing import Protocol

from chunkrt.engine.prefix_cache.tree import NODE_BYTES, STEP, Addition, Node, PrefixTree, Root, evict
from chunkrt.runtime.prefix import Prefix, StateForms
from chunkrt.runtime.state import State

LEAST_BETWEEN_CUTS = 512
"""Tokens of a prompt after which rings and recurrent tensors are kept, at least: each cut has the processors wait."""


@dataclass(frozen=True, kw_only=True)
class Exactness:
    """What the bits of an engine depend on.

    step: chunks that begin at other positions than its multiples give other bits. tokens_differ: whether a run of one
    token is computed elsewhere than those of several, and rounded otherwise.
    """

    step: int
    tokens_differ: bool


class Store(Protocol):
    """What keeps prefixes beyond memory."""

    def load(self, forms: StateForms, tokens: Sequence[int], root: Root, known: int) -> Iterator[Addition]:
        """What there is of some tokens beyond the first that are known, part by part."""
        ...

    def save(self, forms: StateForms, root: Root, nodes: Sequence[Node]) -> None:
        """Have nodes written that follow one another from the first token on, some time."""
        ...

    def close(self) -> None:
        """Write what is left."""
        ...


class PrefixCache:
    """What states held of the first tokens of prompts.

    Args:
        exactness: of the engine.
        chunk_length: of the engine.
        limit: bytes that may be held.
        store: what keeps it beyond this process.
        is_lost: whether the NPU has failed, and what it computed is no more what would be computed.
    """

    def __init__(
        self,
        exactness: Exactness,
        chunk_length: int,
        limit: int,
        *,
        store: Store | None = None,
        is_lost: Callable[[], bool] = bool,
    ) -> None:
        self.exactness = exactness
        self.chunk_length = chunk_length
        self.limit = limit
        self.num_cached = 0
        """Tokens that sessions were given, in place of running them."""
        self._store = store
        self._is_lost = is_lost
        self._trees: dict[Root, PrefixTree] = {}
        """Trees that hold something, by what their prefixes have in common."""
        self._lock = Lock()
        self._adding = Lock()
        """Whoever adds has it, so that the limit holds while pieces are copied."""
        self._clock = count(1)
        self._is_closed = False

    @property
    def num_bytes(self) -> int:
        """That are held."""
        with self._lock:
            return sum(tree.num_bytes for tree in self._trees.values())

    def find(self, tokens: Sequence[int], state: State, limit: int, salt: str = "") -> Prefix | None:
        """Return the longest prefix of some tokens, of `limit` tokens at most, that was kept under a salt and is longer
        than the part which the state has seen."""
        if limit <= state.position or self._is_off():
            return None
        root, clock = Root(salt, state.rope_offset), next(self._clock)
        with self._lock:
            found = self._tree(root, state.forms).find(tokens, state.position, limit, clock)
        if self._store is None or (found is not None and found.position + self.exactness.step > limit):
            return found
        self._load(self._store, root, state.forms, tokens, clock)
        with self._lock:
            return self._tree(root, state.forms).find(tokens, state.position, limit, clock)

    def add(self, tokens: Sequence[int], state: State, salt: str = "") -> None:
        """Keep under a salt what a state holds of its first tokens; at its position it is exact if they are all."""
        if not tokens or self._is_off():
            return
        root, forms, clock = Root(salt, state.rope_offset), state.forms, next(self._clock)
        with self._adding:
            with self._lock:
                tree = self._tree(root, forms)
                wanted = tree.missing(tokens, state.first_in_rings, clock)
                takes_recurrent = len(tokens) == state.position and tree.lacks_recurrent(tokens)
                extended = frozenset(tree.path(tokens))
                room = self.limit - sum(node.num_bytes for node in extended)
            kept = list[tuple[tuple[int, ...], int, bool]]()
            for part, start, is_new in wanted:
                has_rings = bool(forms.rings) and state.first_in_rings <= start
                size = len(part) * (is_new * forms.cache_bytes + has_rings * forms.ring_bytes) + is_new * NODE_BYTES
                if size > room:
                    break
                room -= size
                kept.append((part, start, is_new))
            takes_recurrent = takes_recurrent and len(kept) == len(wanted) and forms.recurrent_bytes <= room
            if not kept and not takes_recurrent:
                return
            room -= takes_recurrent * forms.recurrent_bytes
            with self._lock:
                self._evict(room + sum(node.num_bytes for node in extended), extended)
            pieces = tuple(state.piece(forms, start, start + len(part), caches=is_new) for part, start, is_new in kept)
            recurrent = {len(tokens): state.recurrent()} if takes_recurrent else {}
            with self._lock:
                if self._is_closed:
                    return
                self._trees[root] = tree = self._tree(root, forms)  # `clear` may have come between
                tree.add(tokens, Addition(pieces=pieces, recurrent=recurrent), clock)
            if self._store is not None:
                with self._lock:
                    nodes = tree.path(tokens)
                self._store.save(forms, root, nodes)

    def part_lengths(self, tokens: Sequence[int], state: State, salt: str = "") -> list[int]:
        """The run of the tokens that a state has not seen, parted where rings and recurrent tensors shall be kept.

        That is at borders of its chunks, so that none is added: every so many tokens, where another prompt parted from
        these tokens, and, of recurrent tensors, at the last one, for a prompt that is the same but for its end. What
        caches hold can be kept afterwards.
        """
        forms, chunk, num_tokens = state.forms, self.chunk_length, len(tokens) - state.position
        if not (forms.rings or forms.recurrent):
            return [num_tokens]
        between = max(LEAST_BETWEEN_CUTS, forms.recurrent_bytes // max(forms.cache_bytes + forms.ring_bytes, 1))
        if forms.rings and not forms.recurrent:
            between = max(LEAST_BETWEEN_CUTS, forms.ring_slots)
        between = max(between // chunk, 1) * chunk
        with self._lock:
            parting = self._tree(Root(salt, state.rope_offset), forms).matched(tokens) - state.position
        wanted = {*range(between, num_tokens, between), parting // chunk * chunk}
        if forms.recurrent:
            wanted.add((num_tokens - 1) // chunk * chunk)
        least, cuts = 2 if self.exactness.tokens_differ else 1, [0]
        for cut in sorted(wanted):
            if cuts[-1] + least <= cut <= num_tokens - least:
                cuts.append(cut)
        return [end - begin for begin, end in pairwise([*cuts, num_tokens])]

    def clear(self) -> None:
        """Forget everything that is in memory."""
        with self._lock:
            self._trees = {}

    def close(self) -> None:
        """Give and take nothing more; what is still to be written is."""
        self._is_closed = True
        self.clear()
        if self._store is not None:
            self._store.close()

    def _load(self, store: Store, root: Root, forms: StateForms, tokens: Sequence[int], clock: int) -> None:
        """Put into a tree what the store has of some tokens, as long as all of that fits."""
        with self._lock:
            known = self._tree(root, forms).matched(tokens) // STEP * STEP
        for addition in store.load(forms, tokens, root, known):
            end = addition.pieces[-1].end
            with self._adding, self._lock:
                self._trees[root] = tree = self._tree(root, forms)
                tree.add(tokens[:end], addition, clock)
                self._evict(self.limit)
                if tree.matched(tokens) < end:
                    return

    def _is_off(self) -> bool:
        return self._is_closed or self._is_lost()

    def _tree(self, root: Root, forms: StateForms) -> PrefixTree:
        """Return the tree of a root; an empty one, which the cache does not hold yet, if there is none."""
        tree = self._trees.get(root)
        return PrefixTree(forms, self.exactness.step) if tree is None else tree

    def _evict(self, limit: int, kept: Collection[Node] = ()) -> None:
        """Remove the nodes that were used longest ago, as `evict` does, and trees that are empty by then."""
        evict(list(self._trees.values()), limit, kept)
        self._trees = {root: tree for root, tree in self._trees.items() if not tree.is_empty}
