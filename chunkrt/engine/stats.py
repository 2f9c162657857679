"""Statistics of a running engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """Current activity and memory of an engine.

    Attributes:
        sessions: number of open sessions.
        cache_bytes: bytes reserved for the caches of sessions.
        waiting_sessions: number of sessions that wait for cache memory.
        prefix_bytes: bytes of the prefix cache in memory.
        cached_tokens: number of tokens that the prefix cache has supplied to sessions so far.
        waiting_runs: number of prompts and single tokens that share chunks, or wait for a shared chunk.
        shared_chunks: number of computed chunks that several runs could share.
        shared_rows: number of tokens in these shared chunks.
        chunk_length: maximum number of tokens of a chunk.
        longest_task_s: seconds since the oldest task in progress began; a large value indicates a device that does not
            respond.
    """

    sessions: int
    cache_bytes: int
    waiting_sessions: int
    prefix_bytes: int
    cached_tokens: int
    waiting_runs: int
    shared_chunks: int
    shared_rows: int
    chunk_length: int
    longest_task_s: float
