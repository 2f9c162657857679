"""Runs and their results."""

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
"""Results to compute: the logits of the last token, of all tokens, or of none. With "hidden", no logits are computed,
but the hidden states of all tokens, which are the input of the LM head.
"""
OF_ALL: tuple[Logits, ...] = ("all", "hidden")
"""Values of Logits that require every token to be computed, so no token may come from the prefix cache."""


class Cancel:
    """Flag that stops a run, and may be set from any thread. It uses no lock that an interrupt could leave held."""

    def __init__(self) -> None:
        self._is_set = False

    def set(self) -> None:
        """Stop the run, and every later run until `clear` is called."""
        self._is_set = True

    def clear(self) -> None:
        """Allow runs again."""
        self._is_set = False

    def is_set(self) -> bool:
        """Return True if the flag stops runs."""
        return self._is_set


@dataclass(frozen=True, eq=False)
class Run:
    """Tokens for a decoder, the state that they continue, and the requested results.

    Attributes:
        token_ids: int64 [n], n at least 1.
        state: a state of the same decoder; it advances by n.
        logits: the rows of logits to compute.
        cancel: flag that stops the run as soon as its running tasks have ended; it may be set from any thread.
        on_tokens: called in a computing thread after every chunk, with the number of tokens of that chunk; it must not
            raise.
        is_for_others: True if another rank requested the logits. This rank then computes only its part of the sums, and
            no logits.
    """

    token_ids: NDArray[np.int64]
    state: State
    _: KW_ONLY
    logits: Logits = "last"
    cancel: Cancel | Event | None = None
    is_for_others: bool = False
    on_tokens: Callable[[int], object] | None = None

    def check(self, plan: Plan, chunk_length: int) -> None:
        """Raise ConfigError if tokens, state or an option do not fit a decoder with this chunk length."""
        token_ids, state = self.token_ids, self.state
        if self.logits not in get_args(Logits):
            raise unknown_name("choice of logits", self.logits, get_args(Logits))
        if self.logits == "hidden" and plan.flow.hidden is None:
            raise ConfigError("this decoder's plan does not name its hidden states")
        if token_ids.ndim != 1 or token_ids.dtype != np.int64:
            raise ConfigError(f"token ids are {token_ids.dtype} {list(token_ids.shape)}, not int64 [n]")
        if token_ids.size == 0:
            raise ConfigError("the prompt is empty; pass at least one token")
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
    """Results of a run.

    Attributes:
        logits: float32 [1, V] for the last token, [n, V] for all tokens, or None if no logits were requested.
        hidden: float32 [n, H] if requested: the output of the last norm, which is the input of the LM head.
        records: records of consecutive parts of the run. Each part was computed by one pipeline; its record lists every
            task in the order in which they ended, and the data that explain why workers waited. A run that shares no
            chunk is one part, or one part for each executor if the history outgrows executors of limited reach.
    """

    logits: NDArray[np.float32] | None
    records: Sequence[RunRecord]
    hidden: NDArray[np.float32] | None = None

    @property
    def record(self) -> RunRecord:
        """The only record of a run that consists of one part."""
        (record,) = self.records
        return record


def _memory(plan: Plan) -> tuple[object, ...]:
    """Return the parts of a plan that determine the memory and the contents of a state."""
    return plan.state_tensors, plan.window, plan.key_form
