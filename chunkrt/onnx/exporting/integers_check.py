"""Check of written models with integer weights: ONNX Runtime computes with the values of the integers."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from chunkrt.errors import QuantizationError
from chunkrt.graph.partition import Planned
from chunkrt.onnx.exporting.export_settings import WindowSettings
from chunkrt.onnx.exporting.float16_check import NUM_ROWS, evaluate, spread_tokens, window_feeds
from chunkrt.onnx.exporting.forms import tied_weights, window_model
from chunkrt.onnx.exporting.integer_weights import with_rounded_weights
from chunkrt.onnx.window_session import OnnxSession

TOLERANCE, FLOAT16_TOLERANCE = 1e-4, 2e-2
"""Tolerances relative to the largest logit for exports that compute in float32 and in float16."""

log = logging.getLogger(__name__)


def check_integers(planned: Planned, settings: WindowSettings, paths: Sequence[Path]) -> None:
    """Compare written windows with integer weights, on ONNX Runtime, with the decoder whose float32 weights have the
    values of the integers. The decoder is evaluated by ONNX's own reference.

    Raises:
        QuantizationError: the logits differ, so activations or weights were rounded in another way. Some kernels round
            activations, but only with prepacked weights.
        ModelError: ONNX Runtime cannot load a file.
    """
    rows, length = min(NUM_ROWS, settings.sequence), settings.sequence  # the length selects the rotary table
    exact = WindowSettings(window=rows, sequence=length, context=length, dtype="fp32", opset=settings.opset)
    model = window_model(with_rounded_weights(planned, settings, tied_weights(planned)), exact)
    tokens = spread_tokens(planned, rows)
    expected = evaluate(model, window_feeds(model, tokens), lambda done, total: None)["logits"][0]
    tolerance = FLOAT16_TOLERANCE if settings.dtype == "fp16" else TOLERANCE
    for path in paths:
        session = OnnxSession(path, prepack=True)
        found = session.run(tokens.tolist()) if session.batch == 1 else session.run([tokens.tolist()] * session.batch)
        for logits in [found] if isinstance(found, np.ndarray) else found:
            difference = float(np.abs(logits - expected[-len(logits) :]).max() / max(np.abs(expected).max(), 1e-30))
            if not difference <= tolerance:
                raise QuantizationError(
                    f"{path} differs on ONNX Runtime from its {settings.weights} weights with float activations by "
                    f"{difference:.2g} of the largest logit, expected at most {tolerance:g}; use --weights float"
                )
        log.info("%s agrees with its %s weights to %.2g of the largest logit", path, settings.weights, difference)
