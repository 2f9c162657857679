"""CTranslate2. Its generator takes tokens as strings, and can only continue with its own generated tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any


def versions() -> dict[str, str]:
    return {"ctranslate2": version("ctranslate2")}


def convert(source: Path, target: Path, options: Mapping[str, Any]) -> None:
    """Convert a Hugging Face folder. Options: quantization."""
    from ctranslate2.converters import TransformersConverter

    TransformersConverter(str(source)).convert(str(target), quantization=options["quantization"])


class Runner:
    def __init__(self, model: Path, threads: int, context_length: int, options: Mapping[str, Any]) -> None:
        import ctranslate2

        self.generator = ctranslate2.Generator(
            str(model), device="cpu", inter_threads=1, intra_threads=threads, **options
        )
        self.vocabulary = json.loads((model / "vocabulary.json").read_text("utf-8"))
        self.settings = (
            f"compute type {self.generator.compute_type}; generate_batch() of one token is a prefill, "
            "its greedy choice included"
        )

    def reset(self, room: int) -> None:
        """Do nothing: every call of `generate_batch` starts from an empty context."""

    def prefill(self, tokens: Sequence[int]) -> None:
        self._generate(tokens, 1)

    def decode(self, tokens: Sequence[int]) -> None:
        self._generate(tokens[:1], len(tokens))

    def next_token(self) -> int:
        return int(self.generated[0])

    def _generate(self, tokens: Sequence[int], count: int) -> None:
        strings = [self.vocabulary[token] for token in tokens]
        (result,) = self.generator.generate_batch(
            [strings],
            max_length=count,
            min_length=count,
            sampling_topk=1,
            include_prompt_in_result=False,
            end_token=[],
        )
        self.generated = result.sequences_ids[0]
        if len(self.generated) != count:
            raise RuntimeError(f"CTranslate2 generated {len(self.generated)} tokens of {count}")
