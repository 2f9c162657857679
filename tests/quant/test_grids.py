"""The grids of static schemes: their derivation from a calibration, and their arrays in the store."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rotary_recipes import recipes_of

from chunkrt.compile.calibrate import calibrate
from chunkrt.engine_directory.store import (
    HOT_CHANNELS_SUFFIX,
    INPUT_STEP_SUFFIX,
    MULTIPLIER_SUFFIX,
    OUTPUT_STEP_SUFFIX,
    SCALE_SUFFIX,
    WeightStore,
)
from chunkrt.engine_directory.weights import stored_weights, write_weights
from chunkrt.errors import QuantizationError
from chunkrt.graph.plan import Node, linear_nodes
from chunkrt.quant.arithmetic import quantize_weight_in_blocks
from chunkrt.quant.calibration import Calibration, num_hot_channels
from chunkrt.quant.folding import Folding
from chunkrt.quant.grid import excess_over_grid, grids_of, round_to_grid
from chunkrt.quant.scheme import LEVELS, SCHEMES
from chunkrt.testing.random_decoders import CONFIG_IN_BLOCKS, random_decoder

STATIC = [scheme for scheme in SCHEMES.values() if scheme.is_static]
W8A16, W8A8, W4A16 = (SCHEMES[name] for name in ("w8a16", "w8a8", "w4a16"))
FLOAT_OUTPUTS = replace(W8A8, name="w8a8 with float outputs", float_outputs=("*",))
SHADOWED = replace(W8A8, name="w8a8 with shadows", shadowed=("*",))
QKV, O_PROJ, GATE_UP, DOWN = (
    f"model.layers.0.{name}.weight"
    for name in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
)
HEAD = "lm_head.weight"


def drawn(plan):
    """Return weights from a seed, by plan name."""

    def load(name):
        shape = [int(d) for d in plan.tensors[name].shape]
        return np.random.default_rng(len(name)).standard_normal(shape, np.float32) * np.float32(0.2)

    return load


def linear(weight):
    return Node(name="product", op="MatMul", domain="", inputs=("x", weight), outputs=("y",), attributes={})


SEEN = Calibration(
    model="toy",
    weights="",
    token_ids=np.zeros(1, np.int64),
    method="mse",
    equalisation=None,
    is_rotated=False,
    folding=Folding(),
    peaks={"x": 32639 / 64, "y": 32639 / 256},
    limits={"x": 127 / 64},
    shadow_limits={"x": 127 / 512},
    column_peaks={"y": np.array([127.0, 0.0, 32639 / 256], np.float32)},
    channel_peaks={"x": np.array([32639 / 64, 1.0], np.float32)},
    shadowed_column_peaks={"y": np.array([12.7, 0.0, 1.27], np.float32)},
    hot_channels={"x": np.array([0], np.int32)},
    histograms={},
)

FINE = np.full(3, 1e-9, np.float32)
"""Scales of a weight so small that they do not affect an output's grid."""


@pytest.mark.parametrize("bits", [8, 16])
def test_values_go_to_the_nearest_level_and_ties_to_the_even_one(bits):
    levels, step = LEVELS[bits], np.float32(0.25)
    steps = np.array(
        [0.5, 1.5, -0.5, -2.5, 0.75, levels - 0.5, levels, levels + 0.5, 2 * levels, -levels - 3], np.float32
    )
    expected = [0, 2, 0, -2, 1, levels - 1, levels, levels, levels, -levels]
    np.testing.assert_array_equal(round_to_grid(steps * step, np.array([step]), bits), expected)


def test_column_grids_are_separate():
    x = np.array([[1, 1, 1], [-3, 300, 0.25]], np.float32)
    found = round_to_grid(x, np.array([0.5, 2, 1], np.float32), 8)
    np.testing.assert_array_equal(found, [[2, 0, 1], [-6, 127, 0]])


