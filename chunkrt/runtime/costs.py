"""Cost estimates: the expected duration of every task of a run, for policies.

Before the first measurement, the estimate of a task is its number of floating point operations divided by a typical
speed of its device. Every run then adds measurements: the estimate of a subgraph is a linear fit of the durations over
the operations. For a static subgraph, whose number of operations is constant, the fit is the mean duration. The
operations of attention grow with the position, and so does its estimate.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from chunkrt.graph.operators import attended_pairs, node_flops
from chunkrt.graph.plan import ATTENTION_OPS, Node, Plan
from chunkrt.runtime.tasks import TaskEvent

FLOPS_PER_NS = {"npu": 1000.0, "cpu": 50.0, "link": 0.03}
"""First estimates of the speed of each device. The NPU's is that of a phone on int8 linears of 64 rows (llm.npu, table
3: 600 to 1400). The CPU's is that of the phone's cores. The link's is that of 1 Gbit/s between ranks, which transfers
one float of a sum every 32 ns.
"""

MEMORY = 0.75
"""Factor by which every run reduces the weight of earlier measurements, because speeds change with the temperature."""


class Costs:
    """Estimates of the durations of a decoder's tasks, on the machine that runs them.

    Args:
        plan: the decoder.
    """

    def __init__(self, plan: Plan) -> None:
        flops = [sum((_flops(node, plan) for node in subgraph.nodes), np.zeros(4)) for subgraph in plan.subgraphs]
        self._flops = np.array(flops)
        self._window = plan.window or 0
        self._guesses = np.array([1 / FLOPS_PER_NS[subgraph.device] for subgraph in plan.subgraphs])
        self._sums = np.zeros((5, len(plan.subgraphs)))
        """Sums over the measurements of 1, flops, duration, flops squared, and flops times duration."""

    def flops(self, num_tokens: Sequence[int], num_rows: Sequence[int], position: int) -> NDArray[np.float64]:
        """Return the floating point operations of every task, at least 1.

        Args:
            num_tokens: number of tokens of every chunk, at least 1.
            num_rows: number of rows of every chunk whose logits are requested.
            position: position of the first token of the first chunk.

        Returns:
            float64 [subgraphs, chunks].
        """
        positions = position + np.cumsum(num_tokens) - num_tokens
        segments = [[(int(start), count)] for start, count in zip(positions, num_tokens, strict=True)]
        return self.flops_of_segments(segments, num_rows)

    def flops_of_segments(
        self, chunks: Sequence[Sequence[tuple[int, int]]], num_rows: Sequence[int]
    ) -> NDArray[np.float64]:
        """Return the floating point operations like `flops`, for chunks that may contain tokens of several sequences.

        Args:
            chunks: for every chunk the list of its segments, as position of the first token and number of tokens.
            num_rows: number of rows of every chunk whose logits are requested.
        """
        num_tokens = [sum(count for _, count in chunk) for chunk in chunks]
        pairs = [
            [sum(attended_pairs(start, count, window) for start, count in chunk) for chunk in chunks]
            for window in (0, self._window)
        ]
        flops: NDArray[np.float64] = self._flops @ np.array([num_tokens, num_rows, *pairs], np.float64)
        return np.maximum(flops, 1)

    def durations(self, flops: NDArray[np.float64]) -> list[list[int]]:
        """Return estimates in nanoseconds, [subgraphs][chunks].

        Args:
            flops: operations of every task, as returned by `flops`.
        """
        count, x, y, xx, xy = self._sums
        is_measured = count > 0
        n = np.where(is_measured, count, 1)
        mean, variance = x / n, xx / n - (x / n) ** 2
        ratio = np.divide(y, x, out=self._guesses.copy(), where=is_measured)
        varies = variance > 1e-6 * mean**2
        slope = np.divide(xy / n - mean * y / n, variance, out=ratio.copy(), where=varies)
        slope = np.clip(
            slope, 0, ratio
        )  # the fit must not decrease with the operations, and every duration must be positive
        estimates = slope[:, None] * flops + (y / n - slope * mean)[:, None]
        durations: list[list[int]] = np.rint(estimates).astype(np.int64).tolist()
        return durations

    def learn(self, flops: NDArray[np.float64], events: Sequence[TaskEvent]) -> None:
        """Update the estimates from the tasks of a run.

        Args:
            flops: operations of every task of the run.
            events: events of the run.
        """
        subgraphs = np.array([event.task.subgraph for event in events])
        chunks = np.array([event.task.chunk for event in events])
        x = flops[subgraphs, chunks]
        y = np.array([event.end_ns - event.start_ns for event in events], np.float64)
        y -= [p.began_ns - p.entered_ns if (p := event.passage) else 0 for event in events]  # waits for the NPU
        self._sums *= MEMORY
        for total, values in zip(self._sums, (np.ones_like(x), x, y, x * x, x * y), strict=True):
            np.add.at(total, subgraphs, values)


def _flops(node: Node, plan: Plan) -> NDArray[np.float64]:
    """Operations of one operator: per token, per row of logits, per pair of a token and an attended position, and per
    such pair within the window.
    """
    flops = node_flops(node, plan)
    if node.op in ATTENTION_OPS:
        has_window = bool(node.attributes["window"])
        return np.array([0.0, 0.0, flops * (not has_window), flops * has_window])
    rows = plan.tensors[node.outputs[0]].shape[0]
    return np.array([flops * (rows == "T"), flops * (rows == "R"), 0.0, 0.0])
