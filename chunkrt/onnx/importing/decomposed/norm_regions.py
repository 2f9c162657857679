"""Recognition of root-mean-square norms, x * w / sqrt(mean(x^2) + epsilon), and of the tanh form of GELU, that are
written as small operators in any order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np

from chunkrt.onnx.importing.evaluation import decimal
from chunkrt.onnx.importing.regions import Regions

TOLERANCE = 1e-5
"""Tolerance relative to the largest value, for different orders of the same float32 operations."""
MOST_STEPS = 8
"""Largest number of values between the mean and the norm's result."""


@dataclass(frozen=True, kw_only=True)
class Norm:
    """A norm over the last axis, by the names of values in the foreign graph; `weight` is a constant [N]."""

    source: str
    result: str
    weight: str
    epsilon: float


def find_norms(regions: Regions) -> dict[str, Norm]:
    """Find all norms of a graph, by their results.

    A candidate is accepted as a norm only if it computes the formula's values on random input.
    """
    found = (_norm_around(regions, node.output[0]) for node in regions.proto.graph.node if node.op_type == "ReduceMean")
    return {norm.result: norm for norm in found if norm is not None}


def _norm_around(regions: Regions, mean: str) -> Norm | None:
    if mean not in regions.data:
        return None
    source = _source(regions, mean)
    epsilon = _epsilon(regions, mean)
    if source is None or epsilon is None:
        return None
    width = regions.shape(source)[-1]
    x = regions.random(source, np.random.default_rng(1))
    plain = x / np.sqrt(np.mean(np.square(x, dtype=np.float64), axis=-1, keepdims=True) + epsilon)
    for steps, result in enumerate(regions.below(mean)):
        if steps > MOST_STEPS:
            return None
        node = regions.writer(result)
        weights = [n for n in node.input if n not in regions.data]
        if node.op_type != "Mul" or len(weights) != 1 or weights[0] not in regions.evaluator.constants:
            continue
        weight = regions.evaluator.constant(weights[0])
        if weight.shape[-1:] != (width,) or weight.size != width:
            continue
        if not regions.is_between(result, {source}):
            return None
        expected = plain * weight.reshape(-1)
        y = regions.run(result, {source: x})
        if y.shape == expected.shape and np.abs(y - expected).max() <= _tolerance(y) * np.abs(expected).max():
            return Norm(source=source, result=result, weight=weights[0], epsilon=epsilon)
        return None
    return None


def _source(regions: Regions, mean: str) -> str | None:
    """Return the value that is squared: ignoring casts, the nearest input of the mean that is as wide as the averaged
    value.
    """
    squared = regions.writer(mean).input[0]
    for name in regions.above(squared):
        node = regions.writer(name)
        if name != squared and node.op_type != "Cast":
            return name if regions.shape(name) == regions.shape(squared) else None
    return None


def _epsilon(regions: Regions, mean: str) -> float | None:
    """Return the constant that is added to the mean."""
    for node in regions.readers(mean):
        if node.op_type == "Add":
            for name in node.input:
                if name in regions.evaluator.constants:
                    value = regions.evaluator.constant(name)
                    return decimal(value.item()) if value.size == 1 else None
    return None


def _tolerance(values: np.ndarray) -> float:
    return TOLERANCE if values.dtype == np.float32 else 1e-2


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
