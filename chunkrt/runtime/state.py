"""State: what a session remembers between chunks, the key and value caches of its decoder."""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Mapping
from math import prod
from pathlib import Path
from tempfile import NamedTemporaryFile
from types import MappingProxyType
from typing import IO, Any, Literal

import numpy as np
from numpy.lib import format as npy

from chunkrt.errors import ConfigError, ModelError
from chunkrt.graph.plan import Plan, resolve
from chunkrt.runtime.buffers import Array, aligned_zeros

CacheDtype = Literal["float32", "float16"]


class State:
    """Every cache of one decoder, filled from position 0 up to `position`.

    A cache is [kv_heads, P, head_dim] with P = capacity. Its memory is reserved at once and committed by the
    operating system as positions are written. What lies at `position` and beyond is never read.

    Args:
        plan: the decoder.
        capacity: positions to reserve, 1 to the plan's context length.
        dtype: of the caches, whatever the plan names.

    Raises:
        ConfigError: the capacity or the dtype is out of range.
        ModelError: a cache of the plan is not [kv_heads, P, head_dim].
    """

    def __init__(self, plan: Plan, capacity: int, dtype: CacheDtype = "float32") -> None:
        if not 1 <= capacity <= plan.context_length:
            raise ConfigError(
                f"a state of {capacity} positions was asked for; the model takes 1 to {plan.context_length}"
            )
        if dtype not in ("float32", "float16"):
            raise ConfigError(f"caches cannot be {dtype!r}; there are: float32, float16")
        self.plan = plan
        self.capacity = capacity
        self.dtype: CacheDtype = dtype
        self.position = 0
        """Tokens that the caches hold; the position of the next token."""
        arrays = {}
        for tensor in plan.state_tensors:
            if len(tensor.shape) != 3 or tensor.shape[1] not in ("P", "W"):
                raise ModelError(f"cache {tensor.name!r} has shape {tensor.shape}, not [kv_heads, P or W, head_dim]")
            arrays[tensor.name] = aligned_zeros(resolve(tensor.shape, {"P": capacity, "W": capacity}), dtype)
        self.tensors: Mapping[str, Array] = MappingProxyType(arrays)
        """The caches by tensor name."""

    @property
    def num_bytes(self) -> int:
        """Bytes reserved for the caches, committed or not."""
        return sum(array.nbytes for array in self.tensors.values())

    def advance(self, num_tokens: int) -> None:
        """Count tokens whose keys and values have been written; the executor calls it when a run completes.

        Raises:
            ConfigError: they do not fit.
        """
        if not 0 <= num_tokens <= self.capacity - self.position:
            raise ConfigError(
                f"{num_tokens} tokens do not fit at position {self.position} of a state of "
                f"{self.capacity} positions; rewind it, or make it larger"
            )
        self.position += num_tokens

    def rewind(self, position: int) -> None:
        """Forget everything from `position` on.

        Raises:
            ConfigError: the position is outside 0..the present one.
        """
        if not 0 <= position <= self.position:
            raise ConfigError(f"cannot rewind to position {position}; the state holds positions 0 to {self.position}")
        self.position = position

    def fork(self) -> State:
        """An independent copy that continues from the same prefix; only the filled positions are copied."""
        copy = State(self.plan, self.capacity, self.dtype)
        for name, array in self.tensors.items():
            copy.tensors[name][:, : self.position] = array[:, : self.position]
        copy.position = self.position
        return copy

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the filled positions as a NumPy .npz file, beside `path` first and then renamed.

        Raises:
            ConfigError: the file cannot be written.
        """
        path = Path(path)
        try:
            with NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
                try:
                    self._write(file)
                    file.close()
                    Path(file.name).replace(path)
                except BaseException:
                    Path(file.name).unlink(missing_ok=True)
                    raise
        except OSError as error:
            raise ConfigError(f"cannot save the state to {path}: {error}") from error

    def _write(self, file: IO[bytes]) -> None:
        filled = {name: array[:, : self.position] for name, array in self.tensors.items()}
        with zipfile.ZipFile(file, "w") as archive:
            for name, array in {"position": np.array(self.position), **filled}.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    npy.write_array(member, array, version=(1, 0), allow_pickle=False)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Replace the contents by what `save` wrote for the same decoder and dtype; the capacity may differ.

        Raises:
            ModelError: the file is missing, damaged, of another decoder or dtype, or longer than the
                capacity. The state is then unchanged.
        """
        try:
            with zipfile.ZipFile(path) as archive:
                position = self._check(archive)
                filled = {
                    name: _read(archive, name, (array.shape[0], position, array.shape[2]), array.dtype)
                    for name, array in self.tensors.items()
                }
        except (OSError, EOFError, ValueError, KeyError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
            raise ModelError(
                f"cannot load a state from {path}: {str(error) or type(error).__name__}; prefill again"
            ) from error
        for name, array in filled.items():
            self.tensors[name][:, :position] = array
        self.position = position

    def _check(self, archive: zipfile.ZipFile) -> int:
        """The saved position, once every cache in the file has proved whole and of the right shape."""
        found, expected = set(archive.namelist()), {f"{name}.npy" for name in ("position", *self.tensors)}
        if found != expected:
            raise ValueError(
                f"it holds {len(found)} tensors, not the {len(expected)} of this decoder (such as "
                f"{min(found ^ expected)!r})"
            )
        position = int(_read(archive, "position", (), np.dtype(np.int64)))
        if not 0 <= position <= self.capacity:
            raise ValueError(f"it holds {position} positions; the state has room for {self.capacity}")
        for name, array in self.tensors.items():
            with archive.open(f"{name}.npy") as file:
                _check_header(file, name, (array.shape[0], position, array.shape[2]), array.dtype)
        if damaged := archive.testzip():
            raise ValueError(f"{damaged!r} is damaged")
        return position


def _read(archive: zipfile.ZipFile, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    num_bytes = prod(shape) * dtype.itemsize
    with archive.open(f"{name}.npy") as file:
        _check_header(file, name, shape, dtype)
        data = file.read(num_bytes + 1)
    if len(data) != num_bytes:
        raise ValueError(f"{name!r} has {len(data)} bytes or more, not {num_bytes}")
    return np.frombuffer(data, dtype).reshape(shape)


def _check_header(file: IO[bytes], name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    if (version := npy.read_magic(file)) != (1, 0):
        raise ValueError(f"{name!r} is .npy version {version}, not (1, 0)")
    found_shape, is_fortran, found_dtype = npy.read_array_header_1_0(file)
    if (found_shape, is_fortran, found_dtype) != (shape, False, dtype):
        raise ValueError(f"{name!r} is {found_dtype} {found_shape}, not {dtype} {shape}")
