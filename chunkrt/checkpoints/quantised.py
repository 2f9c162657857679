"""Quantised Hugging Face folders: weights that consist of integers, scales and zero points in several tensors.

Each format becomes a set of `QuantisedWeight`s, which `SafetensorsSource` presents as ordinary weights [out, in]. A
weight of 4 bits whose scales cover groups of a multiple of 32 along its rows can be kept in these integers
(`read_blocks`); all others are dequantised. [o, i] denotes the weight of output o and input i.

Sources: AutoAWQ awq/utils/packing_utils.py; AutoGPTQ auto_gptq/nn_modules/qlinear/qlinear_cuda_old.py and GPTQModel
gptqmodel/quantization/config.py; compressed-tensors, compressors of its formats; Transformers
integrations/finegrained_fp8.py, mxfp4.py, bitsandbytes.py and gemma_quant.py; MLX mlx/backend/cpu/quantized.cpp; OCP
Microscaling Formats 1.0.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chunkrt.checkpoints.source import BLOCK_DEPTH, INT4, BlockTensor, QuantisedWeight, StoredTensor
from chunkrt.errors import ModelError, UnsupportedModelError

Float32 = NDArray[np.float32]
Array = NDArray[Any]

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""Values of the 4-bit floats of MXFP4 and NVFP4."""

_AWQ_COLUMNS = np.array([0, 2, 4, 6, 1, 3, 5, 7])
"""Column, of the 8 columns in a word, that each 4-bit field of AWQ contains; the lowest bits are first."""

_WORDS = (".qweight", ".qzeros")
"""Ends of the names of tensors with packed words."""

_OF_ACTIVATIONS = re.compile(
    r"\.(activation_scale|input_activation_scale|input_global_scale|input_scale|input_zero_point|k_scale|k_zero_point|"
    r"k_cache_scale|output_activation_scale|output_scale|output_zero_point|q_scale|v_cache_scale|v_scale|v_zero_point)$"
)
"""Tensors with scales of activations, which chunkrt does not use."""


Tensors = Mapping[str, StoredTensor]


def quantised_weights(config: Mapping[str, Any], tensors: Tensors, where: str) -> dict[str, QuantisedWeight]:
    """Return the quantised weights of a folder, by name. The dictionary is empty if the folder is not quantised.

    Args:
        config: config.json, of which `quantization_config` or MLX's `quantization` is read.
        tensors: all tensors of the folder.
        where: the folder, for errors.

    Raises:
        UnsupportedModelError: the format, or one of its settings, is not supported.
        ModelError: the settings or the shapes of tensors contradict each other.
    """
    settings = config.get("quantization_config") or {}
    mlx = config.get("quantization")
    if not isinstance(settings, Mapping):
        raise ModelError(f"{where}: quantization_config is {settings!r:.80}, expected an object")
    if isinstance(mlx, Mapping) and "bits" in mlx and "quant_method" not in settings:
        settings = {"quant_method": "mlx", **mlx}  # MLX repeats its settings as quantization_config
    if not settings:
        return {}
    method = settings.get("quant_method")
    if method is None and settings.get("load_in_4bit"):
        method = "bitsandbytes"
    folder, reader = _Folder(settings, tensors, where), _READERS.get(str(method))
    if reader is None:
        raise folder.refused(f"the quantisation {method!r} is not supported; supported: {', '.join(_READERS)}")
    try:
        found = dict(reader(folder))
    except KeyError as error:
        raise ModelError(f"{where}: the {method} weights lack the tensor {error}; the folder is incomplete") from error
    except (ValueError, ZeroDivisionError) as error:
        raise ModelError(f"{where}: a {method} weight has tensors of impossible shapes ({error})") from error
    except (AttributeError, TypeError, re.error) as error:
        raise ModelError(f"{where}: its settings of the quantisation are damaged ({error})") from error
    return {name: _checked(folder, name, weight) for name, weight in found.items()}


