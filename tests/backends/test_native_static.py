"""Static schemes on the native backend: linears between calibrated grids, against sums of int64."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from native_cases import Case, make_case, node, random_products, random_rows, run, tensor
from native_isas import isa_parameters

from chunkrt._native import ProgramBuilder, ThreadPool
from chunkrt.backends.native.backend import NativeBackend
from chunkrt.backends.native.fusion import fuse
from chunkrt.backends.reference import ReferenceBackend
from chunkrt.engine_directory.store import INPUT_STEP_SUFFIX, OUTPUT_STEP_SUFFIX, WeightStore, pack, pack_products
from chunkrt.engine_directory.weights import WeightWriter, stored_weights
from chunkrt.errors import PartitionError
from chunkrt.quant.scheme import LEVELS, SCHEMES, Scheme, find_scheme

SMAPS = Path("/proc/self/smaps")
HIDDEN, INNER = 70, 41  # neither is a multiple of groups or blocks
WIDE = "layers.0.down_proj.weight"
STATIC = [
    *(scheme for scheme in SCHEMES.values() if scheme.is_static),
    replace(SCHEMES["w8a8"], name="mixed", wide=("*.down_proj.weight",)),
    replace(SCHEMES["w8a8"], name="w8a8-float-outputs", wide=("*.down_proj.weight",), float_outputs=("*",)),
]

schemes = pytest.mark.parametrize("scheme", STATIC, ids=lambda scheme: scheme.name)


def linear_case(scheme: Scheme, weight: str = "w") -> Case:
    return make_case(
        [node("MatMul", f"x {weight}", "product"), node("Add", "product bias", "biased"), node("Add", "biased r", "y")],
        [
            tensor("x", "T", HIDDEN),
            tensor("r", "T", INNER),
            tensor(weight, HIDDEN, INNER, kind="weight"),
            tensor("bias", INNER, kind="weight"),
            *(tensor(name, "T", INNER) for name in ("product", "biased", "y")),
        ],
        "y",
        scheme=scheme,
    )


def layer_case(scheme: Scheme) -> Case:
    """A layer's static part without its norms, and two linears that share an input."""
    down, qkv = WIDE, "layers.1.qkv_proj.weight"
    return make_case(
        [
            node("MatMul", "x up", "gate_up"),
            node("Split", "gate_up", "gate up_half", axis=-1, num_outputs=2),
            node("Sigmoid", "gate", "sigmoid"),
            node("Mul", "gate sigmoid", "silu"),
            node("Mul", "silu up_half", "inner"),
            node("MatMul", f"inner {down}", "down"),
            node("Add", "x down", "hidden"),
            node("MatMul", f"hidden {qkv}", "qkv"),
            node("MatMul", "hidden v", "values"),
        ],
        [
            tensor("x", "T", HIDDEN),
            tensor("up", HIDDEN, 2 * INNER, kind="weight"),
            tensor(down, INNER, HIDDEN, kind="weight"),
            tensor(qkv, HIDDEN, INNER, kind="weight"),
            tensor("v", HIDDEN, INNER, kind="weight"),
            tensor("gate_up", "T", 2 * INNER),
            *(tensor(name, "T", INNER) for name in ("gate", "up_half", "sigmoid", "silu", "inner", "qkv", "values")),
            *(tensor(name, "T", HIDDEN) for name in ("down", "hidden")),
        ],
        "qkv values hidden",
        scheme=scheme,
    )


@schemes
@pytest.mark.parametrize("weight", ["w", WIDE])
@pytest.mark.parametrize("rows", [1, 31, 32, 33])
def test_linear_equals_int64_exactly(scheme: Scheme, weight: str, rows: int) -> None:
    case = linear_case(scheme, weight)
    inputs = {"x": random_rows(rows, HIDDEN), "r": random_rows(rows, INNER, seed=1)}
    found = run(NativeBackend(2), case, inputs, rows, scheme)["y"]

    store = case[2]
    integers, scales = store.linear(weight)
    step = store.array(weight + INPUT_STEP_SUFFIX)
    levels = LEVELS[scheme.activation_bits_of(weight)]
    q = np.clip(np.rint(inputs["x"] / step), -levels, levels).astype(np.int64)
    assert (np.abs(q) == levels).any()
    product = (q @ integers.astype(np.int64)).astype(np.float32) * (step * scales)
    if not scheme.has_float_output(weight):
        output_step = store.array(weight + OUTPUT_STEP_SUFFIX)
        product = np.clip(np.rint(product / output_step), -levels, levels).astype(np.float32) * output_step
    np.testing.assert_array_equal(found, (product + store.array("bias")) + inputs["r"])


