"""What a run is, and what it gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from threading import Event
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from chunkrt.errors import ConfigError, unknown_name
from chunkrt.graph.plan import Plan
from chunkrt.runtime.record import RunRecord
from chunkrt.runtime.state import State

Logits = Literal["last", "all", "none", "hidden"]
"""Of the last token, of all, of none; or no logits, but the hidden states that they would be made from, of all."""
OF_ALL: tuple[Logits, ...] = ("all", "hidden")
"""Those that want something of every token, so that none may come from elsewhere."""


class Cancel:
    """Set from any thread, it stops a run. It has no lock that an interrupt could leave taken."""

    def __init__(self) -> None:
        self._is_set = False

    def set(self) -> None:
        """Stop the run, and every later one until it is cleared."""
        self._is_set = True

    def clear(self) -> None:
        """Stop none."""
        self._is_set = False

    def is_set(self) -> bool:
        """Whether it stops a run."""
        return self._is_set


@dataclass(frozen=True, eq=False)
class Run:
    """Tokens for a decoder, the state that they follow, and what is wanted of them.

    token_ids: int64 [n], n at least 1.
    state: of the same decoder; it advances by n.
    logits: which rows of logits to compute.
    cancel: set it from any thread to stop the run as soon as the tasks that run have ended.
    on_tokens: told, in a thread that computes, how many tokens another chunk has taken through the decoder; it must not
        raise.
    is_for_others: of several ranks: another wants the logits; here only what its sums need is computed, and no logits.
    """

    token_ids: NDArray[np.int64]
    state: State
    _: KW_ONLY
    logits: Logits = "last"
    cancel: Cancel | Event | None = None
    is_for_others: bool = False
    on_tokens: Callable[[int], object] | None = None

    def check(self, plan: Plan, chunk_length: int) -> None:
        """Raises ConfigError if tokens, state or an option do not fit a decoder that takes chunks of that length."""
        token_ids, state = self.token_ids, self.state
        if self.logits not in get_args(Logits):
            raise unknown_name("choice of logits", self.logits, get_args(Logits))
        if self.logits == "hidden" and plan.flow.hidden is None:
            raise ConfigError("this decoder's plan does not tell which values are its hidden states")
        if token_ids.ndim != 1 or token_ids.dtype != np.int64:
            raise ConfigError(f"token ids are {token_ids.dtype} {list(token_ids.shape)}, not int64 [n]")
        if token_ids.size == 0:
            raise ConfigError("the prompt is empty; it takes at least one token")
        low, high = token_ids.min(), token_ids.max()
        if low < 0 or high >= plan.vocab_size:
            wrong = low if low < 0 else high
            raise ConfigError(f"token id {wrong} is outside the vocabulary, 0..{plan.vocab_size - 1}")
        if state.plan is not plan and _memory(state.plan) != _memory(plan):
            raise ConfigError("the state belongs to another decoder; make one from this engine's plan")
        if plan.window and chunk_length > state.chunk_length:
            raise ConfigError(f"chunks of {chunk_length} do not fit a state made for {state.chunk_length}")
        if chunk_length > state.capacity:
            raise ConfigError(f"chunk length {chunk_length} is outside 1..{state.capacity}, the state's capacity")
        if token_ids.size > state.capacity - state.position:
            raise ConfigError(
                f"{token_ids.size} tokens do not fit at position {state.position} of a state of "
                f"{state.capacity} positions; shorten the prompt, or make the state larger"
            )


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """What a run computed.

    logits: float32 [1, V] of the last token, [n, V] of all, or None if none were asked for.
    hidden: float32 [n, H], if they were asked for: after the last norm, as the head reads them.
    records: of consecutive parts of the run, each by one pipeline: every task, in the order in which they ended, and
        what tells why workers waited. A run that shares no chunk is one part, or one an executor where its history
        outgrows those that reach only so far.
    """

    logits: NDArray[np.float32] | None
    records: Sequence[RunRecord]
    hidden: NDArray[np.float32] | None = None

    @property
    def record(self) -> RunRecord:
        """That of a run in one part."""
        (record,) = self.records
        return record


def _memory(plan: Plan) -> tuple[object, ...]:
    """What a state is made by, and what lies in it."""
    return plan.state_tensors, plan.window, plan.key_form
