"""The weights of an ONNX decoder as a `TensorSource`, under the names that the module tree uses.

The forms in which an ONNX file stores weights. All forms can be read as float32, and some as blocks of 4 bits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray

from chunkrt.checkpoints.source import BLOCK_DEPTH, BlockTensor, TensorInfo
from chunkrt.errors import ModelError, cause_of

Float32 = NDArray[np.float32]

_NAMES = {
    ir.DataType.DOUBLE: "F64",
    ir.DataType.FLOAT: "F32",
    ir.DataType.FLOAT16: "F16",
    ir.DataType.BFLOAT16: "BF16",
}


def shape_of(tensor: ir.TensorProtocol) -> tuple[int, ...]:
    """Return a tensor's sizes, which are all known because the tensor is constant."""
    return tuple(int(size) for size in tensor.shape if isinstance(size, int))


class OnnxWeight(ABC):
    """A weight in its file. `stored_as`: as in `TensorInfo`."""

    shape: tuple[int, ...]
    stored_as: str

    @abstractmethod
    def read(self) -> Float32:
        """Return the tensor's values; a view of the file if it stores float32."""

    def read_blocks(self) -> BlockTensor | None:
        """Return the values [N, K] in blocks of 4 bits if the conversion is exact, else None."""
        return None


class FloatTensor(OnnxWeight):
    """A tensor of plain numbers: float64, float32, float16 or bfloat16."""

    def __init__(self, tensor: ir.TensorProtocol) -> None:
        self._tensor = tensor
        self.shape = shape_of(tensor)
        self.stored_as = _NAMES.get(tensor.dtype, tensor.dtype.name)

    def read(self) -> Float32:
        """See `OnnxWeight`."""
        return np.asarray(self._tensor.numpy()).astype(np.float32, copy=False)


class Derived(OnnxWeight):
    """The result of a computation on other tensors.

    `stored_as` is the storage type of the underlying tensors.
    """

    def __init__(self, shape: tuple[int, ...], stored_as: str, compute: Callable[[], Float32]) -> None:
        self.shape, self.stored_as, self._compute = shape, stored_as, compute

    def read(self) -> Float32:
        """See `OnnxWeight`."""
        values = self._compute()
        assert values.shape == self.shape, (values.shape, self.shape)
        return values


class Transposed(OnnxWeight):
    """A transposed matrix. It is never in blocks, which extend along the rows of the underlying matrix."""

    def __init__(self, tensor: OnnxWeight) -> None:
        self.tensor = tensor
        self.shape, self.stored_as = tensor.shape[::-1], tensor.stored_as

    def read(self) -> Float32:
        """See `OnnxWeight`."""
        return self.tensor.read().T


def transposed(tensor: OnnxWeight) -> OnnxWeight:
    """Return the transposed matrix, without transposing twice."""
    return tensor.tensor if isinstance(tensor, Transposed) else Transposed(tensor)


class Groups(NamedTuple):
    """Integers with a scale and a zero point for each group of adjacent columns: w = (integer - zero) * scale.

    integers: uint8 [N, K]. scales, zeros: float32 [N, groups].
    """

    integers: NDArray[np.uint8]
    scales: Float32
    zeros: Float32


