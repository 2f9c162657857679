"""The rank of a process among the processes that share a decoder."""

from __future__ import annotations

from dataclasses import dataclass

from chunkrt.errors import ConfigError

MOST_RANKS = 1024


@dataclass(frozen=True)
class Ranks:
    """This process's rank among `size` processes: `rank` counts from 0 to `size` - 1; rank 0 prints.

    Raises:
        ConfigError: `rank` or `size` is out of range.
    """

    rank: int
    size: int

    def __post_init__(self) -> None:
        if any(type(number) is not int for number in (self.rank, self.size)):
            raise ConfigError(f"rank {self.rank!r} of {self.size!r}: expected whole numbers")
        if not 1 <= self.size <= MOST_RANKS:
            raise ConfigError(f"{self.size} ranks, expected 1 to {MOST_RANKS}")
        if not 0 <= self.rank < self.size:
            raise ConfigError(f"rank {self.rank} of {self.size}: expected 0 to {self.size - 1}")

    @property
    def are_alone(self) -> bool:
        """True if the only rank runs the complete decoder."""
        return self.size == 1

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.size}"


ALONE = Ranks(0, 1)
"""One process that has the complete decoder."""
