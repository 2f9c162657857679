"""int8 weights against an independent computation, the packed layout, and the store on disk."""

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from rotary_recipes import recipes_of

from chunkrt.engine_directory.store import SCALE_SUFFIX, WeightStore, pack, packed_shape, unpack
from chunkrt.engine_directory.weights import stored_weights, write_weights
from chunkrt.errors import ConfigError, QuantizationError
from chunkrt.graph.decoders import build_decoder
from chunkrt.graph.partition import plan_decoder
from chunkrt.graph.plan import embedding_tables, linear_weights
from chunkrt.quant.arithmetic import quantize_weight
from chunkrt.quant.scheme import SCHEMES, find_scheme
from chunkrt.testing.random_decoders import RandomCheckpoint, random_decoder

FLOATS = st.floats(-1e6, 1e6, width=32, allow_subnormal=False)
SIDES = st.sampled_from([1, 2, 3, 4, 5, 15, 16, 17, 31, 32, 33])
W8A8 = SCHEMES["w8a8-dynamic"]


def weights():
    return st.tuples(SIDES, SIDES).flatmap(lambda shape: arrays(np.float32, shape, elements=FLOATS))


@given(weights())
def test_every_weight_is_the_nearest_of_255_steps(weight):
    quantized, scale = quantize_weight(weight)
    assert (quantized.dtype, scale.dtype) == (np.int8, np.float32)
    assert quantized.min(initial=0) >= -127
    exact_scale = np.abs(weight.astype(np.float64)).max(axis=0) / 127
    np.testing.assert_allclose(scale, exact_scale, rtol=2.0**-23, atol=2.0**-149)
    distance = np.abs(weight.astype(np.float64) - quantized.astype(np.float64) * scale)
    assert (distance <= scale / 2 * (1 + 127 * 2.0**-22)).all()


def test_integers_follow_exact_arithmetic():
    """Fractions round half to even; no weight here is closer to a tie than float32's resolution."""
    rng = np.random.default_rng(0)
    weight = rng.integers(-1000, 1001, (40, 24)).astype(np.float32)
    quantized, _ = quantize_weight(weight)
    for column, integers in zip(weight.T.astype(int).tolist(), quantized.T.tolist(), strict=True):
        limit = max(map(abs, column))
        exact = [Fraction(127 * value, limit) for value in column]
        assert all(abs(abs(e - round(e)) - Fraction(1, 2)) > Fraction(1, 10**5) or e * 2 % 2 == 1 for e in exact)
        assert integers == [round(e) for e in exact]


def test_the_largest_of_a_column_becomes_127_and_ties_go_to_even():
    weight = np.array([[127, -254, 0.5], [0.5, 1, -63.5], [1.5, 3, 0.75], [-2.5, -5, 0.25]], np.float32)
    quantized, scale = quantize_weight(weight)
    np.testing.assert_array_equal(quantized[:, 0], [127, 0, 2, -2])
    np.testing.assert_array_equal(quantized[:, 1], [-127, 0, 2, -2])
    np.testing.assert_array_equal(quantized[:, 2], [1, -127, 2, 0])
    np.testing.assert_array_equal(scale, np.array([1, 2, 0.5], np.float32))


def test_a_column_of_zeros_has_scale_zero():
    quantized, scale = quantize_weight(np.array([[0, 1], [0, -2]], np.float32))
    np.testing.assert_array_equal(quantized, [[0, 64], [0, -127]])
    assert scale[0] == 0


def test_columns_are_quantised_independently():
    weight = np.random.default_rng(0).standard_normal((8, 2500)).astype(np.float32)
    quantized, scale = quantize_weight(weight)
    for column in (0, 1023, 1024, 2499):
        alone, alone_scale = quantize_weight(weight[:, [column]])
        np.testing.assert_array_equal(quantized[:, column], alone[:, 0])
        assert scale[column] == alone_scale[0]


def test_strides_do_not_matter():
    weight = np.random.default_rng(0).standard_normal((6, 9)).astype(np.float32)
    for found, expected in zip(quantize_weight(weight.T), quantize_weight(weight.T.copy()), strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [(0, 0), (5, 1500)])
def test_a_weight_that_is_not_finite_is_refused_by_name(bad, place):
    weight = np.ones((6, 1501), np.float32)
    weight[place] = bad
    with pytest.raises(QuantizationError, match=r"lm_head.weight holds values that are not finite"):
        quantize_weight(weight, name="lm_head.weight")


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("scheme", ["float", "w8a8-dynamic"])
@pytest.mark.parametrize(
    "name", ["model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight", "model.norm.weight"]
)
def test_write_weights_refuses_a_value_that_is_not_finite(tmp_path, name, scheme, bad):
    source = RandomCheckpoint()
    planned = plan_decoder(source, build_decoder(source), {})

    def load(weight):
        values = planned.load(weight).copy()
        values.flat[-1] = bad if weight == name else values.flat[-1]
        return values

    path = tmp_path / "weights.safetensors"
    with pytest.raises(QuantizationError, match=f"{name} holds values that are not finite"):
        write_weights(planned.plan, find_scheme(scheme), load, path, load_rotary=planned.load_rotary)


