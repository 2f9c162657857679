"""OpenVINO GenAI, which reads GGUF files itself. Options are OpenVINO's properties."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np


def versions() -> dict[str, str]:
    return {name: version(name) for name in ("openvino-genai", "openvino")}


class Runner:
    def __init__(self, model: Path, threads: int, context_length: int, options: Mapping[str, Any]) -> None:
        import openvino_genai

        self.api = openvino_genai
        properties = {"INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": 1, "PERFORMANCE_HINT": "LATENCY", **options}
        self.pipeline = openvino_genai.LLMPipeline(str(model), "CPU", **properties)
        self.settings = (
            ", ".join(f"{key} {value}" for key, value in properties.items())
            + "; generate() of one token is a prefill, its greedy choice included"
        )

    def reset(self, room: int) -> None:
        """Do nothing: every call of `generate` starts from an empty context."""

    def prefill(self, tokens: Sequence[int]) -> None:
        self._generate(tokens, 1)

    def decode(self, tokens: Sequence[int]) -> None:
        self._generate(tokens[:1], len(tokens))

    def next_token(self) -> int:
        return int(self.generated[0])

    def _generate(self, tokens: Sequence[int], count: int) -> None:
        import openvino

        config = self.api.GenerationConfig(max_new_tokens=count, ignore_eos=True, do_sample=False)
        self.generated = self.pipeline.generate(openvino.Tensor(np.array([tokens], np.int64)), config).tokens[0]
        if len(self.generated) != count:
            raise RuntimeError(f"OpenVINO GenAI generated {len(self.generated)} tokens of {count}")
