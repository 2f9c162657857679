"""chunkrt itself. Options are those of `chunkrt.load`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np


def versions() -> dict[str, str]:
    import chunkrt

    return {"chunkrt": chunkrt.__version__}


class Runner:
    def __init__(self, model: Path, threads: int, context_length: int, options: Mapping[str, Any]) -> None:
        import chunkrt

        self.engine = engine = chunkrt.load(model, threads=threads, prefix_cache="off", **options)
        self.session = engine.session()
        self.settings = (
            f"backend {engine.loaded.npu_backend.name}, scheme {engine.scheme.name}, chunk {engine.chunk_length}, "
            f"policy {engine.options.policy}, attention in {engine.attention_math}"
        )

    def reset(self, room: int) -> None:
        self.session.rewind(0)

    def prefill(self, tokens: Sequence[int]) -> None:
        self.logits = self.session.prefill(tokens).logits

    def decode(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.session.prefill([token])

    def next_token(self) -> int:
        assert self.logits is not None
        return int(np.argmax(self.logits))
