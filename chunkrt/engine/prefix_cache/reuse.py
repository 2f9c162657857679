"""What of a sequence's state is exact, and what the prefix cache gives to it and takes of it."""

from __future__ import annotations

from collections.abc import Sequence

from chunkrt.engine.prefix_cache.cache import PrefixCache
from chunkrt.runtime.prefix import Prefix
from chunkrt.runtime.state import State


class Reuse:
    """One sequence's dealings with the cache; without a cache there are none.

    Prefixes of other salts are neither found nor given.

    A state is exact up to a position if a prefill from nothing would have made the same bits up to there. Runs that
    begin there keep it so, if their chunks do not begin where those of a prefill would not.
    """

    def __init__(self, cache: PrefixCache | None, salt: str = "") -> None:
        self._cache, self._salt = cache, salt
        self._num_exact = 0
        self._num_kept = 0
        """Tokens up to which the cache has been given what there is."""

    def may_find(self, tokens: Sequence[int], state: State, limit: int) -> bool:
        """Whether it is worth a look: not for a single token of decode, nor where nothing found would be exact."""
        return self._goes_on_from(state.position) and self._last_end(tokens, limit) > state.position

    def find(self, tokens: Sequence[int], state: State, limit: int) -> Prefix | None:
        """What the cache has of a sequence's tokens beyond its state, up to a limit. It may read from a disk."""
        if self._cache is None or not self._goes_on_from(state.position):
            return None
        return self._cache.find(tokens, state, self._last_end(tokens, limit), self._salt)

    def take(self, prefix: Prefix, state: State) -> int:
        """Give a prefix to the state. Returns the number of tokens that it need not run."""
        assert self._cache is not None
        before = state.position
        state.take(prefix)
        self._num_exact = self._num_kept = prefix.position
        self._cache.num_cached += prefix.position - before
        return prefix.position - before

    def part_lengths(self, tokens: Sequence[int], state: State) -> list[int]:
        """How many of the tokens that the state has not seen are run at a time, so that the cache can look at it."""
        if self._cache is None or not self._goes_on_from(state.position):
            return [len(tokens) - state.position]
        return self._cache.part_lengths(tokens, state, self._salt)

    def before_run(self, position: int) -> None:
        """A run begins here: what was exact behind it is no more."""
        self._num_exact = min(self._num_exact, position)
        self._num_kept = min(self._num_kept, position)

    def after_run(self, position: int, num_tokens: int) -> None:
        """A run of so many tokens has ended."""
        if self._cache is None or not self._goes_on_from(position):
            return
        exactness = self._cache.exactness
        if num_tokens > 1 or not exactness.tokens_differ:
            end = position + num_tokens
            self._num_exact = end - end % exactness.step

    def keep(self, tokens: Sequence[int], state: State) -> None:
        """Give the cache what the state holds and is exact."""
        num_exact = min(self._num_exact, state.position)
        if self._cache is not None and num_exact > self._num_kept:
            self._cache.add(tokens[:num_exact], state, self._salt)
            self._num_kept = num_exact

    def shifted(self, keep: int) -> None:
        """The context is being shifted: only the first tokens stay what they were."""
        self.before_run(keep)

    def copy(self) -> Reuse:
        """For a sequence that has seen the same tokens."""
        copy = Reuse(self._cache, self._salt)
        copy._num_exact, copy._num_kept = self._num_exact, self._num_kept
        return copy

    def _last_end(self, tokens: Sequence[int], limit: int) -> int:
        """Where a hit ends at the latest: something has to be run, and as a prefill from nothing would run it."""
        tokens_differ = self._cache is not None and self._cache.exactness.tokens_differ
        return min(limit, len(tokens) - (2 if tokens_differ else 1))

    def _goes_on_from(self, position: int) -> bool:
        """Whether what is run from a position on is what a prefill from nothing would run there."""
        return self._cache is not None and position <= self._num_exact and position % self._cache.exactness.step == 0
