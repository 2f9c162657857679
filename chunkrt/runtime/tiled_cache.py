"""bfloat16 caches, whose blocks are stored as the tiles that attention multiplies (csrc/kernels/attention/attention.h).

An array is uint16 [heads, slots, width]: slots to a multiple of 64, width the head's dimensions to a multiple of 32,
each bfloat16 the upper half of a float32. Within 64 slots keys are [4, width / 2, 16 slots, 2 dimensions], values
[width / 16, 32, 16 dimensions, 2 slots]. Elsewhere, in files and prefixes, there are rows [heads, slots, width].
"""

from __future__ import annotations

from typing import Any

from chunkrt.runtime.buffers import Array

BLOCK = 64
"""Number of slots in a block, which is stored contiguously."""

_TILE, _DEPTH = 16, 32


def tiled_shape(heads: int, slots: int, head_dim: int) -> tuple[int, int, int]:
    """Return the shape of an array with room for at least `slots` slots."""
    return heads, whole_blocks(slots), -(-head_dim // _DEPTH) * _DEPTH


def whole_blocks(slots: int) -> int:
    """Return the number of slots rounded up to complete blocks."""
    return -(-slots // BLOCK) * BLOCK


def by_slot(array: Array, slots: Array, *, are_values: bool) -> tuple[Array, Any]:
    """Return a view of an array, and a key that selects some slots of it, [heads, slots, width / n, n]."""
    heads, num_slots, width = array.shape
    if are_values:
        tiles = array.reshape(heads, num_slots // BLOCK, width // _TILE, BLOCK // 2, _TILE, 2)
        return tiles.transpose(0, 1, 3, 5, 2, 4), (slice(None), slots // BLOCK, slots % BLOCK // 2, slots % 2)
    tiles = array.reshape(heads, num_slots // _TILE, width // 2, _TILE, 2)
    return tiles.transpose(0, 1, 3, 2, 4), (slice(None), slots // _TILE, slots % _TILE)
