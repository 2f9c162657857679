"""Linears in blocks of 4 bits on the native backend, against the reference."""

from __future__ import annotations

import numpy as np
import pytest
from native_cases import Case, make_case, node, random_rows, run, tensor
from native_isas import isa_parameters

from chunkrt.backends.native.backend import NativeBackend
from chunkrt.backends.native.fusion import fuse
from chunkrt.backends.reference import ReferenceBackend
from chunkrt.checkpoints.source import BlockTensor
from chunkrt.engine_directory.store import BLOCK_SCALE_SUFFIX, WeightStore, pack_blocks
from chunkrt.quant.scheme import SCHEMES

SCHEME = SCHEMES["w4a8-dynamic"]


def linear_case(depth: int, columns: int) -> Case:
    """Build x @ w + bias + r, with a weight in blocks."""
    subgraph, plan, weights = make_case(
        [node("MatMul", "x w", "product"), node("Add", "product bias", "biased"), node("Add", "biased r", "y")],
        [
            tensor("x", "T", depth),
            tensor("r", "T", columns),
            tensor("w", depth, columns, kind="weight"),
            tensor("bias", columns, kind="weight"),
            *(tensor(name, "T", columns) for name in ("product", "biased", "y")),
        ],
        "y",
    )
    rng = np.random.default_rng(3)
    scales, minima = (
        (rng.standard_normal((columns, depth // 32)) * reach).astype(np.float16) for reach in (0.01, 0.08)
    )
    blocks = BlockTensor(integers=rng.integers(0, 16, (columns, depth), np.uint8), scales=scales, minima=minima)
    packed, packed_scales = pack_blocks(blocks)
    arrays = {"w": packed, "w" + BLOCK_SCALE_SUFFIX: packed_scales, "bias": weights.array("bias")}
    return subgraph, plan, WeightStore(arrays, {"w": (depth, columns)})


def inputs(rows: int, depth: int, columns: int) -> dict[str, np.ndarray]:
    x = random_rows(rows, depth)
    x[::3, depth // 3] = -2000
    x[::6, 0] = 3000
    return {"x": x, "r": random_rows(rows, columns, seed=4)}


@pytest.mark.parametrize("isa", isa_parameters())
@pytest.mark.parametrize(("depth", "columns"), [(32, 1), (32, 16), (64, 15), (96, 17), (160, 33), (1536, 65)])
def test_products_equal_the_reference(monkeypatch: pytest.MonkeyPatch, isa: str, depth: int, columns: int) -> None:
    monkeypatch.setenv("CHUNKRT_FORCE_ISA", isa)
    case = linear_case(depth, columns)
    assert [n.op for n in fuse(case[0], case[1], SCHEME)] == ["Linear"]
    blocks = case[2].blocks("w")
    size = np.repeat(15 * np.abs(blocks.scales.astype(np.float64)) + np.abs(blocks.minima), 32, axis=1)
    for rows in (1, 2, 7, 33):
        given = inputs(rows, depth, columns)
        found, expected = (
            run(backend, case, given, rows, SCHEME)["y"] for backend in (NativeBackend(2), ReferenceBackend())
        )
        most = np.abs(given["x"]).astype(np.float64) @ size.T + np.abs(expected) + np.abs(given["r"])
        assert (np.abs(found - expected) <= (depth // 16 + 8) * 2.0**-24 * most).all()


def test_rows_and_threads_change_no_bit() -> None:
    case, given = linear_case(96, 40), inputs(33, 96, 40)
    whole = run(NativeBackend(2), case, given, 33, SCHEME)["y"]
    backend = NativeBackend(1)
    for begin, end in ((0, 1), (1, 9), (9, 33)):
        part = {name: values[begin:end].copy() for name, values in given.items()}
        np.testing.assert_array_equal(run(backend, case, part, end - begin, SCHEME)["y"], whole[begin:end])
