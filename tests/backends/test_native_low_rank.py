"""Products of adapters in native programs, against NumPy in float64."""

from __future__ import annotations

import numpy as np
import pytest

from chunkrt._native import AdapterTables, Program, ProgramBuilder, ThreadPool
from chunkrt.backends.low_rank import Factors, pack, unpack

DEPTH, COLUMNS, ROWS = 40, 75, 33


def random_factors(rank: int, *, is_joined: bool = False) -> Factors:
    """Return random factors; joined ones have zeros as those of two tensors of 20 and 55 rows, in mixed order."""
    rng = np.random.default_rng(rank)
    a, b = rng.standard_normal((DEPTH, rank), np.float32), rng.standard_normal((rank, COLUMNS), np.float32)
    if is_joined:
        b[: rank // 2, 20:] = b[rank // 2 :, :20] = 0
        b = b[:, rng.permutation(COLUMNS)]
    return Factors(a, b)


ADAPTERS = {1: random_factors(3), 2: random_factors(16), 5: random_factors(48, is_joined=True)}


def make_program(threads: int, tables: AdapterTables) -> Program:
    builder = ProgramBuilder(ThreadPool(threads), ROWS)
    x, y = builder.input("x", "float32", ["T", DEPTH]), builder.input("y", "float32", ["T", COLUMNS])
    builder.output("z", builder.low_rank_sum(y, x, builder.input("adapters", "int64", ["T"]), tables, "w"))
    return builder.build()


def loaded() -> AdapterTables:
    tables = AdapterTables()
    for number, factors in ADAPTERS.items():
        tables.add(number, {"w": pack(factors)})
    return tables


def run(program: Program, x: np.ndarray, y: np.ndarray, adapters: np.ndarray) -> np.ndarray:
    z = np.empty_like(y)
    program.run([x, y, adapters], [z])
    return z


def operands() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    adapters = np.repeat([0, 5, 1, 2, 0, 5], [3, 8, 1, 7, 2, 12])
    return rng.standard_normal((ROWS, DEPTH), np.float32), rng.standard_normal((ROWS, COLUMNS), np.float32), adapters


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_low_rank_sum_is_near_numpy(threads: int) -> None:
    x, y, adapters = operands()
    expected = y.astype(np.float64)
    for row, number in enumerate(adapters):
        if number:
            a, b = ADAPTERS[number]
            expected[row] += x[row].astype(np.float64) @ a.astype(np.float64) @ b.astype(np.float64)
    found = run(make_program(threads, loaded()), x, y, adapters)
    magnitude = DEPTH * 48 * np.abs(x).max() * max(np.abs(a).max() * np.abs(b).max() for a, b in ADAPTERS.values())
    np.testing.assert_allclose(found, expected, rtol=0, atol=magnitude * np.finfo(np.float32).eps)
    np.testing.assert_array_equal(found[adapters == 0], y[adapters == 0])


def test_low_rank_sum_of_a_row_does_not_depend_on_the_chunk() -> None:
    x, y, adapters = operands()
    program = make_program(2, loaded())
    whole = run(program, x, y, adapters)
    for row in range(ROWS):
        part = slice(row, row + 1)
        np.testing.assert_array_equal(run(program, x[part], y[part], adapters[part]), whole[part])
    for number in ADAPTERS:
        rows = np.flatnonzero(adapters == number)
        np.testing.assert_array_equal(run(program, x[rows], y[rows], adapters[rows]), whole[rows])


def test_adapter_is_swapped_without_another_program() -> None:
    x, y, _ = operands()
    tables = loaded()
    program = make_program(2, tables)
    ones, sevens = np.ones(ROWS, np.int64), np.full(ROWS, 7)
    first = run(program, x, y, ones)
    with pytest.raises(IndexError, match="adapter 7 is not loaded"):
        run(program, x, y, sevens)
    tables.add(7, {"w": pack(ADAPTERS[1])})
    tables.remove(1)
    np.testing.assert_array_equal(run(program, x, y, sevens), first)
    with pytest.raises(IndexError, match="adapter 1 is not loaded"):
        run(program, x, y, ones)


@pytest.mark.parametrize("rank", [1, 15, 16, 17, 48])
@pytest.mark.parametrize("is_joined", [False, True])
def test_pack_keeps_factors(rank: int, is_joined: bool) -> None:
    factors = random_factors(rank, is_joined=is_joined)
    a, b = unpack(pack(factors))
    np.testing.assert_array_equal(a[:, :rank], factors.a)
    np.testing.assert_array_equal(b[:rank], factors.b)
    assert not a[:, rank:].any()
    assert not b[rank:].any()


def test_factors_that_do_not_fit_are_refused() -> None:
    tables = loaded()
    a, b, spans, columns = pack(ADAPTERS[2])
    for wrong in (
        (a[0], b, spans, columns),
        (a, b[1:], spans, columns),
        (a, b, spans + 1, columns),
        (a, b, spans, columns + 16),
        (a.astype(np.float64), b, spans, columns),
    ):
        with pytest.raises(ValueError, match=r"adapter"):
            tables.add(9, {"w": wrong})
    with pytest.raises(ValueError, match="at most 2048"):
        tables.add(9, {"w": pack(random_factors(2049))})
    tables.add(9, {"w": pack(Factors(np.ones((DEPTH + 1, 2), np.float32), np.ones((2, COLUMNS), np.float32)))})
    x, y, _ = operands()
    with pytest.raises(ValueError, match=r"changes 'w' as \[75, 41\], and the program has \[75, 40\]"):
        run(make_program(1, tables), x, y, np.full(ROWS, 9))
