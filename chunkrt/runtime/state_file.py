"""The file of a state: a NumPy .npz archive with integers and tensors. It is read only if its contents are complete and
have the expected shapes and dtypes.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable, Collection, Mapping
from math import prod
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy

from chunkrt.errors import ConfigError, ModelError, cause_of
from chunkrt.files import check_archive, check_regular, written_aside
from chunkrt.runtime.buffers import Array

Numbers = Mapping[str, int]


class StateFile:
    """The file of a state at a path. Creating the object does not open the file."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def write(self, numbers: Numbers, arrays: Mapping[str, Array]) -> None:
        """Write the arrays and numbers to a temporary file next to the path, and then rename it.

        Raises:
            ConfigError: the file cannot be written.
        """
        try:
            self.path.parent.stat()  # do not create a missing folder
            with written_aside(self.path) as aside, aside.open("wb") as file:
                _write(file, {name: np.array(number, np.int64) for name, number in numbers.items()} | dict(arrays))
        except OSError as error:
            raise ConfigError(f"cannot save the state to {self.path}: {cause_of(error)}") from error

    def read(
        self, expect: Callable[[Numbers], Mapping[str, Array]], numbers: Collection[str], arrays: Collection[str]
    ) -> tuple[Mapping[str, Array], Numbers]:
        """Read a file that `write` wrote.

        Args:
            expect: called with the numbers. It returns arrays with the shapes and dtypes of the arrays in the file, or
                raises ValueError if the numbers do not fit.
            numbers, arrays: the names of all entries of the file.

        Returns:
            The arrays and the numbers.

        Raises:
            ModelError: the file is missing or damaged, or its contents differ from the expected ones.
        """
        try:
            check_regular(self.path)
            with zipfile.ZipFile(self.path) as archive:
                check_archive(archive)
                _check_names(archive, {*numbers, *arrays})
                self._check(archive)
                found = {name: int(read_array(archive, name, np.empty((), np.int64))) for name in numbers}
                forms = expect(found)
                for name, form in forms.items():
                    with archive.open(f"{name}.npy") as file:
                        _check_header(file, name, form)
                if damaged := archive.testzip():
                    raise ValueError(f"{damaged!r} is damaged")
                return {name: read_array(archive, name, form) for name, form in forms.items()}, found
        except ModelError:
            raise
        except Exception as error:  # damaged archives and headers may raise any error
            raise ModelError(f"cannot load a state from {self.path}: {cause_of(error)}; prefill again") from error

    def _check(self, archive: zipfile.ZipFile) -> None:
        """Check a complete archive. Subclasses raise ModelError if it is not valid for their kind of file."""


def state_file(path: str | os.PathLike[str] | StateFile) -> StateFile:
    """Return a StateFile for a path. A StateFile is returned unchanged."""
    return path if isinstance(path, StateFile) else StateFile(path)


def _write(file: IO[bytes], arrays: Mapping[str, Array]) -> None:
    with zipfile.ZipFile(file, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                npy.write_array(member, array, version=(1, 0), allow_pickle=False)


def _check_names(archive: zipfile.ZipFile, names: Collection[str]) -> None:
    found, expected = set(archive.namelist()), {f"{name}.npy" for name in names}
    if found != expected:
        raise ValueError(
            f"its {len(found)} tensors do not match the {len(expected)} tensors of this decoder; "
            f"{min(found ^ expected)!r} is in only one of the two"
        )


def read_array(archive: zipfile.ZipFile, name: str, form: Array) -> Array:
    """Read one tensor of the file. Raise ValueError unless it has the shape and dtype of `form`."""
    num_bytes = prod(form.shape) * form.dtype.itemsize
    with archive.open(f"{name}.npy") as file:
        _check_header(file, name, form)
        data = file.read(num_bytes + 1)
    if len(data) != num_bytes:
        raise ValueError(f"{name!r} has {len(data)} bytes or more, not {num_bytes}")
    return np.frombuffer(data, form.dtype).reshape(form.shape)


def _check_header(file: IO[bytes], name: str, form: Array | np.ndarray[Any, Any]) -> None:
    if (version := npy.read_magic(file)) != (1, 0):
        raise ValueError(f"{name!r} is .npy version {version}, not (1, 0)")
    shape, is_fortran, dtype = npy.read_array_header_1_0(file)
    if (shape, is_fortran, dtype) != (form.shape, False, form.dtype):
        raise ValueError(f"{name!r} is {dtype} {shape}, not {form.dtype} {form.shape}")
