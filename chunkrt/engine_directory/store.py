"""Weights of an engine, which are prepared once when a model is compiled, and memory-mapped from then on.

One file in safetensors format serves every backend, on the NPU and on the CPU, in prefill and in decode. A quantised
linear's weight is stored under its own name, packed for the dot-product instructions of all CPUs. For other uses,
`linear` unpacks it, `experts` unpacks the weights of a mixture, and `blocks` unpacks a weight of 4 bits in blocks. The
other arrays that the scheme needs are stored under the weight's name and one of the suffixes below.

W [K, N] (as in `X @ W`) is packed as int8 [ceil(N/16), ceil(K/4), 16, 4], zero-padded, with W[k, n] at [n // 16, k //
4, n % 16, k % 4]. Four values along k of one column are adjacent, because all int8 dot-product instructions (VNNI
vpdpbusd, NEON sdot) consume four values. Sixteen columns fill one cache line and one 512-bit register. NEON smmla
consumes eight values along k; one zip of two adjacent groups yields them.

A weight of 4 bits in blocks is stored as uint8 [ceil(N/16), K/32, 4, 16, 4]: the integer of W[k, n] is at [n // 16, k
// 32, k % 32 // 8, n % 16, k % 4], in the low half of the byte if k % 8 < 4, otherwise in the high half. A mask or a
shift yields groups of four values as above. A second array, float16 [ceil(N/16), K/32, 2, 16], contains the scales of
16 columns and then their minima. Both arrays are zero past column N.

A weight of 4 bits under a static scheme is stored in the same layout, with ceil(K/32) blocks and 8 added to its
integers. A second array, uint8 [ceil(N/16), ceil(K/32), 16], contains its multipliers, with zeros past column N.
"""

from __future__ import annotations

import json
import mmap
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from chunkrt.checkpoints.source import BLOCK_DEPTH, BlockTensor
from chunkrt.errors import ModelError, OutOfMemoryError, cause_of
from chunkrt.files import map_read_only
from chunkrt.graph.plan import Plan
from chunkrt.graph.rotary_tables import rotary_table

SCALE_SUFFIX = ".scale"
"""float32 [N]: a quantised linear's scales, w ~ q * scale; of experts [E, N]."""

MULTIPLIER_SUFFIX = ".multiplier"
"""uint8 [ceil(N / 16), ceil(K / 32), 16], of a static linear of 4 bits: multipliers of its integers, block by block;
zeros past N.
"""

BLOCK_SCALE_SUFFIX = ".block_scale"
"""float16 [ceil(N / 16), K / 32, 2, 16], of a linear in blocks of 4 bits: its scales and minima."""

INPUT_STEP_SUFFIX = ".input_step"
"""float32 [1], under a static scheme: the step of the grid of the linear's input, x ~ q * step."""

OUTPUT_STEP_SUFFIX = ".output_step"
"""float32 [1] or [N]: the step of the grid of the linear's output, one for all columns or one for each."""

HOT_CHANNELS_SUFFIX = ".hot_channels"
"""int32 [H], ascending, of a linear with a shadow: the rows of its weight to be kept in float32. H may be 0."""

ROTARY_SUFFIX = ".rotary"
"""float64 [tables, 1 + rotary_dim / 2], instead of a rotary table: its recipe; see `graph/rotary_tables.py`."""

CODES = {"float64": "F64", "float32": "F32", "float16": "F16", "int8": "I8", "uint8": "U8", "int32": "I32"}
_DTYPES = {code: np.dtype(name) for name, code in CODES.items()}


@dataclass(frozen=True, kw_only=True)
class StoredArray:
    """One array to be stored. `logical_shape` is [K, N] for a packed linear and [E, K, N] for packed experts; otherwise
    it equals `shape`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    logical_shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Number of bytes that the array takes in the file."""
        return prod(self.shape) * np.dtype(self.dtype).itemsize


