"""The weights of an engine: prepared once when a model is compiled, memory-mapped ever after.

One file, in safetensors format, serves every backend, on the NPU and on the CPU, in prefill and in decode. A linear's
weight under an 8-bit scheme is stored packed for the CPU kernels; `linear` undoes that for the others.

Packed layout of W [K, N] (as in `X @ W`): int8 [ceil(N/16), ceil(K/4), 16, 4], zero-padded, element
[n // 16, k // 4, n % 16, k % 4]. Four k of one column are adjacent because every int8 dot-product instruction (VNNI
vpdpbusd, NEON sdot) consumes four; sixteen columns fill one cache line and one 512-bit register; NEON smmla's
eight-k operands come from two neighbouring k-groups by one zip.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

COLUMNS_PER_BLOCK = 16
DEPTH_PER_GROUP = 4


class WeightStore(Protocol):
    """Read access to prepared weights by plan tensor name."""

    def array(self, name: str) -> NDArray[Any]:
        """A weight as stored: float32, or float16 for an embedding table; read-only, memory-mapped."""
        ...

    def packed_linear(self, name: str) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
        """A quantised linear's packed int8 weight and its scales float32 [N]."""
        ...

    def linear(self, name: str) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
        """A quantised linear's int8 weight as [K, N] (a copy) and its scales float32 [N]."""
        ...


def pack(weight: NDArray[np.int8]) -> NDArray[np.int8]:
    """int8 [K, N] to the packed layout above."""
    depth, columns = weight.shape
    groups, blocks = -(-depth // DEPTH_PER_GROUP), -(-columns // COLUMNS_PER_BLOCK)
    padded = np.zeros((groups * DEPTH_PER_GROUP, blocks * COLUMNS_PER_BLOCK), np.int8)
    padded[:depth, :columns] = weight
    tiles = padded.reshape(groups, DEPTH_PER_GROUP, blocks, COLUMNS_PER_BLOCK)
    return np.ascontiguousarray(tiles.transpose(2, 0, 3, 1))


def unpack(packed: NDArray[np.int8], depth: int, columns: int) -> NDArray[np.int8]:
    """The packed layout back to int8 [K, N] = [depth, columns]."""
    blocks, groups, _, _ = packed.shape
    matrix = packed.transpose(1, 3, 0, 2).reshape(groups * DEPTH_PER_GROUP, blocks * COLUMNS_PER_BLOCK)
    return np.ascontiguousarray(matrix[:depth, :columns])
