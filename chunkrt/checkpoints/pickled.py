"""Tensors of PyTorch's pickled checkpoints, read without PyTorch and without running code from the file.

A file is an uncompressed zip archive: NAME/data.pkl describes the tensors, and NAME/data/KEY contains a storage. The
description may only name OrderedDict, PyTorch's storage types, and its functions that make a tensor of a storage;
anything else is an error. The tensors are views of the file, unless their layout is not row-major.

Source: PyTorch torch/serialization.py (`_save`) and torch/_utils.py (`_rebuild_tensor_v2`).
"""

from __future__ import annotations

import io
import pickle
import pickletools
import zipfile
from collections import OrderedDict
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chunkrt.checkpoints.catalogue import how_to_fetch
from chunkrt.checkpoints.checkpoint import map_file
from chunkrt.checkpoints.source import StoredTensor
from chunkrt.errors import ModelError, UnsupportedModelError

_STORAGES = {
    "DoubleStorage": ("F64", 8),
    "FloatStorage": ("F32", 4),
    "HalfStorage": ("F16", 2),
    "BFloat16Storage": ("BF16", 2),
    "LongStorage": ("I64", 8),
    "IntStorage": ("I32", 4),
    "ShortStorage": ("I16", 2),
    "CharStorage": ("I8", 1),
    "ByteStorage": ("U8", 1),
    "BoolStorage": ("BOOL", 1),
    "Float8_e4m3fnStorage": ("F8_E4M3", 1),
    "Float8_e5m2Storage": ("F8_E5M2", 1),
}
"""PyTorch's storage types: the type's name in safetensors, and its bytes."""

_PUTS = ("PUT", "BINPUT", "LONG_BINPUT")
_LOCAL_HEADER_BYTES = 30
_IS_ENCRYPTED = 1


def read_pickled(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of one file, by name.

    Raises:
        ModelError: the file is missing or damaged.
        UnsupportedModelError: the file is older than PyTorch 1.6, holds other objects than tensors, or has a tensor of
            an unsupported type.
    """
    data = np.frombuffer(map_file(path), np.uint8)
    try:
        if not zipfile.is_zipfile(path):
            raise UnsupportedModelError(f"{path} is not a zip archive, as PyTorch writes since 1.6; save it again")
        with zipfile.ZipFile(path) as archive:
            found = _Unpickler(archive, data, path).load()
    except (ModelError, UnsupportedModelError):
        raise
    except Exception as error:  # damaged archives and pickles raise errors of many types
        what = f"{type(error).__name__}: {error}"
        raise ModelError(f"{path} is truncated or damaged ({what}); {how_to_fetch(path)}") from error
    if not isinstance(found, dict) or not all(
        isinstance(name, str) and isinstance(value, StoredTensor) for name, value in found.items()
    ):
        raise UnsupportedModelError(f"{path} holds other objects than tensors by name; save the weights alone")
    return dict(found)


class _Unpickler(pickle.Unpickler):
    def __init__(self, archive: zipfile.ZipFile, data: NDArray[np.uint8], path: Path) -> None:
        members = archive.infolist()
        self._members = {member.filename: member for member in members}
        (table,) = (name for name in self._members if name.endswith("/data.pkl") and name.count("/") == 1)
        if len(members) != len(self._members):
            raise ValueError("two members have the same name")
        self._folder = table.removesuffix("data.pkl")
        self._data, self._path = data, path
        order = f"{self._folder}byteorder"
        if order in self._members and self._bytes(order).tobytes() != b"little":
            raise UnsupportedModelError(f"{path} has the byte order {self._bytes(order).tobytes()!r}; expected little")
        described = self._bytes(table).tobytes()
        for opcode, argument, _ in pickletools.genops(described):
            if opcode.name in _PUTS and int(argument or 0) > len(described):  # memory would be reserved for it
                raise ValueError(f"its table has an entry {argument}")
        super().__init__(io.BytesIO(described))

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in _STORAGES:
            return name
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return self._tensor
        if (module, name) == ("torch._utils", "_rebuild_parameter"):
            return self._parameter
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        raise UnsupportedModelError(f"{self._path} needs {module}.{name}, which is not a tensor; use safetensors")

    def persistent_load(self, pid: Any) -> tuple[str, NDArray[np.uint8]]:
        kind, storage, key, _location, _count = pid
        if kind != "storage":
            raise ValueError(f"an object of kind {kind!r}")
        return storage, self._bytes(f"{self._folder}data/{key}")

    @staticmethod
    def _parameter(tensor: StoredTensor, *_: object) -> StoredTensor:
        return tensor

    @staticmethod
    def _tensor(
        storage: tuple[str, NDArray[np.uint8]], offset: int, shape: Any, strides: Any, *_: object
    ) -> StoredTensor:
        (dtype, size), stored = _STORAGES[storage[0]], storage[1]
        shape, strides = tuple(map(int, shape)), tuple(map(int, strides))
        end = offset + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) + 1
        is_inside = min((offset, *shape, *strides)) >= 0 and end * size <= stored.size
        if prod(shape) and not (is_inside and prod(shape) * size <= stored.size):
            raise ValueError(f"a tensor {list(shape)} exceeds its storage of {stored.size} bytes")
        rest, row_major = 1, True
        for n, stride in zip(reversed(shape), reversed(strides), strict=True):
            row_major &= n == 1 or stride == rest
            rest *= n
        if row_major or not prod(shape):
            values = stored[offset * size : (offset + prod(shape)) * size]
        else:
            items = np.ascontiguousarray(stored[: stored.size // size * size]).view(f"V{size}")
            steps = tuple(stride * size for stride in strides)
            window = np.lib.stride_tricks.as_strided(items[offset:], shape, steps, writeable=False)
            values = np.ascontiguousarray(window).reshape(-1).view(np.uint8)
        return StoredTensor(shape=shape, dtype=dtype, stored=values)

    def _bytes(self, name: str) -> NDArray[np.uint8]:
        member = self._members[name]
        if member.compress_type != zipfile.ZIP_STORED or member.flag_bits & _IS_ENCRYPTED:
            raise ValueError(f"{name} is compressed or encrypted")
        fields = self._data[member.header_offset :][26:30].view("<u2")
        begin = member.header_offset + _LOCAL_HEADER_BYTES + int(fields.sum())
        if begin + member.file_size > self._data.size:
            raise ValueError(f"{name} exceeds the file")
        return self._data[begin : begin + member.file_size]