class WeightStore:
    """Read access to prepared weights by plan tensor name. Arrays are read-only views of the mapped file."""

    def __init__(
        self,
        arrays: Mapping[str, NDArray[Any]],
        logical_shapes: Mapping[str, tuple[int, ...]],
        mapped: mmap.mmap | None = None,
    ) -> None:
        self._arrays = arrays
        self._logical_shapes = logical_shapes
        self._mapped = mapped

    @classmethod
    def open(cls, path: Path) -> Self:
        """Map a file that `WeightWriter` wrote.

        Raises:
            ModelError: the file is missing or damaged, or cannot be read.
            OutOfMemoryError: memory is insufficient for the mapping.
        """
        try:
            mapped = map_read_only(path)
            start = 8 + int.from_bytes(mapped[:8], "little")
            header = json.loads(mapped[8:start])
            metadata = header.pop("__metadata__")
            arrays = {name: _view(mapped, start, info) for name, info in header.items()}
            shapes = {name: tuple(json.loads(text)) for name, text in metadata.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
                raise ModelError(f"cannot read {path}: {cause_of(error)}") from error
            raise ModelError(
                f"{path} is damaged ({cause_of(error)}); delete its folder and compile the model again"
            ) from error
        return cls(arrays, shapes, mapped)

    def forget_pages(self) -> None:
        """Release the resident pages of the file if the system supports it; later accesses read the file again."""
        if self._mapped is not None and sys.platform != "win32":
            self._mapped.madvise(mmap.MADV_DONTNEED)

    def check(self, entries: Iterable[StoredArray]) -> None:
        """Compare the stored arrays with the expected ones.

        Raises:
            ModelError: an array is missing, or has the wrong shape or dtype.
        """
        for entry in entries:
            array = self._arrays.get(entry.name)
            found = None if array is None else (array.dtype.name, array.shape)
            logical_shape = self._logical_shapes.get(entry.name, entry.shape)
            if found != (entry.dtype, entry.shape) or logical_shape != entry.logical_shape:
                shape = f"{entry.dtype} {list(entry.shape)}"
                raise ModelError(
                    f"the stored weights do not belong to the plan: {entry.name} is "
                    f"{'missing' if found is None else f'{found[0]} {list(found[1])}'}, expected {shape}; "
                    "compile the model again"
                )

    def with_tables(self, plan: Plan) -> WeightStore:
        """Return the same weights with the rotary tables that chunkrt generates, cut to a plan's rows.

        Args:
            plan: plan of these weights; `Plan.within` cuts its tables.

        Raises:
            OutOfMemoryError: memory is insufficient for the tables.
        """
        arrays = dict(self._arrays)
        for tensor in (tensor for tensor in plan.tensors.values() if tensor.rotary):
            rows, recipe = int(tensor.shape[0]), arrays[tensor.name + ROTARY_SUFFIX]
            try:
                arrays[tensor.name] = rotary_table(
                    tensor.rotary, recipe, num_positions=plan.context_length, num_rows=rows
                )
            except MemoryError as error:
                raise OutOfMemoryError(
                    f"the rotary table {tensor.name} of {rows} positions does not fit memory; use a shorter context"
                ) from error
        return WeightStore(arrays, self._logical_shapes, self._mapped)

    @property
    def num_bytes(self) -> int:
        """Number of bytes of all arrays."""
        return sum(array.nbytes for array in self._arrays.values())

    def array(self, name: str) -> NDArray[Any]:
        """Return a weight that is not a quantised linear, in float32, or in float16 for an embedding table.

        Rotary tables that chunkrt generates exist after `with_tables`.
        """
        return self._arrays[name]

    def parts(self, name: str) -> Iterator[tuple[str, NDArray[Any]]]:
        """Return a weight and the arrays stored with it, each with its suffix; the weight's own suffix is empty."""
        beside = (SCALE_SUFFIX, MULTIPLIER_SUFFIX, BLOCK_SCALE_SUFFIX, INPUT_STEP_SUFFIX, OUTPUT_STEP_SUFFIX)
        for suffix in ("", *beside):
            if name + suffix in self._arrays:
                yield suffix, self._arrays[name + suffix]

    def packed_linear(self, name: str) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
        """Return a quantised linear's packed int8 weight and its scales float32 [N]; for experts both have a leading
        axis [E].

        A weight of 4 bits is packed as uint8, and its multipliers are a separate array.
        """
        return self._arrays[name], self._arrays[name + SCALE_SUFFIX]

    def linear(self, name: str) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
        """Return a quantised linear's int8 weight as [K, N] (a copy) and its scales float32 [N].

        A weight of 4 bits becomes the products of its integers and multipliers.
        """
        packed, scale = self.packed_linear(name)
        depth, columns = self._logical_shapes[name]
        if name + MULTIPLIER_SUFFIX not in self._arrays:
            return unpack(packed, depth, columns), scale
        return unpack_products(packed.view(np.uint8), self._arrays[name + MULTIPLIER_SUFFIX], depth, columns), scale

    def multipliers(self, name: str) -> NDArray[np.int8]:
        """Return the multipliers of a static linear of 4 bits, int8 [ceil(K / 32), N] (a copy)."""
        _, columns = self._logical_shapes[name]
        return unpack_multipliers(self._arrays[name + MULTIPLIER_SUFFIX], columns)

    def experts(self, name: str) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
        """Return quantised experts' int8 weights as [E, K, N] (a copy) and their scales float32 [E, N]."""
        packed, scale = self.packed_linear(name)
        _, depth, columns = self._logical_shapes[name]
        return np.stack([unpack(one, depth, columns) for one in packed]), scale

    def packed_blocks(self, name: str) -> tuple[NDArray[np.uint8], NDArray[np.float16]]:
        """Return the packed 4-bit weight of a linear in blocks, and its packed scales and minima."""
        return self._arrays[name], self._arrays[name + BLOCK_SCALE_SUFFIX]

    def blocks(self, name: str) -> BlockTensor:
        """Return the weight of a linear in blocks, transposed to [N, K] (a copy)."""
        _, columns = self._logical_shapes[name]
        return unpack_blocks(*self.packed_blocks(name), columns)


def _view(mapped: mmap.mmap, start: int, info: Mapping[str, Any]) -> NDArray[Any]:
    begin, _ = info["data_offsets"]
    shape = tuple(info["shape"])
    if any(type(size) is not int or size < 0 for size in (begin, *shape)):
        raise ValueError(f"shape {list(shape)} at {begin}")
    flat = np.frombuffer(mapped, _DTYPES[info["dtype"]], count=prod(shape), offset=start + begin)
    return flat.reshape(shape)


COLUMNS_PER_BLOCK = 16
DEPTH_PER_GROUP = 4
ZERO_OF_4_BITS = 8
"""Stored value that represents 0 in a static linear of 4 bits, whose integers are -8 to 7."""


def packed_shape(depth: int, columns: int) -> tuple[int, int, int, int]:
    """Return the shape of the packed form of a weight [depth, columns]."""
    blocks, groups = -(-columns // COLUMNS_PER_BLOCK), -(-depth // DEPTH_PER_GROUP)
    return blocks, groups, COLUMNS_PER_BLOCK, DEPTH_PER_GROUP


def pack(weight: NDArray[np.int8]) -> NDArray[np.int8]:
    """Pack int8 [K, N]."""
    depth, columns = weight.shape
    blocks, groups, _, _ = packed_shape(depth, columns)
    padded = np.zeros((groups * DEPTH_PER_GROUP, blocks * COLUMNS_PER_BLOCK), np.int8)
    padded[:depth, :columns] = weight
    tiles = padded.reshape(groups, DEPTH_PER_GROUP, blocks, COLUMNS_PER_BLOCK)
    return np.ascontiguousarray(tiles.transpose(2, 0, 3, 1))


def packed_blocks_shapes(depth: int, columns: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of the packed arrays of a weight [depth, columns] in blocks: bytes, and scales with minima."""
    tiles, blocks = -(-columns // COLUMNS_PER_BLOCK), -(-depth // BLOCK_DEPTH)
    pairs = BLOCK_DEPTH // (2 * DEPTH_PER_GROUP)
    return (tiles, blocks, pairs, COLUMNS_PER_BLOCK, DEPTH_PER_GROUP), (tiles, blocks, 2, COLUMNS_PER_BLOCK)


def pack_blocks(weight: BlockTensor) -> tuple[NDArray[np.uint8], NDArray[np.float16]]:
    """Pack a tensor [N, K] in blocks into two arrays: bytes, and scales with minima."""
    columns, depth = weight.integers.shape
    (tiles, blocks, *_), scales_shape = packed_blocks_shapes(depth, columns)
    scales = np.zeros((tiles * COLUMNS_PER_BLOCK, blocks, 2), np.float16)
    scales[:columns] = np.stack([weight.scales, weight.minima], axis=-1)
    by_tile = scales.reshape(tiles, COLUMNS_PER_BLOCK, blocks, 2).transpose(0, 2, 3, 1)
    assert by_tile.shape == scales_shape
    return _pack_halves(weight.integers), np.ascontiguousarray(by_tile)


def pack_products(
    products: NDArray[np.int8], multipliers: NDArray[np.int8]
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Pack the factors of products int8 [K, N] of 4-bit integers and multipliers [ceil(K / 32), N]."""
    depth, columns = products.shape
    integers = products // np.repeat(multipliers, BLOCK_DEPTH, axis=0)[:depth] + np.int8(ZERO_OF_4_BITS)
    (tiles, blocks, *_), _ = packed_blocks_shapes(depth, columns)
    padded = np.zeros((blocks, tiles * COLUMNS_PER_BLOCK), np.uint8)
    padded[:, :columns] = multipliers
    by_tile = padded.reshape(blocks, tiles, COLUMNS_PER_BLOCK).transpose(1, 0, 2)
    return _pack_halves(integers.T.astype(np.uint8)), np.ascontiguousarray(by_tile)


def unpack(packed: NDArray[np.int8], depth: int, columns: int) -> NDArray[np.int8]:
    """Unpack int8 [K, N] = [depth, columns]."""
    blocks, groups, _, _ = packed.shape
    matrix = packed.transpose(1, 3, 0, 2).reshape(groups * DEPTH_PER_GROUP, blocks * COLUMNS_PER_BLOCK)
    return np.ascontiguousarray(matrix[:depth, :columns])


def unpack_blocks(packed: NDArray[np.uint8], scales: NDArray[np.float16], columns: int) -> BlockTensor:
    """Unpack a tensor [N, K] in blocks, N = columns."""
    tiles, blocks, *_ = packed.shape
    integers = _unpack_halves(packed, columns)
    by_column = scales.transpose(2, 0, 3, 1).reshape(2, tiles * COLUMNS_PER_BLOCK, blocks)
    return BlockTensor(integers=integers, scales=by_column[0, :columns], minima=by_column[1, :columns])


def unpack_products(
    packed: NDArray[np.uint8], multipliers: NDArray[np.uint8], depth: int, columns: int
) -> NDArray[np.int8]:
    """Unpack 4-bit integers and multipliers to their products int8 [K, N] = [depth, columns]."""
    integers = _unpack_halves(packed, columns)[:, :depth].T.astype(np.int8) - np.int8(ZERO_OF_4_BITS)
    products: NDArray[np.int8] = integers * np.repeat(unpack_multipliers(multipliers, columns), BLOCK_DEPTH, 0)[:depth]
    return products


def unpack_multipliers(packed: NDArray[np.uint8], columns: int) -> NDArray[np.int8]:
    """Unpack multipliers to int8 [ceil(K / 32), N], N = columns."""
    tiles, blocks, _ = packed.shape
    by_block = packed.transpose(1, 0, 2).reshape(blocks, tiles * COLUMNS_PER_BLOCK)
    return by_block[:, :columns].astype(np.int8)


def _pack_halves(integers: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Pack integers [N, K] of 4 bits; incomplete blocks are padded with zeros."""
    columns, depth = integers.shape
    (tiles, blocks, pairs, *_), _ = packed_blocks_shapes(depth, columns)
    padded = np.zeros((tiles * COLUMNS_PER_BLOCK, blocks * BLOCK_DEPTH), np.uint8)
    padded[:columns, :depth] = integers
    halves = padded.reshape(tiles, COLUMNS_PER_BLOCK, blocks, pairs, 2, DEPTH_PER_GROUP).transpose(4, 0, 2, 3, 1, 5)
    return np.ascontiguousarray(halves[0] | halves[1] << 4)


def _unpack_halves(packed: NDArray[np.uint8], columns: int) -> NDArray[np.uint8]:
    """Unpack integers of 4 bits to [N, K], K in complete blocks."""
    tiles, blocks, *_ = packed.shape
    halves = np.stack([packed & 15, packed >> 4], axis=3)
    by_column = halves.transpose(0, 4, 1, 2, 3, 5).reshape(tiles * COLUMNS_PER_BLOCK, blocks * BLOCK_DEPTH)
    return by_column[:columns]