def test_16_bit_grids_reach_the_peak_and_outputs_twice_as_far():
    grids = grids_of(linear(O_PROJ), W8A16, SEEN, FINE)
    np.testing.assert_array_equal(grids.input_step, np.array([1 / 64], np.float32))
    np.testing.assert_array_equal(grids.output_step, np.array([2 / 256], np.float32))


def test_8_bit_grids_end_at_the_limit_and_outputs_a_quarter_above_the_peak_of_their_column():
    """A column that was always zero gets a grid as if it had reached 1."""
    grids = grids_of(linear(O_PROJ), W8A8, SEEN, FINE)
    np.testing.assert_array_equal(grids.input_step, np.array([1 / 64], np.float32))
    np.testing.assert_array_equal(grids.output_step, np.array([1.25, 1 / 127, 1.25 * 32639 / 256 / 127], np.float32))


def test_wide_linears_have_16_bit_grids_by_column():
    grids = grids_of(linear(HEAD), W8A8, SEEN, FINE)
    np.testing.assert_array_equal(grids.input_step, np.array([1 / 64], np.float32))
    np.testing.assert_array_equal(grids.output_step, np.array([2 * 127 / 32639, 1 / 32639, 2 / 256], np.float32))


def test_float_output_has_no_grid():
    """If a pattern selects some outputs, the others keep their grids. Under schemes that are not static all outputs are
    float."""
    for weight, input_step in ((O_PROJ, 1 / 64), (HEAD, 1 / 64)):
        grids = grids_of(linear(weight), FLOAT_OUTPUTS, SEEN, FINE)
        np.testing.assert_array_equal(grids.input_step, np.array([input_step], np.float32))
        assert grids.output_step is None
    some = replace(W8A8, float_outputs=("*.o_proj.weight",))
    assert grids_of(linear(O_PROJ), some, SEEN, FINE).output_step is None
    assert grids_of(linear(QKV), some, SEEN, FINE).output_step.shape == (3,)
    assert [some.has_column_grids(w) for w in (QKV, O_PROJ)] == [True, False]
    assert all(SCHEMES[name].has_float_output(O_PROJ) for name in ("float", "w8a8-dynamic"))


def test_shadow_makes_grids_end_earlier():
    """The input's grid ends at the calibration's limit, the output's a quarter above the peak of the main half."""
    grids = grids_of(linear(O_PROJ), SHADOWED, SEEN, FINE)
    np.testing.assert_array_equal(grids.input_step, np.array([1 / 512], np.float32))
    np.testing.assert_array_equal(grids.output_step, np.array([0.125, 1 / 127, 0.0125], np.float32))
    by_tensor = replace(SHADOWED, column_grids=())
    np.testing.assert_array_equal(
        grids_of(linear(O_PROJ), by_tensor, SEEN, FINE).output_step, np.array([0.125], np.float32)
    )
    of_head, without = (grids_of(linear(HEAD), scheme, SEEN, FINE) for scheme in (SHADOWED, W8A8))
    np.testing.assert_array_equal(of_head.input_step, without.input_step)  # it has 16 bits, and no shadow
    np.testing.assert_array_equal(of_head.output_step, without.output_step)


def test_main_half_of_a_split_linear_has_the_grids_of_the_linear():
    main = replace(linear(O_PROJ), outputs=("y.main",))
    found, expected = (grids_of(node, SHADOWED, SEEN, FINE) for node in (main, linear(O_PROJ)))
    np.testing.assert_array_equal(found.output_step, expected.output_step)


def test_only_8_bit_linears_have_shadows():
    assert [SHADOWED.is_shadowed(w) for w in (QKV, O_PROJ, GATE_UP, DOWN, HEAD)] == [True, True, True, True, False]
    some = replace(W8A8, shadowed=(DOWN,))
    assert [some.is_shadowed(w) for w in (QKV, O_PROJ, GATE_UP, DOWN, HEAD)] == [False, False, False, True, False]
    wide, dynamic = (replace(SCHEMES[name], shadowed=("*",)) for name in ("w8a16", "w8a8-dynamic"))
    assert not any(scheme.is_shadowed(w) for scheme in (wide, dynamic) for w in (QKV, DOWN, HEAD))


