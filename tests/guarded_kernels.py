"""Kernels that write blocks of 16 columns of a matrix, run so that a write anywhere else is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

CANARY = np.float32(1e30)
NUM_GUARDS = 64
"""Canaries on either side of the matrix."""


def run_guarded(
    kernel: Callable[..., None],
    operands: tuple[Any, ...],
    rows: int,
    columns: int,
    blocks: tuple[int, int] | None,
    isa: str,
) -> np.ndarray:
    """float32 [rows, columns]: what a kernel of products writes, in all blocks or [begin, end) of them.

    It stands between canaries, and columns outside those blocks hold some too; all of them must be left.
    """
    begin, end = blocks or (0, -(-columns // 16))
    guarded = np.full(rows * columns + 2 * NUM_GUARDS, CANARY)
    out = guarded[NUM_GUARDS:-NUM_GUARDS].reshape(rows, columns)
    kernel(*operands, out, block_begin=begin, block_end=end, isa=isa)
    assert (guarded[:NUM_GUARDS] == CANARY).all()
    assert (guarded[-NUM_GUARDS:] == CANARY).all()
    outside = np.ones(columns, bool)
    outside[begin * 16 : end * 16] = False
    assert (out[:, outside] == CANARY).all()
    return out
