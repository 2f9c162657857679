"""Recognition of rotary embedding that is written as small operators, by its effect on unit vectors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chunkrt.onnx.importing.regions import Regions
from chunkrt.onnx.importing.signature import Probe

Array = NDArray[Any]

BLOCK = 1024
"""Number of positions whose rows of the tables are read at once."""

FEW = 8
"""Number of tokens of a short prompt."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Rotation:
    """Tables cos and sin, float32 [context, rotary_dim / 2], for rotate-half RoPE; other columns are unchanged."""

    cos: NDArray[np.float32]
    sin: NDArray[np.float32]

    def is_same(self, other: Rotation) -> bool:
        """Return whether another rotation has the same values."""
        return np.array_equal(self.cos, other.cos) and np.array_equal(self.sin, other.sin)

    def rotate(self, x: Array, start: int) -> Array:
        """Rotate x [1, heads, T, head_dim], whose rows are at positions from `start` on."""
        half = self.cos.shape[1]
        cos, sin = (table[start : start + x.shape[2]] for table in (self.cos, self.sin))
        first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


def rotary_dim(regions: Regions, source: str, result: str) -> int | None:
    """Return the number of columns that are rotated between two values [1, heads, T, head_dim]; None if the second is
    not a rotate-half rotation of the first.
    """
    zeros = np.zeros_like(regions.random(source, np.random.default_rng(0)))
    part = regions.part(result, {source: zeros})
    width = zeros.shape[-1]
    mixed = np.zeros((width, width), np.bool_)
    for column in range(width):
        unit = zeros.copy()
        unit[..., column] = 1
        mixed[column] = np.any(_as_heads(part({source: unit}), zeros) != 0, axis=(0, 1, 2))
    rotated = int(np.sum(mixed.sum(axis=1) > 1))
    half = rotated // 2
    plain = np.eye(width, dtype=np.bool_)
    expected = plain.copy()
    expected[np.arange(half), np.arange(half) + half] = expected[np.arange(half) + half, np.arange(half)] = True
    return (
        rotated
        if rotated and rotated % 2 == 0 and np.array_equal(mixed | np.eye(width, dtype=np.bool_), expected)
        else None
    )


def is_by_position(regions: Regions, names: Sequence[str]) -> bool:
    """Return whether the rotation of the first rows is independent of the number of later rows; with longrope it is
    not, because long contexts use other tables. A fixed window has always the same number of rows.
    """
    if regions.lengths.window is not None:
        return True
    few = min(FEW, regions.context)
    short, long = regions.evaluator.runs(names, [Probe(0, few), Probe(0, regions.context)])
    for name in names:
        whole = long[name]
        axis = next((axis for axis, size in enumerate(whole.shape) if size == regions.context), None)
        first = whole if axis is None else whole.take(range(few), axis=axis)
        if first.shape != short[name].shape or not np.allclose(first, short[name], rtol=0, atol=1e-6):
            return False
    return True


def read_tables(regions: Regions, source: str, result: str, width: int) -> Rotation:
    """Return the tables for all positions, read from the rotation of a vector with ones in its first half."""
    context, names = regions.context, regions.positional_inputs(result, {source})
    like = regions.random(source, np.random.default_rng(0))
    half = width // 2
    cos, sin = (np.empty((context, half), np.float32) for _ in range(2))
    window = regions.lengths.window
    if window is not None:
        size = window.length
        probes = [Probe(window.past, size, min(start, context - size)) for start in range(0, context, size)]
    elif regions.lengths.has_past:
        probes = [Probe(start, min(BLOCK, context - start)) for start in range(0, context, BLOCK)]
    else:
        probes = [Probe(0, context)]
    for probe, given in zip(probes, regions.evaluator.runs(names, probes), strict=True):
        start, length = probe.position, probe.length
        ones = np.zeros((1, like.shape[1], length, like.shape[3]), like.dtype)
        ones[..., :half] = 1
        found = regions.part(result, {source: ones}, given)({source: ones})
        cos[start : start + length] = found[0, 0, :, :half]
        sin[start : start + length] = found[0, 0, :, half:width]
    return Rotation(cos=cos, sin=sin)


def _as_heads(values: Array, like: Array) -> Array:
    return values if values.shape == like.shape else values.swapaxes(1, 2)
