"""Native attention against NumPy in float64, written from the formula."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from native_cases import Case, make_case, node, random_rows, tensor

from chunkrt._native import ProgramBuilder, ThreadPool
from chunkrt.backends.base import Executable
from chunkrt.backends.native.backend import NativeBackend
from chunkrt.backends.reference import ReferenceBackend
from chunkrt.engine_directory.store import WeightStore
from chunkrt.errors import BackendError, PartitionError
from chunkrt.quant.scheme import find_scheme

HEADS, KV_HEADS, HEAD_DIM, ROTARY_DIM, CONTEXT, LENGTH = 6, 2, 20, 12, 256, 230
QKV = (HEADS + 2 * KV_HEADS) * HEAD_DIM
SCALE = 0.25
MAX_ROWS = 100
CHUNKS = [1, 31, 32, 33, 64, 95]
WINDOWS = [0, 1, 5, 63, 64, 65, 300]


@dataclass(frozen=True)
class Layer:
    """One compiled attention operator, its rotary tables, and its sinks, -infinity without sinks."""

    executable: Executable
    cos: np.ndarray
    sin: np.ndarray
    sinks: np.ndarray


def make_layer(
    window: int = 0,
    *,
    op: str = "CachedAttention",
    soft_cap: float = 0.0,
    has_sinks: bool = False,
    backend: Any = None,
    threads: int = 2,
) -> Layer:
    case = attention_case(window, op, soft_cap, has_sinks)
    subgraph, plan, weights = case
    compiled = (backend or NativeBackend(threads)).compile(
        subgraph, plan, MAX_ROWS, find_scheme("w8a8-dynamic"), weights
    )
    sinks = weights.array("sinks") if has_sinks else np.full(HEADS, -np.inf)
    return Layer(compiled, weights.array("cos"), weights.array("sin"), sinks)


def attention_case(window: int, op: str, soft_cap: float = 0.0, has_sinks: bool = False) -> Case:
    attributes = dict[str, Any](
        {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "rotary_dim": ROTARY_DIM}
    )
    if soft_cap:
        attributes["soft_cap"] = soft_cap
    inputs = "qkv position rope_position cos sin keys values" + " sinks" * has_sinks
    return make_case(
        [node(op, inputs, "y", "chunkrt", **attributes, scale=SCALE, window=window)],
        [
            tensor("qkv", "T", QKV),
            *(tensor(name, 1, dtype="int64") for name in ("position", "rope_position")),
            *(tensor(name, CONTEXT, ROTARY_DIM // 2, kind="weight") for name in ("cos", "sin")),
            *(tensor(name, KV_HEADS, "W" if window else "P", HEAD_DIM, kind="state") for name in ("keys", "values")),
            tensor("sinks", HEADS, kind="weight"),
            tensor("y", "T", HEADS * HEAD_DIM),
        ],
        "y",
    )


def empty_caches(slots: int = CONTEXT, dtype: str = "float32") -> dict[str, np.ndarray]:
    """Return caches of invalid values, because slots that have not been written must not matter."""
    if dtype == "int8":
        return {name: np.full((KV_HEADS, slots, HEAD_DIM + 4), -1, np.int8) for name in ("keys", "values")}
    return {name: np.full((KV_HEADS, slots, HEAD_DIM), np.nan, dtype) for name in ("keys", "values")}


def run_rows(
    layer: Layer, qkv: np.ndarray, caches: dict[str, np.ndarray], position: int, table_row: int | None = None
) -> np.ndarray:
    y = np.full((len(qkv), HEADS * HEAD_DIM), np.nan, np.float32)
    places = {"position": position, "rope_position": position if table_row is None else table_row}
    inputs = {"qkv": qkv, **{name: np.array([at]) for name, at in places.items()}, **caches}
    layer.executable.run(inputs, {"y": y})
    return y


def run_prompt(
    layer: Layer, qkv: np.ndarray, caches: dict[str, np.ndarray], chunk: int, table_offset: int = 0
) -> np.ndarray:
    starts = range(0, len(qkv), chunk)
    return np.concatenate(
        [run_rows(layer, qkv[start : start + chunk], caches, start, start + table_offset) for start in starts]
    )


def rope(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """Rotate x [T, heads, D] by tables [T, rotary_dim / 2]: (a, b) -> (a cos - b sin, b cos + a sin)."""
    half = ROTARY_DIM // 2
    a, b, rest = x[..., :half], x[..., half:ROTARY_DIM], x[..., ROTARY_DIM:]
    c, s = cos[:, None], sin[:, None]
    return np.concatenate([a * c - b * s, b * c + a * s, rest], axis=-1)


def quantized(rows: np.ndarray) -> np.ndarray:
    """Round rows [..., D] as int8 does: round(x / s) * s, s = max|x| / 127."""
    scale = np.abs(rows).max(axis=-1, keepdims=True) / 127
    return np.round(rows / scale) * scale


def truth(
    layer: Layer,
    qkv: np.ndarray,
    window: int,
    *,
    table_offset: int = 0,
    is_int8: bool = False,
    has_raw_keys: bool = False,
    soft_cap: float = 0.0,
) -> np.ndarray:
    """Compute softmax(scale q k^T) v over the keys max(0, p - window + 1)..p, row by row and head by head. A cap
    replaces scores by cap tanh(scores / cap); a head's sink adds a term to the sum of the softmax.
    """
    heads = qkv.astype(np.float64).reshape(len(qkv), -1, HEAD_DIM)
    q, k, v = np.split(heads, [HEADS, HEADS + KV_HEADS], axis=1)
    rows = slice(table_offset, table_offset + len(qkv))
    cos, sin = layer.cos[rows].astype(np.float64), layer.sin[rows].astype(np.float64)
    store = quantized if is_int8 else np.asarray
    q, v = rope(q, cos, sin), store(v)
    k = rope(store(k), cos, sin) if has_raw_keys else store(rope(k, cos, sin))
    out = np.empty((len(qkv), HEADS, HEAD_DIM))
    for p in range(len(qkv)):
        first = max(0, p - window + 1) if window else 0
        for head in range(HEADS):
            group = head // (HEADS // KV_HEADS)
            scores = SCALE * k[first : p + 1, group] @ q[p, head]
            if soft_cap:
                scores = soft_cap * np.tanh(scores / soft_cap)
            largest = max(scores.max(), layer.sinks[head])
            weights = np.exp(scores - largest)
            total = weights.sum() + np.exp(layer.sinks[head].astype(np.float64) - largest)
            out[p, head] = weights / total @ v[first : p + 1, group]
    return out.reshape(len(qkv), -1)


def ring_slots(window: int, chunk: int) -> int:
    """Return the smallest number of slots for chunks of this length, in blocks of 64."""
    return min(CONTEXT, -(-(window + chunk - 1) // 64) * 64)


QKV_ROWS = random_rows(LENGTH, QKV)


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("window", WINDOWS)
def test_windows_and_rings(window: int, chunk: int) -> None:
    layer = make_layer(window)
    whole = run_prompt(layer, QKV_ROWS, empty_caches(), MAX_ROWS)
    np.testing.assert_allclose(whole, truth(layer, QKV_ROWS, window), atol=2e-5, rtol=0)
    slots = ring_slots(window, chunk) if window else CONTEXT
    in_ring = run_prompt(make_layer(window, threads=3), QKV_ROWS, empty_caches(slots), chunk)
    np.testing.assert_array_equal(in_ring, whole)


@pytest.mark.parametrize("dtype", ["float16", "int8"])
@pytest.mark.parametrize("op", ["CachedAttention", "RawKeyAttention"])
@pytest.mark.parametrize("window", [0, 5, 65])
def test_chunks_and_rings_change_no_bit_of_rounded_caches(window: int, op: str, dtype: str) -> None:
    layer = make_layer(window, op=op)
    whole = run_prompt(layer, QKV_ROWS, empty_caches(dtype=dtype), MAX_ROWS)
    assert np.isfinite(whole).all()
    for chunk in (1, 33, 64):
        slots = ring_slots(window, chunk) if window else CONTEXT
        found = run_prompt(layer, QKV_ROWS, empty_caches(slots, dtype), chunk)
        np.testing.assert_array_equal(found, whole)


@pytest.mark.parametrize("table_offset", [0, 3])
@pytest.mark.parametrize("window", [0, 5, 65])
def test_raw_keys_give_the_same_bits(window: int, table_offset: int) -> None:
    early = run_prompt(make_layer(window), QKV_ROWS, empty_caches(), 33, table_offset)
    layer = make_layer(window, op="RawKeyAttention")
    np.testing.assert_array_equal(run_prompt(layer, QKV_ROWS, empty_caches(), 33, table_offset), early)
    expected = truth(layer, QKV_ROWS, window, table_offset=table_offset)
    np.testing.assert_allclose(early, expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("window", [0, 40])
def test_raw_keys_may_move_along_the_tables(window: int) -> None:
    """In a shifted context, the keys of positions 0..99 count as rows 50..149 from the next row on."""
    layer = make_layer(window, op="RawKeyAttention")
    caches = empty_caches()
    run_rows(layer, QKV_ROWS[:100], caches, 0)
    found = run_rows(layer, QKV_ROWS[100:101], caches, 100, 150)
    expected = truth(layer, QKV_ROWS[:101], window, table_offset=50)[100:]
    np.testing.assert_allclose(found, expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("op", ["CachedAttention", "RawKeyAttention"])
def test_int8_caches_against_quantised_keys_and_values(op: str) -> None:
    layer, caches = make_layer(op=op), empty_caches(dtype="int8")
    found = run_prompt(layer, QKV_ROWS, caches, 64)
    has_raw_keys = op == "RawKeyAttention"
    expected = truth(layer, QKV_ROWS, 0, is_int8=True, has_raw_keys=has_raw_keys)
    # A key on the border of two integers may round to the other one, a step of max|x| / 127 (the largest is about 4.5):
    # its score changes by up to scale * |q| * step, its weight by as much relatively, and a value likewise.
    np.testing.assert_allclose(found, expected, atol=0.02, rtol=0)
    values = QKV_ROWS.reshape(LENGTH, -1, HEAD_DIM)[:, HEADS + KV_HEADS :].transpose(1, 0, 2)
    integers, scales = caches["values"][:, :LENGTH, :HEAD_DIM], caches["values"][:, :LENGTH, HEAD_DIM:]
    scales = np.ascontiguousarray(scales).view(np.float32)
    np.testing.assert_array_equal(scales[..., 0], np.abs(values).max(axis=-1) / np.float32(127))
    assert (np.abs(integers * scales - values) <= scales * 0.5001).all()


@pytest.mark.parametrize("op", ["CachedAttention", "RawKeyAttention"])
@pytest.mark.parametrize(("soft_cap", "has_sinks", "window"), [(1.5, False, 0), (0.0, True, 65), (0.75, True, 5)])
def test_soft_caps_and_sinks(soft_cap: float, has_sinks: bool, window: int, op: str) -> None:
    for backend in (NativeBackend(2), ReferenceBackend()):
        layer = make_layer(window, op=op, soft_cap=soft_cap, has_sinks=has_sinks, backend=backend)
        expected = truth(layer, QKV_ROWS, window, soft_cap=soft_cap)
        found = run_prompt(layer, QKV_ROWS, zero_caches(CONTEXT), MAX_ROWS)
        np.testing.assert_allclose(found, expected, atol=2e-5, rtol=0)
        slots = ring_slots(window, 33) if window else CONTEXT
        in_chunks = run_prompt(layer, QKV_ROWS, zero_caches(slots), 33)
        np.testing.assert_allclose(in_chunks, found, atol=0 if backend.name == "native" else 1e-5, rtol=0)


def zero_caches(slots: int) -> dict[str, np.ndarray]:
    return {name: np.zeros((KV_HEADS, slots, HEAD_DIM), np.float32) for name in ("keys", "values")}


def test_invalid_soft_caps_and_sinks_are_refused() -> None:
    with pytest.raises(PartitionError, match=r"soft cap above 0, or 0 for none, got -1"):
        make_layer(soft_cap=-1.0)
    subgraph, plan, weights = attention_case(0, "CachedAttention", has_sinks=True)
    arrays = {**dict.fromkeys(subgraph.weights), "sinks": np.zeros(HEADS - 1, np.float32)}
    arrays |= {name: weights.array(name) for name in ("cos", "sin")}
    with pytest.raises(PartitionError, match="attention's sinks"):
        NativeBackend(1).compile(subgraph, plan, MAX_ROWS, find_scheme("w8a8-dynamic"), WeightStore(arrays, {}))


@pytest.mark.parametrize("op", ["CachedAttention", "RawKeyAttention"])
@pytest.mark.parametrize("window", [0, 5, 65])
def test_reference_agrees(window: int, op: str) -> None:
    slots = ring_slots(window, 32) if window else CONTEXT
    results = []
    for backend in (NativeBackend(2), ReferenceBackend()):
        caches = {name: np.zeros((KV_HEADS, slots, HEAD_DIM), np.float32) for name in ("keys", "values")}
        results.append(run_prompt(make_layer(window, op=op, backend=backend), QKV_ROWS, caches, 32, 2))
    np.testing.assert_allclose(*results, atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    ("op", "window", "slots", "position", "table_row", "message"),
    [
        ("CachedAttention", 0, 64, 62, 62, "'position': 3 rows from 62 on do not fit: the cache holds 64 positions"),
        ("CachedAttention", 0, 64, -1, 0, "'position': 3 rows from -1 on do not fit"),
        ("CachedAttention", 9, 64, -1, 0, "'position': 3 rows from -1 on do not fit: positions count from 0"),
        (
            "CachedAttention",
            9,
            70,
            69,
            0,
            "a ring of 70 slots cannot wrap, because their number is not a multiple of 64",
        ),
        ("CachedAttention", 63, 64, 62, 62, r"see 63 positions need a ring of window \+ rows - 1 slots, found"),
        (
            "CachedAttention",
            0,
            64,
            0,
            254,
            "'rope_position': 3 rows from 254 on do not fit: the rotary tables have",
        ),
        ("CachedAttention", 9, 64, 5, -1, "'rope_position': 3 rows from -1 on do not fit"),
        (
            "RawKeyAttention",
            0,
            64,
            9,
            8,
            "'rope_position': row 8 of the rotary tables leaves no rows for the 9",
        ),
        ("RawKeyAttention", 5, 64, 90, 3, "row 3 of the rotary tables leaves no rows for the 4 earlier keys that"),
    ],
)
def test_invalid_shapes_are_refused(
    op: str, window: int, slots: int, position: int, table_row: int, message: str
) -> None:
    """Check the refusal before anything is written."""
    caches = empty_caches(slots)
    with pytest.raises(BackendError, match=message):
        run_rows(make_layer(window, op=op), QKV_ROWS[:3], caches, position, table_row)
    assert all(np.isnan(cache).all() for cache in caches.values())


def test_smallest_valid_ring_is_accepted() -> None:
    """The ring has 62 + 3 - 1 slots for three rows; before it is full, any size is valid."""
    layer, caches = make_layer(62), empty_caches(64)
    expected = truth(layer, QKV_ROWS[:66], 62)
    found = run_prompt(layer, QKV_ROWS[:66], caches, 3)
    np.testing.assert_allclose(found, expected, atol=2e-5, rtol=0)
    found = run_prompt(layer, QKV_ROWS[:66], empty_caches(66), 33)
    np.testing.assert_allclose(found, expected, atol=2e-5, rtol=0)


def test_cache_must_be_declared_as_one() -> None:
    builder = ProgramBuilder(ThreadPool(1), 4)
    qkv = builder.input("qkv", "float32", ["T", 12])
    position = builder.input("position", "int64", [1])
    tables = [builder.constant(np.zeros((8, 2), np.float32)) for _ in range(2)]
    rings = [builder.state(name, [1, "W", 4]) for name in ("keys", "values")]
    shape = {"num_heads": 1, "num_kv_heads": 1, "head_dim": 4, "scale": 1.0}
    with pytest.raises(ValueError, match=r"caches to be states float32 \[1, P, 4\], got float32 \[1, W, 4\]"):
        builder.attention(qkv, position, position, *tables, *rings, **shape)
    with pytest.raises(ValueError, match=r"expected table_row to be an input int64 \[1\], got float32 \[T, 12\]"):
        builder.attention(qkv, position, qkv, *tables, *rings, **shape, window=3)
