"""Preparing weights: from checkpoint tensors to what an engine stores under a scheme, one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chunkrt.checkpoints.source import BlockTensor
from chunkrt.engine_directory.layout import pack, pack_blocks, packed_blocks_shapes, packed_shape
from chunkrt.engine_directory.store import (
    BLOCK_SCALE_SUFFIX,
    HOT_CHANNELS_SUFFIX,
    INPUT_STEP_SUFFIX,
    MULTIPLIER_SUFFIX,
    OUTPUT_STEP_SUFFIX,
    SCALE_SUFFIX,
    Entry,
    WeightWriter,
)
from chunkrt.errors import QuantizationError, unknown_name
from chunkrt.graph.plan import MAIN_SUFFIX, Plan, Tensor, embedding_tables, expert_weights, linear_nodes, linear_weights
from chunkrt.quant.blocks import COLUMNS_AT_ONCE, quantize_to_blocks
from chunkrt.quant.calibration import Calibration, num_hot_channels
from chunkrt.quant.grid import grids_of
from chunkrt.quant.scheme import BLOCK_LENGTH, Scheme

Float32 = NDArray[np.float32]
LoadBlocks = Callable[[str], BlockTensor | None]
"""A linear's weight in the checkpoint's own blocks of 4 bits, by its plan name, if it has them."""

ORDER = {"int8": 0, "uint8": 0, "float32": 1, "float16": 2}
MOST_4_BIT, MOST_MULTIPLIER = 7, 16


def quantize_weight(weight: Float32, *, name: str = "weight") -> tuple[NDArray[np.int8], Float32]:
    """Symmetric int8 per output channel.

    Args:
        weight: float32 [K, N], as in `X @ W`; any strides.

    Returns:
        int8 [K, N] in [-127, 127] and float32 scales [N]: weight ~ q * scale, scale = max|column| / 127, ties to
        even. A column of zeros has scale 0.

    Raises:
        QuantizationError: a weight is infinite or not a number.
    """
    depth, columns = weight.shape
    quantized = np.empty((depth, columns), np.int8)
    scale = np.empty(columns, np.float32)
    for begin in range(0, columns, COLUMNS_AT_ONCE):
        part = weight[:, begin : begin + COLUMNS_AT_ONCE]
        limit = _column_limits(part, name)
        part_scale = (limit / np.float32(127)).astype(np.float32)
        divisor = np.where(part_scale > 0, part_scale, np.float32(1))
        quantized[:, begin : begin + COLUMNS_AT_ONCE] = np.rint(part / divisor).clip(-127, 127)
        scale[begin : begin + COLUMNS_AT_ONCE] = part_scale
    return quantized, scale


def quantize_weight_in_blocks(
    weight: Float32, *, name: str = "weight"
) -> tuple[NDArray[np.int8], Float32, NDArray[np.int8]]:
    """4 bits in blocks of BLOCK_LENGTH along the depth, whose scales are whole multiples of their column's.

    A block takes the multiplier that leaves the least square error; the block with a column's largest weight always
    takes 16. Hexagon's compiler divides a column's largest block scale by 16 again, so it finds the same integers.

    Args:
        weight: float32 [K, N], as in `X @ W`; any strides.

    Returns:
        int8 [K, N], the products q * multiplier, at most 112 in magnitude; float32 scales [N], weight ~ product *
        scale; and the multipliers, int8 [ceil(K / BLOCK_LENGTH), N] in 1..16.

    Raises:
        QuantizationError: a weight is infinite or not a number.
    """
    depth, columns = weight.shape
    num_blocks = -(-depth // BLOCK_LENGTH)
    products = np.empty((num_blocks, BLOCK_LENGTH, columns), np.int8)
    multipliers = np.ones((num_blocks, columns), np.int8)
    scale = np.empty(columns, np.float32)
    for begin in range(0, columns, COLUMNS_AT_ONCE):
        part = slice(begin, begin + COLUMNS_AT_ONCE)
        limit = _column_limits(weight[:, part], name)
        scale[part] = limit / np.float32(MOST_4_BIT * MOST_MULTIPLIER)
        padded = np.zeros((num_blocks * BLOCK_LENGTH, len(limit)), np.float32)
        padded[:depth] = weight[:, part] / np.where(scale[part] > 0, scale[part], np.float32(1))
        blocks = padded.reshape(num_blocks, BLOCK_LENGTH, -1)
        widest = np.abs(blocks).max(axis=1)
        least = np.full(widest.shape, np.inf, np.float32)
        for multiplier in range(1, MOST_MULTIPLIER + 1):
            rounded = np.rint(blocks / np.float32(multiplier)).clip(-MOST_4_BIT, MOST_4_BIT) * np.float32(multiplier)
            error = np.square(rounded - blocks).sum(axis=1)
            if multiplier == MOST_MULTIPLIER:
                error[widest == widest.max(axis=0)] = -1
            better = error < least
            least[better] = error[better]
            multipliers[:, part][better] = multiplier
            products[:, :, part] = np.where(better[:, None], rounded, products[:, :, part])
    return products.reshape(-1, columns)[:depth], scale, multipliers


def _column_limits(weight: Float32, name: str) -> Float32:
    limit: Float32 = np.abs(weight).max(axis=0)
    if not np.isfinite(limit).all():
        raise QuantizationError(f"{name} holds values that are not finite; the checkpoint is damaged")
    return limit


def check_calibration(plan: Plan, calibration: Calibration) -> None:
    """Raises QuantizationError if a calibration is not of this decoder: other linears, or of other widths."""
    for weight, node in linear_nodes(plan).items():
        result, columns = node.outputs[0].removesuffix(MAIN_SUFFIX), plan.tensors[weight].shape[1]
        if result not in calibration.column_peaks:
            raise QuantizationError(f"the calibration knows nothing of {result!r}; calibrate this model anew")
        if (found := calibration.column_peaks[result].size) != columns:
            raise QuantizationError(
                f"the calibration is another model's: it knows {found} columns of {weight}, the model has {columns}"
            )


def check_shadowed(plan: Plan, scheme: Scheme) -> None:
    """Raises ConfigError if a scheme shadows what is no 8-bit linear of the plan; the message offers the nearest."""
    narrow = [name for name in linear_nodes(plan) if scheme.activation_bits_of(name) == 8]
    for pattern in scheme.shadowed:
        if not any(fnmatchcase(name, pattern) for name in narrow):
            raise unknown_name(
                "linear of 8 bits", pattern, narrow, hint="`chunkrt plan` lists linears; '*' stands for any text"
            )


def write_weights(
    plan: Plan,
    scheme: Scheme,
    load: Callable[[str], Float32],
    path: Path,
    *,
    load_blocks: LoadBlocks = lambda name: None,
    calibration: Calibration | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Load every weight of the plan, quantise what the scheme says, and write the store.

    Args:
        scheme: as `Planned.settle` gives it, if it has linears in blocks.
        load: a weight's values by its plan name; called at most once a weight, results are dropped at once.
        load_blocks: asked first for linears in blocks; without an answer their values are quantised.
        path: written in full or not at all is the caller's business (write aside, rename).
        calibration: of this decoder; a static scheme needs one.
        progress: told (weights done, weights in all).

    Raises:
        ModelError, QuantizationError: as `load`, `load_blocks` and `quantize_weight`; a calibration is missing, or is
            another decoder's.
    """
    stored = stored_entries(plan, scheme)
    linears, experts = linear_nodes(plan), expert_weights(plan)
    # Packed weights need 64-byte alignment, float32 4-byte: the wider they must be aligned, the earlier they come.
    # Packed scales are multiples of 64 bytes as well, and stand behind their weights.
    names = sorted(stored, key=lambda name: ORDER[stored[name][0].dtype])
    in_blocks = {name for name in linears if scheme.has_blocks(name)}
    first = [e for name in names for e in stored[name][: 2 if name in in_blocks else 1]]
    rest = (e for name in stored.keys() - in_blocks for e in stored[name][1:])
    beside = sorted(rest, key=lambda e: (e.dtype == "int8", e.name))
    later: dict[str, NDArray[Any]] = {}
    with path.open("wb") as file:
        writer = WeightWriter(file, [*first, *beside])
        for done, name in enumerate(names):
            progress(done, len(names))
            if name in in_blocks:
                blocks = load_blocks(name) or quantize_to_blocks(load(name), name=name)
                for array in pack_blocks(blocks):
                    writer.write(array)
                continue
            values = load(name)
            if len(stored[name]) == 1:
                writer.write(_as_dtype(values, stored[name][0].dtype, name=name))
                continue
            if name in experts:
                each = [quantize_weight(value, name=name) for value in values]
                writer.write(np.stack([pack(integers) for integers, _ in each]))
                later[name + SCALE_SUFFIX] = np.stack([scale for _, scale in each])
                continue
            if scheme.weight_bits_of(name) == 4:
                quantized, scale, later[name + MULTIPLIER_SUFFIX] = quantize_weight_in_blocks(values, name=name)
            else:
                quantized, scale = quantize_weight(values, name=name)
            writer.write(pack(quantized))
            later[name + SCALE_SUFFIX] = scale
            if scheme.is_static:
                grids = grids_of(linears[name], scheme, calibration, scale)
                later[name + INPUT_STEP_SUFFIX] = grids.input_step
                if grids.output_step is not None:
                    later[name + OUTPUT_STEP_SUFFIX] = grids.output_step
            if scheme.is_shadowed(name):
                assert calibration is not None
                later[name + HOT_CHANNELS_SUFFIX] = calibration.hot_channels[linears[name].inputs[0]]
        for entry in beside:
            writer.write(later[entry.name])
    progress(len(names), len(names))


