"""One 8-bit linear alone, on values whose quantisation is exact: there rounding and accumulation show plainly."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from chunkrt.graph.plan import Node, Plan, Subgraph, resolve
from chunkrt.quant.scheme import Scheme
from chunkrt.weights.store import WeightStore


@dataclass(frozen=True, kw_only=True)
class ExactLinear:
    """A subgraph of one MatMul, its input float32 [T, K], and what must come out.

    `expected`: float64 [T, N]. `magnitude`: float64 [T, N], the sum of the magnitudes of each value's products; where
    it is 0, so is the result.
    """

    subgraph: Subgraph
    plan: Plan
    values: NDArray[np.float32]
    expected: NDArray[np.float64]
    magnitude: NDArray[np.float64]


def exact_linear(linear: Node, plan: Plan, scheme: Scheme, weights: WeightStore, num_rows: int) -> ExactLinear:
    """Random multiples of 1/2 with one 127 a row, so that a row's scale is 1 and half of them lie on a tie.

    The second digit, where the scheme has one, is left a half wherever the first rounded: it is exact as well. The
    last row is zero.
    """
    tensor = plan.tensors[linear.inputs[0]]
    rng = np.random.default_rng(0)
    values = (rng.integers(-253, 254, resolve(tensor.shape, {"T": num_rows, "R": num_rows})) / 2).astype(np.float32)
    values[np.arange(num_rows), rng.integers(0, values.shape[1], num_rows)] = 127
    values[-1] = 0
    first = np.rint(values.astype(np.float64))
    taken = first if scheme.num_digits(linear.inputs[1]) == 1 else values.astype(np.float64)
    integers, scale = weights.linear(linear.inputs[1])
    matrix = integers.astype(np.float64) * scale
    subgraph = Subgraph(
        name=f"linear {linear.inputs[1]}",
        device="npu",
        is_static=True,
        rows="T" if tensor.shape[0] == "T" else "R",
        nodes=(linear,),
        inputs=linear.inputs[:1],
        outputs=linear.outputs,
        weights=linear.inputs[1:],
        state=(),
    )
    return ExactLinear(
        subgraph=subgraph,
        plan=replace(plan, subgraphs=(subgraph,), inputs=subgraph.inputs, output=linear.outputs[0]),
        values=values,
        expected=taken @ matrix,
        magnitude=np.abs(taken) @ np.abs(matrix),
    )
