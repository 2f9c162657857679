"""Rows of int8 caches in NumPy, with the integers and scales of the native backend.

A row of a head at one position is stored as int8 [head_dim + 4 * groups]: the integers, followed by the bytes of one
float32 scale for each group of INT8_GROUP values.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from chunkrt.graph.plan import INT8_GROUP
from chunkrt.quant.arithmetic import quantize_rows

Int8 = NDArray[np.int8]


def pack_rows(values: NDArray[Any]) -> Int8:
    """Return rows of an int8 cache, int8 [..., head_dim + 4 * groups], for finite values [..., head_dim]."""
    groups = [
        quantize_rows(values[..., begin : begin + INT8_GROUP].astype(np.float32))
        for begin in range(0, values.shape[-1], INT8_GROUP)
    ]
    scales = np.concatenate([scale for _, scale in groups], axis=-1)
    return np.concatenate([*(integers for integers, _ in groups), scales.view(np.int8)], axis=-1)


def unpack_rows(rows: Int8, head_dim: int) -> tuple[Int8, NDArray[np.float32]]:
    """Return the integers [..., head_dim] and the scales [..., groups] of rows of an int8 cache, as views."""
    return rows[..., :head_dim], rows[..., head_dim:].view(np.float32)
