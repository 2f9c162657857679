"""Equalisation: large channels of a linear's input are made smaller, and the weight's rows for these channels larger.

This is SmoothQuant's migration (Xiao et al., 2023, section 4). The division by the factors is applied where the input
is
made: to the weight of a norm, or to columns of an earlier linear.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import cast

import numpy as np
from numpy.typing import NDArray

from chunkrt.errors import ConfigError, QuantizationError
from chunkrt.graph.plan import ATTENTION_OPS, CACHES, Node, Plan
from chunkrt.quant.dataflow import DataFlow
from chunkrt.quant.folding import Folding

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]

MOST_FOR_PRODUCTS = 0.5
"""The largest alpha for inputs that no norm makes: products of gate and up, and attention's results. Single channels of
such inputs are thousands of times larger than the median; with a larger alpha the weights would lose more accuracy than
8-bit inputs gain.
"""

UNREACHED = -1

LARGEST_EXPONENT = 10
"""Factors lie between 2^-10 and 2^10: the quotient of a usual norm's weight and a factor is a normal float16 number."""


def equalise(
    plan: Plan,
    load: Callable[[str], Float32],
    channel_peaks: Mapping[str, Float32],
    alpha: float,
    *,
    most_for_products: float = 1.0,
    left_alone: Collection[str] = (),
) -> Folding:
    """Move a part of every channel's magnitude from a linear's input to its weight.

        d[k] = peak(x[:, k])^alpha / max|W[k, :]|^(1 - alpha), geometric mean 1; x becomes x / d, W becomes diag(d) W

    Linears that read the same value share its factors. A linear is left unchanged if the node that makes its input does
    not permit factors, or if the input has other readers.

    Args:
        load: returns a weight's float32 values by its plan name; called once for each linear.
        channel_peaks: float32 [K], the largest magnitude of each channel, by the name of a linear's input.
        alpha: 0 equalises the weight's rows, 1 the input's channels.
        most_for_products: the largest alpha for inputs that no norm makes; see MOST_FOR_PRODUCTS.
        left_alone: names of weights of linears whose inputs are not changed.

    Raises:
        ConfigError: alpha is not between 0 and 1.
        QuantizationError: the peaks are those of another decoder; a peak or a weight is not finite.
    """
    if not 0 <= alpha <= 1:
        raise ConfigError(f"the strength of the equalisation is {alpha}, expected a number from 0 to 1")
    flow = DataFlow(plan)
    rows: dict[str, Float32] = {}
    columns: dict[str, Float32] = {}
    inputs = dict.fromkeys(_made_as(flow, node.inputs[0]) for node in flow.nodes if flow.is_linear(node))
    for value in reversed(inputs):  # a weight gets its columns' factors before those of its rows are chosen
        linears, source = flow.linears_of(value), _source(flow, value)
        if isinstance(linears, Node) or source is None or any(linear.inputs[1] in left_alone for linear in linears):
            continue
        if UNREACHED in source.columns:
            continue
        peaks = np.zeros(flow.width(source.weights[0]))
        row_peaks = np.zeros_like(peaks)
        for linear in linears:
            seen = _peaks_of(channel_peaks, linear.inputs[0], flow.width(linear.inputs[0]))
            np.maximum.at(peaks, source.columns, seen)
            name = linear.inputs[1]
            weight = load(name) * columns[name] if name in columns else load(name)
            np.maximum.at(row_peaks, source.columns, _row_peaks(weight, name))
        is_normed = len(plan.tensors[source.weights[0]].shape) == 1
        factors = _factors(peaks, row_peaks, alpha if is_normed else min(alpha, most_for_products))
        for linear in linears:
            rows[linear.inputs[1]] = factors[source.columns].astype(np.float32)
        for name in source.weights:
            columns[name] = (columns.get(name, np.float32(1)) / factors).astype(np.float32)
    return Folding(rows=rows, columns=columns)


@dataclass(frozen=True, kw_only=True)
class _Source:
    """Weights that absorb the factors of a value's channels.

    Attributes:
        weights: the weight of a linear or a norm, and biases after it.
        columns: int64 [K], the column of these weights that makes each channel; UNREACHED for a channel without
            factors.
    """

    weights: tuple[str, ...]
    columns: NDArray[np.int64]


def _source(flow: DataFlow, value: str) -> _Source | None:
    """Return the source of a value; None if no weight can absorb its factors, or if the factors would affect another
    value.
    """
    node = flow.makers.get(value)
    if node is None:
        return None
    if flow.is_linear(node) or flow.is_norm(node):
        return _Source(weights=(node.inputs[1],), columns=np.arange(flow.width(value)))
    for operand in reversed(_operands(flow, node)):
        found = _source(flow, operand) if flow.alone_reads(node, operand) else None
        if found is not None:
            return _through(flow, node, value, found)
    return None


