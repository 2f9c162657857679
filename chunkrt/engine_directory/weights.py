"""Prepare weights: convert checkpoint tensors to an engine's stored arrays under a scheme, one tensor at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import IO, TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from chunkrt.checkpoints.source import BLOCK_DEPTH, BLOCK_TYPES, FLOAT_TYPES, BlockTensor
from chunkrt.engine_directory.store import (
    BLOCK_SCALE_SUFFIX,
    CODES,
    COLUMNS_PER_BLOCK,
    HOT_CHANNELS_SUFFIX,
    INPUT_STEP_SUFFIX,
    MULTIPLIER_SUFFIX,
    OUTPUT_STEP_SUFFIX,
    ROTARY_SUFFIX,
    SCALE_SUFFIX,
    StoredArray,
    pack,
    pack_blocks,
    pack_products,
    packed_blocks_shapes,
    packed_shape,
)
from chunkrt.errors import QuantizationError, unknown_name
from chunkrt.graph.plan import (
    MAIN_SUFFIX,
    Node,
    Plan,
    Tensor,
    embedding_tables,
    expert_weights,
    linear_nodes,
    linear_weights,
    resolve,
)
from chunkrt.graph.rotary_tables import Float64
from chunkrt.quant.arithmetic import Integers, quantize_linear, quantize_weight
from chunkrt.quant.calibration import Calibration, num_hot_channels
from chunkrt.quant.grid import LinearGrids, grids_of
from chunkrt.quant.scheme import Scheme, Storage

if TYPE_CHECKING:
    from chunkrt.graph.partition import Planned

Float32 = NDArray[np.float32]
LoadRotary = Callable[[str], Float64]
"""Function that returns the recipe of a rotary table that chunkrt generates, by its plan name; see
`graph/rotary_tables.py`."""
LoadBlocks = Callable[[str], BlockTensor | None]
"""Function that returns a linear's weight in the checkpoint's own blocks of 4 bits, by its plan name; None without such
blocks."""

ALIGNMENT_BYTES = 64
WRITE_BYTES = 32 * 2**20
"""Bytes that are written at once. Linux then keeps the file in huge pages, with which a token takes 0.8 of the time."""
ORDER = {"int8": 0, "uint8": 0, "float64": 1, "float32": 2, "float16": 3}


def check_calibration(plan: Plan, calibration: Calibration) -> None:
    """Raise QuantizationError if a calibration belongs to another decoder, i.e. has other linears or other widths."""
    for weight, node in linear_nodes(plan).items():
        result, columns = node.outputs[0].removesuffix(MAIN_SUFFIX), plan.tensors[weight].shape[1]
        if result not in calibration.column_peaks:
            raise QuantizationError(f"the calibration has no entry for {result!r}; calibrate this model again")
        if (found := calibration.column_peaks[result].size) != columns:
            raise QuantizationError(
                f"the calibration is of another model: it has {found} columns of {weight}, the model has {columns}"
            )


def check_shadowed(plan: Plan, scheme: Scheme) -> None:
    """Raise ConfigError if a shadow does not belong to an 8-bit linear of the plan; the message suggests the nearest
    name."""
    narrow = [name for name in linear_nodes(plan) if scheme.activation_bits_of(name) == 8]
    for pattern in scheme.shadowed:
        if not any(fnmatchcase(name, pattern) for name in narrow):
            raise unknown_name(
                "8-bit linear layer", pattern, narrow, hint="`chunkrt plan` lists linear layers; '*' matches any text"
            )


class QuantizedShares(Protocol):
    """A rank's part of the linears and routed experts of a complete decoder."""

    def linear(self, name: str) -> Node:
        """Return the node of a linear in the complete decoder."""
        ...

    def cut_linear(self, name: str, integers: Integers, grids: LinearGrids) -> tuple[Integers, LinearGrids]:
        """Return the rank's columns of a complete linear, with their grids."""
        ...

    def cut_experts(self, name: str, integers: NDArray[np.int8], scale: Float32) -> tuple[NDArray[np.int8], Float32]:
        """Return the rank's part of the integers [E, K, N] and scales [E, N] of complete experts."""
        ...


