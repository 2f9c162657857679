"""Every error that chunkrt raises on purpose.

A message says what failed, what was found and what was expected, and the next thing to try. The command line
prints it as one line; `-v` adds the traceback and the chained cause.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class ChunkrtError(Exception):
    """Base of all errors below; catch it to catch everything that chunkrt reports.

    The message is one line: what a damaged file or another library puts into it is escaped.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__("".join(c if c.isprintable() else ascii(c)[1:-1] for c in message))


class ConfigError(ChunkrtError):
    """An option, an argument or a configuration file is wrong."""


class ModelError(ChunkrtError):
    """A checkpoint, a tokenizer or an engine directory is missing, damaged or inconsistent."""


class UnsupportedModelError(ModelError):
    """The checkpoint is sound, but its architecture or one of its features is not implemented.

    `feature`: what asks for it, by name: a key of the config, or a tensor. Empty where nothing does by itself.
    """

    def __init__(self, message: str, *, feature: str = "") -> None:
        super().__init__(message)
        self.feature = feature


class BusyError(ChunkrtError):
    """The engine has as much to do, or holds as many sessions, as it may; later there may be room again."""


class PartitionError(ChunkrtError):
    """A subgraph cannot run on the device it was placed on."""


class QuantizationError(ChunkrtError):
    """A tensor cannot be quantised under the chosen scheme."""


class BackendError(ChunkrtError):
    """A backend failed."""


class BackendUnavailableError(BackendError):
    """The backend's library, driver or device is not on this machine."""


class CompileError(BackendError):
    """A backend could not compile a subgraph."""


class DeviceLostError(BackendError):
    """The device stopped answering while it ran a subgraph."""


class NumberRangeError(BackendError):
    """A value is beyond the numbers that a device computes with. The device itself works."""


class OutOfMemoryError(ChunkrtError, MemoryError):
    """There is too little memory for a file, a model or its context; nothing is wrong with those."""


class ConstraintError(ChunkrtError):
    """The constraint of a generation failed, or allows no token; the text up to there does not satisfy it."""


class ClosedError(ChunkrtError):
    """An engine or a session was used after it was closed, or a run was cancelled."""


def unknown_name(kind: str, name: str, known: Iterable[str], *, hint: str = "") -> ConfigError:
    """The error for a name that is not among those known: the nearest is offered, then all, or `hint`."""
    known = list(known)
    nearest = get_close_matches(name, known, n=1, cutoff=0.5)
    guess = f"did you mean {nearest[0]!r}? " if nearest else ""
    return ConfigError(f"unknown {kind} {name!r}; {guess}{hint or 'there are: ' + ', '.join(known)}")