@pytest.mark.parametrize("bits_apart", range(-3, 4))
@pytest.mark.parametrize("threshold", [126.5, 127.0, 127.5, 128.0, 1e6])
@pytest.mark.parametrize("sign", [1, -1])
def test_excess_begins_where_rounding_leaves_the_grid(threshold, sign, bits_apart):
    """With ties to even, the boundary is half-way from the last level to the next: 127.5 steps exceed it, the float32
    below does not."""
    for step in np.float32([1, 0.3, 2.0**-40]):
        x = np.float32(sign * threshold) * step
        for _ in range(abs(bits_apart)):
            x = np.nextafter(x, np.float32(np.copysign(np.inf, bits_apart)))
        found = excess_over_grid(np.full((1, 1), x), np.array([step]))[0, 0]
        is_beyond = abs(np.rint(x / step)) > 127
        assert found == (x - np.float32(sign * 127) * step if is_beyond else 0)
        assert is_beyond or threshold <= 127.5


@given(
    st.lists(st.floats(-1e6, 1e6, width=32) | st.sampled_from([0.0, 127.0, -127.0, 127.5, -127.5, 128.0]), min_size=1),
    st.sampled_from([1.0, 0.5, 2.0**-9, 8.0, 0.3, 0.01, 1e-6]),
)
def test_clipped_value_and_excess_add_up_to_the_value(values, step):
    """The sum is exact if a step is a power of 2 and no digits get lost; otherwise it has the rounding of 127 steps and
    of a sum."""
    x, step = np.array([values], np.float32), np.array([step], np.float32)
    excess, kept = excess_over_grid(x, step), round_to_grid(x, step, 8) * step
    assert excess.dtype == np.float32
    is_saturated = np.abs(np.rint(x / step)) > 127
    np.testing.assert_array_equal(excess[~is_saturated], 0)
    np.testing.assert_array_equal(np.abs(kept[is_saturated]), np.full(is_saturated.sum(), 127 * step[0]))
    whole = (kept.astype(np.float64) + excess)[is_saturated]
    off = 2.0**-24 * np.abs(x[is_saturated].astype(np.float64))
    assert (np.abs(whole - x[is_saturated]) <= off).all()
    if np.frexp(step)[0] == 0.5:
        units = x * 2**10 / step
        is_whole = is_saturated & (units == np.rint(units)) & (np.abs(units) < 2**24)
        np.testing.assert_array_equal((kept.astype(np.float64) + excess)[is_whole], x[is_whole])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_excess_shows_values_that_are_not_finite(value):
    x = np.array([[1, value, 200]], np.float32)
    found = excess_over_grid(x, np.array([1], np.float32))
    assert not np.isfinite(found[0, 1])
    np.testing.assert_array_equal(found[0, [0, 2]], [0, 73])


def test_headroom_of_a_column_ends_at_float16():
    """An NPU would clip a column's limit there. One grid for all columns has no limit as a factor."""
    columns = np.array([32000, 40000, 70000], np.float32)
    seen = replace(SEEN, column_peaks={"y": columns}, peaks={"x": 1.0, "y": 70000.0})
    expected = np.array([64000, 65504, 70000], np.float32) / np.float32(32639)
    np.testing.assert_array_equal(grids_of(linear(DOWN), W8A16, seen, FINE).output_step, expected)
    by_tensor = grids_of(linear(O_PROJ), W8A16, seen, FINE).output_step
    np.testing.assert_array_equal(by_tensor, np.array([140000 / 32639], np.float32))


