"""Exchange between a sequence's state and the prefix cache, and the part of the state that is exact."""

from __future__ import annotations

from collections.abc import Sequence

from chunkrt.engine.prefix_cache.cache import PrefixCache
from chunkrt.runtime.prefix import Prefix
from chunkrt.runtime.state import State


class Reuse:
    """One sequence's use of the cache; without a cache it does nothing.

    Prefixes of other salts are neither found nor stored.

    A state is exact up to a position if a prefill from the first token would have made the same bits up to there. A run
    that begins there keeps it exact if its chunks begin where those of such a prefill would.
    """

    def __init__(self, cache: PrefixCache | None, salt: str = "") -> None:
        self._cache, self._salt = cache, salt
        self._num_exact = 0
        self._num_kept = 0
        """Number of tokens that have been offered to the cache."""

    def may_find(self, tokens: Sequence[int], state: State, limit: int) -> bool:
        """Return False for a single token of decode, or if no prefix would be exact."""
        return self._goes_on_from(state.position) and self._last_end(tokens, limit) > state.position

    def find(self, tokens: Sequence[int], state: State, limit: int) -> Prefix | None:
        """Return the longest cached prefix of a sequence's tokens beyond its state, up to a limit. It may read from a
        disk."""
        if self._cache is None or not self._goes_on_from(state.position):
            return None
        return self._cache.find(tokens, state, self._last_end(tokens, limit), self._salt)

    def take(self, prefix: Prefix, state: State) -> int:
        """Copy a prefix into the state. Returns the number of tokens that it need not run."""
        assert self._cache is not None
        before = state.position
        state.take(prefix)
        self._num_exact = self._num_kept = prefix.position
        self._cache.num_cached += prefix.position - before
        return prefix.position - before

    def part_lengths(self, tokens: Sequence[int], state: State) -> list[int]:
        """Return the numbers of pending tokens to run at a time, so that the cache can copy the state in between."""
        if self._cache is None or not self._goes_on_from(state.position):
            return [len(tokens) - state.position]
        return self._cache.part_lengths(tokens, state, self._salt)

    def before_run(self, position: int) -> None:
        """Note the beginning of a run: the state is no longer exact after this position."""
        self._num_exact = min(self._num_exact, position)
        self._num_kept = min(self._num_kept, position)

    def after_run(self, position: int, num_tokens: int) -> None:
        """Note the end of a run of `num_tokens` tokens."""
        if self._cache is None or not self._goes_on_from(position):
            return
        exactness = self._cache.exactness
        if num_tokens > 1 or not exactness.tokens_differ:
            end = position + num_tokens
            self._num_exact = end - end % exactness.step

    def keep(self, tokens: Sequence[int], state: State) -> None:
        """Store the exact part of the state in the cache."""
        num_exact = min(self._num_exact, state.position)
        if self._cache is not None and num_exact > self._num_kept:
            self._cache.add(tokens[:num_exact], state, self._salt)
            self._num_kept = num_exact

    def shifted(self, keep: int) -> None:
        """Note a shift of the context, which only the first tokens survive unchanged."""
        self.before_run(keep)

    def copy(self) -> Reuse:
        """Return a copy for a sequence that has seen the same tokens."""
        copy = Reuse(self._cache, self._salt)
        copy._num_exact, copy._num_kept = self._num_exact, self._num_kept
        return copy

    def _last_end(self, tokens: Sequence[int], limit: int) -> int:
        """Return the last possible end of a hit: some tokens must be run, and in the same way as in a prefill from the
        first."""
        tokens_differ = self._cache is not None and self._cache.exactness.tokens_differ
        return min(limit, len(tokens) - (2 if tokens_differ else 1))

    def _goes_on_from(self, position: int) -> bool:
        """Return True if runs from a position on are the same as in a prefill from the first token."""
        return self._cache is not None and position <= self._num_exact and position % self._cache.exactness.step == 0