@schemes
def test_bias_and_residual_are_added_after_rounding(scheme: Scheme) -> None:
    subgraph, plan, _ = linear_case(scheme)
    assert fuse(subgraph, plan, scheme) == list(subgraph.nodes)
    assert [n.op for n in fuse(subgraph, plan, find_scheme("w8a8-dynamic"))] == ["Linear"]
    subgraph, plan, _ = layer_case(scheme)
    assert [n.op for n in fuse(subgraph, plan, scheme)] == ["MatMul", "SiluMul", "MatMul", "Add", "MatMul", "MatMul"]


@schemes
@pytest.mark.parametrize("threads", [2, 3, 8])
def test_thread_count_changes_no_bit(threads: int, scheme: Scheme) -> None:
    case, inputs = layer_case(scheme), {"x": random_rows(33, HIDDEN)}
    alone = run(NativeBackend(1), case, inputs, 33, scheme)
    assert all(np.unique(values).size > 100 for values in alone.values())
    found = run(NativeBackend(threads), case, inputs, 33, scheme)
    for name, values in alone.items():
        np.testing.assert_array_equal(found[name], values)


@schemes
@pytest.mark.parametrize("isa", isa_parameters())
def test_instruction_set_changes_no_bit(isa: str, scheme: Scheme, monkeypatch: pytest.MonkeyPatch) -> None:
    case, inputs = layer_case(scheme), {"x": random_rows(33, HIDDEN)}
    results = []
    for name in ("reference", isa):
        monkeypatch.setenv("CHUNKRT_FORCE_ISA", name)
        results.append(run(NativeBackend(2), case, inputs, 33, scheme))
    for name, values in results[0].items():
        np.testing.assert_array_equal(results[1][name], values)


@schemes
def test_linear_equals_the_reference_backend(scheme: Scheme) -> None:
    case, inputs = linear_case(scheme), {"x": random_rows(9, HIDDEN), "r": random_rows(9, INNER)}
    inputs["x"][2, 3], inputs["x"][4, 5], inputs["x"][6, 0] = np.nan, np.inf, -np.inf
    found, truth = (run(b, case, inputs, 9, scheme)["y"] for b in (NativeBackend(2), ReferenceBackend()))
    np.testing.assert_array_equal(found, truth)
    assert np.isnan(found[2]).all()
    assert np.isfinite(np.delete(found, 2, axis=0)).all()


