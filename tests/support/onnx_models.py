"""Exported decoders in tests: built in memory, run window by window, and their expected values."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from fixture_checkpoints import checkpoint

from chunkrt.compile.compiler import plan_checkpoint
from chunkrt.graph.partition import Planned
from chunkrt.onnx.exporting import WindowSettings, window_model

FAMILIES = ("llama_gqa", "qwen3", "gemma3_window_5", "lfm2", "qwen3_next")
"""Fixtures, one per kind of decoder."""


@cache
def planned(name: str) -> Planned:
    """Return the decoder and the plan of a fixture."""
    return plan_checkpoint(checkpoint(name), {})


def open_model(model: ir.Model) -> ort.InferenceSession:
    """Return an ONNX Runtime session of a model, with two threads."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 2
    return ort.InferenceSession(ir.to_proto(model).SerializeToString(), options)


class Window:
    """Driver of a fixed window in NumPy. `step` runs one window with a given mask; `run` runs a complete prompt."""

    def __init__(self, decoder: Planned, **settings: Any) -> None:
        self.settings = WindowSettings(**settings)
        self.session = open_model(window_model(decoder, self.settings))
        self.reset()

    def reset(self) -> None:
        """Set all states to zero."""
        types = {"tensor(float)": np.float32, "tensor(float16)": np.float16}
        inputs = [value for value in self.session.get_inputs() if value.name.startswith("past")]
        self.states = {value.name: np.zeros(value.shape, types[value.type]) for value in inputs}

    def step(self, tokens: np.ndarray, num_tokens: int, positions: np.ndarray | None = None) -> np.ndarray:
        """Return the logits of W rows, of which `num_tokens` at the end are tokens and the others padding."""
        mask = np.arange(self.settings.sequence) >= self.settings.sequence - num_tokens
        feeds = {"input_ids": tokens[None], "attention_mask": mask.astype(np.int64)[None], **self.states}
        if self.settings.keys == "post-rope" and positions is not None:
            feeds["position_ids"] = positions[None]
        names = [output.name for output in self.session.get_outputs()]
        logits, *states = self.session.run(names, feeds)
        self.states = {n.replace("present.", "past_key_values."): s for n, s in zip(names[1:], states, strict=True)}
        return logits[0]

    def run(self, tokens: list[int], extra_padding: int = 0) -> np.ndarray:
        """Return the logits of a prompt, padded on the left to complete windows and by some additional windows."""
        window = self.settings.window
        padding = -len(tokens) % window + extra_padding * window
        padded = np.array([0] * padding + list(tokens), np.int64)
        logits = []
        for start in range(0, len(padded), window):
            places = np.arange(start, start + window) - padding
            logits.append(self.step(padded[start : start + window], max(0, places[-1] + 1), np.maximum(places, 0)))
        return np.concatenate(logits)[padding:]
