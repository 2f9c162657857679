"""The shadow of a linear on the native backend: the part that saturates, times the weight, against NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from native_cases import Case, make_case, node, random_rows, run, tensor
from native_isas import isa_parameters

from chunkrt.backends.native.backend import NativeBackend
from chunkrt.backends.native.fusion import fuse
from chunkrt.backends.reference import ReferenceBackend
from chunkrt.engine_directory.store import (
    HOT_CHANNELS_SUFFIX,
    INPUT_STEP_SUFFIX,
    SCALE_SUFFIX,
    StoredArray,
    WeightStore,
    pack,
)
from chunkrt.engine_directory.weights import WeightWriter
from chunkrt.errors import PartitionError
from chunkrt.quant.scheme import find_scheme

W8A8 = replace(find_scheme("w8a8"), float_outputs=("*",), shadowed=("*",))
DEPTH, COLUMNS = 70, 41  # neither is a multiple of groups or blocks
STEP = 0.01

MAIN, SHADOW = node("MatMul", "x w", "main"), node("ShadowLinear", "x w", "shadow", domain="chunkrt")
SUM = node("Add", "main shadow", "y")


def shadow_case(
    nodes: Sequence[object] = (SHADOW,),
    outputs: str = "shadow",
    *,
    depth: int = DEPTH,
    columns: int = COLUMNS,
    step: float = STEP,
    scale: float | None = None,
    hot: Sequence[int] = (2, 3, 40),
) -> Case:
    names = {n for part in nodes for n in (*part.inputs, *part.outputs)} - {"x", "w"}  # type: ignore[attr-defined]
    tensors = [tensor("x", "T", depth), tensor("w", depth, columns, kind="weight")]
    tensors += [tensor(name, "T", columns) for name in sorted(names)]
    subgraph, plan, _ = make_case(nodes, tensors, outputs, scheme=W8A8)  # type: ignore[arg-type]
    rng = np.random.default_rng(depth)
    scales = (
        rng.random(columns, np.float32) * np.float32(2e-3) if scale is None else np.full(columns, scale, np.float32)
    )
    arrays = {
        "w": pack(rng.integers(-127, 128, (depth, columns)).astype(np.int8)),
        "w" + SCALE_SUFFIX: scales,
        "w" + INPUT_STEP_SUFFIX: np.float32([step]),
        "w" + HOT_CHANNELS_SUFFIX: np.asarray(hot, np.int32),
    }
    return subgraph, plan, WeightStore(arrays, {"w": (depth, columns)})


def truth(case: Case, x: np.ndarray) -> np.ndarray:
    """Compute the definition, one rounding per operation, channel by channel."""
    integers, scales = case[2].linear("w")
    step = case[2].array("w" + INPUT_STEP_SUFFIX)
    q = np.rint(x / step)
    remainders = np.where(np.abs(q) > 127, x - np.clip(q, -127, 127) * step, np.float32(0))
    assert remainders.dtype == np.float32
    result = np.zeros((len(x), len(scales)), np.float32)
    for left, right in zip(remainders.T, integers.astype(np.float32) * scales, strict=True):
        result += left[:, None] * right
    return result


def same_bits(found: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))


def shadow(case: Case, x: np.ndarray, threads: int = 2) -> np.ndarray:
    return run(NativeBackend(threads), case, {"x": x}, len(x), W8A8)["shadow"]


def rows_with_outliers(rows: int, depth: int = DEPTH, share: float = 0.01) -> np.ndarray:
    x = random_rows(rows, depth) * np.float32(0.3)
    rng = np.random.default_rng(rows)
    x[rng.random(x.shape) < share] *= np.float32(100)
    return x


@pytest.mark.parametrize("hot", [(), (2, 3, 40), tuple(range(DEPTH))], ids=["none", "some", "all"])
@pytest.mark.parametrize("rows", [1, 31, 32, 33])
@pytest.mark.parametrize("share", [0, 0.01, 1])
def test_shadow_equals_its_definition(hot: tuple[int, ...], rows: int, share: float) -> None:
    case, x = shadow_case(hot=hot), rows_with_outliers(rows, share=share)
    same_bits(shadow(case, x), truth(case, x))


@pytest.mark.parametrize(("depth", "columns"), [(1, 1), (4, 16), (15, 17), (16, 15), (33, 129), (300, 640)])
def test_shapes_at_the_edges_of_tiles(depth: int, columns: int) -> None:
    case, x = shadow_case(depth=depth, columns=columns, hot=[depth - 1]), rows_with_outliers(5, depth, share=0.5)
    same_bits(shadow(case, x), truth(case, x))


def test_shadow_is_near_float64() -> None:
    case, x = shadow_case(), rows_with_outliers(33, share=0.2)
    integers, scales = case[2].linear("w")
    step = float(case[2].array("w" + INPUT_STEP_SUFFIX)[0])
    quotient = np.rint((x / np.float32(step)).astype(np.float64))
    remainders = np.where(np.abs(quotient) > 127, x - np.clip(quotient, -127, 127) * step, 0)
    weight = integers.astype(np.float64) * scales
    assert (remainders != 0).sum() > 100
    # Each product rounds its left side (127 steps, and their difference), its right side and itself; then the sum.
    size = (np.abs(remainders) + (remainders != 0) * 127 * step) @ np.abs(weight)
    error = np.abs(shadow(case, x) - remainders @ weight)
    assert (error <= (DEPTH + 4) * 2.0**-24 * size).all()


def test_main_and_shadow_add_up_to_the_exact_product() -> None:
    """With steps and scales that are powers of 2 and sums below 2^24 nothing is rounded."""
    case = shadow_case((MAIN, SHADOW, SUM), "y", step=2.0**-5, scale=2.0**-7)
    integers = np.random.default_rng(0).integers(-1000, 1001, (33, DEPTH))
    integers[np.abs(integers) < 400] //= 8
    found = run(NativeBackend(2), case, {"x": integers.astype(np.float32) * np.float32(2.0**-5)}, 33, W8A8)["y"]
    product = integers @ case[2].linear("w")[0].astype(np.int64)
    assert np.abs(product).max() < 2**24
    np.testing.assert_array_equal(found, product * 2.0**-12)


@pytest.mark.parametrize("step", [1, 0.3, 0.01, 1e-38, 2.0**-149])
def test_exact_thresholds(step: float) -> None:
    case, unit = shadow_case(step=step), np.float32(step)
    ties = np.float32([126.5, 127, 127.5, 128, 128.5]) * unit
    values = np.concatenate([ties, np.nextafter(ties, np.float32(0)), np.nextafter(ties, np.float32(np.inf)), [0]])
    x = np.zeros((2 * len(values), DEPTH), np.float32)
    x[:, ::3] = np.concatenate([values, -values]).astype(np.float32)[:, None]
    found = shadow(case, x)
    same_bits(found, truth(case, x))
    if step == 1:
        is_outlier = np.abs(x[:, 0]) >= 127.5
        assert 0 < is_outlier.sum() < len(x)
        np.testing.assert_array_equal((found != 0).any(axis=1), is_outlier)


@pytest.mark.parametrize("value", [0, -0.0, 1.2, -1.2, 2.0**-149])
def test_without_outliers_everything_is_positive_zero(value: float) -> None:
    x = np.full((32, DEPTH), value, np.float32)
    same_bits(shadow(shadow_case(), x), np.zeros((32, COLUMNS), np.float32))


def test_every_element_an_outlier() -> None:
    case = shadow_case(hot=())
    x = np.where(random_rows(33, DEPTH) > 0, np.float32(7), np.float32(-9)) * (1 + rows_with_outliers(33) ** 2)
    same_bits(shadow(case, x), truth(case, x))


@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_outliers_at_any_place_of_any_sign(data: st.DataObject, seed: int) -> None:
    depth, columns = data.draw(st.sampled_from([1, 3, 16, 17, 70])), data.draw(st.sampled_from([1, 16, 33, 150]))
    rows = data.draw(st.integers(1, 33))
    hot = data.draw(st.sets(st.integers(0, depth - 1)))
    case = shadow_case(depth=depth, columns=columns, hot=sorted(hot))
    places = st.tuples(st.integers(0, rows - 1), st.integers(0, depth - 1))
    signs = st.sampled_from([-1, 1])
    magnitudes = st.sampled_from([1.274, 1.275, 1.276, 1.3, 50, 1e30]) | st.floats(1.25, 1e6, width=32)
    x = random_rows(rows, depth, seed) * np.float32(0.2)
    for place, sign, magnitude in data.draw(st.lists(st.tuples(places, signs, magnitudes), max_size=40)):
        x[place] = sign * magnitude
    same_bits(shadow(case, x, threads=data.draw(st.sampled_from([1, 2, 3]))), truth(case, x))


@given(channels=st.sets(st.integers(0, DEPTH - 1), min_size=1), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=30, deadline=None)
def test_channels_a_thousand_times_larger_cost_no_accuracy(channels: set[int], seed: int) -> None:
    case = shadow_case((MAIN, SHADOW, SUM), "y main")
    integers, scales = case[2].linear("w")
    weight = integers.astype(np.float64) * scales

    def errors(x: np.ndarray) -> tuple[float, float]:
        found = run(NativeBackend(2), case, {"x": x}, len(x), W8A8)
        whole, main = (found[name] - x.astype(np.float64) @ weight for name in ("y", "main"))
        return float(np.sqrt(np.mean(whole**2))), float(np.sqrt(np.mean(main**2)))

    x = random_rows(32, DEPTH, seed) * np.float32(0.3)
    without_outliers, _ = errors(x)
    x[:, sorted(channels)] *= np.float32(1000)
    with_shadow, without_shadow = errors(x)
    assert with_shadow <= 2 * without_outliers
    assert without_shadow > 100 * without_outliers


@pytest.mark.parametrize("threads", [2, 3, 8])
def test_thread_count_changes_no_bit(threads: int) -> None:
    case, x = shadow_case(depth=300, columns=640), rows_with_outliers(33, 300)
    alone = shadow(case, x, threads=1)
    assert np.unique(alone).size > 1000
    same_bits(shadow(case, x, threads), alone)


@pytest.mark.parametrize("isa", isa_parameters())
def test_instruction_set_changes_no_bit(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHUNKRT_FORCE_ISA", isa)
    for columns in (COLUMNS, 128):
        case = shadow_case(columns=columns)
        for share in (0.01, 0.5, 1):
            x = rows_with_outliers(33, share=share)
            same_bits(shadow(case, x), truth(case, x))


@pytest.mark.parametrize("chunk", [1, 7, 31, 32])
def test_chunks_change_no_bit(chunk: int) -> None:
    case, x = shadow_case(), rows_with_outliers(33, share=0.1)
    parts = [shadow(case, x[begin : begin + chunk]) for begin in range(0, 33, chunk)]
    same_bits(np.concatenate(parts), shadow(case, x))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("channel", [0, 3, DEPTH - 1])
def test_non_finite_values_stay_in_their_row_and_are_visible(value: float, channel: int) -> None:
    case, x = shadow_case(), rows_with_outliers(9)
    expected = truth(case, np.delete(x, 4, axis=0))
    x[4, channel] = value
    found = shadow(case, x)
    assert not np.isfinite(found[4]).any()
    same_bits(np.delete(found, 4, axis=0), expected)


def test_float_output_is_on_no_grid() -> None:
    case, x = shadow_case((MAIN,), "main"), rows_with_outliers(9)
    found, reference = (run(b, case, {"x": x}, 9, W8A8)["main"] for b in (NativeBackend(2), ReferenceBackend()))
    integers, scales = case[2].linear("w")
    step = case[2].array("w" + INPUT_STEP_SUFFIX)
    product = np.clip(np.rint(x / step), -127, 127).astype(np.int64) @ integers.astype(np.int64)
    same_bits(found, product.astype(np.float32) * (step * scales))
    same_bits(found, reference)


def test_fusion_leaves_both_halves_unchanged() -> None:
    subgraph, plan, _ = shadow_case((MAIN, SHADOW, SUM), "y")
    assert fuse(subgraph, plan, W8A8) == [MAIN, SHADOW, SUM]


@pytest.mark.parametrize("name", ["float", "w8a8-dynamic", "w8a16", "w4a16"])
def test_shadow_without_static_8_bit_grid_is_refused(name: str) -> None:
    subgraph, plan, _ = shadow_case()
    support = NativeBackend(1).supports(subgraph, plan, find_scheme(name))
    assert not support
    assert support.node == "shadow"
    assert support.reason.startswith(
        f"under the scheme '{name}' the activations of this linear layer have no static 8-bit grid"
    )
    assert NativeBackend(1).supports(subgraph, plan, W8A8)
    assert not NativeBackend(1).supports(subgraph, plan, replace(W8A8, wide=("w",)))


def test_computed_weight_is_refused() -> None:
    tensors = [tensor("x", "T", 4), tensor("v", 4, 3), tensor("shadow", "T", 3)]
    subgraph, plan, _ = make_case([node("ShadowLinear", "x v", "shadow", domain="chunkrt")], tensors, "shadow")
    assert (
        NativeBackend(1).supports(subgraph, plan, W8A8).reason == "native multiplies by weights only; 'v' is computed"
    )


@pytest.mark.parametrize(
    ("suffix", "value", "message"),
    [
        (HOT_CHANNELS_SUFFIX, [1, 1], r"expected ascending hot channels from 0 to 69, got 1 at place 1"),
        (HOT_CHANNELS_SUFFIX, [5, 70], r"expected ascending hot channels from 0 to 69, got 70 at place 1"),
        (HOT_CHANNELS_SUFFIX, [-1], r"expected ascending hot channels from 0 to 69, got -1 at place 0"),
        (INPUT_STEP_SUFFIX, [0], r"input step: expected a finite number above 0, got 0"),
        (SCALE_SUFFIX, [1, 2], r"packed weight: expected a constant int8 \[1, 18, 16, 4\], got int8 \[3, 18, 16, 4\]"),
    ],
)
def test_mismatched_operands(suffix: str, value: list[int], message: str) -> None:
    subgraph, plan, weights = shadow_case()
    arrays = {"w" + part: array for part, array in weights.parts("w")}
    arrays["w" + HOT_CHANNELS_SUFFIX] = weights.array("w" + HOT_CHANNELS_SUFFIX)
    arrays["w" + suffix] = np.asarray(value, arrays["w" + suffix].dtype)
    with pytest.raises(PartitionError, match=f"native cannot run static.0: node 'shadow': shadow_linear.*{message}"):
        NativeBackend(1).compile(subgraph, plan, 32, W8A8, WeightStore(arrays, {"w": (DEPTH, COLUMNS)}))


@pytest.mark.parametrize("hot", [[], [0, 5, 69]])
def test_hot_channels_are_loaded_from_the_file(hot: list[int], tmp_path: Path) -> None:
    entries = [StoredArray(name="w" + HOT_CHANNELS_SUFFIX, dtype="int32", shape=(len(hot),), logical_shape=(len(hot),))]
    with (tmp_path / "weights").open("wb") as file:
        WeightWriter(file, entries).write(np.asarray(hot, np.int32))
    store = WeightStore.open(tmp_path / "weights")
    store.check(entries)
    assert store.array("w" + HOT_CHANNELS_SUFFIX).tolist() == hot
