"""Rotary tables, which hold cos and sin of positions times inverse frequencies, and are made when a model is loaded.

A table is made from a few numbers, its recipe, which an engine directory stores. A recipe is float64 [tables, 1 +
rotary_dim / 2]; each row holds the magnitude and the inverse frequencies of one table. The table thus takes no space on
disk, and memory only for the rows that the context of an engine needs.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from chunkrt.graph.plan import Rotary

Float64 = NDArray[np.float64]

FUNCTIONS: dict[Rotary, Callable[[Float64], Float64]] = {"cos": np.cos, "sin": np.sin}
_ROWS_AT_ONCE = 4096
"""Number of rows whose float64 values are in memory at the same time."""


def rotary_table(function: Rotary, recipe: Float64, *, num_positions: int, num_rows: int) -> NDArray[np.float32]:
    """Compute the first rows of a recipe's concatenated tables in float64, and round them to float32.

    Args:
        function: "cos" or "sin".
        recipe: float64 [tables, 1 + rotary_dim / 2].
        num_positions: number of rows of each table.
        num_rows: number of rows to make, over all tables.

    Returns:
        float32 [num_rows, rotary_dim / 2].
    """
    table = np.empty((num_rows, recipe.shape[1] - 1), np.float32)
    for index, (magnitude, frequencies) in enumerate((row[0], row[1:]) for row in recipe):
        part = table[index * num_positions : (index + 1) * num_positions]
        for start in range(0, len(part), _ROWS_AT_ONCE):
            rows = part[start : start + _ROWS_AT_ONCE]
            positions = np.arange(start, start + len(rows), dtype=np.float64)
            rows[:] = magnitude * FUNCTIONS[function](np.outer(positions, frequencies))
    return table
