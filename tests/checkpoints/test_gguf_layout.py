"""Layouts of GGUF tensors: rows and columns are restored to Hugging Face's order, also complete blocks of 4 bits."""

import numpy as np
import pytest

from chunkrt.checkpoints.gguf_names import (
    DEPTHWISE,
    LOGARITHM,
    SINGLE_ROW,
    Layout,
    rotate_half_rows,
    tiled_value_heads,
)
from chunkrt.checkpoints.source import BlockTensor
from chunkrt.errors import ModelError, QuantizationError

CONFIG = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 32,
}
GROUPED = [(key_head, share) for key_head in range(2) for share in range(3)]
TILED = [(key_head, share) for share in range(3) for key_head in range(2)]


def blocks(num_rows, num_columns):
    rng = np.random.default_rng(0)
    scales, minima = rng.standard_normal((2, num_rows, num_columns // 32)).astype(np.float16)
    integers = rng.integers(0, 16, (num_rows, num_columns)).astype(np.uint8)
    return BlockTensor(integers=integers, scales=scales, minima=minima)


def test_value_heads_of_one_key_head_are_grouped():
    layouts = tiled_value_heads(CONFIG)
    stored = np.array([100 * key_head + share for key_head, share in TILED], np.float32)
    expected = [100 * key_head + share for key_head, share in GROUPED]
    assert layouts["ssm_dt"].restore(stored).tolist() == expected
    np.testing.assert_allclose(layouts["ssm_a"].restore(-np.exp(stored / 100)), np.array(expected) / 100, atol=1e-6)
    keys = -np.arange(16, dtype=np.float32)[:, None]
    qkv = np.concatenate([keys, np.repeat(stored, 32)[:, None]])
    wanted = np.concatenate([keys, np.repeat(np.float32(expected), 32)[:, None]])
    np.testing.assert_array_equal(layouts["attn_qkv"].restore(qkv), wanted)
    np.testing.assert_array_equal(layouts["ssm_conv1d"].restore(qkv), wanted[:, None])
    np.testing.assert_array_equal(layouts["ssm_out"].restore(qkv[16:].T), wanted[16:].T)


@pytest.mark.parametrize("module", ["ssm_out", "attn_gate"])
def test_blocks_move_with_their_values(module):
    layout = tiled_value_heads(CONFIG)[module]
    stored = blocks(3, 192) if module == "ssm_out" else blocks(192, 64)
    restored = layout.restore_blocks(stored)
    np.testing.assert_array_equal(restored.dequantise(), layout.restore(stored.dequantise()))


def test_orders_that_split_blocks_are_refused():
    layout = tiled_value_heads(CONFIG | {"linear_value_head_dim": 16})["ssm_out"]
    with pytest.raises(QuantizationError, match="order of its columns splits blocks of 32"):
        layout.restore_blocks(blocks(2, 96))


def test_axis_of_another_length_than_its_order_is_refused():
    with pytest.raises(ModelError, match=r"it is \[5, 2\], and axis 0 should have the length 6"):
        Layout(rows=np.arange(6)).shape((5, 2))
    with pytest.raises(ModelError, match=r"it is \[\], and axis -1 should have the length 6"):
        Layout(columns=np.arange(6)).shape(())
    with pytest.raises(ModelError, match="5 value heads of linear attention cannot share 2 key heads evenly"):
        tiled_value_heads(CONFIG | {"linear_num_value_heads": 5})


def test_pairs_of_interleaved_rope_become_halves():
    stored = np.arange(8, dtype=np.float32)[:, None]
    assert rotate_half_rows(2, 8).restore(stored)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_shapes_become_those_of_hugging_face():
    assert DEPTHWISE.shape((6, 3)) == (6, 1, 3)
    assert DEPTHWISE.shape((6,)) == (6,)
    assert SINGLE_ROW.shape((6,)) == SINGLE_ROW.shape((1, 6)) == (1, 6)
    np.testing.assert_allclose(LOGARITHM.restore(np.float32([-1, -np.e])), [0, 1], atol=1e-6)
