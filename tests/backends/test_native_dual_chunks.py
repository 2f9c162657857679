"""Dual chunk attention of every instruction set and type of caches, against float64 from the definition."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from float64_dual_chunks import attend
from native_cases import make_case, node, random_rows, tensor
from native_isas import isa_parameters

from chunkrt.backends.base import AttentionMath
from chunkrt.backends.native.backend import NativeBackend
from chunkrt.errors import BackendError
from chunkrt.quant.scheme import find_scheme

HEADS, KV_HEADS, DIM, ROTARY_DIM, LENGTH, SLOTS = 6, 2, 20, 12, 230, 256
QKV = (HEADS + 2 * KV_HEADS) * DIM
SCALE, BASE = 0.25, 10000.0
SIZES = (90, 20, 100)
"""Chunks of 70 positions, which end inside of the kernels' blocks of 64 keys."""
ROWS = random_rows(LENGTH, QKV)
TRUTHS: dict[tuple[Any, ...], np.ndarray] = {}


def truth(num_prompt: int, sizes: tuple[int, int, int]) -> np.ndarray:
    if (num_prompt, sizes) not in TRUTHS:
        heads = ROWS.astype(np.float64).reshape(LENGTH, -1, DIM)
        q, k, v = np.split(heads, [HEADS, HEADS + KV_HEADS], axis=1)
        found = attend(q, k, v, num_prompt, scale=SCALE, sizes=sizes, base=BASE, rotary_dim=ROTARY_DIM)
        TRUTHS[num_prompt, sizes] = found.reshape(LENGTH, -1)
    return TRUTHS[num_prompt, sizes]


def make_layer(
    sizes: tuple[int, int, int] = SIZES,
    *,
    op: str = "CachedAttention",
    math: AttentionMath = "float32",
    threads: int = 2,
    table_rows: int | None = None,
) -> Any:
    chunk_size, local_size, original = sizes
    chunks = {"rope_period": chunk_size - local_size, "rope_limit": chunk_size, "long_context_from": original}
    heads = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": DIM, "rotary_dim": ROTARY_DIM, "window": 0}
    num_rows = chunk_size + 1 if table_rows is None else table_rows
    subgraph, plan, weights = make_case(
        [
            node(
                op,
                "qkv position rope_position cos sin keys values",
                "y",
                "chunkrt",
                **heads,
                scale=SCALE,
                **{name: size for name, size in chunks.items() if size},
            )
        ],
        [
            tensor("qkv", "T", QKV),
            *(tensor(name, 1, dtype="int64") for name in ("position", "rope_position")),
            *(tensor(name, num_rows, ROTARY_DIM // 2, kind="weight") for name in ("cos", "sin")),
            *(tensor(name, KV_HEADS, "P", DIM, kind="state") for name in ("keys", "values")),
            tensor("y", "T", HEADS * DIM),
        ],
        "y",
    )
    angles = np.outer(np.arange(num_rows), BASE ** (-np.arange(0, ROTARY_DIM, 2) / ROTARY_DIM))
    weights.array("cos")[:], weights.array("sin")[:] = np.cos(angles), np.sin(angles)
    backend = NativeBackend(threads, attention_math=math)
    return backend.compile(subgraph, plan, LENGTH, find_scheme("w8a8-dynamic"), weights)


def empty_caches(dtype: str) -> dict[str, np.ndarray]:
    """Return caches of invalid values, because slots that have not been written must not matter."""
    if dtype == "int8":
        return {name: np.full((KV_HEADS, SLOTS, DIM + 4), -1, np.int8) for name in ("keys", "values")}
    if dtype == "bfloat16":  # in tiles
        return {name: np.full((KV_HEADS, SLOTS, 32), 0x7FC0, np.uint16) for name in ("keys", "values")}
    return {name: np.full((KV_HEADS, SLOTS, DIM), np.nan, dtype) for name in ("keys", "values")}


def run(layer: Any, dtype: str, chunk: int, num_prompt: int, length: int = LENGTH) -> np.ndarray:
    caches, found = empty_caches(dtype), []
    for start in range(0, length, chunk):
        qkv = ROWS[start : min(start + chunk, length)]
        y = np.full((len(qkv), HEADS * DIM), np.nan, np.float32)
        places = {"position": np.array([start]), "rope_position": np.array([start + num_prompt])}
        layer.run({"qkv": qkv, **places, **caches}, {"y": y})
        found.append(y)
    return np.concatenate(found)


TOLERANCES = {"float32": 1e-5, "float16": 3e-3, "int8": 0.03, "bfloat16": 0.03}


@pytest.mark.parametrize("num_prompt", [0, 180, LENGTH])
@pytest.mark.parametrize("isa", isa_parameters())
@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
@pytest.mark.parametrize("op", ["CachedAttention", "RawKeyAttention"])
def test_float32_arithmetic_equals_the_definition(op, dtype, isa, num_prompt, monkeypatch):
    monkeypatch.setenv("CHUNKRT_FORCE_ISA", isa)
    whole = run(make_layer(op=op), dtype, LENGTH, num_prompt)
    np.testing.assert_allclose(whole, truth(num_prompt, SIZES), rtol=0, atol=TOLERANCES[dtype])
    for chunk in (1, 7, 32, 65):
        found = run(make_layer(op=op, threads=chunk % 3 + 1), dtype, chunk, num_prompt)
        np.testing.assert_array_equal(found, whole)
    monkeypatch.setenv("CHUNKRT_FORCE_ISA", "reference")
    np.testing.assert_array_equal(run(make_layer(op=op), dtype, 32, num_prompt), whole)


@pytest.mark.parametrize("isa", isa_parameters())
@pytest.mark.parametrize(
    ("op", "dtype"),
    [("CachedAttention", dtype) for dtype in TOLERANCES]
    + [("RawKeyAttention", dtype) for dtype in ("float32", "float16", "int8")],
)
def test_bfloat16_arithmetic_is_close_to_the_definition(op, dtype, isa, monkeypatch):
    monkeypatch.setenv("CHUNKRT_FORCE_ISA", isa)
    whole = run(make_layer(op=op, math="bfloat16"), dtype, LENGTH, LENGTH)
    np.testing.assert_allclose(whole, truth(LENGTH, SIZES), rtol=0, atol=TOLERANCES["bfloat16"])
    for chunk in (1, 7, 32, 65):
        found = run(make_layer(op=op, math="bfloat16", threads=chunk % 3 + 1), dtype, chunk, LENGTH)
        np.testing.assert_array_equal(found, whole)


@pytest.mark.parametrize("sizes", [(2, 1, 0), (24, 8, 0), (128, 64, 0), (100, 70, 0), (400, 100, 50)])
def test_chunks_of_other_sizes_equal_the_definition(sizes):
    """The third one ends chunks where blocks end; in the fourth one a query is never rotated for `chunk_size`."""
    for chunk in (33, LENGTH):
        found = run(make_layer(sizes), "float32", chunk, LENGTH)
        np.testing.assert_allclose(found, truth(LENGTH, sizes), rtol=0, atol=2e-5)


def test_tables_end_with_the_context_or_the_largest_rotation():
    length = 80
    layer = make_layer(table_rows=length)
    expected = run(make_layer(), "float32", 32, 0, length)
    np.testing.assert_array_equal(run(layer, "float32", 32, 0, length), expected)
    with pytest.raises(BackendError, match="the rotary tables have 80 rows"):
        run(layer, "float32", 41, 0, 82)
