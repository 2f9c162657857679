"""Weights in blocks of 4 bits: the packed layout, blocks from floats, selection of linears, and their products."""

from dataclasses import replace

import numpy as np
import pytest
from block_checkpoint import BlockCheckpoint
from fixture_checkpoints import checkpoint
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import chunkrt
from chunkrt.checkpoints.catalogue import find, pulled
from chunkrt.checkpoints.source import BlockTensor
from chunkrt.compile.compiler import plan_checkpoint
from chunkrt.engine_directory.figures import linears_by_weight_bits, weight_bytes
from chunkrt.engine_directory.store import (
    BLOCK_SCALE_SUFFIX,
    WeightStore,
    pack_blocks,
    packed_blocks_shapes,
    unpack_blocks,
)
from chunkrt.engine_directory.weights import settle, write_weights
from chunkrt.errors import QuantizationError
from chunkrt.graph.plan import linear_weights
from chunkrt.quant.arithmetic import BlockWeight, quantize_rows, quantize_to_blocks
from chunkrt.quant.scheme import SCHEMES, Scheme
from chunkrt.testing.random_decoders import CONFIG, CONFIG_IN_BLOCKS

SCHEME = SCHEMES["w4a8-dynamic"]
REAL_NAME = "smollm2-135m-instruct"
REAL_MODEL = pulled(find(REAL_NAME))
GGUF = checkpoint("llama_biased_gguf")
LAYER = "model.layers.0"
COLUMNS, DEPTHS = st.sampled_from([1, 15, 16, 17, 33]), st.sampled_from([32, 64, 96])


