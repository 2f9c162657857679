"""Differences between GGUF's and Hugging Face's tensors: another order of rows or columns, or other numbers.

Source: llama.cpp's convert_hf_to_gguf.py and conversion/qwen.py (`Qwen3NextModel`, `_LinearAttentionVReorderBase`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chunkrt.checkpoints.gguf_keys import LARGEST_COUNT
from chunkrt.checkpoints.source import BLOCK_DEPTH, BlockTensor
from chunkrt.errors import ModelError, QuantizationError

Float32 = NDArray[np.float32]
Order = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Conversion of one tensor to Hugging Face's layout.

    Attributes:
        rows, columns: for each row or column in Hugging Face's order, its index in the file.
        values: converts the values.
        is_depthwise: True if the file's [C, K] becomes [C, 1, K].
        is_single_row: True if the file's [K] becomes [1, K].
    """

    rows: Order | None = None
    columns: Order | None = None
    values: Callable[[Float32], Float32] | None = None
    is_depthwise: bool = False
    is_single_row: bool = False

    def shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """Return Hugging Face's shape for the file's shape. Raises ModelError if the length of an axis differs from
        that of its order.
        """
        for axis, order in ((0, self.rows), (-1, self.columns)):
            if order is not None and (not stored or stored[axis] != len(order)):
                raise ModelError(f"it is {list(stored)}, and axis {axis} should have the length {len(order)}")
        if self.is_single_row and len(stored) == 1:
            return (1, *stored)
        return (stored[0], 1, *stored[1:]) if self.is_depthwise and len(stored) == 2 else stored

    def restore(self, stored: Float32) -> Float32:
        """Return the tensor in Hugging Face's layout, from the file's values."""
        found = stored if self.rows is None else stored[self.rows]
        found = found if self.columns is None else found[..., self.columns]
        found = found if self.values is None else self.values(found)
        return found.reshape(self.shape(stored.shape))

    def restore_blocks(self, stored: BlockTensor) -> BlockTensor:
        """Return a tensor in blocks of 4 bits in Hugging Face's layout.

        Raises:
            QuantizationError: the order would split the columns of one block.
        """
        if self.rows is not None:
            stored = BlockTensor(
                integers=stored.integers[self.rows], scales=stored.scales[self.rows], minima=stored.minima[self.rows]
            )
        if self.columns is None:
            return stored
        blocks = self.columns.reshape(-1, BLOCK_DEPTH)
        if (blocks != blocks[:, :1] + np.arange(BLOCK_DEPTH)).any() or (blocks[:, 0] % BLOCK_DEPTH).any():
            raise QuantizationError("the order of its columns splits blocks of 32; use another scheme")
        of_blocks = blocks[:, 0] // BLOCK_DEPTH
        return BlockTensor(
            integers=stored.integers[:, self.columns],
            scales=stored.scales[:, of_blocks],
            minima=stored.minima[:, of_blocks],
        )


AS_IT_IS = Layout()
DEPTHWISE = Layout(is_depthwise=True)
SINGLE_ROW = Layout(is_single_row=True)


def _logarithm(rate: Float32) -> Float32:
    """Return A_log, which the file stores as -exp(A_log)."""
    with np.errstate(all="ignore"):
        return np.log(-rate)


LOGARITHM = Layout(values=_logarithm)


def rotate_half_rows(num_heads: int, num_rows: int) -> Layout:
    """Return Hugging Face's order (rotate-half) of rows that are in the order of interleaved RoPE (pairs adjacent)."""
    pairs = np.arange(num_rows).reshape(num_heads, -1, 2)
    return Layout(rows=pairs.swapaxes(1, 2).ravel())


def tiled_value_heads(config: Mapping[str, Any]) -> dict[str, Layout]:
    """Return layouts, by GGUF module, of linear attention whose file order has the first value heads of all key heads,
    then the second ones, and so on. Hugging Face groups the value heads of each key head.
    """
    k_heads, v_heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    if v_heads % k_heads:
        raise ModelError(f"{v_heads} value heads of linear attention cannot share {k_heads} key heads evenly")
    dim, num_before = config["linear_value_head_dim"], 2 * k_heads * config["linear_key_head_dim"]
    if num_before + v_heads * dim > LARGEST_COUNT:
        raise ModelError(f"linear attention of {num_before + v_heads * dim} columns; expected at most {LARGEST_COUNT}")
    heads = np.arange(v_heads).reshape(-1, k_heads).T.ravel()
    of_values = (heads[:, None] * dim + np.arange(dim)).ravel()
    after_keys = np.concatenate([np.arange(num_before), num_before + of_values])
    return {
        "attn_qkv": Layout(rows=after_keys),
        "attn_gate": Layout(rows=of_values),
        "ssm_alpha": Layout(rows=heads),
        "ssm_beta": Layout(rows=heads),
        "ssm_dt": Layout(rows=heads),
        "ssm_a": Layout(rows=heads, values=_logarithm),
        "ssm_conv1d": Layout(rows=after_keys, is_depthwise=True),
        "ssm_out": Layout(columns=of_values),
    }