def _checked(folder: _Folder, name: str, weight: QuantisedWeight) -> QuantisedWeight:
    """Return a weight whose functions raise ModelError if its tensors have other shapes than expected. Raise ModelError
    if a tensor is missing, or is of a type that no format has.
    """
    for part in weight.parts:
        if part not in folder.tensors:
            raise ModelError(f"{folder.where} has no tensor {part}, a part of {name}; the folder is incomplete")
        dtype = folder.tensors[part].dtype
        if part.endswith(_WORDS) and dtype not in ("I32", "U32"):
            raise ModelError(f"{folder.where}: tensor {part} is stored as {dtype}, expected I32")
        if dtype[0] not in "BFIU" or dtype == "BOOL":
            raise ModelError(f"{folder.where}: tensor {part} is stored as {dtype}, which no format of weights has")

    def checked(load: Callable[[], Any]) -> Any:
        try:
            return load()
        except (ValueError, IndexError, ZeroDivisionError) as error:
            raise ModelError(f"{folder.where}: the tensors of {name} have impossible shapes ({error})") from error

    def read() -> Float32:
        values: Float32 = checked(weight.read)
        if values.shape != weight.shape:
            found, expected = list(values.shape), list(weight.shape)
            raise ModelError(f"{folder.where}: the tensors of {name} give {found}, expected {expected}")
        return values

    return replace(weight, read=read, read_blocks=lambda: checked(weight.read_blocks))


def of_activations(names: Iterable[str]) -> set[str]:
    """Return the names of tensors with scales of activations."""
    return {name for name in names if _OF_ACTIVATIONS.search(name)}


@dataclass(frozen=True)
class _Folder:
    """A folder: its settings of the quantisation, and its tensors."""

    settings: Mapping[str, Any]
    tensors: Tensors
    where: str

    def ending(self, suffix: str) -> Iterator[str]:
        """Yield the names of modules with a tensor `suffix`."""
        for name in self.tensors:
            if name.endswith(suffix):
                yield name.removesuffix(suffix)

    def refused(self, message: str) -> UnsupportedModelError:
        """Return the error for an unsupported setting."""
        return UnsupportedModelError(f"{self.where}: {message}", feature="quantization_config")

    def array(self, name: str) -> Array:
        """Return a tensor's values; see `decoded`."""
        return decoded(self.tensors[name])

    def whole(self, key: str, default: int, allowed: Sequence[int]) -> int:
        """Return a setting that is a whole number."""
        value = self.settings.get(key, default)
        if value not in allowed or isinstance(value, bool):
            raise self.refused(f"{key} of the quantisation is {value!r}; supported: {', '.join(map(str, allowed))}")
        return int(value)

    def check(self, name: str, shape: Sequence[int]) -> None:
        """Raise ModelError unless a tensor has this shape."""
        if self.tensors[name].shape != tuple(shape):
            found = list(self.tensors[name].shape)
            raise ModelError(f"{self.where}: tensor {name} is {found}, expected {list(shape)}")