def _as_dtype(values: Float32, dtype: str, *, name: str) -> NDArray[np.floating[Any]]:
    with np.errstate(over="ignore"):
        converted = values.astype(dtype, copy=False)
    if np.isinf(converted).any():
        raise QuantizationError(f"{name} holds values too large for {dtype}; use the scheme 'float'")
    return converted


def stored_entries(plan: Plan, scheme: Scheme) -> dict[str, list[Entry]]:
    """How a scheme stores each weight of a plan: the weight itself, then what a quantised linear needs beside it."""
    linears = linear_weights(plan) if scheme.weight_bits else set()
    experts = expert_weights(plan) if scheme.weight_bits else set()
    tables = embedding_tables(plan) if scheme.weight_bits else set()

    def entries(tensor: Tensor) -> list[Entry]:
        if tensor.name in linears:
            return _linear_entries(tensor, scheme)
        return _expert_entries(tensor) if tensor.name in experts else [_entry(tensor, tables)]

    return {t.name: entries(t) for t in plan.tensors.values() if t.kind == "weight"}


def _entry(tensor: Tensor, tables: set[str]) -> Entry:
    shape = tuple(int(d) for d in tensor.shape)
    dtype = "float16" if tensor.name in tables else "float32"
    return Entry(name=tensor.name, dtype=dtype, shape=shape, logical_shape=shape)


