"""The int8 matrix product against NumPy in 64-bit integers, for every instruction set of this processor."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from guarded_kernels import run_guarded
from hypothesis import given, settings
from native_isas import isa_parameters

from chunkrt import _native
from chunkrt.engine_directory.weights import pack

ISAS = isa_parameters("reference", "neon_dotprod", "neon_i8mm", "avx2", "avxvnni", "avx512vnni")
ROWS = [1, 2, 5, 6, 7, 8, 9, 16, 31, 32, 33]
DEPTHS = [1, 3, 4, 5, 15, 16, 17, 31, 33, 64, 1023, 1024, 1025, 1100]
COLUMNS = [1, 7, 8, 9, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 65, 97]


def random_case(seed: int, rows: int, depth: int, columns: int, *, extreme: bool) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    choices = np.array([-128, -127, 127] if extreme else np.arange(-128, 128), np.int8)
    return {
        "left": rng.choice(choices, (rows, depth)),
        "right": rng.choice(choices, (depth, columns)),
        "left_scales": rng.random(rows, np.float32) + np.float32(0.01),
        "right_scales": rng.random(columns, np.float32) + np.float32(0.01),
        "bias": rng.standard_normal(columns, np.float32),
        "residual": rng.standard_normal((rows, columns), np.float32),
    }


def expected(case: dict[str, np.ndarray], *, bias: bool, residual: bool) -> np.ndarray:
    sums = case["left"].astype(np.int64) @ case["right"].astype(np.int64)
    value = (sums.astype(np.float32) * case["left_scales"][:, None]) * case["right_scales"]
    if bias:
        value = value + case["bias"]
    return value + case["residual"] if residual else value


def gemm(
    case: dict[str, np.ndarray],
    isa: str,
    *,
    bias: bool = False,
    residual: bool = False,
    blocks: tuple[int, int] | None = None,
) -> np.ndarray:
    rows, depth = case["left"].shape
    left = np.zeros((rows, -(-depth // 4) * 4), np.int8)
    left[:, :depth] = case["left"]
    operands = (
        left,
        case["left_scales"],
        left.sum(axis=1, dtype=np.int32),
        pack(case["right"]),
        case["right_scales"],
        case["bias"] if bias else None,
        case["residual"] if residual else None,
    )
    return run_guarded(_native.kernels.gemm, operands, rows, case["right"].shape[1], blocks, isa)


@pytest.mark.parametrize("isa", ISAS)
@given(
    seed=st.integers(0, 2**32 - 1),
    rows=st.sampled_from(ROWS),
    depth=st.sampled_from(DEPTHS),
    columns=st.sampled_from(COLUMNS),
    extreme=st.booleans(),
    bias=st.booleans(),
    residual=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_equals_numpy_exactly(
    isa: str, seed: int, rows: int, depth: int, columns: int, extreme: bool, bias: bool, residual: bool
) -> None:
    case = random_case(seed, rows, depth, columns, extreme=extreme)
    found = gemm(case, isa, bias=bias, residual=residual)
    np.testing.assert_array_equal(found, expected(case, bias=bias, residual=residual))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("left", "right"), [(-128, -128), (-128, 127), (127, 127)])
def test_deepest_sum_does_not_overflow(isa: str, left: int, right: int) -> None:
    """At 131071 inputs the extreme sums are as far from zero as int32 allows."""
    depth = 131071
    case = random_case(0, 2, 1, 17, extreme=False)
    case |= {"left": np.full((2, depth), left, np.int8), "right": np.full((depth, 17), right, np.int8)}
    assert abs(left * right * depth) < 2**31
    np.testing.assert_array_equal(gemm(case, isa), expected(case, bias=False, residual=False))


@pytest.mark.parametrize("isa", ISAS)
def test_splitting_changes_no_bit(isa: str) -> None:
    case = random_case(1, 33, 1030, 150, extreme=False)
    whole = gemm(case, isa, bias=True, residual=True)
    for begin, end in [(0, 1), (1, 4), (4, 9), (9, 10), (3, 3)]:
        part = gemm(case, isa, bias=True, residual=True, blocks=(begin, end))
        columns = slice(begin * 16, end * 16)
        np.testing.assert_array_equal(part[:, columns], whole[:, columns])
    for first in range(0, 33, 10):
        rows = {name: case[name][first : first + 10] for name in ("left", "left_scales", "residual")}
        part = gemm(case | rows, isa, bias=True, residual=True)
        np.testing.assert_array_equal(part, whole[first : first + 10])


def test_wrong_arguments_are_refused() -> None:
    case = random_case(2, 4, 8, 16, extreme=False)
    with pytest.raises(ValueError, match="shapes do not fit"):
        gemm(case | {"left_scales": case["left_scales"][:3]}, "reference")
    with pytest.raises(ValueError, match="no such blocks"):
        gemm(case, "reference", blocks=(0, 2))
    with pytest.raises(TypeError, match="incompatible function arguments"):
        gemm(case | {"right_scales": case["right_scales"].astype(np.float64)}, "reference")