def _operands(flow: DataFlow, node: Node) -> Sequence[str]:
    """Return the inputs of a node in which its output is linear, channel by channel, if other inputs are unchanged."""
    width = flow.width(node.outputs[0])
    if node.op == "Mul":
        return [name for name in node.inputs if flow.width(name) == width]
    if node.op == "Add" and (biases := [name for name in node.inputs if flow.owns(node, name)]):
        return [name for name in node.inputs if name not in biases and flow.width(biases[0]) == width]
    if node.op in ATTENTION_OPS and any(flow.readers[cache] != [node] for cache in node.inputs[CACHES]):
        return ()  # factors of v would reach other layers too
    if node.op in (*ATTENTION_OPS, "HeadNorm") or flow.picks_rows(node) or _splits_channels(flow, node):
        return node.inputs[:1]
    return ()


def _through(flow: DataFlow, node: Node, value: str, operand: _Source) -> _Source:
    """Return the source of a node's output, given that of its operand."""
    if node.op == "Add":
        (bias,) = (name for name in node.inputs if flow.is_weight(name))
        return replace(operand, weights=(*operand.weights, bias))
    if node.op == "Split":
        widths = [flow.width(name) for name in node.outputs]
        index = node.outputs.index(value)
        return replace(operand, columns=operand.columns[sum(widths[:index]) :][: widths[index]])
    if node.op == "HeadNorm":  # the norm cancels factors of q and k; factors of v pass through
        num_normed = prod(int(size) for size in flow.plan.tensors[node.inputs[1]].shape)
        return replace(operand, columns=np.where(np.arange(flow.width(value)) < num_normed, UNREACHED, operand.columns))
    if node.op in ATTENTION_OPS:
        return replace(operand, columns=operand.columns[_attended_columns(node)])
    return operand


def _attended_columns(attention: Node) -> NDArray[np.int64]:
    """Return, for each channel of attention's output, the column of q | k | v of which it is a mean; heads of a group
    share columns.
    """
    names = ("num_heads", "num_kv_heads", "head_dim")
    num_heads, num_kv_heads, head_dim = (cast(int, attention.attributes[name]) for name in names)
    kv_heads = num_heads + num_kv_heads + np.arange(num_heads) // (num_heads // num_kv_heads)
    return (kv_heads[:, None] * head_dim + np.arange(head_dim)).ravel()


def _splits_channels(flow: DataFlow, node: Node) -> bool:
    last = len(flow.plan.tensors[node.inputs[0]].shape) - 1
    return node.op == "Split" and node.attributes.get("axis", 0) in (-1, last)


def _made_as(flow: DataFlow, value: str) -> str:
    """Return the value that rows were picked from, or the value itself."""
    node = flow.makers.get(value)
    return _made_as(flow, node.inputs[0]) if node is not None and flow.picks_rows(node) else value


def _peaks_of(channel_peaks: Mapping[str, Float32], value: str, width: int) -> Float32:
    if value not in channel_peaks:
        raise QuantizationError(f"the calibration has no entry for the channels of {value}; calibrate this model again")
    peaks = channel_peaks[value]
    if peaks.shape != (width,):
        raise QuantizationError(
            f"the calibration is of another model: it has {peaks.size} channels of {value}, the model has {width}"
        )
    if not np.isfinite(peaks).all():
        raise QuantizationError(f"the calibration has channels of {value} that are not finite; calibrate again")
    return peaks


def _row_peaks(weight: Float32, name: str) -> Float32:
    peaks: Float32 = np.maximum(weight.max(axis=1), -weight.min(axis=1))
    if not np.isfinite(peaks).all():
        raise QuantizationError(f"{name} holds values that are not finite; the checkpoint is damaged")
    return peaks


def _factors(peaks: Float64, row_peaks: Float64, alpha: float) -> Float64:
    """Return the factors d of `equalise`, float64; 1 for a channel whose values or weights are all zero."""
    exponents = np.zeros_like(peaks)
    used = (peaks > 0) & (row_peaks > 0)
    if used.any():
        exponents[used] = alpha * np.log2(peaks[used]) - (1 - alpha) * np.log2(row_peaks[used])
        exponents[used] -= exponents[used].mean()
    factors: Float64 = np.exp2(exponents.clip(-LARGEST_EXPONENT, LARGEST_EXPONENT))
    return factors
