"""Statistics of a running engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """Current activity and memory of an engine.

    sessions: number of open sessions. cache_bytes: bytes reserved for their caches. waiting_sessions: number of
        sessions that wait for room in them. prefix_bytes: bytes of the prefix cache in memory; cached_tokens: number of
        tokens that it has supplied to sessions so far. waiting_runs: number of prompts and tokens that share chunks
        now, or wait to. shared_chunks, shared_rows: number of computed chunks that could be shared, and of the tokens
        in them; chunk_length: the most that one holds. longest_task_s: seconds since the oldest task in progress began;
        this reveals a device that hangs.
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
