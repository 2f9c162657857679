"""Ranks that are threads of one process: for tests, and for whoever has no MPI."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Condition

import numpy as np

from chunkrt.backends.communicator import Float32, Key
from chunkrt.errors import BackendError, DeviceLostError
from chunkrt.graph.ranks import Ranks


def local_communicators(size: int) -> list[LocalCommunicator]:
    """One for each of `size` ranks that reach each other. Raises ConfigError as `Ranks` does."""
    group = _Group(size)
    return [LocalCommunicator(Ranks(rank, size), group) for rank in range(size)]


@dataclass
class _Sum:
    """One sum under way: what ranks have given, and how many have taken the result."""

    partials: dict[int, Float32] = field(default_factory=dict)
    total: Float32 | None = None
    num_taken: int = 0


class _Group:
    """What the ranks share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.changed = Condition()
        self.sums: dict[Key, _Sum] = {}
        self.lost: int | None = None
        """The rank that left first."""


class LocalCommunicator:
    """One rank's end; see `Communicator`."""

    def __init__(self, ranks: Ranks, group: _Group) -> None:
        self.rank, self.size = ranks.rank, ranks.size
        self._group = group

    def all_reduce(self, partial: Float32, out: Float32, *, key: Key) -> None:
        """See `Communicator.all_reduce`."""
        group = self._group
        with group.changed:
            self._check_whole()
            # the sum before it may have the same key, and others still take their results from it
            self._wait_for(lambda: key not in group.sums or self.rank not in group.sums[key].partials)
            current = group.sums.setdefault(key, _Sum())
            current.partials[self.rank] = partial
            if len(current.partials) == self.size:
                try:
                    current.total = self._add(current)
                except BackendError:
                    self._leave()
                    raise
                group.changed.notify_all()
            self._wait_for(lambda: current.total is not None)
            assert current.total is not None
            out[...] = current.total
            current.num_taken += 1
            if current.num_taken == self.size:
                del group.sums[key]
                group.changed.notify_all()

    def close(self) -> None:
        """See `Communicator.close`."""
        with self._group.changed:
            self._leave()

    def _leave(self) -> None:
        if self._group.lost is None:
            self._group.lost = self.rank
            self._group.changed.notify_all()

    def _wait_for(self, happens: Callable[[], bool]) -> None:
        """Wait, with the group's lock. Raises DeviceLostError if a rank leaves before."""
        group = self._group
        group.changed.wait_for(lambda: group.lost is not None or happens())
        if not happens():
            self._check_whole()

    def _check_whole(self) -> None:
        if self._group.lost is not None:
            raise DeviceLostError(f"rank {self._group.lost} left; {Ranks(self.rank, self.size)} cannot go on")

    def _add(self, current: _Sum) -> Float32:
        partials = [current.partials[rank] for rank in range(self.size)]
        if len(shapes := {partial.shape for partial in partials}) > 1:
            raise BackendError(f"ranks give sums of different shapes: {sorted(shapes)}; they run different prompts")
        total = partials[0].copy()
        for partial in partials[1:]:
            np.add(total, partial, out=total)
        return total
