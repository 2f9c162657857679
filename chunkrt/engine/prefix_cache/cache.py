"""The prefix cache of an engine: results of sessions for reuse by sessions that begin with the same tokens.

The cache is exact: a hit gives the same results as a prefill from the first token. `Reuse` defines the exact states,
and `PrefixCache.step` the possible ends of a hit.

Any thread may use the cache. The lock is held while the tree is searched or changed, but never during copies. A node
that is evicted while another thread copies it stays in memory until the copy is done.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import count, pairwise
from threading import Lock
from typing import TYPE_CHECKING

from chunkrt.backends.fallback import NpuHealth
from chunkrt.engine.prefix_cache.tree import NODE_BYTES, STEP, Addition, PrefixTree, Root, TreeNode, evict
from chunkrt.runtime.prefix import Prefix, StateForms
from chunkrt.runtime.state import State

if TYPE_CHECKING:
    from chunkrt.engine.prefix_cache.disk import DiskStore

LEAST_BETWEEN_CUTS = 512
"""Minimum number of tokens between positions of a prompt at which rings and recurrent tensors are kept. At each such
position the processors wait.
"""


class PrefixCache:
    """Contents of states for the first tokens of prompts.

    Args:
        step, tokens_differ: see `ExecutorSet.exact_step` and `ExecutorSet.tokens_differ`.
        chunk_length: the engine's chunk length.
        limit: maximum number of bytes in memory.
        store: storage outside this process, or None.
        npu_health: state of the NPU. While the CPU computes in its place, results of the NPU are not used, because the
            CPU would compute other values.
    """

    def __init__(
        self,
        step: int,
        tokens_differ: bool,
        chunk_length: int,
        limit: int,
        *,
        store: DiskStore | None = None,
        npu_health: NpuHealth | None = None,
    ) -> None:
        self.step, self.tokens_differ = step, tokens_differ
        self.chunk_length = chunk_length
        self.limit = limit
        self.num_cached = 0
        """Number of tokens that the cache has supplied to sessions."""
        self._store = store
        self._npu_health = npu_health
        self._trees: dict[Root, PrefixTree] = {}
        """Trees that are not empty, by the common properties of their prefixes."""
        self._lock = Lock()
        self._adding = Lock()
        """Lock of the thread that adds nodes, so the limit also holds while pieces are copied."""
        self._clock = count(1)
        self._is_closed = False

    @property
    def num_fallbacks(self) -> int:
        """Number of runs so far that the CPU computed in place of the NPU."""
        return 0 if self._npu_health is None else self._npu_health.num_fallbacks

    @property
    def num_bytes(self) -> int:
        """Number of bytes in memory."""
        with self._lock:
            return sum(tree.num_bytes for tree in self._trees.values())

    def find(self, tokens: Sequence[int], state: State, limit: int, salt: str = "") -> Prefix | None:
        """Return the longest prefix of at most `limit` tokens that was kept under a salt and that is longer than the
        state's contents.
        """
        if limit <= state.position or self._is_off():
            return None
        root, clock = (salt, state.rope_offset), next(self._clock)
        with self._lock:
            found = self._tree(root, state.forms).find(tokens, state.position, limit, clock)
        if self._store is None or (found is not None and found.position + self.step > limit):
            return found
        self._load(self._store, root, state.forms, tokens, clock)
        with self._lock:
            return self._tree(root, state.forms).find(tokens, state.position, limit, clock)

    def add(self, tokens: Sequence[int], state: State, salt: str = "") -> None:
        """Store a state's contents for its first tokens under a salt. If these are all tokens of the state, the
        recurrent tensors are stored, too.
        """
        if not tokens or self._is_off():
            return
        root, forms, clock = (salt, state.rope_offset), state.forms, next(self._clock)
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
            pieces = tuple(state.piece(start, start + len(part), caches=is_new) for part, start, is_new in kept)
            recurrent = {len(tokens): state.recurrent()} if takes_recurrent else {}
            with self._lock:
                if self._is_closed:
                    return
                self._trees[root] = tree = self._tree(root, forms)  # `clear` may have been called in the meantime
                tree.add(tokens, Addition(pieces=pieces, recurrent=recurrent), clock)
            if self._store is not None:
                with self._lock:
                    nodes = tree.path(tokens)
                self._store.save(forms, root, nodes)

    def part_lengths(self, tokens: Sequence[int], state: State, salt: str = "") -> list[int]:
        """Split the run of the pending tokens at positions where rings and recurrent tensors should be kept.

        These positions are chunk boundaries, so the number of chunks does not grow. They lie at regular intervals, and
        at the point where another prompt diverged from these tokens. For recurrent tensors the last boundary is added,
        which serves a prompt that differs only at its end. The contents of caches can be kept after the run.
        """
        forms, chunk, num_tokens = state.forms, self.chunk_length, len(tokens) - state.position
        if not (forms.rings or forms.recurrent):
            return [num_tokens]
        between = max(LEAST_BETWEEN_CUTS, forms.recurrent_bytes // max(forms.cache_bytes + forms.ring_bytes, 1))
        if forms.rings and not forms.recurrent:
            between = max(LEAST_BETWEEN_CUTS, forms.ring_slots)
        between = max(between // chunk, 1) * chunk
        with self._lock:
            parting = self._tree((salt, state.rope_offset), forms).matched(tokens) - state.position
        wanted = {*range(between, num_tokens, between), parting // chunk * chunk}
        if forms.recurrent:
            wanted.add((num_tokens - 1) // chunk * chunk)
        least, cuts = 2 if self.tokens_differ else 1, [0]
        for cut in sorted(wanted):
            if cuts[-1] + least <= cut <= num_tokens - least:
                cuts.append(cut)
        return [end - begin for begin, end in pairwise([*cuts, num_tokens])]

    def clear(self) -> None:
        """Remove all nodes from memory."""
        with self._lock:
            self._trees = {}

    def close(self) -> None:
        """Write the remaining nodes, and close the cache. It supplies and accepts no contents afterwards."""
        self._is_closed = True
        self.clear()
        if self._store is not None:
            self._store.close()

    def _load(self, store: DiskStore, root: Root, forms: StateForms, tokens: Sequence[int], clock: int) -> None:
        """Load the stored parts for some tokens into a tree, as far as they fit into the limit."""
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
        return self._is_closed or (self._npu_health is not None and self._npu_health.is_lost)

    def _tree(self, root: Root, forms: StateForms) -> PrefixTree:
        """Return the tree of a root. If no such tree exists, return an empty tree that is not part of the cache yet."""
        tree = self._trees.get(root)
        return PrefixTree(forms, self.step) if tree is None else tree

    def _evict(self, limit: int, kept: Collection[TreeNode] = ()) -> None:
        """Remove the least recently used nodes like `evict`, and then remove empty trees."""
        evict(list(self._trees.values()), limit, kept)
        self._trees = {root: tree for root, tree in self._trees.items() if not tree.is_empty}


class Reuse:
    """One sequence's use of the prefix cache. Without a cache the methods have no effect.

    Only prefixes under the sequence's salt are found and stored.

    A state is exact up to a position if a prefill from the first token would have computed the same contents up to this
    position. A run that begins at this position keeps the state exact if its chunks begin at the same positions as the
    chunks of such a prefill.
    """

    def __init__(self, cache: PrefixCache | None, salt: str = "") -> None:
        self._cache, self._salt = cache, salt
        self._num_exact = 0
        self._num_fallbacks = 0
        """Number of fallbacks at the beginning of the last run."""
        self._num_kept = 0
        """Number of tokens that were offered to the cache."""

    def find(self, tokens: Sequence[int], state: State, limit: int) -> Prefix | None:
        """Return the longest cached prefix of a sequence's tokens, up to a limit, if it is longer than the state's
        contents. Return None if a single token is decoded, or if no prefix would be exact. This may read from a disk.
        """
        if self._cache is None or not self._goes_on_from(state.position):
            return None
        # At least one token must be run after the prefix, in the same way as in a prefill from the first token.
        limit = min(limit, len(tokens) - (2 if self._cache.tokens_differ else 1))
        return self._cache.find(tokens, state, limit, self._salt) if limit > state.position else None

    def take(self, prefix: Prefix, state: State) -> int:
        """Copy a prefix into the state. Return the number of tokens that need not be run."""
        assert self._cache is not None
        before = state.position
        state.take(prefix)
        self._num_exact = self._num_kept = prefix.position
        self._cache.num_cached += prefix.position - before
        return prefix.position - before

    def part_lengths(self, tokens: Sequence[int], state: State) -> list[int]:
        """Return the lengths of the runs into which the pending tokens are split, so the cache can copy the state in
        between.
        """
        if self._cache is None or not self._goes_on_from(state.position):
            return [len(tokens) - state.position]
        return self._cache.part_lengths(tokens, state, self._salt)

    def before_run(self, position: int) -> None:
        """Record the beginning of a run. The state is no longer exact after this position."""
        self._num_exact = min(self._num_exact, position)
        self._num_kept = min(self._num_kept, position)
        if self._cache is not None:
            self._num_fallbacks = self._cache.num_fallbacks

    def after_run(self, position: int, num_tokens: int) -> None:
        """Record the end of a run of `num_tokens` tokens."""
        if self._cache is None or position > self._num_exact or not self._goes_on_from(position):
            return
        if self._cache.num_fallbacks != self._num_fallbacks:  # some results may be those of the CPU
            return
        if num_tokens > 1 or not self._cache.tokens_differ:
            end = position + num_tokens
            self._num_exact = end - end % self._cache.step

    def keep(self, tokens: Sequence[int], state: State) -> None:
        """Copy the exact part of the state to the cache."""
        num_exact = min(self._num_exact, state.position)
        if self._cache is not None and num_exact > self._num_kept:
            self._cache.add(tokens[:num_exact], state, self._salt)
            self._num_kept = num_exact

    def shifted(self, keep: int) -> None:
        """Record a shift of the context. Only the contents for the first tokens stay exact."""
        self.before_run(keep)

    def copy(self) -> Reuse:
        """Return a copy for another sequence with the same tokens."""
        copy = Reuse(self._cache, self._salt)
        copy._num_exact, copy._num_kept = self._num_exact, self._num_kept
        return copy

    def _goes_on_from(self, position: int) -> bool:
        """Return True if runs from a position on give the same results as in a prefill from the first token."""
        return self._cache is not None and position <= self._num_exact and position % self._cache.step == 0
