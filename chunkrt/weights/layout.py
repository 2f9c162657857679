"""How an int8 weight lies in memory: one packed layout that every CPU's dot-product instructions can read.

W [K, N] (as in `X @ W`) is stored as int8 [ceil(N/16), ceil(K/4), 16, 4], zero-padded, W[k, n] at
[n // 16, k // 4, n % 16, k % 4]. Four k of one column are adjacent because every int8 dot-product instruction (VNNI
vpdpbusd, NEON sdot) consumes four; sixteen columns fill one cache line and one 512-bit register; the eight-k operands
of NEON smmla come from two neighbouring k-groups by one zip.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

COLUMNS_PER_BLOCK = 16
DEPTH_PER_GROUP = 4


def packed_shape(depth: int, columns: int) -> tuple[int, int, int, int]:
    """Shape of the packed form of a weight [depth, columns]."""
    blocks, groups = -(-columns // COLUMNS_PER_BLOCK), -(-depth // DEPTH_PER_GROUP)
    return blocks, groups, COLUMNS_PER_BLOCK, DEPTH_PER_GROUP


def pack(weight: NDArray[np.int8]) -> NDArray[np.int8]:
    """int8 [K, N] to the packed layout."""
    depth, columns = weight.shape
    blocks, groups, _, _ = packed_shape(depth, columns)
    padded = np.zeros((groups * DEPTH_PER_GROUP, blocks * COLUMNS_PER_BLOCK), np.int8)
    padded[:depth, :columns] = weight
    tiles = padded.reshape(groups, DEPTH_PER_GROUP, blocks, COLUMNS_PER_BLOCK)
    return np.ascontiguousarray(tiles.transpose(2, 0, 3, 1))


def unpack(packed: NDArray[np.int8], depth: int, columns: int) -> NDArray[np.int8]:
    """The packed layout back to int8 [K, N] = [depth, columns]."""
    blocks, groups, _, _ = packed.shape
    matrix = packed.transpose(1, 3, 0, 2).reshape(groups * DEPTH_PER_GROUP, blocks * COLUMNS_PER_BLOCK)
    return np.ascontiguousarray(matrix[:depth, :columns])
