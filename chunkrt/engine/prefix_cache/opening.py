"""From an engine's options to its prefix cache."""

from __future__ import annotations

from collections.abc import Callable

from chunkrt.engine import options as engine_options
from chunkrt.engine.options import EngineOptions
from chunkrt.engine.prefix_cache.cache import Exactness, PrefixCache
from chunkrt.errors import ConfigError

MOST_BYTES = 2 * 2**30
SHARE_OF_FREE = 8


def open_cache(
    options: EngineOptions,
    exactness: Exactness,
    chunk_length: int,
    *,
    has_ranks: bool,
    is_npu_lost: Callable[[], bool],
) -> PrefixCache | None:
    """The cache that the options ask for; None if they ask for none.

    Raises:
        ConfigError: one is asked for with ranks.
    """
    place = options.prefix_cache
    if has_ranks and place not in (None, "off"):
        raise ConfigError(f"ranks have no prefix cache, and prefix_cache is {str(place)!r}; leave it away, or 'off'")
    place = place or ("off" if has_ranks else engine_options.DEFAULT_PREFIX_CACHE)
    if place == "off":
        return None
    return PrefixCache(exactness, chunk_length, options.prefix_cache_memory or default_bytes(), is_lost=is_npu_lost)


def default_bytes() -> int:
    """An eighth of what is free, within bounds."""
    import psutil

    return min(psutil.virtual_memory().available // SHARE_OF_FREE, MOST_BYTES)
