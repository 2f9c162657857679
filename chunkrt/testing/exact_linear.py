"""Test cases of a single quantised linear. The quantisation of their values is known, and exposes rounding and
accumulation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from chunkrt.checkpoints.source import BLOCK_DEPTH
from chunkrt.engine_directory.store import HOT_CHANNELS_SUFFIX, INPUT_STEP_SUFFIX, OUTPUT_STEP_SUFFIX, WeightStore
from chunkrt.graph.plan import Node, Plan, Subgraph, resolve
from chunkrt.quant.scheme import LEVELS, Scheme

Float64 = NDArray[np.float64]

SUM_TOLERANCE = 4 * 2.0**-23
INPUT_TOLERANCE = 2.0**-10
"""Tolerance as a share of a product's magnitude, for inputs that are quantised from float16."""
OUTPUT_TOLERANCE = 2.0**-9
"""Tolerance as a share of the output grid's limit, for outputs that are converted to float16."""
PRODUCT_TOLERANCE = 2.0**-24
"""Float32 rounding error, relative to the sum of the products' magnitudes, per product and for PRODUCTS_BESIDE more."""
PRODUCTS_BESIDE = 4
STEP_TOLERANCE = 1 + 2.0**-6
"""Tolerance of one step, plus the float32 rounding error of a value at the end of a 16-bit grid."""

INPUT_STEP = 2.0**-6
"""Step of the input grid. It is a power of two, so that values on the grid and midpoints between them are exact."""

FINE_REACH = {8: 3, 16: 1023}
"""Number of steps on each side of zero, by the bits of the grid. It is small enough that one more step changes a
result, and that float16 represents half steps.
"""

WIDE_UNIT = {8: 1, 16: 32}
"""Number of steps between values over the complete grid, by the bits of the grid. Float16 represents these values."""


THRESHOLDS = (126.5, 127.0, 127.5, 128.0)
"""Numbers of steps around the end of an 8-bit grid: the first two are within the grid, and the others exceed it."""

DYNAMIC_OUTLIER = 127.0 * 40
"""Outlier of dynamic schemes. In rows of at least 20 values of up to 127, two outliers exceed 8 times the mean."""

OUTLIER_REACH = 1000
"""Maximum number of steps of an outlier from zero, small enough that float16 represents half steps."""


class Bounds(NamedTuple):
    """Lower and upper bounds of an output, each float64 [T, N]."""

    least: Float64
    most: Float64


@dataclass(frozen=True, kw_only=True)
class ExactLinear:
    """A subgraph of one MatMul with its weights, its input float32 [T, K], and the bounds of its output."""

    subgraph: Subgraph
    plan: Plan
    weights: WeightStore
    values: NDArray[np.float32]
    exact: Bounds
    in_float16: Bounds
    """Bounds if inputs and outputs are float16; a tie may then be rounded in either direction."""


def exact_linears(linear: Node, plan: Plan, scheme: Scheme, weights: WeightStore, num_rows: int) -> list[ExactLinear]:
    """Return test cases of a linear under a scheme; the last row is zero.

    Dynamic schemes: the inputs are random multiples of 1/2 with one 127 per row, so that a row's scale is 1 and half of
    the values are ties; every other row also has two outliers.

    Static schemes: the inputs of the first case are steps near zero, with half steps in every other row, and the
    results just fill the output grid. The inputs of the second case are steps over the complete input grid, beyond its
    end in every other row, and the range of the results is twice that of the output grid.
    """
    name = linear.inputs[1]
    shape = (num_rows, *resolve(plan.tensors[name].shape, {})[:1])
    rng, is_odd = np.random.default_rng(0), np.arange(num_rows)[:, None] % 2 == 1
    if not scheme.is_static:
        values = rng.integers(-253, 254, shape) / 2
        for index, row in enumerate(values):
            largest, *outliers = rng.choice(len(row), 3, replace=False)
            row[largest] = LEVELS[8]
            if index % 2 == 0:
                row[outliers] = rng.choice([-1, 1], 2) * DYNAMIC_OUTLIER
        values[-1] = 0
        return [_dynamic(linear, plan, scheme, weights, values)]
    bits = scheme.activation_bits_of(name)
    fine = rng.integers(-FINE_REACH[bits], FINE_REACH[bits] + 1, shape).astype(np.float64)
    fine += rng.integers(0, 2, shape) * is_odd / 2
    reach = np.where(is_odd, 160, 127) * 2 ** (bits - 8) // WIDE_UNIT[bits]
    wide = rng.integers(-reach, reach + 1, shape).astype(np.float64) * WIDE_UNIT[bits]
    fine[-1], wide[-1] = 0, 0
    return [
        _static(linear, plan, scheme, weights, fine, output_reach=1.0),
        _static(linear, plan, scheme, weights, wide, output_reach=0.5),
    ]


