"""The header of a GGUF file: its metadata and its table of tensors.

The `gguf` package's reader trusts the header and makes an array for every token of the vocabulary. This reader reads
the header once, compares every size and offset with the file's size before it uses them, and decodes values on demand.

Source: the GGUF specification (ggml, docs/gguf.md), versions 2 and 3, little-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from mmap import mmap
from pathlib import Path
from typing import Any

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from chunkrt.checkpoints.catalogue import how_to_fetch
from chunkrt.checkpoints.checkpoint import MAGIC
from chunkrt.errors import ModelError, UnsupportedModelError

VERSIONS = (2, 3)
MAX_DIMENSIONS = 4
MAX_NAME_BYTES = 65535

_SMALLEST_FIELD_BYTES = 8 + 4 + 1
_SMALLEST_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8
_DEFAULT_ALIGNMENT = 32
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_SCALARS = {
    GGUFValueType.UINT8: struct.Struct("<B"),
    GGUFValueType.INT8: struct.Struct("<b"),
    GGUFValueType.UINT16: struct.Struct("<H"),
    GGUFValueType.INT16: struct.Struct("<h"),
    GGUFValueType.UINT32: _U32,
    GGUFValueType.INT32: struct.Struct("<i"),
    GGUFValueType.FLOAT32: struct.Struct("<f"),
    GGUFValueType.BOOL: struct.Struct("<?"),
    GGUFValueType.UINT64: _U64,
    GGUFValueType.INT64: struct.Struct("<q"),
    GGUFValueType.FLOAT64: struct.Struct("<d"),
}


@dataclass(frozen=True, kw_only=True)
class GgufTensor:
    """A row of the tensor table. `shape` is row-major (the file stores it reversed), `start` is an offset in the file,
    and `part` is the number of the part in a split file.
    """

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    start: int
    num_bytes: int
    part: int = 0


class Metadata(Mapping[str, Any]):
    """The header's keys and values: int, float, bool, str or a list of them, decoded at each access."""

    def __init__(self, data: mmap, path: Path, fields: Mapping[str, tuple[GGUFValueType, int]]) -> None:
        self._data = data
        self._path = path
        self._fields = fields

    def __getitem__(self, key: str) -> Any:
        kind, offset = self._fields[key]
        if kind != GGUFValueType.ARRAY:
            return self._value(key, kind, offset)[0]
        item_kind = GGUFValueType(_U32.unpack_from(self._data, offset)[0])
        (count,) = _U64.unpack_from(self._data, offset + 4)
        offset += 12
        if item_kind != GGUFValueType.STRING:
            item = _SCALARS[item_kind]
            return [v for (v,) in item.iter_unpack(self._data[offset : offset + count * item.size])]
        items = []
        for _ in range(count):
            item, offset = self._value(key, item_kind, offset)
            items.append(item)
        return items

    def __contains__(self, key: object) -> bool:
        return key in self._fields

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def _value(self, key: str, kind: GGUFValueType, offset: int) -> tuple[Any, int]:
        """Decode a scalar or a string, and return the value and the position after it."""
        if kind != GGUFValueType.STRING:
            return _SCALARS[kind].unpack_from(self._data, offset)[0], offset + _SCALARS[kind].size
        start = offset + 8
        end = start + _U64.unpack_from(self._data, offset)[0]
        return _text(self._data[start:end], self._path, f"the value of {key}"), end


@dataclass(frozen=True, kw_only=True)
class GgufHeader:
    """The header: all data before the weights."""

    metadata: Metadata
    tensors: Mapping[str, GgufTensor]


def read_header(data: mmap, path: Path) -> GgufHeader:
    """Read the header once. Time and memory are proportional to the size of the header, regardless of its contents.

    Raises:
        ModelError: the file is not GGUF, is truncated, or its header contradicts itself or the file's size.
        UnsupportedModelError: the version, byte order or a block type is not supported.
    """
    walk = _Walk(data, path)
    num_tensors, num_fields = walk.preamble()
    fields = walk.fields(num_fields)
    metadata = Metadata(data, path, fields)
    alignment = metadata["general.alignment"] if "general.alignment" in fields else _DEFAULT_ALIGNMENT
    if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1):
        raise walk.damaged(f"general.alignment is {alignment!r}, not a power of two")
    tensors = walk.tensors(num_tensors, alignment)
    return GgufHeader(metadata=metadata, tensors=tensors)


