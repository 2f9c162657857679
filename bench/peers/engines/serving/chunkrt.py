"""chunkrt: a session a prompt, in one event loop. Options are those of `chunkrt.load`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from peers.engines.chunkrt import versions as versions
from peers.engines.serving.clock import Answer, Clock


class Runner:
    def __init__(self, model: Path, threads: int, context_length: int, options: Mapping[str, Any]) -> None:
        import chunkrt

        settings = {"threads": threads, "context_length": context_length, "prefix_cache": "off", **options}
        self.engine = engine = chunkrt.load(model, **settings)
        self.settings = (
            f"backend {engine.loaded.npu_backend.name}, scheme {engine.scheme.name}, chunk {engine.chunk_length}, "
            f"batcher {engine.options.batcher}, prefix cache {settings['prefix_cache']}; asession() and aprefill(), "
            "the most likely token by NumPy"
        )

    def serve(self, prompts: Sequence[Sequence[int]], arrivals: Sequence[float], new_tokens: int) -> list[Answer]:
        return asyncio.run(self._serve(prompts, arrivals, new_tokens))

    async def _serve(
        self, prompts: Sequence[Sequence[int]], arrivals: Sequence[float], new_tokens: int
    ) -> list[Answer]:
        clock = Clock()

        async def answer(prompt: Sequence[int], arrival: float) -> Answer:
            await asyncio.sleep(max(arrival - clock(), 0.0))
            found, tokens = Answer(), prompt
            async with await self.engine.asession() as session:
                for _ in range(new_tokens):
                    logits = (await session.aprefill(tokens)).logits
                    assert logits is not None
                    tokens = [int(np.argmax(logits))]
                    found.add(tokens[0], clock())
            return found

        return await asyncio.gather(*map(answer, prompts, arrivals))