def exact_shadow(shadow: Node, plan: Plan, weights: WeightStore, num_rows: int) -> ExactLinear:
    """Return a test case of a linear's shadow: half steps on both sides of the grid's end.

    In half of the rows a few values are outliers, and in the other rows all values are; the last row is zero.
    """
    name = shadow.inputs[1]
    integers, scale = weights.linear(name)
    shape = (num_rows, len(integers))
    rng = np.random.default_rng(0)
    inside, outside = (rng.integers(least, most + 1, shape) / 2 for least, most in ((0, 253), (255, 2 * OUTLIER_REACH)))
    is_outlier = rng.random(shape) < np.where(np.arange(num_rows)[:, None] % 2 == 1, 1, 0.1)
    steps = np.where(is_outlier, outside, inside)
    at_threshold = rng.random(shape) < 0.1
    steps[at_threshold] = rng.choice(THRESHOLDS, at_threshold.sum())
    steps *= rng.choice([-1.0, 1.0], shape)
    steps[-1] = 0
    levels = LEVELS[8]
    excess = np.where(np.abs(np.rint(steps)) > levels, steps - steps.clip(-levels, levels), 0) * INPUT_STEP
    matrix = integers * scale.astype(np.float64)
    expected, size = excess @ matrix, np.abs(excess) @ np.abs(matrix)
    off = _float_error(len(integers)) * size
    either_way = (np.abs(steps) == levels + 0.5) * INPUT_STEP / 2 @ np.abs(matrix)
    in_float16 = INPUT_TOLERANCE * size + either_way
    store = WeightStore(
        {**_parts(weights, name), name + INPUT_STEP_SUFFIX: np.array([INPUT_STEP], np.float32)}, {name: integers.shape}
    )
    return _alone(
        shadow,
        plan,
        store,
        values=steps * INPUT_STEP,
        exact=Bounds(expected - off, expected + off),
        in_float16=Bounds(expected - in_float16, expected + in_float16),
    )


def _dynamic(linear: Node, plan: Plan, scheme: Scheme, weights: WeightStore, values: Float64) -> ExactLinear:
    """Return a case with dynamic quantisation, in which values beyond 127 are multiplied without rounding."""
    name = linear.inputs[1]
    taken = np.where(np.abs(values) > LEVELS[8], values, np.rint(values))
    if scheme.has_blocks(name):
        blocks = weights.blocks(name)
        integers = blocks.integers.T.astype(np.float64)
        scales, minima = (
            np.repeat(part.T.astype(np.float64), BLOCK_DEPTH, axis=0) for part in (blocks.scales, blocks.minima)
        )
        matrix, size = integers * scales + minima, integers * np.abs(scales) + np.abs(minima)
        tolerance = _float_error(len(matrix))
    else:
        int8, scale = weights.linear(name)
        matrix = int8.astype(np.float64) * scale
        size, tolerance = np.abs(matrix), SUM_TOLERANCE
    expected, off = taken @ matrix, tolerance * (np.abs(taken) @ size)
    bounds = Bounds(expected - off, expected + off)
    return _alone(linear, plan, weights, values=values, exact=bounds, in_float16=bounds)


