"""Exchange of contents between a sequence's state and the prefix cache, limited to the exact part of the state."""

from __future__ import annotations

from collections.abc import Sequence

from chunkrt.engine.prefix_cache.cache import PrefixCache
from chunkrt.runtime.prefix import Prefix
from chunkrt.runtime.state import State


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
        self._num_kept = 0
        """Number of tokens that were offered to the cache."""

    def may_find(self, tokens: Sequence[int], state: State, limit: int) -> bool:
        """Return True unless a single token is decoded, or no prefix would be exact."""
        return self._goes_on_from(state.position) and self._last_end(tokens, limit) > state.position

    def find(self, tokens: Sequence[int], state: State, limit: int) -> Prefix | None:
        """Return the longest cached prefix of a sequence's tokens, up to a limit, if it is longer than the state's
        contents. This may read from a disk.
        """
        if self._cache is None or not self._goes_on_from(state.position):
            return None
        return self._cache.find(tokens, state, self._last_end(tokens, limit), self._salt)

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

    def after_run(self, position: int, num_tokens: int) -> None:
        """Record the end of a run of `num_tokens` tokens."""
        if self._cache is None or not self._goes_on_from(position):
            return
        exactness = self._cache.exactness
        if num_tokens > 1 or not exactness.tokens_differ:
            end = position + num_tokens
            self._num_exact = end - end % exactness.step

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

    def _last_end(self, tokens: Sequence[int], limit: int) -> int:
        """Return the last possible end of a hit. At least one token must be run after it, in the same way as in a
        prefill from the first token.
        """
        tokens_differ = self._cache is not None and self._cache.exactness.tokens_differ
        return min(limit, len(tokens) - (2 if tokens_differ else 1))

    def _goes_on_from(self, position: int) -> bool:
        """Return True if runs from a position on give the same results as in a prefill from the first token."""
        return self._cache is not None and position <= self._num_exact and position % self._cache.exactness.step == 0