def random_blocks(columns, depth, seed=0):
    rng = np.random.default_rng(seed)
    scales, minima = (rng.standard_normal((columns, depth // 32)).astype(np.float16) for _ in range(2))
    return BlockTensor(integers=rng.integers(0, 16, (columns, depth), np.uint8), scales=scales, minima=minima)


def assert_same(found, expected):
    for name in ("integers", "scales", "minima"):
        assert getattr(found, name).dtype == getattr(expected, name).dtype
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))


@given(COLUMNS, DEPTHS, st.integers(0, 9))
def test_unpacking_inverts_packing(columns, depth, seed):
    blocks = random_blocks(columns, depth, seed)
    packed = pack_blocks(blocks)
    assert tuple(part.shape for part in packed) == packed_blocks_shapes(depth, columns)
    assert_same(unpack_blocks(*packed, columns), blocks)


def test_packed_layout():
    blocks = random_blocks(18, 64)
    packed, scales = pack_blocks(blocks)
    assert (packed.shape, scales.shape) == ((2, 2, 4, 16, 4), (2, 2, 2, 16))
    for k, n in np.ndindex(64, 32):
        byte = packed[n // 16, k // 32, k % 32 // 8, n % 16, k % 4]
        assert (byte & 15 if k % 8 < 4 else byte >> 4) == (blocks.integers[n, k] if n < 18 else 0)
        for index, part in enumerate((blocks.scales, blocks.minima)):
            assert scales[n // 16, k // 32, index, n % 16] == (part[n, k // 32] if n < 18 else 0)


@given(arrays(np.float32, (64, 3), elements=st.floats(-100, 100, width=16, allow_subnormal=False)))
def test_every_weight_is_the_nearest_step_of_its_block(weight):
    blocks = quantize_to_blocks(weight)
    assert (blocks.integers.shape, blocks.scales.shape, blocks.integers.max() <= 15) == ((3, 64), (3, 2), True)
    exact = weight.T.astype(np.float64).reshape(3, 2, 32)
    scale, minimum = (part[..., None].astype(np.float64) for part in (blocks.scales, blocks.minima))
    np.testing.assert_array_equal(minimum[..., 0], exact.min(axis=-1))
    span = exact.max(axis=-1) - exact.min(axis=-1)
    np.testing.assert_allclose(scale[..., 0], span / 15, rtol=2.0**-11, atol=2.0**-25)
    steps = np.arange(16).reshape(16, 1, 1, 1) * scale + minimum
    nearest = np.abs(steps - exact).min(axis=0)
    found = blocks.dequantise().reshape(3, 2, 32)
    assert (np.abs(found - exact) <= nearest + 2.0**-22 * np.abs(exact).max()).all()


def test_blocks_of_equal_weights_are_their_minimum():
    blocks = quantize_to_blocks(np.full((32, 2), -1.5, np.float32))
    np.testing.assert_array_equal(blocks.dequantise(), np.full((2, 32), -1.5, np.float32))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 7e4, -7e4])
def test_values_that_float16_cannot_hold_are_refused_by_name(bad):
    weight = np.zeros((64, 1030), np.float32)
    weight[40, 1029] = bad if abs(bad) != 7e4 else 16 * bad
    message = r"too large for blocks of 4 bits .*w8a8" if np.isfinite(bad) else "that are not finite"
    with pytest.raises(QuantizationError, match=f"head.weight holds values {message}"):
        quantize_to_blocks(weight, name="head.weight")


@given(COLUMNS, DEPTHS)
def test_products_equal_those_of_the_values(columns, depth):
    """They are computed in float64, on the quantised rows; a sum loses one float32 step per block's product and
    minimum."""
    blocks = random_blocks(columns, depth)
    x = np.random.default_rng(1).standard_normal((5, depth)).astype(np.float32)
    x[1, 7], x[3, 0], x[3, 31] = -4321.7, 2000.1, 2100.3
    x[2] = 0
    is_outlier = np.abs(x) > 1000
    quantized, scale = quantize_rows(np.where(is_outlier, np.float32(0), x))
    exact = np.where(is_outlier, x, quantized * scale.astype(np.float64))
    size = np.repeat(15 * np.abs(blocks.scales.astype(np.float64)) + np.abs(blocks.minima), 32, axis=1)
    found = BlockWeight(blocks).multiply(x)
    off = np.abs(found - exact @ blocks.dequantise().T.astype(np.float64))
    assert (off <= (depth + 4) * 2.0**-24 * (np.abs(exact) @ size.T)).all()
    assert not found[2].any()
    np.testing.assert_array_equal(BlockWeight(blocks).dequantise(), blocks.dequantise().T)


def test_quantize_rows_counts_rows_of_tiny_values_as_zero():
    """127 / 1e-38 is more than float32 holds."""
    x = np.float32([[1e-38, -2e-38, 0], [2.0**-120, -(2.0**-121), 0]])
    integers, scale = quantize_rows(x)
    np.testing.assert_array_equal(integers, [[0, 0, 0], [127, -64, 0]])
    np.testing.assert_allclose(scale, [[0], [2.0**-120 / 127]], rtol=1e-6)


QKV, O_PROJ, GATE_UP, DOWN = (
    f"{LAYER}.{n}_proj.weight" for n in ("self_attn.qkv", "self_attn.o", "mlp.gate_up", "mlp.down")
)


def settled(types, config=CONFIG_IN_BLOCKS, scheme=SCHEME):
    """Return the linears of the first layer, and the LM head, that are in 4 bits."""
    found = settle(BlockCheckpoint(types, config).planned(), scheme)
    return {name for name in (QKV, O_PROJ, GATE_UP, DOWN, "lm_head.weight") if found.has_blocks(name)}


def test_checkpoint_determines_linears_with_blocks():
    assert settled({}) == {QKV, O_PROJ, GATE_UP, DOWN}
    parts = [f"{LAYER}.self_attn.{n}_proj.weight" for n in "qkv"]
    assert settled(dict.fromkeys(parts, "Q4_1")) == {QKV, O_PROJ, GATE_UP, DOWN}
    assert settled(dict(zip(parts, ("Q4_1", "Q4_0", "Q4_1"), strict=True))) == {QKV, O_PROJ, GATE_UP, DOWN}
    assert settled(dict.fromkeys(parts[:2], "Q4_1")) == {O_PROJ, GATE_UP, DOWN}
    assert settled(dict(zip(parts, ("Q4_1", "Q4_1", "Q6_K"), strict=True))) == {O_PROJ, GATE_UP, DOWN}
    assert settled({DOWN: "Q8_0", O_PROJ: "Q4_K"}) == {QKV, GATE_UP}
    assert settled({"lm_head.weight": "Q4_0"}) == {QKV, O_PROJ, GATE_UP, DOWN, "lm_head.weight"}
    assert settled({}, CONFIG) == set()  # blocks do not divide its depths


@pytest.mark.parametrize("name", [name for name in SCHEMES if name != SCHEME.name])
def test_other_schemes_need_no_settling(name):
    assert settle(BlockCheckpoint({}).planned(), SCHEMES[name]) is SCHEMES[name]
    assert not SCHEMES[name].has_blocks(QKV)


def test_checkpoint_blocks_are_stored_unchanged(tmp_path):
    """Parts are concatenated; if there are blocks, no values are loaded."""
    types = {f"{LAYER}.self_attn.{n}_proj.weight": "Q4_1" for n in "qkv"}
    planned = BlockCheckpoint(types).planned()
    scheme, path, loaded = settle(planned, SCHEME), tmp_path / "weights", []

    def load(name):
        loaded.append(name)
        return planned.load(name)

    write_weights(planned.plan, scheme, load, path, load_rotary=planned.load_rotary, load_blocks=planned.load_blocks)
    store = WeightStore.open(path).with_tables(planned.plan)
    parts = [planned.source.read_blocks(name) for name in types]
    expected = BlockTensor(
        **{n: np.concatenate([getattr(part, n) for part in parts]) for n in ("integers", "scales", "minima")}
    )
    assert_same(store.blocks(QKV), expected)
    np.testing.assert_array_equal(store.blocks(QKV).dequantise().T, planned.load(QKV))
    assert QKV not in loaded
    assert_same(store.blocks(DOWN), quantize_to_blocks(planned.load(DOWN)))
    assert sum(weight_bytes(planned.plan, scheme).values()) == store.num_bytes
    for name in linear_weights(planned.plan):
        assert store.array(name).ctypes.data % 64 == 0
        if scheme.has_blocks(name):
            assert store.array(name + BLOCK_SCALE_SUFFIX).ctypes.data % 64 == 0


def test_backends_agree_on_a_float_checkpoint():
    logits = {}
    for npu in ("reference", "onnxrt", "native"):
        with chunkrt.load(GGUF, scheme=SCHEME.name, npu=npu, chunk_length=8) as engine:
            assert isinstance(engine.scheme, Scheme)
            assert engine.scheme.weights_of_8_bits == ("lm_head.weight",)
            logits[npu] = engine.session().prefill(list(range(20))).logits
    for npu in ("onnxrt", "native"):
        off = np.sqrt(np.mean((logits[npu] - logits["reference"]) ** 2))
        assert off <= np.sqrt(np.mean(logits["reference"] ** 2)) / 64


@pytest.mark.skipif(REAL_MODEL is None, reason=f"{REAL_NAME} is not here: chunkrt pull {REAL_NAME}")
def test_real_checkpoint_keeps_its_blocks(tmp_path):
    planned = plan_checkpoint(REAL_MODEL, {})
    scheme = settle(planned, SCHEME)
    assert scheme == replace(SCHEME, weights_of_8_bits=("lm_head.weight",))
    assert linears_by_weight_bits(planned.plan, scheme) == {4: 120, 8: 1, 32: 0}
    for name in ("model.layers.7.self_attn.qkv_proj.weight", "model.layers.29.mlp.down_proj.weight"):
        np.testing.assert_array_equal(planned.load_blocks(name).dequantise().T, planned.load(name))
    assert planned.load_blocks("lm_head.weight") is None
    in_4_bits, in_8_bits = (weight_bytes(planned.plan, s) for s in (scheme, SCHEMES["w8a8-dynamic"]))
    layers = [name for name in linear_weights(planned.plan) if name != "lm_head.weight"]
    assert sum(in_4_bits[n] for n in layers) < 0.63 * sum(in_8_bits[n] for n in layers)