def linear_outputs(
    x: np.ndarray, packed: np.ndarray, multipliers: np.ndarray | None, scales: np.ndarray, digits: int, threads: int = 2
) -> np.ndarray:
    builder = ProgramBuilder(ThreadPool(threads), len(x))
    value = builder.input("x", "float32", ["T", x.shape[1]])
    beside = None if multipliers is None else builder.constant(multipliers)
    operands = builder.constant(packed), builder.constant(scales), None, None, digits
    builder.output("y", builder.linear(value, *operands, input_step=1e-3, multipliers=beside))
    y = np.empty((len(x), len(scales)), np.float32)
    builder.build().run([x], [y])
    return y


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("isa", isa_parameters())
@pytest.mark.parametrize("digits", [1, 2])
@pytest.mark.parametrize(
    ("depth", "columns"), [(1, 1), (32, 16), (33, 17), (48, 49), (160, 130), (5600, 33), (8200, 50), (16400, 17)]
)
def test_packed_4_bits_have_the_bits_of_their_int8_products(
    depth: int, columns: int, digits: int, isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From 5462 inputs on, a panel in the second-level cache has 2 blocks of columns; from 8193 on 1, which then
    exceeds the intended size."""
    monkeypatch.setenv("CHUNKRT_FORCE_ISA", isa)
    rng = np.random.default_rng(depth)
    products, multipliers = random_products(rng, depth, columns)
    scales = rng.random(columns, np.float32)
    for rows in (1, 7):
        x = rng.standard_normal((rows, depth), np.float32)
        found = linear_outputs(x, *pack_products(products, multipliers), scales, digits)
        np.testing.assert_array_equal(found, linear_outputs(x, pack(products), None, scales, digits))
        np.testing.assert_array_equal(
            found, linear_outputs(x, *pack_products(products, multipliers), scales, digits, threads=1)
        )


def test_invalid_packed_4_bits() -> None:
    products, multipliers = random_products(np.random.default_rng(0), 40, 20)
    packed, by_block = pack_products(products, multipliers)
    builder = ProgramBuilder(ThreadPool(1), 2)
    x = builder.input("x", "float32", ["T", 40])
    scales = builder.constant(np.ones(20, np.float32))
    of_4_bits, beside = builder.constant(packed), builder.constant(by_block)
    with pytest.raises(ValueError, match="4-bit weights with multipliers require an input on a grid"):
        builder.linear(x, of_4_bits, scales, multipliers=beside)
    with pytest.raises(ValueError, match=r"packed weight: expected a constant int8 \[2, 10, 16, 4\], got uint8"):
        builder.linear(x, of_4_bits, scales, input_step=1.0)
    with pytest.raises(ValueError, match=r"weight of 4 bits: expected a constant uint8 \[2, 2, 4, 16, 4\], got uint8"):
        builder.linear(x, beside, scales, input_step=1.0, multipliers=beside)
    with pytest.raises(ValueError, match=r"multipliers: expected a constant uint8 \[2, 2, 16\], got uint8"):
        builder.linear(x, of_4_bits, scales, input_step=1.0, multipliers=of_4_bits)


@pytest.mark.skipif(sys.platform != "linux", reason="this system has no /proc/self/smaps")
def test_4_bit_weights_take_half_the_resident_memory_of_8_bit_ones(tmp_path: Path) -> None:
    depth, columns, resident = 4096, 1024, {}
    for name in ("w8a16", "w4a16"):
        scheme, path = find_scheme(name), tmp_path / name
        tensors = tensor("x", "T", depth), tensor("w", depth, columns, kind="weight"), tensor("y", "T", columns)
        subgraph, plan, drawn = make_case([node("MatMul", "x w", "y")], tensors, "y", scheme=scheme)
        entries = stored_weights(plan, scheme)["w"].entries
        with path.open("wb") as file:
            writer = WeightWriter(file, entries)
            for entry in entries:
                writer.write(drawn.array(entry.name))
        case = subgraph, plan, WeightStore.open(path)
        run(NativeBackend(2), case, {"x": random_rows(3, depth)}, 3, scheme)
        resident[name] = resident_bytes(path)
    most_beside = 64 * 1024  # scales, and partial pages
    assert 0 <= resident["w8a16"] - depth * columns < most_beside
    assert 0 <= resident["w4a16"] - depth * columns * 17 // 32 < most_beside


def resident_bytes(path: Path) -> int:
    """Return the resident bytes of all that is mapped from a file."""
    sizes, is_ours = [], False
    for line in SMAPS.read_text().splitlines():
        if "-" in line.split()[0]:
            is_ours = line.endswith(str(path))
        elif is_ours and line.startswith("Rss:"):
            sizes.append(int(line.split()[1]) * 1024)
    return sum(sizes)


@pytest.mark.parametrize(
    ("suffix", "value", "message"),
    [
        (INPUT_STEP_SUFFIX, 0, "linear's input step: expected a finite number above 0, got 0"),
        (INPUT_STEP_SUFFIX, np.nan, "linear's input step: expected a finite number above 0, got nan"),
        (OUTPUT_STEP_SUFFIX, -1, "round_to_grid's step: expected a finite number above 0, got -1"),
        (OUTPUT_STEP_SUFFIX, np.inf, "round_to_grid's step: expected a finite number above 0, got inf"),
    ],
)
def test_invalid_steps(suffix: str, value: float, message: str) -> None:
    scheme = find_scheme("w8a16")
    subgraph, plan, weights = linear_case(scheme)
    weights.array("w" + suffix)[-1] = value
    with pytest.raises(PartitionError, match=f"native cannot run static.0: node 'product': {message}"):
        NativeBackend(1).compile(subgraph, plan, 32, scheme, weights)
