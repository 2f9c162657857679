"""The tiny checkpoints of tests/parity/fixtures, with the logits that Hugging Face Transformers computes for them."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

_FOLDER = Path(__file__).parent / "parity" / "fixtures"
NAMES = sorted(path.name for path in _FOLDER.iterdir())
ONE_OF_EACH_STATE = ("llama_biased_gguf", "gemma3_window_5", "lfm2", "qwen3_next")
"""Caches, rings, and the two kinds of recurrent state: all by which decoders differ for what is above the kernels."""


def checkpoint(name: str) -> Path:
    """The Hugging Face folder, or the GGUF file."""
    gguf = _FOLDER / name / "model.gguf"
    return gguf if gguf.exists() else _FOLDER / name


def input_ids(name: str) -> list[int]:
    """The prompt whose logits are known."""
    return np.load(_FOLDER / name / "expected.npz")["input_ids"].tolist()


def expected_logits(name: str) -> NDArray[np.float32]:
    """Transformers' logits float32 [T, V] of that prompt, in one shot."""
    return np.load(_FOLDER / name / "expected.npz")["logits"]