@given(st.tuples(SIDES, SIDES).flatmap(lambda shape: arrays(np.int8, shape)))
def test_unpack_inverts_pack(weight):
    packed = pack(weight)
    assert packed.shape == packed_shape(*weight.shape)
    np.testing.assert_array_equal(unpack(packed, *weight.shape), weight)


def test_packed_layout_matches_its_documentation():
    weight = np.arange(1, 7 * 18 + 1, dtype=np.int8).reshape(7, 18)
    packed = pack(weight)
    assert packed.shape == (2, 2, 16, 4)
    for k, n in np.ndindex(8, 32):
        expected = weight[k, n] if k < 7 and n < 18 else 0
        assert packed[n // 16, k // 4, n % 16, k % 4] == expected


def test_store_returns_the_decoders_weights():
    source = RandomCheckpoint()
    decoder = random_decoder(list(SCHEMES.values()))
    qkv = np.vstack([source.read(f"model.layers.0.self_attn.{n}_proj.weight") for n in "qkv"]).T
    name = "model.layers.0.self_attn.qkv_proj.weight"
    np.testing.assert_array_equal(decoder.weights["float"].array(name), qkv)
    integers, scale = decoder.weights[W8A8.name].linear(name)
    expected, expected_scale = quantize_weight(qkv)
    np.testing.assert_array_equal(integers, expected)
    np.testing.assert_array_equal(scale, expected_scale)
    packed, _ = decoder.weights[W8A8.name].packed_linear(name)
    np.testing.assert_array_equal(packed, pack(expected))
    table = source.read("model.embed_tokens.weight")
    np.testing.assert_array_equal(decoder.weights["float"].array("model.embed_tokens.weight"), table)
    np.testing.assert_array_equal(
        decoder.weights[W8A8.name].array("model.embed_tokens.weight"), table.astype(np.float16)
    )


def test_stored_weights_separate_linears_and_tables():
    plan = random_decoder([W8A8]).plan
    assert embedding_tables(plan) == {"model.embed_tokens.weight"}
    layers = {
        f"model.layers.{i}.{n}.weight"
        for i in range(2)
        for n in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    }
    assert linear_weights(plan) == layers | {"lm_head.weight"}


def test_packed_weights_lie_at_multiples_of_64_bytes():
    """So that a kernel's loads never cross a cache line."""
    decoder = random_decoder([W8A8])
    for name in linear_weights(decoder.plan):
        packed, _ = decoder.weights[W8A8.name].packed_linear(name)
        assert packed.ctypes.data % 64 == 0


def test_a_store_is_safetensors(tmp_path):
    """An independent reader finds the same arrays."""
    from safetensors.numpy import load_file

    decoder = random_decoder([W8A8])
    drawn = {
        name: np.random.default_rng(0).random([int(d) for d in tensor.shape], np.float32)
        for name, tensor in decoder.plan.tensors.items()
        if tensor.kind == "weight"
    }
    path = tmp_path / "weights.safetensors"
    steps = []
    recipes, plan = recipes_of(decoder.plan), decoder.plan
    write_weights(
        plan, W8A8, drawn.__getitem__, path, load_rotary=recipes, progress=lambda *numbers: steps.append(numbers)
    )
    store, arrays_ = WeightStore.open(path), load_file(path)
    assert steps == [(done, len(drawn)) for done in range(len(drawn) + 1)]
    assert {e.name for w in stored_weights(decoder.plan, W8A8).values() for e in w.entries} == set(arrays_)
    name = "lm_head.weight"
    np.testing.assert_array_equal(arrays_[name], store.packed_linear(name)[0])
    np.testing.assert_array_equal(arrays_[name + SCALE_SUFFIX], store.linear(name)[1])
    assert store.num_bytes == sum(array.nbytes for array in arrays_.values())


def test_write_weights_propagates_errors_of_load(tmp_path):
    plan = random_decoder([W8A8]).plan

    def load(name):
        raise QuantizationError(f"no {name}")

    with pytest.raises(QuantizationError, match="no model"):
        write_weights(plan, W8A8, load, Path(tmp_path / "weights"), load_rotary=recipes_of(plan))


def test_a_table_that_overflows_float16_is_refused(tmp_path):
    plan = random_decoder([W8A8]).plan
    with pytest.raises(QuantizationError, match=r"model.embed_tokens.weight holds values too large for float16"):
        write_weights(
            plan,
            W8A8,
            lambda name: np.full(plan.tensors[name].shape, 7e4, np.float32),
            tmp_path / "weights",
            load_rotary=recipes_of(plan),
        )


def test_an_unknown_scheme_offers_the_nearest():
    with pytest.raises(ConfigError, match=r"unknown scheme 'w8a8-dynmic'; did you mean 'w8a8-dynamic'\? there"):
        find_scheme("w8a8-dynmic")


@pytest.mark.parametrize("name", ["w8a8-dynamic", "w4a8-dynamic"])
def test_dynamic_activations_have_one_digit(name):
    parts = ("self_attn.qkv", "self_attn.o", "mlp.gate_up", "mlp.down")
    names = [*(f"model.layers.3.{part}_proj.weight" for part in parts), "lm_head.weight"]
    assert {SCHEMES[name].num_digits(weight) for weight in names} == {1}
