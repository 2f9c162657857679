"""Pack the weights of linear layers for the dot-product instructions of all CPUs, and unpack them.

W [K, N] (as in `X @ W`) is stored as int8 [ceil(N/16), ceil(K/4), 16, 4], zero-padded, with W[k, n] at [n // 16, k //
4, n % 16, k % 4]. Four values along k of one column are adjacent, because all int8 dot-product instructions (VNNI
vpdpbusd, NEON sdot) consume four values. Sixteen columns fill one cache line and one 512-bit register. NEON smmla
consumes eight values along k; one zip of two adjacent groups yields them.

A weight of 4 bits in blocks is stored as uint8 [ceil(N/16), K/32, 4, 16, 4]: the integer of W[k, n] is at [n // 16, k
// 32, k % 32 // 8, n % 16, k % 4], in the low half of the byte if k % 8 < 4, otherwise in the high half. A mask or a
shift yields groups of four values as above. A second array, float16 [ceil(N/16), K/32, 2, 16], contains the scales of
16 columns and then their minima. Both arrays are zero past column N.

A weight of 4 bits under a static scheme is stored in the same layout, with ceil(K/32) blocks and 8 added to its
integers. A second array, uint8 [ceil(N/16), ceil(K/32), 16], contains its multipliers, with zeros past column N.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from chunkrt.checkpoints.source import BLOCK_DEPTH, BlockTensor

COLUMNS_PER_BLOCK = 16
DEPTH_PER_GROUP = 4
ZERO_OF_4_BITS = 8
"""Stored value that represents 0 in a static linear of 4 bits, whose integers are -7 to 7."""


def packed_shape(depth: int, columns: int) -> tuple[int, int, int, int]:
    """Return the shape of the packed form of a weight [depth, columns]."""
    blocks, groups = -(-columns // COLUMNS_PER_BLOCK), -(-depth // DEPTH_PER_GROUP)
    return blocks, groups, COLUMNS_PER_BLOCK, DEPTH_PER_GROUP


def pack(weight: NDArray[np.int8]) -> NDArray[np.int8]:
    """Pack int8 [K, N]."""
    depth, columns = weight.shape
    blocks, groups, _, _ = packed_shape(depth, columns)
    padded = np.zeros((groups * DEPTH_PER_GROUP, blocks * COLUMNS_PER_BLOCK), np.int8)
    padded[:depth, :columns] = weight
    tiles = padded.reshape(groups, DEPTH_PER_GROUP, blocks, COLUMNS_PER_BLOCK)
    return np.ascontiguousarray(tiles.transpose(2, 0, 3, 1))


def packed_blocks_shapes(depth: int, columns: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of the packed arrays of a weight [depth, columns] in blocks: bytes, and scales with minima."""
    tiles, blocks = -(-columns // COLUMNS_PER_BLOCK), -(-depth // BLOCK_DEPTH)
    pairs = BLOCK_DEPTH // (2 * DEPTH_PER_GROUP)
    return (tiles, blocks, pairs, COLUMNS_PER_BLOCK, DEPTH_PER_GROUP), (tiles, blocks, 2, COLUMNS_PER_BLOCK)


def pack_blocks(weight: BlockTensor) -> tuple[NDArray[np.uint8], NDArray[np.float16]]:
    """Pack a tensor [N, K] in blocks into two arrays: bytes, and scales with minima."""
    columns, depth = weight.integers.shape
    (tiles, blocks, *_), scales_shape = packed_blocks_shapes(depth, columns)
    scales = np.zeros((tiles * COLUMNS_PER_BLOCK, blocks, 2), np.float16)
    scales[:columns] = np.stack([weight.scales, weight.minima], axis=-1)
    by_tile = scales.reshape(tiles, COLUMNS_PER_BLOCK, blocks, 2).transpose(0, 2, 3, 1)
    assert by_tile.shape == scales_shape
    return _pack_halves(weight.integers), np.ascontiguousarray(by_tile)


def pack_products(
    products: NDArray[np.int8], multipliers: NDArray[np.int8]
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Pack the factors of products int8 [K, N] of 4-bit integers and multipliers [ceil(K / 32), N]."""
    depth, columns = products.shape
    integers = products // np.repeat(multipliers, BLOCK_DEPTH, axis=0)[:depth] + np.int8(ZERO_OF_4_BITS)
    (tiles, blocks, *_), _ = packed_blocks_shapes(depth, columns)
    padded = np.zeros((blocks, tiles * COLUMNS_PER_BLOCK), np.uint8)
    padded[:, :columns] = multipliers
    by_tile = padded.reshape(blocks, tiles, COLUMNS_PER_BLOCK).transpose(1, 0, 2)
    return _pack_halves(integers.T.astype(np.uint8)), np.ascontiguousarray(by_tile)


def unpack(packed: NDArray[np.int8], depth: int, columns: int) -> NDArray[np.int8]:
    """Unpack int8 [K, N] = [depth, columns]."""
    blocks, groups, _, _ = packed.shape
    matrix = packed.transpose(1, 3, 0, 2).reshape(groups * DEPTH_PER_GROUP, blocks * COLUMNS_PER_BLOCK)
    return np.ascontiguousarray(matrix[:depth, :columns])


def unpack_blocks(packed: NDArray[np.uint8], scales: NDArray[np.float16], columns: int) -> BlockTensor:
    """Unpack a tensor [N, K] in blocks, N = columns."""
    tiles, blocks, *_ = packed.shape
    integers = _unpack_halves(packed, columns)
    by_column = scales.transpose(2, 0, 3, 1).reshape(2, tiles * COLUMNS_PER_BLOCK, blocks)
    return BlockTensor(integers=integers, scales=by_column[0, :columns], minima=by_column[1, :columns])


def unpack_products(
    packed: NDArray[np.uint8], multipliers: NDArray[np.uint8], depth: int, columns: int
) -> NDArray[np.int8]:
    """Unpack 4-bit integers and multipliers to their products int8 [K, N] = [depth, columns]."""
    integers = _unpack_halves(packed, columns)[:, :depth].T.astype(np.int8) - np.int8(ZERO_OF_4_BITS)
    products: NDArray[np.int8] = integers * np.repeat(unpack_multipliers(multipliers, columns), BLOCK_DEPTH, 0)[:depth]
    return products


def unpack_multipliers(packed: NDArray[np.uint8], columns: int) -> NDArray[np.int8]:
    """Unpack multipliers to int8 [ceil(K / 32), N], N = columns."""
    tiles, blocks, _ = packed.shape
    by_block = packed.transpose(1, 0, 2).reshape(blocks, tiles * COLUMNS_PER_BLOCK)
    return by_block[:, :columns].astype(np.int8)


def _pack_halves(integers: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Pack integers [N, K] of 4 bits; incomplete blocks are padded with zeros."""
    columns, depth = integers.shape
    (tiles, blocks, pairs, *_), _ = packed_blocks_shapes(depth, columns)
    padded = np.zeros((tiles * COLUMNS_PER_BLOCK, blocks * BLOCK_DEPTH), np.uint8)
    padded[:columns, :depth] = integers
    halves = padded.reshape(tiles, COLUMNS_PER_BLOCK, blocks, pairs, 2, DEPTH_PER_GROUP).transpose(4, 0, 2, 3, 1, 5)
    return np.ascontiguousarray(halves[0] | halves[1] << 4)


def _unpack_halves(packed: NDArray[np.uint8], columns: int) -> NDArray[np.uint8]:
    """Unpack integers of 4 bits to [N, K], K in complete blocks."""
    tiles, blocks, *_ = packed.shape
    halves = np.stack([packed & 15, packed >> 4], axis=3)
    by_column = halves.transpose(0, 4, 1, 2, 3, 5).reshape(tiles * COLUMNS_PER_BLOCK, blocks * BLOCK_DEPTH)
    return by_column[:columns]
