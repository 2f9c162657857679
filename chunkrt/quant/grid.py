"""Grids: the evenly spaced values to which a static scheme rounds the inputs and outputs of linears.

    x ~ q * step, q = round-half-even(x / step), saturating at the grid's levels; step = limit / levels

Grids are symmetric around zero, so one number defines a grid. Zero is on the grid, and a product of values on two grids
needs no correction.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from chunkrt.errors import QuantizationError
from chunkrt.graph.plan import MAIN_SUFFIX, Node
from chunkrt.quant.calibration import Calibration
from chunkrt.quant.scheme import LEVELS, Scheme

Float32 = NDArray[np.float32]

OUTPUT_HEADROOM = {8: 1.25, 16: 2.0}
"""Factor by which an output's grid exceeds the largest output in calibration. Other texts have larger outputs, which
saturate. On 8-bit grids factors of 1.2 to 1.4 lose least: coarser steps cost less than saturated values. 16-bit grids
are fine enough for a factor of 2.
"""

FLOAT16_MAX = 65504
"""Limit of the headroom of a column's own grid: on an NPU the grid's limit is a factor in float16."""

SUM_RESOLUTION = 256
"""Number of integer units below which no output step may be: Hexagon drops the last 8 bits of a 16-bit linear's sum."""


@dataclass(frozen=True, kw_only=True)
class LinearGrids:
    """The steps of one linear's grids: input float32 [1]; output float32 [1], or [N] for grids of columns, or None."""

    input_step: Float32
    output_step: Float32 | None


def round_to_grid(x: Float32, step: Float32, bits: int) -> Float32:
    """Return the integers q of x [T, N] on a grid with step [1] or [N], as float32."""
    levels = np.float32(LEVELS[bits])
    quotient: Float32 = np.rint(x / step).clip(-levels, levels)
    return quotient


def excess_over_grid(x: Float32, step: Float32) -> Float32:
    """Return the part of x [T, K] that exceeds an 8-bit grid with step [1]; 0 where x is within the grid. A NaN stays a
    NaN.
    """
    levels = np.float32(LEVELS[8])
    quotient = np.rint(x / step)
    excess: Float32 = np.where(np.abs(quotient) <= levels, np.float32(0), x - quotient.clip(-levels, levels) * step)
    return excess


def grids_of(linear: Node, scheme: Scheme, calibration: Calibration | None, scale: Float32) -> LinearGrids:
    """Return the grids of a linear (a MatMul node with a weight) under a static scheme.

    Args:
        scale: float32 [N], the scales of the quantised weight.

    Raises:
        QuantizationError: the calibration is missing, or belongs to another decoder.
    """
    if calibration is None:
        raise QuantizationError(f"the scheme {scheme.name!r} needs a calibration; run `chunkrt calibrate` on the model")
    (source, weight), result = linear.inputs, linear.outputs[0].removesuffix(MAIN_SUFFIX)
    bits, by_column = scheme.activation_bits_of(weight), scheme.has_column_grids(weight)
    is_shadowed = scheme.is_shadowed(weight)
    limits_of = calibration.peaks if bits == 16 else calibration.shadow_limits if is_shadowed else calibration.limits
    columns_of = calibration.shadowed_column_peaks if is_shadowed else calibration.column_peaks
    try:
        input_step = _steps(limits_of[source], bits)
        outputs: Float32 | float = calibration.peaks[result]
        if by_column or is_shadowed:
            outputs = columns_of[result] if by_column else float(columns_of[result].max())
    except KeyError as error:
        raise QuantizationError(f"the calibration has no entry for {error}; calibrate this model again") from error
    if scheme.has_float_output(weight):
        return LinearGrids(input_step=input_step, output_step=None)
    if by_column and np.size(outputs) != scale.size:
        found = f"{np.size(outputs)} columns of {weight}, the model has {scale.size}"
        raise QuantizationError(f"the calibration is of another model: it has {found}")
    limits = np.float32(OUTPUT_HEADROOM[bits]) * np.asarray(outputs, np.float32)
    if by_column:
        limits = np.minimum(limits, np.maximum(outputs, np.float32(FLOAT16_MAX)))
    output_step = _steps(limits, bits)
    if bits == 16:
        finest = np.float32(SUM_RESOLUTION) * input_step * scale
        output_step = np.maximum(output_step, finest if by_column else finest.max(keepdims=True))
    return LinearGrids(input_step=input_step, output_step=output_step)


def _steps(limits: Float32 | float, bits: int) -> Float32:
    """Return the step for a limit; a limit of 0 (values that are always zero) is treated as 1."""
    known = np.atleast_1d(np.asarray(limits, np.float32))
    steps: Float32 = np.where(known > 0, known, np.float32(1)).astype(np.float32) / np.float32(LEVELS[bits])
    return steps
