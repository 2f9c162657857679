"""Commands from the leader to its followers.

The leader is rank 0, which runs the program. Each follower repeats the leader's calls on its own engines, states and
snapshots. A command contains the number of the object, the name of the method, and the number under which the follower
stores the result.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from chunkrt import errors
from chunkrt.errors import BackendError, ChunkrtError
from chunkrt.runtime.request import Logits


class Reference(NamedTuple):
    """Placeholder for an object of the follower in the arguments of a call."""

    number: int


FOLLOWER = 0
"""Number of the follower itself among its objects."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """Command to call a method.

    Attributes:
        result: number under which the follower stores the result, or None.
        has_reply: True if the call may fail, so the follower replies, with the result if it does not store it.
    """

    target: int
    method: str
    arguments: tuple[Any, ...]
    result: int | None = None
    has_reply: bool = False


class Part(NamedTuple):
    """Part of the `num_tokens` tokens of a request.

    Attributes:
        start: number of tokens of the request before this part.
        position: position of the first token of this part.
    """

    state: int
    position: int
    start: int
    num_tokens: int
    token_ids: NDArray[np.int64]
    logits: Logits


@dataclass(frozen=True, kw_only=True)
class Compute:
    """Command to compute tokens of one request, or a chunk of several requests. `executor` is the name of the executor
    in the `ExecutorSet`.
    """

    engine: int
    executor: str
    parts: tuple[Part, ...]

    @property
    def is_urgent(self) -> bool:
        """True if a rank has no other work while it waits for a sum of this command."""
        return len(self.parts) > 1 or self.parts[0].token_ids.size == 1


Message = tuple[Call | Compute, tuple[Call, ...], tuple[int, ...]]
"""A command, earlier calls that were postponed, which are executed first, and the numbers of objects that are no longer
needed.
"""


def reply(value: object = None, error: BaseException | None = None) -> bytes:
    """Serialise a reply."""
    return pickle.dumps((value, None if error is None else (type(error).__name__, str(error))))


def read_reply(rank: int, payload: memoryview) -> Any:
    """Return the reply of a follower.

    Raises:
        ChunkrtError: the error in the reply, with the same type, and with the rank in front of its message.
    """
    value, error = pickle.loads(payload)
    if error is None:
        return value
    kind, message = error
    known = getattr(errors, kind, None)
    if isinstance(known, type) and issubclass(known, ChunkrtError):
        raise known(f"rank {rank}: {message}")
    raise BackendError(f"rank {rank}: unexpected {kind}: {message}")
