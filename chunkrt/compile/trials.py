"""Loss of quantising some linears of a decoder: KL divergence from the float decoder, on a few windows of text.

A float run keeps the inputs of every subgraph, so a trial can begin at the first subgraph that it changes. A trial
differs from an engine only in the order in which floats are summed, and in embeddings, which are not rounded to
float16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from math import inf, sqrt
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from chunkrt.checkpoints.source import BlockTensor
from chunkrt.compile.calibrate import RunNode, Values, first_values, run_node, run_subgraph
from chunkrt.engine_directory.weights import LoadBlocks
from chunkrt.errors import QuantizationError
from chunkrt.graph.plan import Node, Plan, linear_nodes, resolve
from chunkrt.quant.arithmetic import Integers, StaticWeight, quantize_linear, right_operand
from chunkrt.quant.calibration import Calibration
from chunkrt.quant.grid import LinearGrids, grids_of
from chunkrt.quant.scheme import LEVELS, Scheme

Float32 = NDArray[np.float32]
TokenIds = NDArray[np.int64]
Result = TypeVar("Result")

LOSS_EVERY = 4
"""Interval of a window's rows whose logits are compared. Comparing all rows would be slow, because an LM head costs as
much as many layers.
"""


@dataclass(frozen=True, kw_only=True)
class Loss:
    """Result of a trial compared with the float decoder: mean KL divergence in nats, and the ratio of perplexities."""

    kl: float
    perplexity_ratio: float


class Losses:
    """Trials of schemes on one decoder. The object holds all weights in float32, and those of linears additionally as
    integers.

    Windows run in parallel, each on one thread: results do not depend on the number of cores.

    Args:
        plan: the decoder without placement and without shadows.
        load: returns a weight's float32 values by its plan name, with the calibration's folding; called once per
            weight.
        calibration: gives the limits of grids.
        windows: tokens of text, int64 [n] with n at least 2 for each window; every window starts at position 0.
    """

    def __init__(
        self,
        plan: Plan,
        load: Callable[[str], Float32],
        calibration: Calibration,
        windows: Sequence[TokenIds],
    ) -> None:
        self.plan = plan
        self.linears = linear_nodes(plan)
        self._calibration = calibration
        weights = {name: load(name) for s in plan.subgraphs for name in s.weights}
        self._rounded = RoundedLinears(weights, calibration)
        self.home_of: dict[str, int] = {
            node.inputs[1]: index
            for index, s in enumerate(plan.subgraphs)
            for node in s.nodes
            if node.op == "MatMul" and node.inputs[1] in self.linears
        }
        """Index of the subgraph that runs each linear; a trial begins at the first that it changes."""
        self._windows = [_TrialWindow(plan, weights, tokens) for tokens in windows]
        self._for_each_window(_TrialWindow.keep)

    @cached_property
    def multiply_adds(self) -> dict[str, int]:
        """Multiply-adds of every linear, for one row."""
        shapes = {name: resolve(self.plan.tensors[name].shape, {}) for name in self.linears}
        return {name: depth * columns for name, (depth, columns) in shapes.items()}

    def reach(self, weight: str) -> float:
        """Return the largest magnitude of a linear's input divided by the step of its grid with a shadow."""
        source = self.linears[weight].inputs[0]
        limit = self._calibration.shadow_limits[source] or 1.0  # the same rule as in grids
        return LEVELS[8] * self._calibration.peaks[source] / limit

    def of(self, scheme: Scheme, only: Iterable[str] | None = None) -> Loss:
        """Return the loss under a static scheme.

        Args:
            only: weights of the linears to which the scheme applies, while other linears stay in float; by default all.

        Raises:
            QuantizationError: a logit is not finite.
        """
        chosen = set(self.linears if only is None else only)
        if not chosen:
            return Loss(kl=0.0, perplexity_ratio=1.0)
        first = min(self.home_of[name] for name in chosen)
        for name in chosen:  # before threads need them
            self._rounded.weight(name, scheme)

        def run(node: Node, values: Values) -> Any:
            if node.op == "MatMul" and node.inputs[1] in chosen:
                return self._rounded.multiply(node, values[node.inputs[0]], scheme)
            return run_node(node, values)

        found = self._for_each_window(lambda window: window.loss(first, run))
        kl = np.concatenate([kl for kl, _ in found])
        surprise = np.concatenate([surprise for _, surprise in found])
        if not np.isfinite(kl).all():
            raise QuantizationError(
                f"logits under the scheme {scheme.name!r} are not finite; is the checkpoint damaged?"
            )
        return Loss(kl=float(kl.mean()), perplexity_ratio=float(np.exp(surprise.mean())))

    def _for_each_window(self, task: Callable[[_TrialWindow], Result]) -> list[Result]:
        with threadpool_limits(1, "blas"), ThreadPoolExecutor(len(self._windows)) as pool:
            return list(pool.map(task, self._windows))


