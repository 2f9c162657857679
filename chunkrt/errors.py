"""All exceptions that chunkrt raises on purpose.

A message states the failure, the actual value, the expected value, and the next thing to try. The command line prints
the message as one line; `-v` adds the traceback and the chained cause.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterable
from difflib import get_close_matches

COMPILE_PARTS = ("gguf", "onnx", "onnx_ir", "onnxruntime")
"""Modules of the extra `compile`. An engine directory runs without them."""

INSTALL_COMPILE = 'pip install "chunkrt[compile]"'


def needs_compile_extra(error: ImportError) -> bool:
    """Return whether a module of the extra `compile` is missing."""
    return (error.name or "").partition(".")[0] in COMPILE_PARTS


_FILE_IN_USE = (32, 33, 1224)  # ERROR_SHARING_VIOLATION, ERROR_LOCK_VIOLATION, ERROR_USER_MAPPED_FILE of winerror.h


def cause_of(error: Exception) -> str:
    """Return the text of an error. Errors of the system have the same words on Windows as elsewhere."""
    if not isinstance(error, OSError):
        return str(error) or type(error).__name__
    code: int | None = getattr(error, "winerror", None)
    if code in _FILE_IN_USE:
        return "a program uses the file; close it first"
    if sys.platform == "win32" and not code and isinstance(error, PermissionError) and _is_folder(error.filename):
        return os.strerror(errno.EISDIR)  # the reason why `open` refuses a folder
    if code and error.errno not in (None, errno.EINVAL):  # EINVAL represents all errors without a counterpart
        return os.strerror(error.errno)
    return error.strerror or str(error)


def _is_folder(name: object) -> bool:
    return isinstance(name, str) and os.path.isdir(name)  # noqa: PTH112, as in `cause_in_file`


def cause_in_file(error: Exception) -> str:
    """Return `cause_of` an error, after the name of the file if the system reports one."""
    name = getattr(error, "filename", None)
    return f"{os.path.basename(name)}: {cause_of(error)}" if isinstance(name, str) else cause_of(error)  # noqa: PTH119


class ChunkrtError(Exception):
    """Base class of all exceptions of chunkrt.

    The message is one line. Control characters from damaged files or other libraries are escaped.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__("".join(c if c.isprintable() else ascii(c)[1:-1] for c in message))


class ConfigError(ChunkrtError):
    """An option, an argument or a configuration file is wrong."""


class ModelError(ChunkrtError):
    """A checkpoint, a tokenizer or an engine directory is missing, damaged or inconsistent."""


class UnsupportedModelError(ModelError):
    """The checkpoint is valid, but its architecture or one of its features is not implemented.

    `feature` is the name of the key in the config, or of the tensor, that requires the feature. It is empty if several
    do.
    """

    def __init__(self, message: str, *, feature: str = "") -> None:
        super().__init__(message)
        self.feature = feature


class BusyError(ChunkrtError):
    """The engine has reached its limit of work or sessions. A later attempt may succeed."""


class PartitionError(ChunkrtError):
    """A subgraph cannot run on the device on which it was placed."""


class QuantizationError(ChunkrtError):
    """A tensor cannot be quantised under the chosen scheme."""


class BackendError(ChunkrtError):
    """A backend failed."""


class BackendUnavailableError(BackendError):
    """The backend's library, driver or device is not available on this machine."""


class CompileError(BackendError):
    """A backend could not compile a subgraph."""


class DeviceLostError(BackendError):
    """The device stopped responding while it ran a subgraph, or another rank was lost."""


class NumberRangeError(BackendError):
    """A value exceeds the range of the device's number format. The device itself works."""


class OutOfMemoryError(ChunkrtError, MemoryError):
    """The memory is not sufficient for a valid file, a model or its context."""


class ConstraintError(ChunkrtError):
    """The constraint of a generation failed, or allows no further token although the text does not satisfy it yet."""


class ClosedError(ChunkrtError):
    """An engine or a session was used after it was closed, or a run was cancelled."""


def unknown_name(kind: str, name: str, known: Iterable[str], *, hint: str = "") -> ConfigError:
    """Return the error for an unknown name. The message suggests the nearest known name, and then lists all names or
    contains `hint`.
    """
    known = list(known)
    nearest = get_close_matches(name, known, n=1, cutoff=0.5)
    guess = f"did you mean {nearest[0]!r}? " if nearest else ""
    return ConfigError(f"unknown {kind} {name!r}; {guess}{hint or 'there are: ' + ', '.join(known)}")
