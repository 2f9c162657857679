"""Writing a model: whole or not at all, and with external data tensor by tensor, so that memory holds one at a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx_ir as ir

from chunkrt.errors import ChunkrtError, ConfigError
from chunkrt.files import check_writable, remove

DATA_SUFFIX = ".data"
"""Added to a model's name where its weights are in a file of their own."""

LARGEST_FILE = 2**31 - 2**24
"""Bytes of weights that one ONNX file holds: protobuf ends at 2 GiB, and the graph takes some."""

SMALLEST_EXTERNAL = 1024
"""Bytes: what is smaller stays in the model, where shape inference finds it."""


def model_files(path: Path) -> tuple[Path, Path]:
    """Where a model is, and where its weights are if they are in a file of their own."""
    return path, path.with_name(path.name + DATA_SUFFIX)


def check_output(path: Path) -> None:
    """Raises ConfigError where a model cannot be written, as far as can be told beforehand.

    It, or its weights, may be there already; the name may be none for a model.
    """
    if path.suffix != ".onnx":
        raise ConfigError(f"--output is {path}, expected a name that ends in .onnx")
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
    """Write a model; with `external_data` its weights into a file beside it, whose name has ".data" added.

    Args:
        progress: told (tensors written, all of them).

    Raises:
        ConfigError: there is a file already, it cannot be written, or it is too large for one file.
        QuantizationError: a weight is beyond the type that it is written in.
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
        for file in sorted(aside.iterdir(), key=lambda file: file.name == path.name):  # with the model, all is there
            file.rename(path.with_name(file.name))
    except ir.serde.SerdeError as error:  # what a weight raised as it was read, wrapped again and again
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, ChunkrtError):
            cause = cause.__cause__
        raise cause or error from None
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        remove(aside)
