"""Records of runs that shared chunks: sessions of a real engine, each in a thread of its own."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Thread
from typing import Any

from gates import LONGEST_S, wait_until_waiting

import chunkrt
from chunkrt.runtime.record import RunRecord
from chunkrt.runtime.ticket import Ticket


def shared_records(model: Any, prompts: list[list[int]], *, steps: int = 4, **options: Any) -> list[RunRecord]:
    """The records of prompts that are taken at the same time, and then some tokens, one by one; the last of these each
    session takes when no other does."""
    with chunkrt.load(model, **options) as engine:
        records: list[list[RunRecord]] = [[] for _ in prompts]
        sessions = [engine.session() for _ in prompts]
        for session, ran in zip(sessions, records, strict=True):
            session.on_run = ran.append
        _prefill_together(engine, sessions, prompts)
        for step in range(steps - 1):
            _prefill_together(engine, sessions, [prompt[step : step + 1] for prompt in prompts])
        for session, prompt in zip(sessions, prompts, strict=True):
            session.prefill(prompt[steps - 1 : steps])
    found = [record for ran in records for record in ran]
    assert max((len(chunk.segments) for record in found for chunk in record.chunks), default=0) == len(prompts)
    return found


def _prefill_together(engine: Any, sessions: Sequence[Any], pieces: Sequence[list[int]]) -> None:
    """Whether runs meet is the machine's affair: nothing is computed before all have asked."""
    threads = [Thread(target=each.prefill, args=(piece,)) for each, piece in zip(sessions, pieces, strict=True)]
    with engine._conductor._turn:
        for thread in threads:
            thread.start()
            wait_until_waiting(thread.ident, Ticket.wait)
    for thread in threads:
        thread.join(LONGEST_S)
        assert not thread.is_alive()
