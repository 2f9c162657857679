"""Rows of bfloat16 caches: each element is stored where the layout in csrc/kernels/attention/attention.h places it."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from chunkrt.runtime.state_tensors import tiled_writes

HEADS, SLOTS, WIDTH = 2, 256, 32
TILED = [(0, SLOTS), (64, 192), (32, 64), (0, 16), (16, 48), (32, 96), (48, 160)]
RAGGED = [(0, 1), (5, 6), (15, 17), (3, 61), (17, 207), (63, 65), (100, 228), (130, 131), (7, 256)]
RANGES = [*TILED, *RAGGED, (20, 20), (64, 64)]


def in_tiles(rows: NDArray[np.uint16], start: int, *, are_values: bool) -> NDArray[np.uint16]:
    """Return a cache with the rows [heads, slots, width] from slot `start` on, element by element, and zeros.

    Keys are [4, depth / 2, 16 positions, 2 dimensions] in each block of 64 positions, and values [depth / 16, 32, 16
    dimensions, 2 positions].
    """
    cache = np.zeros((HEADS, SLOTS // 64, 64 * WIDTH), np.uint16)
    for head, row, dim in np.ndindex(rows.shape):
        block, slot = divmod(start + row, 64)
        if are_values:
            place = ((dim // 16 * 32 + slot // 2) * 16 + dim % 16) * 2 + slot % 2
        else:
            place = ((slot // 16 * (WIDTH // 2) + dim // 2) * 16 + slot % 16) * 2 + dim % 2
        cache[head, block, place] = rows[head, row, dim]
    return cache.reshape(HEADS, SLOTS, WIDTH)


@pytest.mark.parametrize("are_values", [False, True])
@pytest.mark.parametrize(("start", "stop"), RANGES)
def test_tiled_writes_store_rows_in_the_layout_of_the_kernels(start: int, stop: int, *, are_values: bool) -> None:
    random = np.random.default_rng(start + 1000 * stop)
    rows = random.integers(1, 2**16, (HEADS, stop - start, WIDTH)).astype(np.uint16)
    expected = in_tiles(rows, start, are_values=are_values)
    for slots in (slice(start, stop), np.arange(start, stop)):
        cache = np.zeros((HEADS, SLOTS, WIDTH), np.uint16)
        for view, key, value in tiled_writes(cache, slots, rows, are_values=are_values):
            view[key] = value
        np.testing.assert_array_equal(cache, expected)


@pytest.mark.parametrize("are_values", [False, True])
@pytest.mark.parametrize(("start", "stop"), RANGES)
def test_tiled_writes_are_views_by_which_rows_are_read(start: int, stop: int, *, are_values: bool) -> None:
    random = np.random.default_rng(start + 1000 * stop)
    rows = random.integers(1, 2**16, (HEADS, stop - start, WIDTH)).astype(np.uint16)
    cache = in_tiles(rows, start, are_values=are_values)
    together = np.zeros((HEADS, stop - start + 7, WIDTH), np.uint16)  # the rows are a part of a larger array
    for view, key, value in tiled_writes(
        cache, slice(start, stop), together[:, 3 : 3 + stop - start], are_values=are_values
    ):
        value[...] = view[key]
    np.testing.assert_array_equal(together[:, 3 : 3 + stop - start], rows)
    assert not together[:, :3].any()
    assert not together[:, 3 + stop - start :].any()
