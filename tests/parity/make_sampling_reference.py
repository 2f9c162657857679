"""Probabilities after Hugging Face Transformers' logits processors, for random logits: the reference of the sampler's
tests.

Writes tests/data/sampling_reference.npz: `options`, JSON text [N]; `logits` float32 [N, V]; `history` int64 [N, T];
`probabilities` float32 [N, V], of the next token. The processors are applied in the order of `generate`.

    python make_sampling_reference.py

Needs torch and transformers; last done with torch 2.13, transformers 5.23.
"""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import LogitsProcessorList
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

REFERENCE = Path(__file__).parents[1] / "data" / "sampling_reference.npz"
VOCAB_SIZE, HISTORY = 64, 12


def main() -> None:
    """Write the reference."""
    grid = product((0.3, 1.0, 2.5), (None, 1, 7), (1.0, 0.9, 0.2), (0.0, 0.15), (1.0, 1.3, 0.7))
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    options = [dict(zip(names, values, strict=True)) for values in grid]
    rng = np.random.default_rng(0)
    logits = (rng.standard_normal((len(options), VOCAB_SIZE)) * 3).astype(np.float32)
    history = rng.integers(0, VOCAB_SIZE, (len(options), HISTORY))
    probabilities = [
        softmax_of(processors(chosen), ids, row) for chosen, ids, row in zip(options, history, logits, strict=True)
    ]
    np.savez_compressed(
        REFERENCE,
        options=np.array([json.dumps(chosen) for chosen in options]),
        logits=logits,
        history=history,
        probabilities=np.array(probabilities),
    )


def softmax_of(
    chosen: LogitsProcessorList, history: NDArray[np.int64], logits: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Return probabilities float32 [V] after the processors."""
    scores = chosen(torch.from_numpy(history)[None], torch.from_numpy(logits)[None])
    return np.asarray(torch.softmax(scores, dim=-1)[0].numpy())


def processors(options: dict[str, Any]) -> LogitsProcessorList:
    """Return the processors of one set of options; the order is that of GenerationMixin._get_logits_processor."""
    chosen = LogitsProcessorList()
    if options["repetition_penalty"] != 1:
        chosen.append(RepetitionPenaltyLogitsProcessor(options["repetition_penalty"]))
    if options["temperature"] != 1:
        chosen.append(TemperatureLogitsWarper(options["temperature"]))
    if options["top_k"] is not None:
        chosen.append(TopKLogitsWarper(options["top_k"]))
    if options["top_p"] < 1:
        chosen.append(TopPLogitsWarper(options["top_p"]))
    if options["min_p"] > 0:
        chosen.append(MinPLogitsWarper(options["min_p"]))
    return chosen


if __name__ == "__main__":
    main()