class GroupedTensor(OnnxWeight):
    """A weight [N, K] of whole numbers in groups along K.

    Args:
        decode: reads the integers, scales and zero points; called whenever values are needed.
        group: number of adjacent columns that share a scale.
    """

    def __init__(self, shape: tuple[int, int], bits: int, group: int, decode: Callable[[], Groups]) -> None:
        self.shape, self._bits, self._group, self._decode = shape, bits, group, decode

    @cached_property
    def stored_as(self) -> str:  # type: ignore[override]
        """Storage type: "Q4_1" if the conversion to blocks is lossless, else another name."""
        is_exact = self._can_be_blocks and _minima(self._decode()) is not None
        return "Q4_1" if is_exact else f"INT{self._bits}_GROUPS_OF_{self._group}"

    @property
    def _can_be_blocks(self) -> bool:
        return self._bits == 4 and self._group % BLOCK_DEPTH == 0 and self.shape[1] % BLOCK_DEPTH == 0

    def read(self) -> Float32:
        """See `OnnxWeight`."""
        integers, scales, zeros = self._decode()
        depth = self.shape[1]
        values = integers - np.repeat(zeros, self._group, axis=1)[:, :depth]
        return (values * np.repeat(scales, self._group, axis=1)[:, :depth]).astype(np.float32, copy=False)

    def read_blocks(self) -> BlockTensor | None:
        """Return the integers, with scales and minima in float16, if float16 represents them exactly; otherwise
        None.
        """
        if not self._can_be_blocks:
            return None
        groups = self._decode()
        if (minima := _minima(groups)) is None:
            return None
        times, blocks = self._group // BLOCK_DEPTH, self.shape[1] // BLOCK_DEPTH
        scales, lows = (np.repeat(a, times, axis=1)[:, :blocks] for a in (groups.scales.astype(np.float16), minima))
        return BlockTensor(integers=groups.integers, scales=scales, minima=lows)


def _minima(groups: Groups) -> NDArray[np.float16] | None:
    """Return -zero * scale in float16; None if float16 does not represent it and the scale exactly."""
    exact = -groups.zeros.astype(np.float64) * groups.scales
    with np.errstate(over="ignore"):
        minima, scales = exact.astype(np.float16), groups.scales.astype(np.float16)
    is_exact = np.isfinite(minima).all() and (minima == exact).all() and (scales == groups.scales).all()
    return minima if is_exact else None


