"""Writing of model files, which are complete or absent. External data is written tensor by tensor, with one in
memory.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx_ir as ir

from chunkrt.errors import ChunkrtError, ConfigError
from chunkrt.files import check_writable, remove

DATA_SUFFIX = ".data"
"""Suffix of a model's name for the file of its weights."""

LARGEST_FILE = 2**31 - 2**24
"""Largest number of bytes of weights in one ONNX file: protobuf's limit is 2 GiB, which includes the graph."""

SMALLEST_EXTERNAL = 1024
"""Size in bytes below which a tensor stays in the model, where shape inference finds it."""


def model_files(path: Path) -> tuple[Path, Path]:
    """Return the model's path, and the path of its weights if they are in a separate file."""
    return path, path.with_name(path.name + DATA_SUFFIX)


def check_output(path: Path) -> None:
    """Raise ConfigError if a model cannot be written to a path.

    Reasons are that the model's or the weights' file already exists, or that the name is not valid for a model.
    """
    if path.suffix != ".onnx":
        raise ConfigError(f"--output is {path}, expected a name that ends with .onnx")
    for file in model_files(path):
        try:
            check_writable(file)
        except OSError as error:
            raise ConfigError(f"cannot write {file}: {error.strerror or error}") from error
        if file.exists():
            raise ConfigError(f"{file} exists already; remove it, or write to another name")


def save_model(
    model: ir.Model,
    path: Path,
    *,
    external_data: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Write a model; with `external_data` its weights go to a file next to it, with ".data" added to its name.

    Args:
        progress: called with (tensors written, total).

    Raises:
        ConfigError: the file exists already, cannot be written, or would be too large.
        QuantizationError: a weight exceeds the range of the written type.
    """
    check_output(path)
    tensors = [value.const_value for value in model.graph.initializers.values()]
    num_bytes = sum(tensor.nbytes for tensor in tensors if tensor is not None)
    if not external_data and num_bytes > LARGEST_FILE:
        raise ConfigError(
            f"the weights are {num_bytes / 1e9:.1f} GB, and one ONNX file holds 2 GB; use --external-data"
        )
    data = path.name + DATA_SUFFIX if external_data else None
    aside = path.with_name(f".{path.name}.part")
    remove(aside)
    try:
        aside.mkdir(parents=True)
        ir.save(
            model,
            aside / path.name,
            external_data=data,
            size_threshold_bytes=SMALLEST_EXTERNAL,
            callback=lambda tensor, info: progress(info.index + 1, info.total),
        )
        for file in sorted(aside.iterdir(), key=lambda file: file.name == path.name):  # the model's file last
            file.rename(path.with_name(file.name))
    except ir.serde.SerdeError as error:  # the exception of reading a weight is wrapped several times
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, ChunkrtError):
            cause = cause.__cause__
        raise cause or error from None
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        remove(aside)
