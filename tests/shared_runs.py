"""Records of runs that shared chunks: sessions of a real engine, each in a thread of its own."""

from __future__ import annotations

from threading import Barrier, Thread
from typing import Any

import chunkrt
from chunkrt.runtime.record import ChunkRecord, RunRecord

MOST_ROUNDS = 50


def shared_records(model: Any, prompts: list[list[int]], *, steps: int = 4, **options: Any) -> list[RunRecord]:
    """The records of prompts that are taken, and answered by some tokens, at the same time.

    Whether two runs meet is the machine's affair; they are asked for again until some chunk has held rows of all.
    """
    with chunkrt.load(model, **options) as engine:
        for _ in range(MOST_ROUNDS):
            records: list[list[RunRecord]] = [[] for _ in prompts]
            start = Barrier(len(prompts))

            def take(prompt: list[int], ran: list[RunRecord], start: Barrier = start) -> None:
                session = engine.session()
                session.on_run = ran.append
                start.wait(60)
                session.prefill(prompt)
                for token in prompt[:steps]:
                    session.prefill([token])

            threads = [Thread(target=take, args=args) for args in zip(prompts, records, strict=True)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
            found = [record for ran in records for record in ran]
            if max(len(chunk.segments) for record in found for chunk in [*record.chunks] or [_NOBODYS]) == len(prompts):
                return found
    raise AssertionError(f"in {MOST_ROUNDS} rounds no chunk has held rows of all {len(prompts)} sequences")


_NOBODYS = ChunkRecord(0, ())