def test_16_bit_grid_is_not_finer_than_an_npus_sums():
    """The sums are integer multiples of 256 * input step * scale."""
    scale = np.array([1e-9, 1 / 1024, 1 / 8], np.float32)
    assert grids_of(linear(O_PROJ), W8A16, SEEN, scale).output_step == [np.float32(256 / 64 / 8)]
    by_column = grids_of(linear(HEAD), W8A8, SEEN, scale).output_step
    np.testing.assert_array_equal(by_column, np.array([2 * 127 / 32639, 256 / 64 / 1024, 256 / 64 / 8], np.float32))
    np.testing.assert_array_equal(
        grids_of(linear(O_PROJ), W8A8, SEEN, scale).output_step, grids_of(linear(O_PROJ), W8A8, SEEN, FINE).output_step
    )


def test_value_that_was_always_zero_has_a_grid_to_1():
    silent = replace(SEEN, peaks={"x": 0.0, "y": 0.0})
    grids = grids_of(linear(O_PROJ), W8A16, silent, FINE)
    for step in (grids.input_step, grids.output_step):
        np.testing.assert_array_equal(step, np.array([1 / 32639], np.float32))


def test_bits_depend_on_the_weight_s_name():
    by_scheme = {s.name: [s.activation_bits_of(w) for w in (QKV, O_PROJ, GATE_UP, DOWN, HEAD)] for s in STATIC}
    assert by_scheme == {
        "w8a16": [16, 16, 16, 16, 16],
        "w8a8": [8, 8, 8, 8, 16],
        "w4a16": [16, 16, 16, 16, 16],
    }
    assert [W8A8.num_digits(w) for w in (HEAD, O_PROJ)] == [2, 1]
    assert [W4A16.weight_bits_of(w) for w in (QKV, O_PROJ, GATE_UP, DOWN, HEAD)] == [4, 4, 4, 4, 8]
    assert {W8A16.weight_bits_of(w) for w in (QKV, HEAD)} == {8}
    assert SCHEMES["float"].weight_bits_of(HEAD) is None
    assert [W8A16.has_column_grids(w) for w in (QKV, O_PROJ, GATE_UP, DOWN, HEAD)] == [False, False, False, True, False]
    assert all(W8A8.has_column_grids(w) for w in (QKV, O_PROJ, GATE_UP, DOWN, HEAD))
    assert {s.name for s in SCHEMES.values() if s.is_static} == set(by_scheme)


