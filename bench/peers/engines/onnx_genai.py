"""ONNX Runtime GenAI; its own builder makes the model."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np


def versions() -> dict[str, str]:
    return {name: version(name) for name in ("onnxruntime-genai", "onnxruntime")}


def convert(source: Path, target: Path, options: Mapping[str, Any]) -> None:
    """Build from a Hugging Face folder. Options: precision, and those of the builder's --extra_options."""
    extra = [f"{key}={value}" for key, value in options.items() if key != "precision"]
    builder = [sys.executable, "-m", "onnxruntime_genai.models.builder"]
    places = ["-i", str(source), "-o", str(target), "-c", str(target / "cache")]
    precision = ["-p", options["precision"], "-e", "cpu"]
    subprocess.run([*builder, *places, *precision, "--extra_options", "hf_token=false", *extra], check=True)


class Runner:
    def __init__(self, model: Path, threads: int, context_length: int, options: Mapping[str, Any]) -> None:
        import onnxruntime_genai

        self.api = onnxruntime_genai
        session_options = {"intra_op_num_threads": threads, "inter_op_num_threads": 1, **options}
        config = onnxruntime_genai.Config(str(model))
        config.overlay(json.dumps({"model": {"decoder": {"session_options": session_options}}}))
        self.model = onnxruntime_genai.Model(config)
        self.settings = f"builder's prune_lm_head (logits of the last token only), {json.dumps(session_options)}"

    def reset(self, room: int) -> None:
        parameters = self.api.GeneratorParams(self.model)
        parameters.set_search_options(max_length=room + 1, do_sample=False)
        self.generator = self.api.Generator(self.model, parameters)

    def prefill(self, tokens: Sequence[int]) -> None:
        self.generator.append_tokens(np.array(tokens, np.int32))

    def decode(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.prefill([token])

    def next_token(self) -> int:
        return int(np.argmax(np.asarray(self.generator.get_logits()).reshape(-1)))