class WeightWriter:
    """Writes a store sequentially, one array at a time, in the order of its entries."""

    def __init__(self, file: IO[bytes], entries: Sequence[StoredArray]) -> None:
        self._file = file
        self._entries: Iterator[StoredArray] = iter(entries)
        header: dict[str, Any] = {
            "__metadata__": {e.name: json.dumps(e.logical_shape) for e in entries if e.logical_shape != e.shape}
        }
        offset = 0
        for entry in entries:
            end = offset + entry.num_bytes
            header[entry.name] = {
                "dtype": CODES[entry.dtype],
                "shape": entry.shape,
                "data_offsets": [offset, end],
            }
            offset = end
        text = json.dumps(header).encode()
        text += b" " * (-(len(text) + 8) % ALIGNMENT_BYTES)
        file.write(len(text).to_bytes(8, "little") + text)

    def write(self, array: NDArray[Any]) -> None:
        """Append the array of the next entry; its shape and dtype must be those of the entry."""
        entry = next(self._entries)
        assert (array.shape, array.dtype) == (entry.shape, np.dtype(entry.dtype)), entry.name
        self._file.write(np.ascontiguousarray(array).data)


def settle(planned: Planned, scheme: Scheme) -> Scheme:
    """Adapt a scheme to the checkpoint: `weights_of_8_bits` of the result names every linear that is not in blocks.

    A linear is in blocks in two cases. Either the checkpoint stores all of its tensors in blocks, and no rank's share
    would cut a block; or its tensors are floats, the scheme does not keep it in 8 bits, and its depth is divisible into
    blocks. A scheme without blocks is returned unchanged.

    Raises:
        ModelError: the checkpoint lacks a tensor.
    """
    if scheme.weight_bits != 4 or scheme.is_static:
        return scheme

    def is_in_blocks(name: str) -> bool:
        parameter = planned.parameters[name]
        types = parameter.stored_as(planned.source)
        depth, _ = resolve(planned.plan.tensors[name].shape, {})
        is_made_here = types <= FLOAT_TYPES and scheme.has_blocks(name) and depth % BLOCK_DEPTH == 0
        return (types <= BLOCK_TYPES and parameter.keeps_blocks) or is_made_here

    others = sorted(name for name in linear_weights(planned.plan) if not is_in_blocks(name))
    return replace(scheme, weights_of_8_bits=tuple(others))


