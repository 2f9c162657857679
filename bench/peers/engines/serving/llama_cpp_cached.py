"""llama.cpp through llama-cpp-python's `Llama`, with its own prefix caches, used like in its `create_completion`.

The context is emptied between two prompts, so that any hit is the cache's.
Options: cache, one of none, ram, disk.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from peers.engines.llama_cpp import UBATCH, open_llama
from peers.engines.llama_cpp import versions as versions
from peers.engines.serving.clock import Answer, Clock

CACHE_BYTES = 2 << 30


class Runner:
    def __init__(self, model: Path, threads: int, context_length: int, options: Mapping[str, Any]) -> None:
        import llama_cpp

        self.model = open_llama(model, threads, context_length)
        self.cache: Any = None
        if options["cache"] == "ram":
            self.cache = llama_cpp.LlamaRAMCache(CACHE_BYTES)
        elif options["cache"] == "disk":
            self._folder = tempfile.TemporaryDirectory(dir=Path.cwd())
            self.cache = llama_cpp.LlamaDiskCache(self._folder.name, CACHE_BYTES)
        self.settings = (
            f"Llama.generate(), {type(self.cache).__name__ if self.cache else 'no cache'}, n_ubatch {UBATCH}"
        )

    def serve(self, prompts: Sequence[Sequence[int]], arrivals: Sequence[float], new_tokens: int) -> list[Answer]:
        return [self._answer(list(prompt), new_tokens) for prompt in prompts]

    def _answer(self, prompt: list[int], new_tokens: int) -> Answer:
        self.model.reset()
        answer, clock = Answer(), Clock()
        if self.cache is not None:
            with suppress(KeyError):  # the cache has no common prefix
                self.model.load_state(self.cache[prompt])
        for token in self.model.generate(prompt, temp=0.0):
            answer.add(int(token), clock())
            if len(answer.tokens) == new_tokens:
                break
        if self.cache is not None:
            self.cache[[*prompt, *answer.tokens]] = self.model.save_state()
        return answer
