"""Records of runs with shared chunks: sessions of a real engine, each in its own thread."""

from __future__ import annotations

from functools import partial
from typing import Any

from gates import asked_before_any_is_computed

import chunkrt
from chunkrt.runtime.record import RunRecord


def shared_records(model: Any, prompts: list[list[int]], *, steps: int = 4, **options: Any) -> list[RunRecord]:
    """Return the records of prompts that run at the same time, and of some single tokens after them.

    Each session runs its last token when no other session runs.
    """
    with chunkrt.load(model, **options) as engine:
        records: list[list[RunRecord]] = [[] for _ in prompts]
        sessions = [engine.session() for _ in prompts]
        for session, ran in zip(sessions, records, strict=True):
            session.on_run = ran.append
        for pieces in (prompts, *([prompt[step : step + 1] for prompt in prompts] for step in range(steps - 1))):
            asked_before_any_is_computed(engine, [partial(s.prefill, p) for s, p in zip(sessions, pieces, strict=True)])
        for session, prompt in zip(sessions, prompts, strict=True):
            session.prefill(prompt[steps - 1 : steps])
    found = [record for ran in records for record in ran]
    assert max((len(chunk.segments) for record in found for chunk in record.chunks), default=0) == len(prompts)
    return found
