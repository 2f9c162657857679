"""What a state held at a position, and what it is at present."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import count

from chunkrt.runtime.buffers import Array
from chunkrt.runtime.state_tensors import Write

_histories = count()


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """What a state held at a position. `tensors`: copies by name, of caches the filled part.

    `first`: the first position that rings hold. `kept`: what the state could be rewound to.
    """

    position: int
    first: int
    rope_offset: int
    tensors: Mapping[str, Array]
    kept: tuple[Snapshot, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Present:
    """What a state is, once `writes` have been made. Those of a run in progress undo it.

    `history`: while it is the same, tokens have only been added: who has a copy of caches and rings up to a position
    needs what came after it only. `is_running`: a run has begun, and has not completed.
    """

    position: int = 0
    first: int = 0
    rope_offset: int = 0
    kept: tuple[Snapshot, ...] = ()
    writes: tuple[Write, ...] = ()
    history: int = field(default_factory=lambda: next(_histories))
    is_running: bool = False

    def begun(self, undo: tuple[Write, ...]) -> Present:
        """With a run that `undo` undoes. What one that was broken off has written may be in others' copies."""
        history = next(_histories) if self.is_running else self.history
        return replace(self, writes=undo, history=history, is_running=True)

    def advanced(self, position: int, first: int) -> Present:
        """After a run."""
        return replace(self, position=position, first=first, writes=(), is_running=False)

    def rewound(self, position: int, kept: tuple[Snapshot, ...]) -> Present:
        """At a position that is not after this one, and nothing has to be written for it."""
        history = self.history if position == self.position else next(_histories)
        return replace(self, position=position, kept=kept, history=history)