def _static(
    linear: Node, plan: Plan, scheme: Scheme, weights: WeightStore, steps: Float64, *, output_reach: float
) -> ExactLinear:
    """Return a case whose inputs are multiples of a step; the output's range is `output_reach` times that of the
    results."""
    name = linear.inputs[1]
    bits = scheme.activation_bits_of(name)
    integers, scale = weights.linear(name)
    result_step = INPUT_STEP * scale.astype(np.float64)
    quantized = _saturated(np.rint(steps), bits)
    if scheme.is_shadowed(name):  # the shadow is the excess over the last level
        quantized = Bounds(*[np.rint(steps).clip(-LEVELS[bits], LEVELS[bits])] * 2)
    result = _products(quantized, integers)
    limit = np.abs(np.stack(result) * result_step).max(axis=(0, 1) if scheme.has_column_grids(name) else None)
    output_step = np.atleast_1d(np.where(limit > 0, limit, 1) * output_reach / LEVELS[bits]).astype(np.float32)

    def output(result: Bounds, steps_off: float) -> Bounds:
        least, most = (_saturated(np.rint(r * result_step / output_step), bits) for r in result)
        return Bounds((least.least - steps_off) * output_step, (most.most + steps_off) * output_step)

    def in_float(result: Bounds, relative: float) -> Bounds:
        off = relative * (np.maximum(*np.abs(quantized)) @ np.abs(integers.astype(np.float64))) * result_step
        return Bounds(result.least * result_step - off, result.most * result_step + off)

    off = INPUT_TOLERANCE * np.abs(steps) + (steps != np.rint(steps))
    rounded_in = _products(Bounds(quantized.least - off, quantized.most + off), integers)
    parts = {**_parts(weights, name), name + INPUT_STEP_SUFFIX: np.array([INPUT_STEP], np.float32)}
    if scheme.has_float_output(name):
        exact, in_float16 = in_float(result, _float_error(len(integers))), in_float(rounded_in, INPUT_TOLERANCE)
    else:
        parts[name + OUTPUT_STEP_SUFFIX] = output_step
        exact = output(result, STEP_TOLERANCE)
        in_float16 = output(rounded_in, STEP_TOLERANCE + OUTPUT_TOLERANCE * LEVELS[bits])
    store = WeightStore(parts, {name: integers.shape})
    return _alone(
        linear,
        plan,
        store,
        values=steps * INPUT_STEP,
        exact=exact,
        in_float16=in_float16,
    )


def _parts(weights: WeightStore, name: str) -> dict[str, NDArray[Any]]:
    """Return a linear's weight and all arrays stored with it, by name."""
    parts = {name + suffix: array for suffix, array in weights.parts(name)}
    try:
        return {**parts, name + HOT_CHANNELS_SUFFIX: weights.array(name + HOT_CHANNELS_SUFFIX)}
    except KeyError:  # the linear has no shadow
        return parts


def _float_error(depth: int) -> float:
    """Return the largest float32 rounding error as a share of the sum of the products' magnitudes."""
    return (depth + PRODUCTS_BESIDE) * PRODUCT_TOLERANCE


def _saturated(steps: Float64, bits: int) -> Bounds:
    """Return integers on a grid. A value beyond the last level becomes the last level, or any value up to the end of
    the type."""
    inner, outer = steps.clip(-LEVELS[bits], LEVELS[bits]), steps.clip(-(2 ** (bits - 1)), 2 ** (bits - 1))
    return Bounds(np.minimum(inner, outer), np.maximum(inner, outer))


def _products(left: Bounds, integers: NDArray[np.int8]) -> Bounds:
    """Multiply the left operand [T, K] by integers [K, N]; sums are exact, because no product has more than 24 bits."""
    positive, negative = np.maximum(integers, 0).astype(np.float64), np.minimum(integers, 0).astype(np.float64)
    return Bounds(left.least @ positive + left.most @ negative, left.most @ positive + left.least @ negative)


def _alone(
    linear: Node, plan: Plan, weights: WeightStore, *, values: Float64, exact: Bounds, in_float16: Bounds
) -> ExactLinear:
    subgraph = Subgraph(
        name=f"linear {linear.inputs[1]}",
        device="npu",
        is_static=linear.op == "MatMul",
        rows="T" if plan.tensors[linear.inputs[0]].shape[0] == "T" else "R",
        nodes=(linear,),
        inputs=linear.inputs[:1],
        outputs=linear.outputs,
        weights=linear.inputs[1:],
        state=(),
    )
    others = (other for other in plan.subgraphs if linear not in other.nodes)
    return ExactLinear(
        subgraph=subgraph,
        plan=replace(plan, subgraphs=(*others, subgraph), inputs=subgraph.inputs, output=linear.outputs[0]),
        weights=weights,
        values=values.astype(np.float32),
        exact=exact,
        in_float16=in_float16,
    )
