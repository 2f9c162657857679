"""Residual scaling: a residual stream that exceeds float16 is made smaller by a power of two, by changing weights.

Values between linears are float16 on an NPU. Gemma 3's stream exceeds float16's largest value, 65,504. An RMSNorm is
invariant to scale, so the complete stream can be multiplied by s = 2^-k: the embeddings, and all terms added to the
stream, are multiplied by s, and the epsilon of norms that read the stream is multiplied by s^2. If norms follow the
linears, as in Gemma 3, the weights of those norms are scaled instead of the linears'. Tied LM heads are separate
weights in a plan. They read a norm's result, and are not scaled.

Powers of two are exact: a decoder's results do not change unless a value becomes subnormal in its type.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from chunkrt.errors import QuantizationError
from chunkrt.graph.plan import EXPERTS_OP, Node, Plan
from chunkrt.quant.calibration import Calibration
from chunkrt.quant.dataflow import DataFlow
from chunkrt.quant.folding import Folding
from chunkrt.quant.grid import FLOAT16_MAX

Number = TypeVar("Number", float, NDArray[np.float32])

HEADROOM = 2.0
"""Factor by which the stream may exceed its peak in calibration on other text. 16-bit output grids have the same
headroom.
"""

LARGEST_EXPONENT = 10
"""Limit of k in s = 2^-k. With a larger k usual embeddings, about 2^-5, would be subnormal in float16, so no scale is
possible.
"""


@dataclass(frozen=True, kw_only=True)
class ResidualScaling:
    """A scale of a decoder's residual stream, and the places where it is applied.

    exponent: k of s = 2^-k; 0 if nothing is scaled.
    peak: the stream's largest magnitude in calibration, unscaled.
    values: names of the plan's values that are scaled: the stream, and all terms added to it.
    norms: nodes whose epsilon is multiplied by s^2.
    writers: weights whose columns are multiplied by s.
    readers: linears whose rows are divided by s.
    obstacle: the reason why a stream that needs a scale cannot be scaled; empty otherwise.
    """

    exponent: int
    peak: float
    values: Collection[str]
    norms: Collection[str]
    writers: Collection[str]
    readers: Collection[str]
    obstacle: str = ""

    def __str__(self) -> str:
        reach = f"the residual stream reaches {self.peak:.6g}"
        if self.obstacle:
            return f"{reach}, and {HEADROOM:g} times that exceeds float16 ({FLOAT16_MAX}), but {self.obstacle}"
        if not self.exponent:
            return f"{reach} and keeps its scale (float16's largest value is {FLOAT16_MAX})"
        return f"{reach} and is scaled by 2^-{self.exponent}, to {self.peak * 2.0**-self.exponent:.6g}"

    def plan(self, plan: Plan) -> Plan:
        """Return the plan with the norms' epsilons scaled; the same plan if nothing is scaled."""
        if not self.exponent:
            return plan

        def scaled(node: Node) -> Node:
            if node.name not in self.norms:
                return node
            epsilon = node.attributes["epsilon"]
            assert isinstance(epsilon, float), node.name
            return replace(node, attributes={**node.attributes, "epsilon": epsilon * 4.0**-self.exponent})

        return replace(plan, subgraphs=tuple(replace(s, nodes=tuple(map(scaled, s.nodes))) for s in plan.subgraphs))

    def folding(self, plan: Plan) -> Folding:
        """Return the folding that applies the scale to a plan's weights."""
        if not self.exponent:
            return Folding()

        def factors(name: str, axis: int, exponent: int) -> NDArray[np.float32]:
            return np.full(int(plan.tensors[name].shape[axis]), 2.0**exponent, np.float32)

        return Folding(
            rows={name: factors(name, 0, self.exponent) for name in self.readers},
            columns={name: factors(name, -1, -self.exponent) for name in self.writers},
        )

    def calibration(self, plan: Plan, calibration: Calibration) -> Calibration:
        """Return the calibration of the scaled decoder, whose folding includes the scale."""
        if not self.exponent:
            return calibration
        factor = 2.0**-self.exponent
        return replace(
            calibration,
            folding=calibration.folding.then(self.folding(plan)),
            peaks=_times(calibration.peaks, self.values, factor),
            limits=_times(calibration.limits, self.values, factor),
            shadow_limits=_times(calibration.shadow_limits, self.values, factor),
            column_peaks=_times(calibration.column_peaks, self.values, factor),
            channel_peaks=_times(calibration.channel_peaks, self.values, factor),
            shadowed_column_peaks=_times(calibration.shadowed_column_peaks, self.values, factor),
            histograms={},
        )