@pytest.mark.parametrize("scheme", [*STATIC, FLOAT_OUTPUTS, SHADOWED], ids=lambda scheme: scheme.name)
def test_store_holds_grids_with_each_linear(scheme):
    decoder = random_decoder([scheme])
    store = decoder.weights[scheme.name]
    store.check(e for w in stored_weights(decoder.plan, scheme).values() for e in w.entries)
    for name in linear_nodes(decoder.plan):
        integers, scale = store.linear(name)
        depth, columns = integers.shape
        parts = {suffix: array for suffix, array in store.parts(name) if suffix}
        shapes = {
            SCALE_SUFFIX: ("float32", (columns,)),
            INPUT_STEP_SUFFIX: ("float32", (1,)),
            OUTPUT_STEP_SUFFIX: ("float32", (columns,) if scheme.has_column_grids(name) else (1,)),
        }
        if scheme.has_float_output(name):
            del shapes[OUTPUT_STEP_SUFFIX]
        if scheme.weight_bits_of(name) == 4:
            shapes[MULTIPLIER_SUFFIX] = ("uint8", (-(-columns // 16), -(-depth // 32), 16))
            assert store.array(name).nbytes == -(-columns // 16) * -(-depth // 32) * 16 * 32 // 2
            multipliers = store.multipliers(name)
            assert (multipliers.dtype, multipliers.shape) == (np.int8, (-(-depth // 32), columns))
            assert (multipliers > 0).all()
        assert {suffix: (array.dtype.name, array.shape) for suffix, array in parts.items()} == shapes
        assert all((array > 0).all() for suffix, array in parts.items() if suffix != MULTIPLIER_SUFFIX)
        assert scale.shape == (columns,)
        if not scheme.is_shadowed(name):
            with pytest.raises(KeyError):
                store.array(name + HOT_CHANNELS_SUFFIX)
        else:
            hot = store.array(name + HOT_CHANNELS_SUFFIX)
            assert (hot.dtype, hot.shape) == (np.int32, (num_hot_channels(depth),))
            assert (np.diff(hot) > 0).all()
            assert 0 <= hot.min() <= hot.max() < depth


def test_store_holds_the_grids_of_the_calibration_and_4_bit_weights_as_products(tmp_path):
    plan = random_decoder([]).plan
    load = drawn(plan)
    calibration = calibrate(plan, load, np.arange(30) % plan.vocab_size, model="drawn")
    write_weights(plan, W4A16, load, tmp_path / "weights", load_rotary=recipes_of(plan), calibration=calibration)
    store = WeightStore.open(tmp_path / "weights")
    for name, node in linear_nodes(plan).items():
        grids = grids_of(node, W4A16, calibration, store.array(name + SCALE_SUFFIX))
        np.testing.assert_array_equal(store.array(name + INPUT_STEP_SUFFIX), grids.input_step)
        np.testing.assert_array_equal(store.array(name + OUTPUT_STEP_SUFFIX), grids.output_step)
        if name != HEAD:
            products, scale, multipliers = quantize_weight_in_blocks(load(name))
            for found, expected in zip(store.linear(name), (products, scale), strict=True):
                np.testing.assert_array_equal(found, expected)
            np.testing.assert_array_equal(store.multipliers(name), multipliers)


@pytest.mark.parametrize("scheme", STATIC, ids=lambda scheme: scheme.name)
def test_static_scheme_needs_a_calibration(scheme, tmp_path):
    plan = random_decoder([]).plan
    with pytest.raises(QuantizationError, match=rf"'{scheme.name}' needs a calibration; run `chunkrt calibrate`"):
        write_weights(plan, scheme, drawn(plan), tmp_path / "weights", load_rotary=recipes_of(plan))


@pytest.mark.parametrize(
    ("scheme", "field", "lacking"),
    [
        (W8A16, "peaks", "layers.0.mlp.gate_up_proj.output"),
        (W8A8, "column_peaks", "layers.0.mlp.gate_up_proj.output"),
        (W4A16, "column_peaks", "layers.1.mlp.down_proj.output"),
        (W8A8, "limits", "layers.1.self_attn.attention"),
        (SHADOWED, "shadow_limits", "layers.1.self_attn.attention"),
        (SHADOWED, "shadowed_column_peaks", "layers.0.mlp.gate_up_proj.output"),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_calibration_that_lacks_a_value_is_refused(scheme, field, lacking, tmp_path):
    plan = random_decoder([]).plan
    calibration = calibrate(plan, drawn(plan), np.arange(30), model="drawn")
    known = {name: value for name, value in getattr(calibration, field).items() if not name.endswith(lacking)}
    assert len(known) == len(getattr(calibration, field)) - 1
    foreign = replace(calibration, **{field: known})
    with pytest.raises(
        QuantizationError, match=f"the calibration has no entry for .*{lacking}.*; calibrate this model again"
    ):
        write_weights(
            plan, scheme, drawn(plan), tmp_path / "weights", load_rotary=recipes_of(plan), calibration=foreign
        )


@pytest.mark.parametrize("scheme", STATIC, ids=lambda scheme: scheme.name)
def test_calibration_of_another_width_is_refused(scheme, tmp_path):
    plan, other = random_decoder([]).plan, random_decoder([], CONFIG_IN_BLOCKS).plan
    calibration = calibrate(other, drawn(other), np.arange(30), model="other")
    with pytest.raises(QuantizationError, match=r"of another model: it has \d+ columns of .*, the model has \d+"):
        write_weights(
            plan, scheme, drawn(plan), tmp_path / "weights", load_rotary=recipes_of(plan), calibration=calibration
        )
