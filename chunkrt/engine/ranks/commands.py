"""Commands from the leader to its followers.

The leader is rank 0, which runs the program. Each follower repeats the leader's calls on its own engines, states and
snapshots: a command names the object by number, the method, and the number under which the result is kept.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from chunkrt import errors
from chunkrt.engine.options import EngineOptions
from chunkrt.errors import BackendError, ChunkrtError
from chunkrt.runtime.run import Logits


class Reference(NamedTuple):
    """Placeholder for an object of the follower among the arguments of a call."""

    number: int


class RankPath(NamedTuple):
    """Placeholder for a path of each rank's own: the leader's, with the rank appended."""

    path: Path

    def of(self, rank: int) -> Path:
        """Return the path of a follower."""
        return self.path.with_name(f"{self.path.name}.rank{rank}")


@dataclass(frozen=True, kw_only=True)
class Open:
    """Load a model; the reply is the engine's identity."""

    model: str
    options: EngineOptions
    result: int


@dataclass(frozen=True, kw_only=True)
class Call:
    """Call a method. `result`: number under which the result is kept, or None. `has_reply`: True if the call may
    fail."""

    target: int
    method: str
    arguments: tuple[Any, ...]
    result: int | None = None
    has_reply: bool = False


class Part(NamedTuple):
    """Tokens of a run of `run_tokens` tokens, of which `start` came before. `position`: position of the first token
    here."""

    state: int
    position: int
    start: int
    run_tokens: int
    token_ids: NDArray[np.int64]
    logits: Logits


@dataclass(frozen=True, kw_only=True)
class Compute:
    """Compute the rest of one run, or a chunk that several share; `lane`: name of the executor."""

    engine: int
    lane: str
    parts: tuple[Part, ...]

    @property
    def is_urgent(self) -> bool:
        """True if a rank computes only this while it waits for a sum."""
        return len(self.parts) > 1 or self.parts[0].token_ids.size == 1


class Message(NamedTuple):
    """A command. `before`: earlier calls that were postponed until now. `forgotten`: objects that are not needed any
    more."""

    command: Open | Call | Compute
    before: tuple[Call, ...]
    forgotten: tuple[int, ...]


def reply(value: object = None, error: BaseException | None = None) -> bytes:
    """Serialise a reply."""
    return pickle.dumps((value, None if error is None else (type(error).__name__, str(error))))


def read_reply(rank: int, payload: memoryview) -> Any:
    """Return the reply of a follower.

    Raises:
        ChunkrtError: the error in the reply, of the same type, with the rank before its message.
    """
    value, error = pickle.loads(payload)
    if error is None:
        return value
    kind, message = error
    known = getattr(errors, kind, None)
    if isinstance(known, type) and issubclass(known, ChunkrtError):
        raise known(f"rank {rank}: {message}")
    raise BackendError(f"rank {rank}: unexpected {kind}: {message}")