def residual_scaling(plan: Plan, calibration: Calibration) -> ResidualScaling:
    """Choose a scale by calibration: the largest scale at which HEADROOM times the stream's peak fits float16.

    Then 2 * peak * 2^-k is at most 65,504, and k is 0 for streams that stay below 32,752. If values reach the stream by
    a path that cannot be scaled, or k would exceed LARGEST_EXPONENT, nothing is scaled, and `obstacle` states the
    reason.

    Args:
        plan: the decoder without placement and without shadows.

    Raises:
        QuantizationError: the calibration is of another decoder.
    """
    stream = _ScaledStream(DataFlow(plan))
    obstacle = stream.follow()
    if obstacle:
        obstacle = f"it cannot be scaled: {obstacle}"
    if unknown := sorted(stream.values - calibration.peaks.keys()):
        raise QuantizationError(f"the calibration has no entry for {unknown[0]!r}; calibrate this model again")
    peak = max((calibration.peaks[name] for name in stream.values), default=0.0)
    exponent = _exponent(peak)
    if exponent > LARGEST_EXPONENT:
        obstacle = f"it would need a scale below 2^-{LARGEST_EXPONENT}"
    return ResidualScaling(
        exponent=0 if obstacle else exponent,
        peak=peak,
        values=stream.values,
        norms=stream.norms,
        writers=stream.writers,
        readers=stream.readers,
        obstacle=obstacle if exponent else "",
    )


def _exponent(peak: float) -> int:
    exponent = 0
    while HEADROOM * peak * 2.0**-exponent > FLOAT16_MAX:
        exponent += 1
    return exponent


def _times(numbers: Mapping[str, Number], names: Collection[str], factor: float) -> dict[str, Number]:
    return {name: number * factor if name in names else number for name, number in numbers.items()}


class _ObstacleError(Exception):
    """Exception for a node that prevents scaling, with the reason."""


@dataclass
class _ScaledStream:
    """Search for the values that a scale affects, starting from the embeddings, and the nodes around them; see
    ResidualScaling.
    """

    flow: DataFlow
    values: set[str] = field(default_factory=set)
    norms: set[str] = field(default_factory=set)
    writers: set[str] = field(default_factory=set)
    readers: set[str] = field(default_factory=set)

    def follow(self) -> str:
        """Search the plan; return the obstacle, empty if there is none."""
        flow = self.flow
        pending = [node.outputs[0] for node in flow.nodes if node.op == "Gather" and flow.is_weight(node.inputs[0])]
        if not pending:
            return "the decoder has no table of embeddings"
        try:
            while pending:
                value = pending.pop()
                if value not in self.values:
                    self.values.add(value)
                    pending += [*self._goes_to(value), *self._made_from(value)]
            self._check_products()
        except _ObstacleError as obstacle:
            return str(obstacle)
        return ""

    def _made_from(self, value: str) -> list[str]:
        """Return the values that must be scaled so that this value is scaled, and record weights."""
        flow, node = self.flow, self.flow.makers.get(value)
        if node is None:
            raise _ObstacleError(f"{value!r} is an input of the decoder")
        if flow.picks_rows(node):
            return [node.inputs[0]]
        if node.op == "Add":
            return [name for name in node.inputs if not self._writes(node, name)]
        if node.op == "Gather":
            is_written = self._writes(node, node.inputs[0])
        elif flow.is_linear(node) or flow.is_norm(node):
            is_written = self._writes(node, node.inputs[1])
        elif node.op == EXPERTS_OP:
            is_written = all(self._writes(node, name) for name in (node.inputs[3], *filter(None, node.inputs[6:])))
        elif node.op == "Mul":
            return self._factor_of(node)
        else:
            is_written = False
        if not is_written:
            raise _ObstacleError(f"node {node.name!r} ({node.op}) writes into it, and has no unshared weight to scale")
        return []

    def _factor_of(self, product: Node) -> list[str]:
        """Return the factor of a product that takes the scale: a value that is already scaled, a weight, or a linear's
        output.
        """
        flow = self.flow
        if any(name in self.values for name in product.inputs):
            return []
        if any(flow.owns(product, name) and self._writes(product, name) for name in product.inputs):
            return []
        for name in product.inputs:
            maker = flow.makers.get(name)
            if maker is not None and flow.is_linear(maker) and flow.alone_reads(product, name):
                return [name]
        raise _ObstacleError(f"node {product.name!r} (Mul) writes into it, and none of its factors can be scaled alone")

    def _check_products(self) -> None:
        scaled = self.values | self.writers
        for node in self.flow.nodes:
            if node.op == "Mul" and sum(name in scaled for name in node.inputs) > 1:
                raise _ObstacleError(f"node {node.name!r} (Mul) multiplies two parts of it")

    def _writes(self, node: Node, name: str) -> bool:
        """Record the weight with which a node writes the stream; return False if the node has no weight."""
        flow = self.flow
        if not flow.is_weight(name):
            return False
        if not flow.owns(node, name) or flow.width(name) != flow.width(node.outputs[0]):
            raise _ObstacleError(
                f"node {node.name!r} ({node.op}) reads {name}, which other nodes read too or which is narrower"
            )
        self.writers.add(name)
        return True

    def _goes_to(self, value: str) -> list[str]:
        """Return the values that are scaled because this value is, and record the norms and linears that read it."""
        flow = self.flow
        if value == flow.plan.output:
            raise _ObstacleError(f"node {flow.makers[value].name!r} makes it the decoder's output")
        further = []
        for node in flow.readers[value]:
            if node.op in ("Add", "Mul") or flow.picks_rows(node):
                further.append(node.outputs[0])
            elif flow.is_norm(node):
                self.norms.add(node.name)
            elif flow.is_linear(node):
                self.readers.add(node.inputs[1])
            else:
                raise _ObstacleError(f"node {node.name!r} ({node.op}) reads it, and is not invariant to its scale")
        return further