def n_bits_tensor(
    packed: ir.TensorProtocol,
    scales: ir.TensorProtocol,
    zeros: ir.TensorProtocol | None,
    *,
    shape: tuple[int, int],
    bits: int,
    block_size: int,
    where: str,
) -> GroupedTensor:
    """Return the weight [N, K] of com.microsoft's MatMulNBits.

    Args:
        packed: uint8 [N, ceil(K / block_size), block_size * bits / 8], low bits first.
        scales: float [N, ceil(K / block_size)], in any shape.
        zeros: by default the middle of the range; whole numbers of as many bits, packed row by row, or floats.
        where: the node, for messages.

    Raises:
        ModelError: an operand has another size.
    """
    columns, depth = shape
    groups = -(-depth // block_size)
    expected = {"weight": (packed, columns * groups * block_size * bits // 8), "scales": (scales, columns * groups)}
    is_packed = zeros is not None and zeros.dtype == ir.DataType.UINT8
    if zeros is not None:
        expected["zero points"] = zeros, columns * (-(-groups * bits // 8) if is_packed else groups)
    for name, (tensor, size) in expected.items():
        if tensor.size != size:
            raise ModelError(f"{where}: its {name} have {tensor.size} elements, expected {size}")

    def decode() -> Groups:
        integers = _unpacked(packed.numpy().reshape(columns, -1), bits).reshape(columns, -1)[:, :depth]
        offsets: NDArray[np.float32] = np.full((columns, groups), 2 ** (bits - 1), np.float32)
        if zeros is not None:
            flat = zeros.numpy().reshape(columns, -1)
            offsets = (_unpacked(flat, bits)[:, :groups] if is_packed else flat).astype(np.float32)
        return Groups(integers, scales.numpy().reshape(columns, groups).astype(np.float32), offsets)

    return GroupedTensor(shape, bits, block_size, decode)


def _unpacked(packed: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    if bits == 8:
        return packed
    per_byte = 8 // bits
    shifts = np.arange(per_byte, dtype=np.uint8) * bits
    parts: NDArray[np.uint8] = (packed[..., None] >> shifts) & (2**bits - 1)
    return parts.reshape(*packed.shape[:-1], -1)


def dequantised_tensor(
    integers: ir.TensorProtocol,
    scales: ir.TensorProtocol,
    zeros: ir.TensorProtocol | None,
    *,
    axis: int,
    block_size: int,
    where: str,
) -> OnnxWeight:
    """Return the result of DequantizeLinear: one scale for all, for each slice of an axis, or for each block.

    Raises:
        ModelError: the shapes do not match.
    """
    shape, of_scales = shape_of(integers), shape_of(scales)
    axis %= max(len(shape), 1)
    if block_size:
        expected = tuple(-(-size // block_size) if i == axis else size for i, size in enumerate(shape))
        fits = of_scales == expected
    else:
        fits = scales.size == 1 or (len(of_scales) == 1 and bool(shape) and of_scales[0] == shape[axis])
    if not fits or (zeros is not None and shape_of(zeros) != of_scales):
        raise ModelError(f"{where}: scales {list(of_scales)} do not match a weight {list(shape)} on axis {axis}")

    def spread(tensor: ir.TensorProtocol) -> NDArray[np.float32]:
        values = tensor.numpy().astype(np.float32)
        if block_size:
            return np.repeat(values, block_size, axis=axis).take(range(shape[axis]), axis=axis)
        return values.reshape([-1 if i == axis else 1 for i in range(len(shape))]) if values.size > 1 else values

    bits = integers.dtype.bitwidth
    if block_size and len(shape) == 2 and axis == 0 and bits in (4, 8):
        lowest = 2 ** (bits - 1) if integers.dtype in (ir.DataType.INT4, ir.DataType.INT8) else 0

        def decode() -> Groups:
            rows = np.ascontiguousarray((integers.numpy().astype(np.int16) + lowest).astype(np.uint8).T)
            steps = scales.numpy().astype(np.float32).T
            offsets = np.zeros_like(steps) if zeros is None else zeros.numpy().astype(np.float32).T
            return Groups(rows, steps, offsets + np.float32(lowest))

        return Transposed(GroupedTensor((shape[1], shape[0]), bits, block_size, decode))

    def compute() -> Float32:
        values = integers.numpy().astype(np.float32)
        return (values if zeros is None else values - spread(zeros)) * spread(scales)

    return Derived(shape, integers.dtype.name, compute)


class OnnxSource:
    """Tensors by the names of the initializers from which they are made; linears are [out_features, in_features].

    Attributes:
        path: the folder that is searched for tokenizer files.
        file: the model's file.
        original: the model as it was read; `verify` releases it.
    """

    path: Path
    architecture: str
    config: Mapping[str, Any]

    def __init__(self, file: Path, architecture: str, config: Mapping[str, Any], original: onnx.ModelProto) -> None:
        self.file, self.path = file, file.parent
        self.original: onnx.ModelProto | None = original
        self.architecture, self.config = architecture, config
        self._tensors: dict[str, OnnxWeight] = {}

    def add(self, name: str, tensor: OnnxWeight) -> str:
        """Add a tensor, and return its name in the source, which differs from its own name if another tensor has that
        name.
        """
        unique, number = name, 1
        while unique in self._tensors:
            unique, number = f"{name}.{number}", number + 1
        self._tensors[unique] = tensor
        return unique

    def keep(self, names: Collection[str]) -> None:
        """Remove all tensors except those with the given names."""
        self._tensors = {name: tensor for name, tensor in self._tensors.items() if name in names}

    def names(self) -> Sequence[str]:
        """Return the names of the tensors that the decoder reads."""
        return list(self._tensors)

    def info(self, name: str) -> TensorInfo:
        """See `TensorSource`."""
        tensor = self._find(name)
        return TensorInfo(shape=tensor.shape, stored_as=tensor.stored_as)

    def read(self, name: str) -> NDArray[np.float32]:
        """See `TensorSource`; also raises ModelError for data that can no longer be read."""
        try:
            return self._find(name).read()
        except (OSError, ValueError) as error:
            raise ModelError(f"{self.file}: the weight {name} cannot be read: {cause_of(error)}") from error

    def read_blocks(self, name: str) -> BlockTensor | None:
        """See `TensorSource`."""
        return self._find(name).read_blocks()

    def stored(self, name: str) -> NDArray[np.uint8]:
        """See `TensorSource`: the bytes of its values in float32, which verifying the import has read anyway."""
        return np.ascontiguousarray(self.read(name)).reshape(-1).view(np.uint8)

    def _find(self, name: str) -> OnnxWeight:
        if name not in self._tensors:
            raise ModelError(f"{self.file} has no weight {name}")
        return self._tensors[name]
