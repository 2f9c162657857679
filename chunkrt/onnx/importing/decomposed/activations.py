"""The tanh form of GELU, written as small operators."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import numpy as np

from chunkrt.onnx.importing.regions import Regions

TOLERANCE = 1e-5
MOST_STEPS = 8
"""Largest number of values between the input and Tanh, and between Tanh and the result."""


def find_gelus(regions: Regions) -> Iterator[tuple[str, str]]:
    """Find all pairs (source, result) where result is 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), by
    evaluation.
    """
    for node in regions.proto.graph.node:
        if node.op_type == "Tanh" and node.output[0] in regions.data:
            yield from islice(_around(regions, node.output[0]), 1)


def _around(regions: Regions, tanh: str) -> Iterator[tuple[str, str]]:
    shape = regions.shape(tanh)
    for source in islice(regions.above(tanh), 1, MOST_STEPS):
        if regions.shape(source) != shape:
            return
        x = regions.random(source, np.random.default_rng(2))
        expected = 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
        tolerance = (TOLERANCE if x.dtype == np.float32 else 1e-2) * np.abs(expected).max()
        for result in islice(regions.below(tanh), 1, MOST_STEPS):
            if regions.shape(result) != shape or not regions.is_between(result, {source}):
                continue
            if np.abs(regions.run(result, {source: x}) - expected).max() <= tolerance:
                yield source, result