def write_weights(
    plan: Plan,
    scheme: Scheme,
    load: Callable[[str], Float32],
    path: Path,
    *,
    load_rotary: LoadRotary | None = None,
    load_blocks: LoadBlocks = lambda name: None,
    rounded: Mapping[str, Integers | BlockTensor] = MappingProxyType({}),
    calibration: Calibration | None = None,
    share: QuantizedShares | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Load every weight of the plan, quantise it under the scheme, and write the store.

    Args:
        scheme: the scheme; if it has linears in blocks, a result of `settle`.
        load: returns a weight's values by its plan name; it is called at most once per weight, and results are dropped
            at once.
        load_rotary: returns the recipe of a rotary table that chunkrt generates; plans without such tables need none.
        load_blocks: called first for linears in blocks; if it returns None, the values of the linear are quantised.
        rounded: linears that are quantised already.
        path: path of the store; the caller ensures that the file is written completely or not at all (by renaming it).
        calibration: calibration of this decoder; a static scheme needs it.
        share: the rank's part of the linears and experts of a static scheme, whose `load`, `rounded` and `calibration`
            are those of the complete decoder.
        progress: called with the number of finished weights and the number of all weights.

    Raises:
        ModelError, QuantizationError: see `load`, `load_blocks` and `quantize_weight`; or the calibration is missing,
            or belongs to another decoder.
    """
    # Packed weights need 64-byte alignment, float64 8-byte, float32 4-byte, float16 2-byte. Safetensors has no gaps, so
    # entries with wider alignment come first. Packed scales of blocks are multiples of 64 bytes and follow their
    # weights.
    stored = sorted(stored_weights(plan, scheme).values(), key=lambda weight: ORDER[weight.entries[0].dtype])
    tables = [weight for weight in stored if weight.entries[0].dtype == "float16"]
    aligned = [weight for weight in stored if weight.entries[0].dtype != "float16"]
    rest = [entry for weight in stored for entry in weight.entries[weight.num_first :]]
    beside = sorted(rest, key=lambda e: (e.dtype == "uint8", e.name))
    scales = [entry for entry in beside if entry.dtype != "uint8"]
    later: dict[str, NDArray[Any]] = {}
    with path.open("wb", buffering=WRITE_BYTES) as file:
        order = [*_first(aligned), *scales, *_first(tables), *beside[len(scales) :]]
        writer = WeightWriter(file, order)
        for done, weight in enumerate([*aligned, *tables]):
            progress(done, len(stored))
            if done == len(aligned):
                _write_all(writer, scales, later)
            if weight.storage == "rotary":
                assert load_rotary is not None, weight.tensor.name
                recipe = load_rotary(weight.tensor.name)
                _check_recipe(recipe, plan.context_length, name=weight.tensor.name)
                arrays = {weight.tensor.name + ROTARY_SUFFIX: recipe}
            else:
                arrays = _arrays(weight, scheme, load, load_blocks, rounded, calibration, share)
            for entry in weight.entries[: weight.num_first]:
                writer.write(arrays.pop(entry.name))
            later |= arrays
        _write_all(writer, beside[len(scales) :] if tables else beside, later)
    progress(len(stored), len(stored))


def _first(weights: Sequence[StoredWeight]) -> list[StoredArray]:
    return [entry for weight in weights for entry in weight.entries[: weight.num_first]]


def _write_all(writer: WeightWriter, entries: Sequence[StoredArray], arrays: Mapping[str, NDArray[Any]]) -> None:
    for entry in entries:
        writer.write(arrays[entry.name])


def _arrays(
    weight: StoredWeight,
    scheme: Scheme,
    load: Callable[[str], Float32],
    load_blocks: LoadBlocks,
    rounded: Mapping[str, Integers | BlockTensor],
    calibration: Calibration | None,
    share: QuantizedShares | None,
) -> dict[str, NDArray[Any]]:
    """Return the arrays of a weight's entries by name."""
    name, linear = weight.tensor.name, weight.linear
    if weight.storage in ("float32", "float16"):
        return {name: _as_dtype(load(name), weight.storage, name=name)}
    if weight.storage == "experts":
        values, scales = zip(*(quantize_weight(value, name=name) for value in load(name)), strict=True)
        integers, scale = np.stack(values), np.stack(scales)
        if share is not None:
            integers, scale = share.cut_experts(name, integers, scale)
        return {name: np.stack([pack(expert) for expert in integers]), name + SCALE_SUFFIX: scale}
    assert linear is not None
    blocks = load_blocks(name) if weight.storage == "blocks" else None
    quantized = rounded.get(name) or blocks or quantize_linear(load(name), scheme.storage_of(name), name=name)
    if isinstance(quantized, BlockTensor):
        blocks_of_integers, block_scales = pack_blocks(quantized)
        return {name: blocks_of_integers, name + BLOCK_SCALE_SUFFIX: block_scales}
    grids: LinearGrids | None = None
    if scheme.is_static:
        linear = linear if share is None else share.linear(name)
        grids = grids_of(linear, scheme, calibration, quantized.scale)
        if share is not None:
            quantized, grids = share.cut_linear(name, quantized, grids)
    arrays: dict[str, NDArray[Any]] = {name + SCALE_SUFFIX: quantized.scale}
    if quantized.multipliers is None:
        arrays[name] = pack(quantized.values)
    else:
        arrays[name], arrays[name + MULTIPLIER_SUFFIX] = pack_products(quantized.values, quantized.multipliers)
    if grids is not None:
        arrays[name + INPUT_STEP_SUFFIX] = grids.input_step
        if grids.output_step is not None:
            arrays[name + OUTPUT_STEP_SUFFIX] = grids.output_step
    if scheme.is_shadowed(name):
        assert calibration is not None
        arrays[name + HOT_CHANNELS_SUFFIX] = calibration.hot_channels[linear.inputs[0]]
    return arrays


def _check_recipe(recipe: Float64, num_positions: int, *, name: str) -> None:
    with np.errstate(over="ignore"):
        is_finite = np.isfinite(recipe[:, 1:] * num_positions).all()
    if not is_finite or not (np.abs(recipe[:, 0]) <= np.finfo(np.float32).max).all():
        raise QuantizationError(f"{name} would hold values that are not finite; the checkpoint is damaged")


def _as_dtype(values: Float32, dtype: str, *, name: str) -> NDArray[np.floating[Any]]:
    with np.errstate(over="ignore"):
        converted = values.astype(dtype, copy=False)
    if not np.isfinite(converted).all():
        if not np.isfinite(values).all():
            raise QuantizationError(f"{name} holds values that are not finite; the checkpoint is damaged")
        raise QuantizationError(f"{name} holds values too large for {dtype}; use the scheme 'float'")
    return converted


@dataclass(frozen=True, kw_only=True)
class StoredWeight:
    """Storage of one weight of a plan under a scheme.

    Attributes:
        storage: kind of storage; for a linear see `Scheme.storage_of`. "experts" are int8 with a scale for each output
            channel of each expert, a looked-up table is float16, and "rotary" is the recipe of a rotary table.
        linear: the node that multiplies by the weight, if it is the weight of a linear.
        num_tables: number of consecutive tables in a rotary table.
    """

    tensor: Tensor
    storage: Storage | Literal["float16", "experts", "rotary"]
    scheme: Scheme
    linear: Node | None
    num_tables: int = 1

    @property
    def num_first(self) -> int:
        """Number of entries that are written at the weight's own place; the other entries follow all weights."""
        return 2 if self.storage == "blocks" else 1

    @cached_property
    def entries(self) -> list[StoredArray]:
        """Entries of the weight itself, and then of the other arrays of a quantised linear."""
        name, shape, scheme = self.tensor.name, resolve(self.tensor.shape, {}), self.scheme
        if self.storage in ("float32", "float16"):
            return [StoredArray(name=name, dtype=self.storage, shape=shape, logical_shape=shape)]
        if self.storage == "rotary":
            made_of = (self.num_tables, 1 + shape[1])
            return [StoredArray(name=name + ROTARY_SUFFIX, dtype="float64", shape=made_of, logical_shape=made_of)]
        *experts, depth, columns = shape
        beside: dict[str, tuple[str, tuple[int, ...]]] = {SCALE_SUFFIX: ("float32", (*experts, columns))}
        dtype, packed = "int8", (*experts, *packed_shape(depth, columns))
        if self.storage == "blocks":
            packed, of_scales = packed_blocks_shapes(depth, columns)
            dtype, beside = "uint8", {BLOCK_SCALE_SUFFIX: ("float16", of_scales)}
        elif self.storage != "experts":
            if self.storage == "int4":
                dtype, packed = "uint8", packed_blocks_shapes(depth, columns)[0]
                beside[MULTIPLIER_SUFFIX] = ("uint8", (*packed[:2], COLUMNS_PER_BLOCK))
            if scheme.is_static:
                beside[INPUT_STEP_SUFFIX] = ("float32", (1,))
                if not scheme.has_float_output(name):
                    beside[OUTPUT_STEP_SUFFIX] = ("float32", (columns,) if scheme.has_column_grids(name) else (1,))
                if scheme.is_shadowed(name):
                    beside[HOT_CHANNELS_SUFFIX] = ("int32", (num_hot_channels(depth),))
        first = StoredArray(name=name, dtype=dtype, shape=packed, logical_shape=shape)
        return [first, *(StoredArray(name=name + s, dtype=d, shape=n, logical_shape=n) for s, (d, n) in beside.items())]


def stored_weights(plan: Plan, scheme: Scheme) -> dict[str, StoredWeight]:
    """Map the name of each weight of a plan to its storage under a scheme."""
    linears, experts, tables = linear_nodes(plan), expert_weights(plan), embedding_tables(plan)

    def storage_of(name: str) -> Storage | Literal["float16", "experts", "rotary"]:
        if plan.tensors[name].rotary:
            return "rotary"
        if not scheme.weight_bits:
            return "float32"
        if name in linears:
            return scheme.storage_of(name)
        return "experts" if name in experts else "float16" if name in tables else "float32"

    return {
        name: StoredWeight(
            tensor=tensor,
            storage=storage_of(name),
            scheme=scheme,
            linear=linears.get(name),
            num_tables=plan.num_rotary_tables,
        )
        for name, tensor in plan.tensors.items()
        if tensor.kind == "weight"
    }
