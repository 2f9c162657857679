"""llama.cpp through llama-cpp-python's low-level bindings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

UBATCH = 512
"""Tokens of one pass, llama.cpp's own default."""


def versions() -> dict[str, str]:
    return {"llama-cpp-python": version("llama-cpp-python")}


def open_llama(model: Path, threads: int, context_length: int, **options: Any) -> Any:
    """llama-cpp-python's `Llama`; options are its own."""
    import llama_cpp

    return llama_cpp.Llama(
        str(model),
        n_ctx=context_length,
        n_batch=context_length,
        n_ubatch=UBATCH,
        n_threads=threads,
        n_threads_batch=threads,
        verbose=False,
        **options,
    )


class Runner:
    def __init__(self, model: Path, threads: int, context_length: int, options: Mapping[str, Any]) -> None:
        import llama_cpp

        self.api = llama_cpp
        self.model = open_llama(model, threads, context_length, **options)
        attention = "on" if options.get("flash_attn") else "off"
        self.settings = f"n_ctx {self.model.n_ctx()}, n_ubatch {UBATCH}, float16 cache, flash attention {attention}"

    def reset(self, room: int) -> None:
        if room > self.model.n_ctx():
            raise ValueError(f"{room} tokens do not fit n_ctx {self.model.n_ctx()}")
        self.api.llama_memory_clear(self.api.llama_get_memory(self.model.ctx), True)

    def prefill(self, tokens: Sequence[int]) -> None:
        array = (self.api.llama_token * len(tokens))(*tokens)
        if status := self.api.llama_decode(self.model.ctx, self.api.llama_batch_get_one(array, len(tokens))):
            raise RuntimeError(f"llama_decode returned status {status} for {len(tokens)} tokens")
        self.api.llama_synchronize(self.model.ctx)

    def decode(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.prefill([token])

    def next_token(self) -> int:
        logits = self.api.llama_get_logits_ith(self.model.ctx, -1)
        return int(np.argmax(np.ctypeslib.as_array(logits, (self.model.n_vocab(),))))
