"""What a state held at a position, and what it is at present."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from chunkrt.runtime.buffers import Array
from chunkrt.runtime.state_tensors import Write


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
    """What a state is, once `writes` have been made. Those of a run in progress undo it."""

    position: int = 0
    first: int = 0
    rope_offset: int = 0
    kept: tuple[Snapshot, ...] = ()
    writes: tuple[Write, ...] = ()
