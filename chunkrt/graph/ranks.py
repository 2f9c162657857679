"""Which of how many processes that share a decoder this one is."""

from __future__ import annotations

from dataclasses import dataclass

from chunkrt.errors import ConfigError

MOST_RANKS = 1024


@dataclass(frozen=True)
class Ranks:
    """Which of how many ranks this process is: `rank` counts from 0 to `size` - 1; rank 0 speaks.

    Raises:
        ConfigError: there is no such rank.
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
        """Whether there is one only, which has all of the decoder."""
        return self.size == 1

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.size}"


ALONE = Ranks(0, 1)
"""One process that has the whole decoder."""