class _Walk:
    """A position in the header, which never passes the end of the file."""

    def __init__(self, data: mmap, path: Path) -> None:
        self.data = data
        self.path = path
        self.size = len(data)
        self.offset = 0

    def damaged(self, found: str) -> ModelError:
        return ModelError(f"{self.path} is truncated or damaged: {found}; {how_to_fetch(self.path)}")

    def skip(self, num_bytes: int, what: str) -> int:
        """Advance over bytes that must lie inside the file, and return their start."""
        start = self.offset
        if num_bytes > self.size - start:
            raise self.damaged(
                f"{what} at byte {start} needs {num_bytes} bytes, {self.size - start} are left of {self.size}"
            )
        self.offset = start + num_bytes
        return start

    def integer(self, layout: struct.Struct, what: str) -> int:
        return int(layout.unpack_from(self.data, self.skip(layout.size, what))[0])

    def name(self, what: str) -> str:
        length = self.integer(_U64, f"the length of {what}")
        start = self.skip(length, what)
        if length > MAX_NAME_BYTES:
            raise self.damaged(f"{what} has {length} bytes, more than {MAX_NAME_BYTES}")
        text = _text(self.data[start : start + length], self.path, what)
        if not text.isprintable():
            raise self.damaged(f"{what} is not a name: {text[:40]!r}")
        return text

    def count(self, what: str, smallest_bytes: int) -> int:
        """Read the number of items that follow, each of which takes at least `smallest_bytes`."""
        count = self.integer(_U64, f"the number of {what}")
        if count * smallest_bytes > self.size - self.offset:
            raise self.damaged(f"its header claims {count} {what}, but it has only {self.size} bytes")
        return count

    def preamble(self) -> tuple[int, int]:
        if self.data[: len(MAGIC)] != MAGIC:
            raise ModelError(f"{self.path} is not a GGUF file: it starts with {self.data[:4]!r}, not {MAGIC!r}")
        self.offset = len(MAGIC)
        version = self.integer(_U32, "the version")
        if version & 0xFFFF == 0:
            raise UnsupportedModelError(
                f"{self.path} is a big-endian GGUF file; only little-endian ones are supported; convert it again"
            )
        if version not in VERSIONS:
            raise UnsupportedModelError(f"{self.path} is a GGUF file of version {version}; supported: {VERSIONS}")
        num_tensors = self.count("tensors", _SMALLEST_TENSOR_BYTES)
        return num_tensors, self.count("metadata fields", _SMALLEST_FIELD_BYTES)

    def fields(self, count: int) -> dict[str, tuple[GGUFValueType, int]]:
        """Map each key to the start of its value and the value's type."""
        fields: dict[str, tuple[GGUFValueType, int]] = {}
        for index in range(count):
            key = self.name(f"the key of metadata field {index}")
            if key in fields:
                raise self.damaged(f"the metadata key {key} appears twice")
            kind = self.value_type(key)
            fields[key] = (kind, self.offset)
            if kind == GGUFValueType.ARRAY:
                self.skip_array(key)
            elif kind == GGUFValueType.STRING:
                self.skip(self.integer(_U64, f"the length of {key}"), key)
            else:
                self.skip(_SCALARS[kind].size, key)
        return fields

    def value_type(self, key: str) -> GGUFValueType:
        number = self.integer(_U32, f"the type of {key}")
        try:
            return GGUFValueType(number)
        except ValueError:
            raise self.damaged(f"{key} has the unknown value type {number}") from None

    def skip_array(self, key: str) -> None:
        kind = self.value_type(key)
        if kind == GGUFValueType.ARRAY:
            raise UnsupportedModelError(f"{self.path}: {key} is an array of arrays, which is not supported")
        if kind != GGUFValueType.STRING:
            item_bytes = _SCALARS[kind].size
            self.skip(self.count(f"items in {key}", item_bytes) * item_bytes, key)
            return
        count = self.count(f"strings in {key}", _U64.size)
        offset, data, length = self.offset, self.data, _U64.unpack_from
        try:
            for _ in range(count):
                offset += 8 + length(data, offset)[0]
        except (struct.error, OverflowError):
            offset = self.size + 1
        if offset > self.size:
            raise self.damaged(f"the {count} strings of {key} reach past the end of its {self.size} bytes")
        self.offset = offset

    def tensors(self, count: int, alignment: int) -> dict[str, GgufTensor]:
        rows = [self.tensor_row(index) for index in range(count)]
        data_start = -(-self.offset // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, shape, kind, offset in rows:
            block_length, block_bytes = GGML_QUANT_SIZES[kind]
            start, num_bytes = data_start + offset, prod(shape) // block_length * block_bytes
            if offset % alignment:
                raise self.damaged(f"tensor {name} starts at offset {offset}, not a multiple of {alignment}")
            if start + num_bytes > self.size:
                raise self.damaged(f"tensor {name} ends at byte {start + num_bytes}, the file at {self.size}")
            if name in tensors:
                raise self.damaged(f"tensor {name} appears twice")
            tensors[name] = GgufTensor(name=name, shape=shape, type=kind, start=start, num_bytes=num_bytes)
        for left, right in pairwise(sorted(tensors.values(), key=lambda t: t.start)):
            if left.start + left.num_bytes > right.start:
                raise self.damaged(f"tensors {left.name} and {right.name} overlap at byte {right.start}")
        return tensors

    def tensor_row(self, index: int) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
        name = self.name(f"the name of tensor {index}")
        rank = self.integer(_U32, f"the rank of {name}")
        if not 1 <= rank <= MAX_DIMENSIONS:
            raise self.damaged(f"tensor {name} claims {rank} dimensions, expected 1 to {MAX_DIMENSIONS}")
        shape = tuple(self.integer(_U64, f"the shape of {name}") for _ in range(rank))[::-1]
        number = self.integer(_U32, f"the type of {name}")
        try:
            kind = GGMLQuantizationType(number)
        except ValueError:
            raise UnsupportedModelError(
                f"{self.path}: tensor {name} has block type {number}, unknown to the installed gguf package; "
                f"upgrade it (pip install -U gguf); if the file may be damaged, {how_to_fetch(self.path)}"
            ) from None
        if 0 in shape or shape[-1] % GGML_QUANT_SIZES[kind][0]:
            raise self.damaged(f"tensor {name} of type {kind.name} has the impossible shape {list(shape)}")
        return name, shape, kind, self.integer(_U64, f"the offset of {name}")


def _text(raw: bytes, path: Path, what: str) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise ModelError(f"{path} is damaged: {what} is not UTF-8 ({error.reason}); {how_to_fetch(path)}") from error
