"""What mpiexec told this process: how many were launched and which of them it is."""

from __future__ import annotations

import os

from chunkrt.errors import ConfigError
from chunkrt.ranks.base import ALONE, Ranks

_VARIABLES = (("PMI_RANK", "PMI_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"))
"""Of MPICH and of what follows it, and of Open MPI."""


def launched_ranks() -> Ranks:
    """Which rank of how many this process was launched as; `ALONE` without mpiexec. MPI is not imported for it.

    Raises:
        ConfigError: the variables make no sense.
    """
    for rank, size in _VARIABLES:
        if rank in os.environ and size in os.environ:
            try:
                return Ranks(int(os.environ[rank]), int(os.environ[size]))
            except ValueError as error:
                raise ConfigError(
                    f"{rank}={os.environ[rank]} and {size}={os.environ[size]} are not from mpiexec; unset them"
                ) from error
    return ALONE
