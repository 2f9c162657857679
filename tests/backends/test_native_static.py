"""Static schemes on the native backend: linears between calibrated grids, against sums of int64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from native_cases import Case, make_case, node, random_rows, run, tensor
from native_isas import isa_parameters

from chunkrt.backends.native.backend import NativeBackend
from chunkrt.backends.native.fusion import fuse
from chunkrt.backends.reference import ReferenceBackend
from chunkrt.engine_directory.store import INPUT_STEP_SUFFIX, OUTPUT_STEP_SUFFIX
from chunkrt.errors import PartitionError
from chunkrt.quant.scheme import LEVELS, SCHEMES, Scheme, find_scheme

HIDDEN, INNER = 70, 41  # neither is whole groups or blocks
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
def test_bias_and_residual_come_after_the_rounding(scheme: Scheme) -> None:
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


@pytest.mark.parametrize(
    ("suffix", "value", "message"),
    [
        (INPUT_STEP_SUFFIX, 0, "linear's input step: expected a finite number above 0, got 0"),
        (INPUT_STEP_SUFFIX, np.nan, "linear's input step: expected a finite number above 0, got nan"),
        (OUTPUT_STEP_SUFFIX, -1, "round_to_grid's step: expected a finite number above 0, got -1"),
        (OUTPUT_STEP_SUFFIX, np.inf, "round_to_grid's step: expected a finite number above 0, got inf"),
    ],
)
def test_steps_that_are_none(suffix: str, value: float, message: str) -> None:
    scheme = find_scheme("w8a16")
    subgraph, plan, weights = linear_case(scheme)
    weights.array("w" + suffix)[-1] = value
    with pytest.raises(PartitionError, match=f"native cannot run static.0: node 'product': {message}"):
        NativeBackend(1).compile(subgraph, plan, 32, scheme, weights)
