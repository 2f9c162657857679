"""The contents of a state at an earlier position (a snapshot), and the description of its present contents."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import count

from chunkrt.runtime.buffers import Array
from chunkrt.runtime.state_tensors import Write

_histories = count()


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """Contents of a state at a position.

    Attributes:
        tensors: copies of the tensors by name; of caches only the filled part.
        first: the first position that rings contain.
        kept: the snapshots to which the state could be rewound.
    """

    position: int
    first: int
    rope_offset: int
    tensors: Mapping[str, Array]
    kept: tuple[Snapshot, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Present:
    """Description of a state after `writes` have been executed. During a run, the writes undo the run.

    Attributes:
        history: number that stays the same as long as tokens are only added. If it is unchanged, a copy of caches and
            rings up to a position needs only the later positions.
        is_running: True if a run has begun and has not completed.
    """

    position: int = 0
    first: int = 0
    rope_offset: int = 0
    kept: tuple[Snapshot, ...] = ()
    writes: tuple[Write, ...] = ()
    history: int = field(default_factory=lambda: next(_histories))
    is_running: bool = False

    def begun(self, undo: tuple[Write, ...]) -> Present:
        """Return the description of the state during a new run, which the writes `undo` undo.

        If the previous run was aborted, `history` changes, because copies of caches may contain data of that run.
        """
        history = next(_histories) if self.is_running else self.history
        return replace(self, writes=undo, history=history, is_running=True)

    def advanced(self, position: int, first: int) -> Present:
        """Return the description of the state after a run."""
        return replace(self, position=position, first=first, writes=(), is_running=False)

    def rewound(self, position: int, kept: tuple[Snapshot, ...]) -> Present:
        """Return the description of the state at the same or an earlier position that requires no writes."""
        history = self.history if position == self.position else next(_histories)
        return replace(self, position=position, kept=kept, history=history)
