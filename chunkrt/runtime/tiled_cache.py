"""Layout of bfloat16 caches: blocks are stored in the tile layout of attention (csrc/kernels/attention/attention.h).

An array is uint16 [heads, slots, width]. The number of slots is padded to a multiple of 64, and width is the head
dimension padded to a multiple of 32. Each element is the upper half of a float32. A block of 64 slots is stored as [4,
width / 2, 16 slots, 2 dimensions] for keys, and as [width / 16, 32, 16 dimensions, 2 slots] for values. Files and
prefixes store rows [heads, slots, width] instead.
"""

from __future__ import annotations

from typing import Any

from chunkrt.runtime.buffers import Array

BLOCK = 64
"""Number of slots in a block, which is stored contiguously."""

_TILE, _DEPTH = 16, 32


def tiled_shape(heads: int, slots: int, head_dim: int) -> tuple[int, int, int]:
    """Return the shape of an array for at least `slots` slots."""
    return heads, whole_blocks(slots), -(-head_dim // _DEPTH) * _DEPTH


def whole_blocks(slots: int) -> int:
    """Return the number of slots rounded up to complete blocks."""
    return -(-slots // BLOCK) * BLOCK


def by_slot(array: Array, slots: Array, *, are_values: bool) -> tuple[Array, Any]:
    """Return a view of an array and an index into the view that selects the given slots, [heads, slots, width / n,
    n]."""
    heads, num_slots, width = array.shape
    if are_values:
        tiles = array.reshape(heads, num_slots // BLOCK, width // _TILE, BLOCK // 2, _TILE, 2)
        return tiles.transpose(0, 1, 3, 5, 2, 4), (slice(None), slots // BLOCK, slots % BLOCK // 2, slots % 2)
    tiles = array.reshape(heads, num_slots // _TILE, width // 2, _TILE, 2)
    return tiles.transpose(0, 1, 3, 2, 4), (slice(None), slots // _TILE, slots % _TILE)
