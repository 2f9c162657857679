"""Detect a launch by mpiexec, and connect to the other ranks."""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from chunkrt import __version__
from chunkrt.errors import ConfigError
from chunkrt.graph.plan import ALONE, Ranks
from chunkrt.runtime.ranks.last_words import LastWords

if TYPE_CHECKING:
    from chunkrt.runtime.ranks.mpi import MpiCommunicator

_communicator: MpiCommunicator | None = None
_last_words: LastWords | None = None

_VARIABLES = (("PMI_RANK", "PMI_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"))
"""Environment variables with rank and number of ranks: those of MPICH and its descendants, and those of Open MPI."""


def launched_ranks() -> Ranks:
    """Return this process's rank and the number of ranks, or `ALONE` without mpiexec. MPI is not imported.

    Raises:
        ConfigError: the environment variables are invalid.
    """
    for rank, size in _VARIABLES:
        if rank in os.environ and size in os.environ:
            try:
                return Ranks(int(os.environ[rank]), int(os.environ[size]))
            except ValueError as error:
                raise ConfigError(
                    f"{rank}={os.environ[rank]} and {size}={os.environ[size]} are not a rank and a number of ranks; "
                    "unset them, or start with mpiexec"
                ) from error
    return ALONE


def connect(arguments: Sequence[str]) -> MpiCommunicator | None:
    """Connect to the other ranks of this launch on the first call; return None without mpiexec.

    Args:
        arguments: the arguments of this process, which must be the same on all ranks.

    Raises:
        ConfigError, DeviceLostError: see `MpiCommunicator`.
    """
    global _communicator, _last_words
    if _communicator is None and not (ranks := launched_ranks()).are_alone:
        if os.name != "posix":
            raise ConfigError(f"mpiexec started {ranks.size} ranks, which need Linux or macOS; start without mpiexec")
        from chunkrt.runtime.ranks.mpi import MpiCommunicator

        logging.getLogger("chunkrt.files").setLevel(logging.ERROR)  # ranks wait until all ranks have compiled the model
        if ranks.rank == 0 and _last_words is None:
            _last_words = LastWords()
            atexit.register(_last_words.say, "")
        _communicator = MpiCommunicator(ranks, version=__version__, arguments=arguments, foretell=_foretell, end=_end)
    return _communicator


def say(line: str, *, is_verbose: bool = False) -> None:
    """Print an error on stderr. Only rank 0 prints, unless `is_verbose` is set."""
    if _last_words is not None:
        _last_words.say(line)
    elif is_verbose or launched_ranks().rank == 0:
        print(line, file=sys.stderr)


def _foretell(why: str) -> None:
    """Set the line to print if this process is killed before it reports an error."""
    if _last_words is not None:
        _last_words.prepare(f"chunkrt: {why}")


def _end(why: str) -> NoReturn:
    """End the process at once."""
    say(f"chunkrt: {why}")
    os._exit(1)
