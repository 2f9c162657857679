"""Linear attention by definition in float64, row by row, and native programs of it with random inputs."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from chunkrt._native import Program, ProgramBuilder, ThreadPool

Float64 = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Shape:
    num_k_heads: int = 2
    num_v_heads: int = 4
    head_k_dim: int = 24
    head_v_dim: int = 80
    use_qk_l2norm: bool = True
    taps: int = 4

    @property
    def keys(self) -> int:
        return self.num_k_heads * self.head_k_dim

    @property
    def channels(self) -> int:
        return 2 * self.keys + self.num_v_heads * self.head_v_dim


SHAPES = {
    "shared k heads": Shape(),
    "a k head each, no norm": Shape(num_v_heads=2, head_k_dim=16, head_v_dim=16, use_qk_l2norm=False),
    "odd sizes": Shape(num_k_heads=1, num_v_heads=3, head_k_dim=7, head_v_dim=5, taps=2),
    "as in a model": Shape(num_k_heads=1, num_v_heads=1, head_k_dim=128, head_v_dim=128),
}


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Return random inputs of a number of rows, and random states before them."""

    qkv: NDArray[np.float32]
    gate: NDArray[np.float32]
    beta: NDArray[np.float32]
    weight: NDArray[np.float32]
    conv_state: NDArray[np.float32]
    recurrent_state: NDArray[np.float32]

    def rows(self, begin: int, end: int) -> list[NDArray[np.float32]]:
        return [np.ascontiguousarray(array[begin:end]) for array in (self.qkv, self.gate, self.beta)]


def random_inputs(shape: Shape, rows: int, seed: int = 0) -> Inputs:
    rng = np.random.default_rng(seed)
    scale = 1.0 if shape.use_qk_l2norm else 0.3  # the recurrence would grow if keys were longer than sqrt(2)
    return Inputs(
        qkv=(rng.standard_normal((rows, shape.channels)) * scale).astype(np.float32),
        gate=-np.exp(rng.uniform(-4, 1, (rows, shape.num_v_heads))).astype(np.float32),
        beta=rng.uniform(0, 1, (rows, shape.num_v_heads)).astype(np.float32),
        weight=(rng.standard_normal((shape.channels, 1, shape.taps)) * 0.5).astype(np.float32),
        conv_state=rng.standard_normal((shape.channels, shape.taps - 1)).astype(np.float32) * np.float32(scale),
        recurrent_state=rng.standard_normal((shape.num_v_heads, shape.head_k_dim, shape.head_v_dim)).astype(np.float32),
    )


def convolve(
    x: NDArray[np.float32], weight: NDArray[np.float32], state: NDArray[np.float32]
) -> tuple[Float64, Float64]:
    """Return y[t] = sum over j of w[j] z[t + j] with z = state | x, and the last columns of z."""
    z = np.concatenate([state.T, x]).astype(np.float64)
    taps = weight.shape[2]
    y = np.stack([(z[t : t + taps] * weight[:, 0].T.astype(np.float64)).sum(axis=0) for t in range(len(x))])
    return y, z[len(x) :].T


def expected_delta_rule(inputs: Inputs, shape: Shape) -> tuple[Float64, Float64, Float64]:
    """Return output and both states, computed row by row and head by head."""
    y, conv_state = convolve(inputs.qkv, inputs.weight, inputs.conv_state)
    with np.errstate(over="ignore"):
        y = y / (1 + np.exp(-y))
    state = inputs.recurrent_state.astype(np.float64)
    out = np.zeros((len(y), shape.num_v_heads, shape.head_v_dim))
    for t, row in enumerate(y):
        q, k = row[: 2 * shape.keys].reshape(2, shape.num_k_heads, shape.head_k_dim)
        v = row[2 * shape.keys :].reshape(shape.num_v_heads, shape.head_v_dim)
        if shape.use_qk_l2norm:
            q, k = (x / np.sqrt((x * x).sum(axis=1, keepdims=True) + 1e-6) for x in (q, k))
        for head in range(shape.num_v_heads):
            k_head = head // (shape.num_v_heads // shape.num_k_heads)
            state[head] *= np.exp(np.float64(inputs.gate[t, head]))
            delta = np.float64(inputs.beta[t, head]) * (v[head] - state[head].T @ k[k_head])
            state[head] += np.outer(k[k_head], delta)
            out[t, head] = state[head].T @ (q[k_head] * shape.head_k_dim**-0.5)
    return out.reshape(len(y), -1), conv_state, state


def delta_rule_program(
    inputs: Inputs, shape: Shape, threads: int = 2, bias: NDArray[np.float32] | None = None
) -> Program:
    builder = ProgramBuilder(ThreadPool(threads), 128)
    qkv = builder.input("qkv", "float32", ["T", shape.channels])
    gate = builder.input("gate", "float32", ["T", shape.num_v_heads])
    beta = builder.input("beta", "float32", ["T", shape.num_v_heads])
    out = builder.gated_delta_rule(
        qkv,
        gate,
        beta,
        builder.constant(inputs.weight),
        None if bias is None else builder.constant(bias),
        builder.state("conv_state", inputs.conv_state.shape),
        builder.state("recurrent_state", inputs.recurrent_state.shape),
        num_k_heads=shape.num_k_heads,
        num_v_heads=shape.num_v_heads,
        head_k_dim=shape.head_k_dim,
        head_v_dim=shape.head_v_dim,
        use_qk_l2norm=shape.use_qk_l2norm,
    )
    builder.output("out", out)
    return builder.build()


def run_delta_rule(program: Program, inputs: Inputs, cuts: list[int]) -> list[NDArray[np.float32]]:
    """Return output and both states after chunks that end at the given rows."""
    states = [inputs.conv_state.copy(), inputs.recurrent_state.copy()]
    parts = []
    for begin, end in pairwise([0, *cuts]):
        parts.append(np.full((end - begin, inputs.gate.shape[1] * states[1].shape[2]), np.nan, np.float32))
        program.run([*inputs.rows(begin, end), *states], [parts[-1]])
    return [np.concatenate(parts), *states]


def assert_near(found: NDArray[np.float32], expected: NDArray[np.generic], units: float = 64.0) -> None:
    """Check that errors are within `units` float32 roundings of the largest value.

    The error of a sum depends on the size of its terms.
    """
    assert np.isfinite(found).all()
    limit = np.abs(expected).max()
    np.testing.assert_allclose(found, expected, rtol=0, atol=units * 2**-24 * max(float(limit), 1e-30))
