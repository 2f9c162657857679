"""Native Mamba-2 against NumPy in float64, row by row from the definition."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
from native_isas import isa_parameters
from native_linear_attention_cases import assert_near, convolve
from numpy.typing import NDArray

from chunkrt._native import Program, ProgramBuilder, ThreadPool

ISAS = isa_parameters("reference", "neon", "avx2", "avx512vnni")
ROWS = 70


@dataclass(frozen=True, kw_only=True)
class Shape:
    num_groups: int
    num_heads: int
    state_dim: int
    head_dim: int
    taps: int = 4

    @property
    def states(self) -> int:
        return self.num_groups * self.state_dim

    @property
    def inner(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def channels(self) -> int:
        return 2 * self.states + self.inner


SHAPES = {
    "shared groups": Shape(num_groups=2, num_heads=6, state_dim=16, head_dim=24),
    "odd sizes": Shape(num_groups=3, num_heads=3, state_dim=7, head_dim=5, taps=2),
    "as in a model": Shape(num_groups=1, num_heads=2, state_dim=128, head_dim=64),
}


class Problem:
    """Random inputs, weights and states before the first row."""

    def __init__(self, shape: Shape) -> None:
        rng = np.random.default_rng(shape.channels)

        def draw(*sizes: int) -> NDArray[np.float32]:
            return rng.standard_normal(sizes, np.float32)

        self.shape = shape
        self.cbx, self.weight = draw(ROWS, shape.channels), draw(shape.channels, 1, shape.taps)
        self.bias = draw(shape.channels)
        self.step = rng.uniform(0, 1, (ROWS, shape.num_heads)).astype(np.float32)
        self.gate = -np.exp(rng.uniform(-4, 1, (ROWS, shape.num_heads))).astype(np.float32)
        self.gate[::13] = -1e4  # forgets all
        self.skip = draw(shape.num_heads)
        self.states = [draw(shape.channels, shape.taps - 1), draw(shape.num_heads, shape.state_dim, shape.head_dim)]

    def program(self, threads: int = 2) -> Program:
        shape, builder = self.shape, ProgramBuilder(ThreadPool(threads), ROWS)
        inputs = {"cbx": shape.channels, "gate": shape.num_heads, "step": shape.num_heads}
        cbx, gate, step = (builder.input(name, "float32", ["T", width]) for name, width in inputs.items())
        conv_state, state = (builder.state(f"state.{index}", array.shape) for index, array in enumerate(self.states))
        constants = [builder.constant(array) for array in (self.weight, self.bias, self.skip)]
        out = builder.mamba2(
            cbx,
            gate,
            step,
            constants[0],
            constants[1],
            conv_state,
            state,
            constants[2],
            num_groups=shape.num_groups,
            num_heads=shape.num_heads,
            state_dim=shape.state_dim,
            head_dim=shape.head_dim,
        )
        builder.output("out", out)
        return builder.build()

    def run(self, cuts: list[int], threads: int = 2) -> list[NDArray[np.float32]]:
        """Return the output and both states after chunks that end at the given rows."""
        program, states, parts = self.program(threads), [array.copy() for array in self.states], []
        for begin, end in pairwise([0, *cuts]):
            parts.append(np.full((end - begin, self.shape.inner), np.nan, np.float32))
            rows = [np.ascontiguousarray(array[begin:end]) for array in (self.cbx, self.gate, self.step)]
            program.run([*rows, *states], [parts[-1]])
        return [np.concatenate(parts), *states]

    def truth(self) -> list[NDArray[np.float64]]:
        shape = self.shape
        y, conv_state = convolve(self.cbx, self.weight, self.states[0])
        y = y + self.bias
        y = y / (1 + np.exp(-y))
        state, out = self.states[1].astype(np.float64), np.zeros((ROWS, shape.num_heads, shape.head_dim))
        for t, row in enumerate(y):
            c, b = row[: 2 * shape.states].reshape(2, shape.num_groups, shape.state_dim)
            x = row[2 * shape.states :].reshape(shape.num_heads, shape.head_dim)
            for head in range(shape.num_heads):
                group = head // (shape.num_heads // shape.num_groups)
                state[head] *= np.exp(np.float64(self.gate[t, head]))
                state[head] += np.outer(b[group], self.step[t, head] * x[head])
                out[t, head] = state[head].T @ c[group] + self.skip[head] * x[head]
        return [out.reshape(ROWS, -1), conv_state, state]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", SHAPES)
def test_mamba2_equals_float64(isa: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHUNKRT_FORCE_ISA", isa)
    problem = Problem(SHAPES[name])
    for found, expected in zip(problem.run([ROWS]), problem.truth(), strict=True):
        assert_near(found, expected)


@pytest.mark.parametrize("name", SHAPES)
def test_chunks_threads_and_instruction_sets_change_no_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(SHAPES[name])
    expected = problem.run([ROWS], threads=1)
    for cuts in (list(range(1, ROWS + 1)), [1, 3, 36, ROWS]):
        for found, array in zip(problem.run(cuts, threads=3), expected, strict=True):
            np.testing.assert_array_equal(found, array)
    monkeypatch.setenv("CHUNKRT_FORCE_ISA", "reference")
    for found, array in zip(problem.run([ROWS]), expected, strict=True):
        np.testing.assert_array_equal(found, array)


def test_builder_checks_operands_of_mamba2() -> None:
    builder = ProgramBuilder(ThreadPool(1), 4)
    cbx = builder.input("cbx", "float32", ["T", 29])
    gate, narrow = (builder.input(name, "float32", ["T", width]) for name, width in (("gate", 3), ("narrow", 2)))
    weight, skip = builder.constant(np.ones((29, 1, 2), np.float32)), builder.constant(np.ones(3, np.float32))
    conv_state, state = builder.state("conv_state", [29, 1]), builder.state("state", [3, 7, 5])

    def mamba2(*operands: int | None, **changes: int) -> None:
        sizes = {"num_groups": 1, "num_heads": 3, "state_dim": 7, "head_dim": 5}
        builder.mamba2(*operands, **{**sizes, **changes})  # type: ignore[arg-type]

    with pytest.raises(ValueError, match="number of heads to be a multiple of that of groups, got 3 and 2"):
        mamba2(cbx, gate, gate, weight, None, conv_state, state, skip, num_groups=2)
    with pytest.raises(ValueError, match=r"1 groups of 7 and x of 3 heads of 6, got float32 \[T, 29\]"):
        mamba2(cbx, gate, gate, weight, None, conv_state, state, skip, head_dim=6)
    with pytest.raises(ValueError, match=r"mamba2: expected gate and step float32 \[T, 3\], got float32 \[T, 2\]"):
        mamba2(cbx, gate, narrow, weight, None, conv_state, state, skip)
    with pytest.raises(ValueError, match=r"recurrent state: expected a state float32 \[3, 7, 5\]"):
        mamba2(cbx, gate, gate, weight, None, conv_state, conv_state, skip)
    with pytest.raises(ValueError, match=r"mamba2's skip: expected a constant float32 \[3\]"):
        mamba2(cbx, gate, gate, weight, None, conv_state, state, weight)
