"""chunkrt. Options: way, "together" (`Engine.score`), "item by item" (one session) or "pair by pair" (a session each);
the others are those of `chunkrt.load`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from peers.engines.chunkrt import versions as versions

Pairs = Sequence[tuple[Sequence[int], Sequence[int]]]

SCORED_BY = {
    "together": "Engine.score",
    "item by item": "Session.score in one session, which runs the common context of consecutive pairs once",
    "pair by pair": "Session.score, every pair in a session of its own",
}


class Runner:
    def __init__(self, model: Path, threads: int, context_length: int, options: Mapping[str, Any]) -> None:
        import chunkrt

        options = dict(options)
        self.way = options.pop("way")
        settings = {"threads": threads, "context_length": context_length, "prefix_cache": "off", **options}
        self.engine = engine = chunkrt.load(model, **settings)
        self.settings = (
            f"backend {engine.loaded.npu_backend.name}, scheme {engine.scheme.name}, chunk {engine.chunk_length}; "
            f"{SCORED_BY[self.way]}"
        )
        self.num_rows = self.num_padded = 0

    def score(self, pairs: Pairs) -> tuple[list[float], int, int]:
        self.num_rows = self.num_padded = 0
        if self.way == "together":
            before = self.engine.stats()
            found = [score.log_probability for score in self.engine.score(pairs)]
            after = self.engine.stats()
            self.num_rows = after.shared_rows - before.shared_rows
            self.num_padded = self._with_padding(self.num_rows, after.shared_chunks - before.shared_chunks)
        elif self.way == "item by item":
            with self._session() as session:
                found = [session.score(*pair).log_probability for pair in pairs]
        else:
            found = []
            for pair in pairs:
                with self._session() as session:
                    found.append(session.score(*pair).log_probability)
        return found, self.num_rows, self.num_padded

    def _session(self) -> Any:
        session = self.engine.session()
        session.on_run = self._note
        return session

    def _note(self, record: Any) -> None:
        self.num_rows += record.num_tokens
        self.num_padded += self._with_padding(record.num_tokens, record.num_chunks)

    def _with_padding(self, num_rows: int, num_chunks: int) -> int:
        """Count padded rows. On the CPU alone chunks are as long as their rows; an NPU has one length."""
        engine = self.engine
        return num_rows if engine.loaded.npu_backend is engine.loaded.cpu_backend else num_chunks * engine.chunk_length