def _expert_entries(tensor: Tensor) -> list[Entry]:
    experts, depth, columns = (int(d) for d in tensor.shape)
    shape, of_scales = (experts, *packed_shape(depth, columns)), (experts, columns)
    return [
        Entry(name=tensor.name, dtype="int8", shape=shape, logical_shape=(experts, depth, columns)),
        Entry(name=tensor.name + SCALE_SUFFIX, dtype="float32", shape=of_scales, logical_shape=of_scales),
    ]


def _linear_entries(tensor: Tensor, scheme: Scheme) -> list[Entry]:
    name = tensor.name
    depth, columns = (int(d) for d in tensor.shape)
    if scheme.has_blocks(name):
        shape, scales_shape = packed_blocks_shapes(depth, columns)
        return [
            Entry(name=name, dtype="uint8", shape=shape, logical_shape=(depth, columns)),
            Entry(name=name + BLOCK_SCALE_SUFFIX, dtype="float16", shape=scales_shape, logical_shape=scales_shape),
        ]
    beside: dict[str, tuple[str, tuple[int, ...]]] = {SCALE_SUFFIX: ("float32", (columns,))}
    if scheme.weight_bits_of(name) == 4:
        beside[MULTIPLIER_SUFFIX] = ("int8", (-(-depth // BLOCK_LENGTH), columns))
    if scheme.is_static:
        beside[INPUT_STEP_SUFFIX] = ("float32", (1,))
        if not scheme.has_float_output(name):
            beside[OUTPUT_STEP_SUFFIX] = ("float32", (columns,) if scheme.has_column_grids(name) else (1,))
        if scheme.is_shadowed(name):
            beside[HOT_CHANNELS_SUFFIX] = ("int32", (num_hot_channels(depth),))
    packed = Entry(name=name, dtype="int8", shape=packed_shape(depth, columns), logical_shape=(depth, columns))
    return [packed, *(Entry(name=name + s, dtype=d, shape=n, logical_shape=n) for s, (d, n) in beside.items())]
