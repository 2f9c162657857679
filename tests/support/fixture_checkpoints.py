"""Tiny checkpoints of tests/parity/fixtures, with the logits that Hugging Face Transformers computes for them."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

_FOLDER = Path(__file__).parents[1] / "parity" / "fixtures"
NAMES = sorted(path.name for path in _FOLDER.iterdir())
ONE_OF_EACH_STATE = ("llama_biased_gguf", "gemma3_window_5", "lfm2", "qwen3_next")
"""Decoders with caches, rings and both kinds of recurrent state: all differences that matter above the kernels."""


def checkpoint(name: str) -> Path:
    """Return the path of the Hugging Face folder or the GGUF file."""
    gguf = _FOLDER / name / "model.gguf"
    return gguf if gguf.exists() else _FOLDER / name


def input_ids(name: str) -> list[int]:
    """Return the prompt whose logits are known."""
    return np.load(_FOLDER / name / "expected.npz")["input_ids"].tolist()


def expected_logits(name: str) -> NDArray[np.float32]:
    """Return Transformers' logits of that prompt, float32 [T, V], computed in one pass."""
    return np.load(_FOLDER / name / "expected.npz")["logits"]
