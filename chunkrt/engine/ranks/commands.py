"""What the leader has its followers do.

The leader is rank 0, which runs the program. What it does to an engine, a state or a snapshot, each follower does to
its own: a command names the object by number, what to call, and the number that the result is kept under.
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
    """Stands for an object of the follower's, among the arguments of a call."""

    number: int


class RankPath(NamedTuple):
    """Stands for a path of each rank's own: the leader's, with the rank at its end."""

    path: Path

    def of(self, rank: int) -> Path:
        """The path of a follower."""
        return self.path.with_name(f"{self.path.name}.rank{rank}")


@dataclass(frozen=True, kw_only=True)
class Open:
    """Load a model; the reply is the engine's identity."""

    model: str
    options: EngineOptions
    result: int


@dataclass(frozen=True, kw_only=True)
class Call:
    """Call a method. `result`: what its result is kept under, if at all. `has_reply`: whether it may fail."""

    target: int
    method: str
    arguments: tuple[Any, ...]
    result: int | None = None
    has_reply: bool = False


class Part(NamedTuple):
    """Tokens of a run, which has `run_tokens`; `start` of them came before. `position`: of the first here."""

    state: int
    position: int
    start: int
    run_tokens: int
    token_ids: NDArray[np.int64]
    logits: Logits


@dataclass(frozen=True, kw_only=True)
class Compute:
    """Compute what is left of one run, or a chunk that several share; `lane`: the name of the executor for it."""

    engine: int
    lane: str
    parts: tuple[Part, ...]

    @property
    def is_urgent(self) -> bool:
        """Whether nothing else is computed while a sum is waited for."""
        return len(self.parts) > 1 or self.parts[0].token_ids.size == 1


class Message(NamedTuple):
    """A command. `before`: calls that came earlier and could wait for it. `forgotten`: objects that nobody needs any
    more."""

    command: Open | Call | Compute
    before: tuple[Call, ...]
    forgotten: tuple[int, ...]


def reply(value: object = None, error: BaseException | None = None) -> bytes:
    """A reply as it is sent."""
    return pickle.dumps((value, None if error is None else (type(error).__name__, str(error))))


def read_reply(rank: int, payload: memoryview) -> Any:
    """What a follower replied.

    Raises:
        ChunkrtError: the error that it replied with, of the same kind, with the rank before its message.
    """
    value, error = pickle.loads(payload)
    if error is None:
        return value
    kind, message = error
    known = getattr(errors, kind, None)
    if isinstance(known, type) and issubclass(known, ChunkrtError):
        raise known(f"rank {rank}: {message}")
    raise BackendError(f"rank {rank}: unexpected {kind}: {message}")