def decoded(tensor: StoredTensor) -> Array:
    """Return the values of a tensor; floats of any size as float32."""
    stored, shape = tensor.stored, tensor.shape
    match tensor.dtype:
        case "BF16":
            return (stored.view("<u2").astype(np.uint32) << 16).view(np.float32).reshape(shape)
        case "F64" | "F32" | "F16":
            return stored.view(f"<f{int(tensor.dtype[1:]) // 8}").astype(np.float32).reshape(shape)
        case "F8_E4M3":
            return _E4M3[stored].reshape(shape)
        case "F8_E5M2":
            return (stored.astype(np.uint16) << 8).view(np.float16).astype(np.float32).reshape(shape)
        case "F8_E8M0":
            return np.ldexp(np.float32(1), stored.astype(np.int32) - 127).reshape(shape)
        case _:
            kind = {"I": "i", "U": "u"}[tensor.dtype[0]] + str(int(tensor.dtype[1:]) // 8)
            return stored.view(f"<{kind}").reshape(shape)


def _e4m3() -> Float32:
    """Return the values of all 8-bit floats with 4 bits of exponent (OCP 8-bit floating point, 1.0)."""
    bits = np.arange(256)
    exponent, fraction = bits >> 3 & 15, bits & 7
    size = np.where(exponent == 0, np.ldexp(fraction / 8, -6), np.ldexp(1 + fraction / 8, exponent - 7))
    size = np.where(bits & 127 == 127, np.nan, size)
    return np.where(bits & 128, -size, size).astype(np.float32)


_E4M3 = _e4m3()


def unpacked(words: Array, bits: int, count: int) -> NDArray[np.uint8]:
    """Return the fields of `bits` bits in the last axis of unsigned words, the lowest bits first, [..., count]. A field
    may extend into the next word.
    """
    stored = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return stored[..., :count]
    if bits == 4:
        return np.stack([stored & 15, stored >> 4], axis=-1).reshape(*stored.shape[:-1], -1)[..., :count]
    flat = np.unpackbits(stored, axis=-1, bitorder="little")
    flat = flat[..., : flat.shape[-1] // bits * bits]
    fields = flat.reshape(*flat.shape[:-1], -1, bits)
    return np.packbits(fields, axis=-1, bitorder="little")[..., 0][..., :count]


def grouped(
    integers: NDArray[np.uint8], scales: Float32, zeros: Array, groups: NDArray[np.int64] | None = None
) -> Float32:
    """Return (integer - zero) * scale, float32 [out, in].

    Args:
        integers: [out, in].
        scales, zeros: [out, groups].
        groups: the group of each input, int64 [in]; by default groups of equal length.
    """
    if groups is None:
        groups = np.arange(integers.shape[1]) // (integers.shape[1] // scales.shape[1])
    found: Float32 = (integers.astype(np.float32) - zeros.astype(np.float32)[:, groups]) * scales[:, groups]
    return found


def blocks_of(integers: NDArray[np.uint8], scales: Float32, minima: Float32) -> BlockTensor | None:
    """Return a weight of 4 bits in blocks; None if float16 cannot hold its scales and minima.

    Args:
        integers: [out, in], 0 to 15.
        scales, minima: [out, groups]; the length of a group is a multiple of BLOCK_DEPTH.
    """
    repeats = integers.shape[1] // BLOCK_DEPTH // scales.shape[1]
    with np.errstate(over="ignore"):
        halves = [np.repeat(values, repeats, axis=1).astype(np.float16) for values in (scales, minima)]
    step = np.abs(scales).max(initial=0)
    if not all(np.isfinite(half).all() for half in halves) or (step and np.abs(scales)[scales != 0].min() < 2**-14):
        return None
    return BlockTensor(integers=integers, scales=halves[0], minima=halves[1])


def _in_blocks(bits: int, depth: int, num_groups: int) -> bool:
    return bits == 4 and depth % (num_groups * BLOCK_DEPTH) == 0


def _integers(
    folder: _Folder,
    name: str,
    parts: Sequence[str],
    shape: tuple[int, int],
    label: str,
    bits: int,
    num_groups: int,
    load: Callable[[], tuple[NDArray[np.uint8], Float32, Array, NDArray[np.int64] | None]],
    *,
    is_ordered: bool = True,
) -> tuple[str, QuantisedWeight]:
    """Return a weight (integer - zero) * scale. `load` returns the arguments of `grouped`."""

    def read() -> Float32:
        return grouped(*load())

    def read_blocks() -> BlockTensor | None:
        integers, scales, zeros, _ = load()
        return blocks_of(integers, scales, (-zeros.astype(np.float32) * scales).astype(np.float32))

    if is_ordered and shape[1] % num_groups:
        raise ModelError(f"{folder.where}: {name} has {shape[1]} inputs, which {num_groups} groups cannot share evenly")
    is_kept = is_ordered and _in_blocks(bits, shape[1], num_groups)
    weight = QuantisedWeight(
        shape=shape,
        stored_as=INT4 if is_kept else label,
        parts=tuple(parts),
        read=read,
        read_blocks=read_blocks if is_kept else lambda: None,
    )
    return f"{name}.weight", weight


def _awq(folder: _Folder) -> Iterator[tuple[str, QuantisedWeight]]:
    bits = folder.whole("bits", folder.settings.get("w_bit", 4), (4,))
    if (version := str(folder.settings.get("version", "gemm")).lower()) != "gemm":
        raise folder.refused(f"the AWQ version {version!r} is not supported; supported: gemm")
    for name in folder.ending(".qweight"):
        depth, words = folder.tensors[f"{name}.qweight"].shape
        num_groups, size = folder.tensors[f"{name}.scales"].shape
        parts = [f"{name}.{part}" for part in ("qweight", "qzeros", "scales")]
        folder.check(parts[0], (depth, size // 8))
        folder.check(parts[1], (num_groups, words))

        def load(parts: Sequence[str] = parts) -> tuple[NDArray[np.uint8], Float32, Array, None]:
            weight, zeros = (_awq_columns(folder.array(part)) for part in parts[:2])
            return np.ascontiguousarray(weight.T), folder.array(parts[2]).T, zeros.T, None

        yield _integers(folder, name, parts, (size, depth), "AWQ", bits, num_groups, load)


def _awq_columns(words: Array) -> NDArray[np.uint8]:
    """Unpack AWQ's words [n, columns / 8]."""
    fields = unpacked(words, 4, words.shape[-1] * 8).reshape(len(words), -1, 8)
    columns = np.empty_like(fields)
    columns[..., _AWQ_COLUMNS] = fields
    return columns.reshape(len(words), -1)


def _gptq(folder: _Folder) -> Iterator[tuple[str, QuantisedWeight]]:
    bits = folder.whole("bits", 4, (2, 3, 4, 8))
    version = str(folder.settings.get("checkpoint_format", "gptq")).lower()
    if version not in ("gptq", "gptq_v2"):
        raise folder.refused(f"the GPTQ format {version!r} is not supported; supported: gptq, gptq_v2")
    is_less_one = version == "gptq"
    for name in folder.ending(".qweight"):
        num_groups, size = folder.tensors[f"{name}.scales"].shape
        depth = folder.tensors[f"{name}.qweight"].shape[0] * 32 // bits
        parts = [f"{name}.{part}" for part in ("qweight", "qzeros", "scales")]
        folder.check(parts[0], (depth * bits // 32, size))
        folder.check(parts[1], (num_groups, size * bits // 32))
        order = f"{name}.g_idx" if f"{name}.g_idx" in folder.tensors else None
        is_ordered = True
        if order is not None:
            folder.check(order, (depth,))
            groups = folder.array(order).astype(np.int64)
            if groups.min(initial=0) < 0 or groups.max(initial=0) >= num_groups:
                raise ModelError(f"{folder.where}: tensor {order} names groups outside 0..{num_groups - 1}")
            is_ordered = not depth % num_groups and bool((groups == np.arange(depth) // (depth // num_groups)).all())

        def load(
            parts: Sequence[str] = parts, order: str | None = order, size: int = size, depth: int = depth
        ) -> tuple[NDArray[np.uint8], Float32, Array, NDArray[np.int64] | None]:
            words = np.ascontiguousarray(folder.array(parts[0]).T)
            zeros = _gptq_zeros(folder.array(parts[1]), bits, size, is_less_one=is_less_one)
            groups = None if order is None else folder.array(order).astype(np.int64)
            return unpacked(words, bits, depth), folder.array(parts[2]).T, zeros.T, groups

        kept = [*parts, *([] if order is None else [order])]
        yield _integers(folder, name, kept, (size, depth), "GPTQ", bits, num_groups, load, is_ordered=is_ordered)


def _gptq_zeros(words: Array, bits: int, size: int, *, is_less_one: bool) -> NDArray[np.int32]:
    """Unpack zero points. Version 1 stores each word less a one in every field, so a zero point of 0 borrows from the
    next field.
    """
    if not is_less_one:
        return unpacked(words, bits, size).astype(np.int32)
    if 32 % bits:
        return (unpacked(words, bits, size).astype(np.int32) + 1) % (1 << bits)
    ones = np.uint32(sum(1 << place for place in range(0, 32, bits)))
    return unpacked(words.view(np.uint32) + ones, bits, size).astype(np.int32)


_COMPRESSED = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "mxfp4-pack-quantized",
    "mxfp8-quantized",
    "nvfp4-pack-quantized",
    "dense",
)
"""Formats of compressed-tensors."""


def _compressed_tensors(folder: _Folder) -> Iterator[tuple[str, QuantisedWeight]]:
    groups = folder.settings.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise ModelError(f"{folder.where}: quantization_config has no config_groups")
    if folder.settings.get("transform_config"):
        raise folder.refused("transforms of compressed-tensors (transform_config) are not supported")
    formats = {str(group.get("format") or folder.settings.get("format")) for group in groups.values()}
    if odd := sorted(formats - set(_COMPRESSED)):
        raise folder.refused(
            f"the compressed-tensors format {odd[0]!r} is not supported; supported: {', '.join(_COMPRESSED)}"
        )
    for name in folder.ending(".weight_packed"):
        if f"{name}.weight_shape" in folder.tensors:
            yield _packed(folder, name, _bits_of(folder, groups, name))
        else:
            yield _packed_floats(folder, name, is_nvfp4=f"{name}.weight_global_scale" in folder.tensors)
    for name in folder.ending(".weight_scale"):
        if f"{name}.weight" in folder.tensors:
            yield _scaled(folder, name)


def _bits_of(folder: _Folder, groups: Mapping[str, Any], name: str) -> int:
    """Return the number of bits of a module's weights."""
    for group in groups.values():
        targets, weights = group.get("targets") or [], group.get("weights") or {}
        bits = weights.get("num_bits")
        if len(groups) == 1 or any(_targets(target, name) for target in targets):
            if not isinstance(bits, int) or not 1 <= bits <= 8 or weights.get("type", "int") != "int":
                raise folder.refused(f"weights of {bits} bits of type {weights.get('type')!r} are not supported")
            return bits
    raise ModelError(f"{folder.where}: no group of quantization_config targets {name}")


def _targets(target: str, name: str) -> bool:
    if target.startswith("re:"):
        return re.match(target[3:], name) is not None
    return target in (name, "Linear") or fnmatchcase(name, target)


def _packed(folder: _Folder, name: str, bits: int) -> tuple[str, QuantisedWeight]:
    folder.check(f"{name}.weight_shape", (2,))
    size, depth = (int(n) for n in folder.array(f"{name}.weight_shape").tolist())
    parts = [f"{name}.{part}" for part in ("weight_packed", "weight_scale", "weight_shape")]
    folder.check(parts[0], (size, -(-depth * bits // 32)))
    scale_shape = folder.tensors[parts[1]].shape
    num_groups = scale_shape[1] if len(scale_shape) == 2 else 1
    zero = f"{name}.weight_zero_point" if f"{name}.weight_zero_point" in folder.tensors else None
    order = f"{name}.weight_g_idx" if f"{name}.weight_g_idx" in folder.tensors else None
    if zero is not None and folder.tensors[zero].dtype == "I32":
        folder.check(zero, (-(-size * bits // 32), num_groups))

    def load() -> tuple[NDArray[np.uint8], Float32, Array, NDArray[np.int64] | None]:
        scales = np.broadcast_to(folder.array(parts[1]).reshape(-1, num_groups), (size, num_groups))
        zeros: Array = np.full((size, num_groups), 1 << bits - 1)
        if zero is not None:
            stored = folder.array(zero)
            if folder.tensors[zero].dtype == "I32":
                zeros = unpacked(np.ascontiguousarray(stored.T), bits, size).T
            else:
                zeros = np.broadcast_to(stored.reshape(-1, num_groups).astype(np.int32) + (1 << bits - 1), zeros.shape)
        groups = None if order is None else folder.array(order).astype(np.int64)
        groups = None if groups is not None and (groups < 0).any() else groups
        return unpacked(folder.array(parts[0]), bits, depth), scales, zeros, groups

    kept = [*parts, *(part for part in (zero, order) if part is not None)]
    label = f"INT{bits} (compressed-tensors)"
    return _integers(folder, name, kept, (size, depth), label, bits, num_groups, load, is_ordered=order is None)


def _packed_floats(folder: _Folder, name: str, *, is_nvfp4: bool) -> tuple[str, QuantisedWeight]:
    packed, scale, whole = (f"{name}.{part}" for part in ("weight_packed", "weight_scale", "weight_global_scale"))
    size, half = folder.tensors[packed].shape
    length = 16 if is_nvfp4 else 32
    folder.check(scale, (size, 2 * half // length))

    def read() -> Float32:
        values = E2M1[unpacked(folder.array(packed), 4, 2 * half)]
        if is_nvfp4:
            scales = folder.array(scale) / folder.array(whole).reshape(-1)[0]
        else:
            scales = np.ldexp(np.float32(1), folder.tensors[scale].stored.astype(np.int32) - 127).reshape(size, -1)
        found: Float32 = (values * np.repeat(scales, length, axis=1)).astype(np.float32)
        return found

    parts = (packed, scale, whole) if is_nvfp4 else (packed, scale)
    label = "NVFP4" if is_nvfp4 else "MXFP4"
    return f"{name}.weight", QuantisedWeight(shape=(size, 2 * half), stored_as=label, parts=parts, read=read)


def _scaled(folder: _Folder, name: str, scale_name: str = "weight_scale") -> tuple[str, QuantisedWeight]:
    """Return a weight of 8 bits that is multiplied by a scale for the tensor, each row, or each block of it."""
    weight, scale, zero = (f"{name}.{part}" for part in ("weight", scale_name, "weight_zero_point"))
    shape, dtype = folder.tensors[weight].shape, folder.tensors[weight].dtype
    if dtype not in ("I8", "F8_E4M3", "F8_E5M2"):
        raise folder.refused(f"tensor {weight} is stored as {dtype}; supported with scales: I8, F8_E4M3, F8_E5M2")

    def read() -> Float32:
        values = folder.array(weight).astype(np.float32)
        if zero in folder.tensors:
            values = values - spread_blocks(folder.array(zero).astype(np.float32), shape)
        scales = folder.array(scale)
        if folder.tensors[scale].dtype == "U8":  # MXFP8: exponents
            scales = np.ldexp(np.float32(1), scales.astype(np.int32) - 127)
        found: Float32 = values * spread_blocks(scales.astype(np.float32), shape)
        return found

    parts = (weight, scale, *([zero] if zero in folder.tensors else []))
    return weight, QuantisedWeight(shape=shape, stored_as=dtype, parts=parts, read=read)


def spread_blocks(scales: Float32, shape: tuple[int, ...]) -> Float32:
    """Repeat the scales of blocks to a weight's shape; the last blocks may be shorter."""
    if scales.size == 1:
        return scales.reshape(-1)[0]  # type: ignore[no-any-return]
    scales = scales.reshape(*scales.shape, *[1] * (len(shape) - scales.ndim))
    for axis, size in enumerate(shape):
        count = scales.shape[axis]
        if count not in (1, size):
            length = next((n for n in (128, 64, 32, 16) if -(-size // n) == count), -(-size // count))
            scales = np.repeat(scales, length, axis=axis)
            scales = np.take(scales, np.arange(size), axis=axis)
    return scales


def _fp8(folder: _Folder) -> Iterator[tuple[str, QuantisedWeight]]:
    for suffix in ("weight_scale_inv", "weight_scale"):
        for name in folder.ending(f".{suffix}"):
            if f"{name}.weight" in folder.tensors:
                yield _scaled(folder, name, suffix)


def _mxfp4(folder: _Folder) -> Iterator[tuple[str, QuantisedWeight]]:
    for name in folder.ending("_blocks"):
        blocks, scales = f"{name}_blocks", f"{name}_scales"
        *outer, num_blocks, half = folder.tensors[blocks].shape
        if half != BLOCK_DEPTH // 2 or len(outer) != 2:
            raise ModelError(f"{folder.where}: tensor {blocks} is {[*outer, num_blocks, half]}, expected [E, N, n, 16]")
        folder.check(scales, (*outer, num_blocks))

        def read(blocks: str = blocks, scales: str = scales) -> Float32:
            values = E2M1[unpacked(folder.array(blocks), 4, BLOCK_DEPTH)]
            exponents = folder.array(scales).astype(np.int32) - 127
            whole = np.ldexp(values, exponents[..., None]).reshape(*folder.tensors[blocks].shape[:2], -1)
            return np.ascontiguousarray(whole.transpose(0, 2, 1), np.float32)

        shape = (outer[0], num_blocks * BLOCK_DEPTH, outer[1])
        yield name, QuantisedWeight(shape=shape, stored_as="MXFP4", parts=(blocks, scales), read=read)


def _bitsandbytes(folder: _Folder) -> Iterator[tuple[str, QuantisedWeight]]:
    for name in folder.ending(".SCB"):
        weight, scale = f"{name}.weight", f"{name}.SCB"
        size, depth = folder.tensors[weight].shape
        folder.check(scale, (size,))

        def read8(weight: str = weight, scale: str = scale) -> Float32:
            factors: Float32 = (folder.array(scale) / 127).astype(np.float32)
            return folder.array(weight).astype(np.float32) * factors[:, None]

        parts = tuple(part for part in (weight, scale, f"{name}.weight_format") if part in folder.tensors)
        yield weight, QuantisedWeight(shape=(size, depth), stored_as="INT8 (bitsandbytes)", parts=parts, read=read8)
    for kind in ("nf4", "fp4"):
        suffix = f".weight.quant_state.bitsandbytes__{kind}"
        for name in folder.ending(suffix):
            yield _four_bits(folder, name, f"{name}{suffix}", kind)


def _four_bits(folder: _Folder, name: str, state_name: str, kind: str) -> tuple[str, QuantisedWeight]:
    weight = f"{name}.weight"
    try:
        state = json.loads(folder.tensors[state_name].stored.tobytes())
        shape, length = tuple(int(n) for n in state["shape"]), int(state["blocksize"])
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{folder.where}: tensor {state_name} is damaged: {error}") from error
    count = int(np.prod(shape))
    if folder.tensors[weight].stored.size * 2 < count or length < 1:
        raise ModelError(f"{folder.where}: tensor {weight} has too few values for the shape {list(shape)}")
    nested = f"{weight}.nested_absmax"
    parts = [weight, state_name, f"{weight}.absmax", f"{weight}.quant_map"]
    parts += [nested, f"{weight}.nested_quant_map"] if nested in folder.tensors else []

    def read() -> Float32:
        peaks = folder.array(f"{weight}.absmax")
        if nested in folder.tensors:
            outer = np.repeat(folder.array(nested), int(state["nested_blocksize"]))[: peaks.size]
            table = folder.array(f"{weight}.nested_quant_map")
            offset = np.float32(state["nested_offset"])
            peaks = (table[peaks.reshape(-1)] * outer + offset).astype(np.float32)
        stored = folder.tensors[weight].stored
        fields = np.stack([stored >> 4, stored & 15], axis=-1).reshape(-1)[:count]
        values = folder.array(f"{weight}.quant_map")[fields]
        found: Float32 = (values * np.repeat(peaks.reshape(-1), length)[:count]).astype(np.float32).reshape(shape)
        return found

    return weight, QuantisedWeight(shape=shape, stored_as=kind.upper(), parts=tuple(parts), read=read)


def _mlx(folder: _Folder) -> Iterator[tuple[str, QuantisedWeight]]:
    if (mode := folder.settings.get("mode", "affine")) != "affine":
        raise folder.refused(f"the MLX mode {mode!r} is not supported; supported: affine")
    for name in folder.ending(".scales"):
        own = folder.settings.get(name)
        of_module = replace(folder, settings={**folder.settings, **own}) if isinstance(own, Mapping) else folder
        bits = of_module.whole("bits", 4, (2, 3, 4, 6, 8))
        parts = tuple(f"{name}.{part}" for part in ("weight", "scales", "biases"))
        size, num_groups = folder.tensors[parts[1]].shape
        depth = folder.tensors[parts[0]].shape[1] * 32 // bits
        folder.check(parts[2], (size, num_groups))

        def load(
            parts: Sequence[str] = parts, depth: int = depth, bits: int = bits
        ) -> tuple[NDArray[np.uint8], Float32, Float32]:
            return unpacked(folder.array(parts[0]), bits, depth), folder.array(parts[1]), folder.array(parts[2])

        def read(load: Callable[[], tuple[NDArray[np.uint8], Float32, Float32]] = load) -> Float32:
            integers, scales, biases = load()
            length = integers.shape[1] // scales.shape[1]
            whole = [np.repeat(values, length, axis=1) for values in (scales, biases)]
            found: Float32 = integers.astype(np.float32) * whole[0] + whole[1]
            return found

        def read_blocks(load: Callable[[], tuple[NDArray[np.uint8], Float32, Float32]] = load) -> BlockTensor | None:
            return blocks_of(*load())

        is_kept = _in_blocks(bits, depth, num_groups)
        yield (
            f"{name}.weight",
            QuantisedWeight(
                shape=(size, depth),
                stored_as=INT4 if is_kept else f"INT{bits} (MLX)",
                parts=parts,
                read=read,
                read_blocks=read_blocks if is_kept else lambda: None,
            ),
        )


def _gemma(folder: _Folder) -> Iterator[tuple[str, QuantisedWeight]]:
    overrides = folder.settings.get("module_quant_configs") or {}

    def weight_of(module: str, stored: str, scale: str) -> tuple[str, QuantisedWeight]:
        own: Mapping[str, Any] = next((value for pattern, value in overrides.items() if re.search(pattern, module)), {})
        bits = replace(folder, settings={**folder.settings, **own}).whole("num_bits", 4, (2, 4, 8))
        if folder.tensors[stored].dtype != ("I8" if bits == 8 else "U8"):
            found = folder.tensors[stored].dtype
            raise ModelError(f"{folder.where}: tensor {stored} is stored as {found}, unlike weights of {bits} bits")
        size, width = folder.tensors[stored].shape
        _, num_groups = folder.tensors[scale].shape
        folder.check(scale, (size, num_groups))
        depth, zero = width * 8 // bits, 2 ** (bits - 1)

        def load() -> tuple[NDArray[np.uint8], Float32, Array, None]:
            packed = folder.array(stored)
            integers = packed.view(np.uint8) ^ np.uint8(zero) if bits == 8 else unpacked(packed, bits, depth)
            scales = folder.array(scale)
            return integers, scales, np.full_like(scales, zero), None

        label = f"INT{bits} (Gemma)"
        return _integers(folder, module, (stored, scale), (size, depth), label, bits, num_groups, load)

    for name in folder.ending(".weight_scale"):
        yield weight_of(name, f"{name}.weight", f"{name}.weight_scale")
    for name in folder.ending(".embedding_quantized"):
        yield weight_of(name, f"{name}.embedding_quantized", f"{name}.embedding_scale")


_READERS: dict[str, Callable[[_Folder], Iterator[tuple[str, QuantisedWeight]]]] = {
    "awq": _awq,
    "gptq": _gptq,
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "mxfp4": _mxfp4,
    "bitsandbytes": _bitsandbytes,
    "gemma": _gemma,
    "mlx": _mlx,
}
"""Readers by `quant_method`."""
