"""The prefix cache of an engine: results of its sessions, for those that begin with the same tokens.

The cache is exact: a hit gives the same bits as a prefill from the first token. `Exactness` defines which states are
exact, and where a hit may end.

Any thread may use it. The lock is held to walk the tree, never during copies. A node that is evicted while another
thread copies it lives until that is done.
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
"""Least number of tokens of a prompt between positions at which rings and recurrent tensors are kept: the processors
wait at each."""


@dataclass(frozen=True, kw_only=True)
class Exactness:
    """Conditions under which an engine computes equal bits.

    step: chunks that begin at positions other than its multiples give other bits. tokens_differ: True if a run of one
        token is computed elsewhere than those of several, and rounded differently.
    """

    step: int
    tokens_differ: bool


class Store(Protocol):
    """Storage of prefixes outside memory."""

    def load(self, forms: StateForms, tokens: Sequence[int], root: Root, known: int) -> Iterator[Addition]:
        """Yield the stored parts of some tokens after the first `known` ones."""
        ...

    def save(self, forms: StateForms, root: Root, nodes: Sequence[Node]) -> None:
        """Schedule the writing of consecutive nodes from the first token on."""
        ...

    def close(self) -> None:
        """Write the remaining nodes."""
        ...


class PrefixCache:
    """Contents of states for the first tokens of prompts.

    Args:
        exactness: the engine's exactness.
        chunk_length: the engine's chunk length.
        limit: largest number of bytes in memory.
        store: storage outside this process, if any.
        is_lost: returns True if the NPU has failed, so that its earlier results would not be computed again.
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
        """Number of tokens that sessions got from the cache."""
        self._store = store
        self._is_lost = is_lost
        self._trees: dict[Root, PrefixTree] = {}
        """Trees with contents, by the common properties of their prefixes."""
        self._lock = Lock()
        self._adding = Lock()
        """Lock of the thread that adds, so that the limit holds while pieces are copied."""
        self._clock = count(1)
        self._is_closed = False

    @property
    def num_bytes(self) -> int:
        """Bytes that the cache holds."""
        with self._lock:
            return sum(tree.num_bytes for tree in self._trees.values())

    def find(self, tokens: Sequence[int], state: State, limit: int, salt: str = "") -> Prefix | None:
        """Return the longest prefix of at most `limit` tokens that was kept under a salt and is longer than the part
        that the state has seen."""
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
        """Keep a state's contents for its first tokens under a salt; if they are all its tokens, they include recurrent
        tensors."""
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
                self._trees[root] = tree = self._tree(root, forms)  # `clear` may have been called meanwhile
                tree.add(tokens, Addition(pieces=pieces, recurrent=recurrent), clock)
            if self._store is not None:
                with self._lock:
                    nodes = tree.path(tokens)
                self._store.save(forms, root, nodes)

    def part_lengths(self, tokens: Sequence[int], state: State, salt: str = "") -> list[int]:
        """Split the run of the pending tokens at positions where rings and recurrent tensors should be kept.

        These positions are chunk boundaries, so that no chunk is added: at regular intervals, where another prompt
        diverged from these tokens, and, for recurrent tensors, at the last boundary, for a prompt that differs only at
        its end. The contents of caches can be kept afterwards.
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
        """Forget everything in memory."""
        with self._lock:
            self._trees = {}

    def close(self) -> None:
        """Close the cache: it supplies and accepts nothing more, and writes the remaining nodes."""
        self._is_closed = True
        self.clear()
        if self._store is not None:
            self._store.close()

    def _load(self, store: Store, root: Root, forms: StateForms, tokens: Sequence[int], clock: int) -> None:
        """Load the stored parts of some tokens into a tree, as long as they all fit."""
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
        """Return the tree of a root; if there is none, an empty one that the cache does not hold yet."""
        tree = self._trees.get(root)
        return PrefixTree(forms, self.exactness.step) if tree is None else tree

    def _evict(self, limit: int, kept: Collection[Node] = ()) -> None:
        """Remove the least recently used nodes, like `evict`, and trees that are then empty."""
        evict(list(self._trees.values()), limit, kept)
        self._trees = {root: tree for root, tree in self._trees.items() if not tree.is_empty}