@dataclass
class RelativeError:
    """Root mean square of an error, relative to that of the expected values, over all values so far."""

    of_error: float = 0.0
    of_expected: float = 0.0

    def see(self, found: Float32, expected: Float32) -> None:
        """Add values."""
        with np.errstate(over="ignore", invalid="ignore"):
            self.of_error += float(np.square(found - expected, dtype=np.float64).sum())
        self.of_expected += float(np.square(expected, dtype=np.float64).sum())

    @property
    def relative(self) -> float:
        """The relative error; infinite if an error is not finite, or if all expected values are 0 and others found."""
        if not np.isfinite(self.of_error):
            return inf
        if self.of_expected == 0:
            return inf if self.of_error else 0.0
        return sqrt(self.of_error / self.of_expected)


class RoundedLinears:
    """Linears under a scheme, computed in float32.

    Args:
        weights: float32 [K, N], by name.
        calibration: for static schemes.
        load_blocks: returns weights that the checkpoint stores in blocks of 4 bits; other weights are converted to
            blocks.
    """

    def __init__(
        self,
        weights: Mapping[str, Float32],
        calibration: Calibration | None,
        load_blocks: LoadBlocks = lambda name: None,
    ) -> None:
        self._weights = weights
        self._load_blocks = load_blocks
        self._calibration = calibration
        self._quantized: dict[tuple[str, str], Integers | BlockTensor] = {}

    def multiply(self, node: Node, x: Float32, scheme: Scheme) -> Float32:
        """Return a MatMul node's output float32 [T, N] for x float32 [T, K], including its shadow."""
        name = node.inputs[1]
        grids = self.grids(node, scheme) if scheme.is_static else None
        right = right_operand(self.weight(name, scheme), name, scheme, grids, np.float32)
        if isinstance(right, StaticWeight) and scheme.is_shadowed(name):
            return right.multiply(x) + right.multiply_excess(x)
        return right.multiply(x)

    def grids(self, node: Node, scheme: Scheme) -> LinearGrids:
        """Return the grids of a linear under a static scheme. Raises QuantizationError if the calibration belongs to
        another decoder.
        """
        quantized = self.weight(node.inputs[1], scheme)
        assert isinstance(quantized, Integers)
        return grids_of(node, scheme, self._calibration, quantized.scale)

    def weight(self, name: str, scheme: Scheme) -> Integers | BlockTensor:
        """Return a weight as a scheme stores it, with its integers as float32; it is converted once."""
        storage = scheme.storage_of(name)
        if (name, storage) not in self._quantized:
            blocks = self._load_blocks(name) if storage == "blocks" else None
            made = blocks or quantize_linear(self._weights[name], storage, name=name)
            if isinstance(made, Integers):
                made = made._replace(values=made.values.astype(np.float32))
            self._quantized[name, storage] = made
        return self._quantized[name, storage]


class _TrialWindow:
    """Consecutive tokens, and the inputs of every subgraph for them in the float run."""

    def __init__(self, plan: Plan, weights: Mapping[str, Float32], token_ids: TokenIds) -> None:
        self._plan = plan
        self._weights = weights
        self._token_ids = token_ids
        self._rows = np.arange(0, len(token_ids) - 1, LOSS_EVERY)
        self._given: list[Values] = []
        """Live values at the start of each subgraph."""
        self._log_p: Float32

    def keep(self) -> None:
        """Run in float, and keep the values that a trial needs."""
        live: Values = first_values(self._token_ids, self._rows)
        for index in range(len(self._plan.subgraphs)):
            self._given.append(live)
            live = run_subgraph(self._plan, index, live, self._weights, run_node)
        self._log_p = _log_softmax(live[self._plan.output])

    def loss(self, first: int, run: RunNode) -> tuple[Float32, Float32]:
        """Return, for each compared row, the KL divergence and the decrease of the log-probability of the text's next
        token.
        """
        live = self._given[first]
        for index in range(first, len(self._plan.subgraphs)):
            live = run_subgraph(self._plan, index, live, self._weights, run)
        log_p, log_q = self._log_p, _log_softmax(live[self._plan.output])
        drop, p = log_p - log_q, np.exp(log_p)
        # Because p and q sum to 1, sum p log(p / q) is sum p log(p / q) + q - p. No term of the latter is negative, and
        # terms are small where p is near q, so float32 is sufficient.
        kl: Float32 = (p * drop + (np.exp(log_q) - p)).sum(axis=-1)
        rows = np.arange(len(self._rows))
        return kl, drop[rows, self._token_ids[self._rows + 1]]


def _log_softmax(logits: Float32) -> Float32:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    result: Float32 = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True, dtype=np.float64)).astype(np.float32)
    return result
