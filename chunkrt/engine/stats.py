"""What an engine tells of itself while it works."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """What an engine does and holds.

    sessions: that are open. cache_bytes: reserved for their caches. waiting_sessions: that wait for room in them.
    prefix_bytes: what the prefix cache holds in memory; cached_tokens: that it gave to sessions so far, in place of
    running them. waiting_runs: prompts and tokens that share chunks now, or wait to. shared_chunks, shared_rows: the
    chunks that have been computed for those that could share them, and the tokens in them; chunk_length: the most that
    one holds. longest_task_s: seconds since the oldest task in progress began; a device that hangs shows here.
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
