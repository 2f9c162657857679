"""The native backend on hand-made plans, against NumPy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from native_cases import VOCABULARY, W8A8, Case, make_case, node, random_rows, run, tensor

from chunkrt.backends.native.backend import NativeBackend
from chunkrt.backends.native.fusion import fuse
from chunkrt.backends.reference import ReferenceBackend
from chunkrt.errors import BackendError, ConfigError, PartitionError
from chunkrt.quant.scheme import find_scheme

HIDDEN, INNER = 24, 40


def linear_case(outputs: str = "y") -> Case:
    return make_case(
        [
            node("MatMul", "x w", "product"),
            node("Add", "product bias", "biased"),
            node("Add", "residual biased", "y"),
        ],
        [
            tensor("x", "T", HIDDEN),
            tensor("residual", "T", INNER),
            tensor("w", HIDDEN, INNER, kind="weight"),
            tensor("bias", INNER, kind="weight"),
            *(tensor(name, "T", INNER) for name in ("product", "biased", "y")),
        ],
        outputs,
    )


def mlp_case(outputs: str = "y") -> Case:
    return make_case(
        [
            node("Split", "x", "gate up", axis=-1, num_outputs=2),
            node("Sigmoid", "gate", "sigmoid"),
            node("Mul", "sigmoid gate", "silu"),
            node("Mul", "up silu", "y"),
        ],
        [
            tensor("x", "T", 2 * INNER),
            *(tensor(name, "T", INNER) for name in ("gate", "up", "sigmoid", "silu", "y")),
        ],
        outputs,
    )


def gelu_case(outputs: str = "y") -> Case:
    return make_case(
        [
            node("Split", "x", "gate up", axis=-1, num_outputs=2),
            node("Gelu", "gate", "gelu", approximate="tanh"),
            node("Mul", "gelu up", "y"),
        ],
        [tensor("x", "T", 2 * INNER), *(tensor(name, "T", INNER) for name in ("gate", "up", "gelu", "y"))],
        outputs,
    )


@pytest.mark.parametrize("rows", [1, 31, 32, 33])
def test_linear_equals_numpy_exactly(rows: int) -> None:
    case = linear_case()
    x, residual = random_rows(rows, HIDDEN), random_rows(rows, INNER, seed=1)
    outliers = np.zeros_like(x)
    outliers[::3, 11] = -3000.3  # at most one per row: its product and the sum with the rest are each rounded once
    x[outliers != 0] = 0
    found = run(NativeBackend(2), case, {"x": x + outliers, "residual": residual}, rows)["y"]

    weight, scales = case[2].linear("w")
    limit = np.abs(x).max(axis=1, keepdims=True)
    quantized = np.rint(x * (np.float32(127) / limit)).astype(np.int64)
    product = (quantized @ weight.astype(np.int64)).astype(np.float32)
    product = (product * (limit / np.float32(127))) * scales
    added = ((product + case[2].array("bias")) + residual).astype(np.float64)
    of_outliers = (outliers.astype(np.float64) @ weight).astype(np.float32)
    np.testing.assert_array_equal(found, (of_outliers.astype(np.float64) * scales + added).astype(np.float32))


@pytest.mark.parametrize(
    ("make", "op", "inner"),
    [(linear_case, "Linear", "product biased"), (mlp_case, "SiluMul", "sigmoid silu"), (gelu_case, "GeluMul", "gelu")],
)
def test_fusion_changes_no_bit_without_outliers(make: Callable[[str], Case], op: str, inner: str) -> None:
    fused, unfused = make("y"), make(f"{inner} y")  # a value with another reader cannot be fused
    assert [n.op for n in fuse(*fused[:2], W8A8)] == [op]
    assert fuse(*unfused[:2], W8A8) == list(unfused[0].nodes)
    inputs = {name: random_rows(5, int(fused[1].tensors[name].shape[1])) for name in fused[0].inputs}
    backend = NativeBackend(2)
    np.testing.assert_array_equal(run(backend, fused, inputs, 5)["y"], run(backend, unfused, inputs, 5)["y"])


def test_add_of_two_linears_with_bias_leaves_the_bias_with_the_earlier_one() -> None:
    """The earlier linear has the same bits as in a subgraph of its own, also in rows with outliers."""
    nodes = [
        node("MatMul", "x w", "first"),
        node("Add", "first bias", "biased"),
        node("MatMul", "x v", "second"),
        node("Add", "second bias", "other"),
        node("Add", "biased other", "y"),
    ]
    weights = [tensor(name, HIDDEN, INNER, kind="weight") for name in "wv"]
    values = [tensor(name, "T", INNER) for name in ("first", "biased", "second", "other", "y")]
    tensors = [tensor("x", "T", HIDDEN), *weights, tensor("bias", INNER, kind="weight"), *values]
    joined, apart = make_case(nodes, tensors, "y"), make_case(nodes, tensors, "biased y")
    assert [(n.op, n.outputs) for n in fuse(*joined[:2], W8A8)] == [("Linear", ("biased",)), ("Linear", ("y",))]
    x = random_rows(5, HIDDEN)
    x[1, 3], x[4, [0, 23]] = 5000, (-2000, 2500)
    found, expected = (run(NativeBackend(2), case, {"x": x}, 5)["y"] for case in (joined, apart))
    np.testing.assert_array_equal(found, expected)


def test_fusion_changes_only_rounding_order_with_outliers() -> None:
    fused, unfused = linear_case(), linear_case("product biased y")
    inputs = {"x": random_rows(5, HIDDEN), "residual": random_rows(5, INNER)}
    inputs["x"][1, 3], inputs["x"][4, [0, 23]] = 5000, (-2000, 2500)
    found, truth = (run(NativeBackend(2), case, inputs, 5) for case in (fused, unfused))
    np.testing.assert_array_equal(found["y"][[0, 2, 3]], truth["y"][[0, 2, 3]])
    largest = np.abs(truth["product"]) + np.abs(fused[2].array("bias")) + np.abs(inputs["residual"])
    assert (np.abs(found["y"] - truth["y"]) <= 6 * 2.0**-24 * largest).all()


def test_silu_against_numpy() -> None:
    x = random_rows(3, 2 * INNER)
    gate, up = np.split(x.astype(np.float64), 2, axis=1)
    found = run(NativeBackend(1), mlp_case(), {"x": x}, 3)["y"]
    # The sigmoid has 2.5 units in the last place, and each of two products one half.
    np.testing.assert_allclose(found, gate / (1 + np.exp(-gate)) * up, rtol=3.5 * 2.0**-23)


def test_gelu_against_numpy() -> None:
    x = random_rows(3, 2 * INNER)
    gate, up = np.split(x.astype(np.float64), 2, axis=1)
    found = run(NativeBackend(1), gelu_case(), {"x": x}, 3)["y"]
    truth = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) * up
    np.testing.assert_allclose(found, truth, rtol=1e-5)


@pytest.mark.parametrize(
    ("op", "truth"), [("Tanh", np.tanh), ("Softplus", lambda x: np.log1p(np.exp(x.astype(np.float64))))]
)
def test_functions_against_numpy(op: str, truth: Callable[[np.ndarray], np.ndarray]) -> None:
    case = make_case([node(op, "x", "y")], [tensor("x", "T", INNER), tensor("y", "T", INNER)], "y")
    x = random_rows(3, INNER) * np.float32(5)
    np.testing.assert_allclose(run(NativeBackend(1), case, {"x": x}, 3)["y"], truth(x), rtol=4 * 2.0**-23)


def test_two_products_joined_by_one_add() -> None:
    case = make_case(
        [node("MatMul", "x v", "a"), node("MatMul", "x w", "b"), node("Add", "a b", "y")],
        [
            tensor("x", "T", HIDDEN),
            tensor("v", HIDDEN, INNER, kind="weight"),
            tensor("w", HIDDEN, INNER, kind="weight"),
            *(tensor(name, "T", INNER) for name in "aby"),
        ],
        "y",
    )
    assert [n.op for n in fuse(case[0], case[1], W8A8)] == ["MatMul", "Linear"]
    inputs = {"x": random_rows(4, HIDDEN)}
    found, truth = (run(b, case, inputs, 4)["y"] for b in (NativeBackend(1), ReferenceBackend()))
    np.testing.assert_array_equal(found, truth)


def test_embedding_and_norm() -> None:
    case = make_case(
        [
            node("Gather", "table input_ids", "hidden", axis=0),
            node("RMSNormalization", "hidden weight", "y", axis=-1, epsilon=1e-6),
        ],
        [
            tensor("table", VOCABULARY, HIDDEN, kind="weight"),
            tensor("weight", HIDDEN, kind="weight"),
            tensor("input_ids", "T", dtype="int64"),
            *(tensor(name, "T", HIDDEN) for name in ("hidden", "y")),
        ],
        "hidden y",
    )
    ids = np.array([0, VOCABULARY - 1, 7, 7])
    found = run(NativeBackend(2), case, {"input_ids": ids}, 4)
    hidden = case[2].array("table")[ids].astype(np.float64)
    np.testing.assert_array_equal(found["hidden"], hidden)
    truth = hidden / np.sqrt((hidden**2).mean(axis=1, keepdims=True) + 1e-6) * case[2].array("weight")
    np.testing.assert_allclose(found["y"], truth, rtol=(HIDDEN / 16 + 18) * 2.0**-24)


def attention_case(kv_heads: int = 1) -> Case:
    heads, head_dim = 3, 16
    attributes = {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": head_dim, "scale": 0.25, "window": 0}
    cache = (kv_heads, "P", head_dim)
    return make_case(
        [node("CachedAttention", "qkv position position cos sin keys values", "y", "chunkrt", **attributes)],
        [
            tensor("qkv", "T", (heads + 2 * kv_heads) * head_dim),
            tensor("position", 1, dtype="int64"),
            *(tensor(name, 64, head_dim // 2, kind="weight") for name in ("cos", "sin")),
            *(tensor(name, *cache, kind="state") for name in ("keys", "values")),
            tensor("y", "T", heads * head_dim),
        ],
        "y",
    )


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("kv_heads", [1, 3])
def test_attention_against_the_reference(kv_heads: int, dtype: str) -> None:
    case = attention_case(kv_heads)
    results = []
    for backend in (NativeBackend(2), ReferenceBackend()):
        state = {name: np.zeros((kv_heads, 64, 16), dtype) for name in ("keys", "values")}
        parts = []
        for start, rows in [(0, 31), (31, 1), (32, 32)]:
            inputs = {"qkv": random_rows(rows, (3 + 2 * kv_heads) * 16, seed=start), "position": np.array([start])}
            parts.append(run(backend, case, inputs | state, rows)["y"])
        results.append((np.concatenate(parts), state))
    (found, found_state), (truth, true_state) = results
    unit = float(np.finfo(dtype).eps)
    for name in ("keys", "values"):
        np.testing.assert_allclose(
            found_state[name].astype(np.float64), true_state[name].astype(np.float64), rtol=unit, atol=4 * unit
        )
    # A cached value may round the other way; the output is a mean of them, whose weights change likewise.
    np.testing.assert_allclose(found, truth, atol=64 * unit, rtol=0)


def test_gather_from_computed_rows() -> None:
    case = make_case(
        [node("Gather", "hidden logit_rows", "last", axis=0), node("MatMul", "last w", "logits")],
        [
            tensor("hidden", "T", HIDDEN),
            tensor("logit_rows", "R", dtype="int64"),
            tensor("w", HIDDEN, VOCABULARY, kind="weight"),
            tensor("last", "R", HIDDEN),
            tensor("logits", "R", VOCABULARY),
        ],
        "logits",
    )
    inputs = {"hidden": random_rows(6, HIDDEN), "logit_rows": np.array([5, 0])}
    found, truth = (run(b, case, inputs, 2)["logits"] for b in (NativeBackend(2), ReferenceBackend()))
    np.testing.assert_array_equal(found, truth)


def refusal(case: Case, scheme: str = "w8a8-dynamic") -> str:
    """Return the reason; `supports` and `compile` must agree."""
    subgraph, plan, weights = case
    support = NativeBackend(1).supports(subgraph, plan, find_scheme(scheme))
    assert not support
    with pytest.raises(PartitionError) as error:
        NativeBackend(1).compile(subgraph, plan, 32, find_scheme(scheme), weights)
    assert str(error.value) == f"native cannot run static.0: node {support.node!r}: {support.reason}"
    return f"{support.node}: {support.reason}"


def test_refusal_names_node_and_remedy() -> None:
    reason = refusal(linear_case(), "float")
    assert reason.startswith("product: under the scheme 'float' this linear is not int8 by int8")
    assert "use a quantised scheme such as 'w8a8-dynamic', or `npu='onnxrt'` or `npu='reference'`" in reason

    values = [tensor("x", "T", 8), tensor("y", "T", 8), tensor("z", "T", 4)]
    assert "native has no operator Erf; it has: add, add_positions, cached_attention, concat, embedding" in refusal(
        make_case([node("Erf", "x", "y")], values, "y")
    )
    assert "Gelu has the approximations 'none' and 'tanh', not 'sigmoid'" in refusal(
        make_case([node("Gelu", "x", "y", approximate="sigmoid")], values, "y")
    )
    assert "over the last axis only, not over axis 0 of 2" in refusal(
        make_case([node("Split", "x", "y z", axis=0)], values, "y")
    )
    assert "native multiplies by weights only; 'y' is computed" in refusal(
        make_case([node("MatMul", "x y", "z")], values, "z")
    )
    assert NativeBackend(1).supports(*mlp_case()[:2], find_scheme("float"))


def test_mismatched_operands_are_a_partition_error() -> None:
    case = make_case([node("Add", "x z", "y")], [tensor(n, "T", w) for n, w in [("x", 8), ("y", 8), ("z", 4)]], "y")
    message = r"native cannot run static.0: node 'y': add: expected the right side to be float32 \[T, 8\]"
    with pytest.raises(PartitionError, match=message):
        NativeBackend(1).compile(case[0], case[1], 32, W8A8, case[2])


def test_run_errors_are_backend_errors() -> None:
    case, backend = linear_case(), NativeBackend(2)
    inputs = {"x": random_rows(3, HIDDEN), "residual": random_rows(3, INNER)}
    with pytest.raises(BackendError, match=r"native, static.0: no array was passed for 'residual'"):
        run(backend, case, {"x": inputs["x"]}, 3)
    with pytest.raises(
        BackendError, match=r"input 'residual': expected float32 \[T, 40\] with T = 3, got float32 \[3, 24\]"
    ):
        run(backend, case, inputs | {"residual": inputs["x"]}, 3)
    with pytest.raises(BackendError, match="T = 34 rows, but the program was compiled for at most 33"):
        run(backend, case, {"x": random_rows(34, HIDDEN), "residual": random_rows(34, INNER)}, 34)


def test_thread_count_must_be_positive() -> None:
    with pytest.raises(ConfigError, match="at least 1 thread, got 0"):
        NativeBackend(0)
