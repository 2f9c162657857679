"""A generation: token after token of an answer, and the text that they make."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from chunkrt.engine.sampling import PluginSampler, Sampler, StopStrings
from chunkrt.engine.scoring import TokenLogProbabilities, likeliest
from chunkrt.engine.sequence import Steps, TokenSequence
from chunkrt.errors import ClosedError
from chunkrt.tokenizer import IncrementalDecoder, Tokenizer

FinishReason = Literal["stop", "length", "context"]


class Constraint(Protocol):
    """Which tokens may come next, of a grammar for instance. One is for one generation."""

    def allowed(self) -> NDArray[np.bool_]:
        """bool [V]: the tokens that may come next; one at least."""
        ...

    def accept(self, token_id: int) -> None:
        """A token came, which was allowed."""
        ...


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A step of generation: text that is now certain (perhaps none), and why it ended if this is the last.

    `finish_reason`: "stop" at an end-of-generation token or a stop string, "length" at max_new_tokens, "context" when
    the context is full and does not shift; None before the last piece. `token_id` is None on a closing piece that no
    token made. `log_probabilities` if they were asked for: the model's own, before what the sampling options make of
    them.
    """

    text: str
    token_id: int | None
    finish_reason: FinishReason | None = None
    log_probabilities: TokenLogProbabilities | None = field(default=None, repr=False)

    def __str__(self) -> str:
        """The text."""
        return self.text


class Generation:
    """Continues a sequence.

    Args:
        sequence: with one token at least.
        tokenizer: makes text of tokens; without one there is none. Rows of logits that it has no token for are not
            drawn.
        sampler: draws them.
        stops: strings that end it.
        max_new_tokens: at most so many.
        num_likeliest: of how many tokens each piece has log-probabilities beside its own; None: of none at all.
        constraint: which tokens may come, if not all.
        check_open: raises ClosedError if nothing may be computed any more.
    """

    def __init__(
        self,
        sequence: TokenSequence,
        tokenizer: Tokenizer | None,
        sampler: Sampler | PluginSampler,
        stops: StopStrings,
        *,
        max_new_tokens: int,
        check_open: Callable[[], None],
        num_likeliest: int | None = None,
        constraint: Constraint | None = None,
    ) -> None:
        self.is_finished = False
        self._num_likeliest, self._constraint = num_likeliest, constraint
        self._sequence = sequence
        self._sampler = sampler
        self._missing_ids = tokenizer.missing_ids if tokenizer else np.empty(0, np.int64)
        self._text = _Text(tokenizer, stops, follows_text=sequence.follows_text)
        self._left = self._most = max_new_tokens
        self._check_open = check_open

    def next_piece(self) -> Steps[Piece]:
        """Run what is to be run, and draw a token. Raises ClosedError if the sequence was cancelled."""
        sequence = self._sequence
        if sequence.cancel.is_set():
            raise ClosedError(f"the generation was cancelled after {self._most - self._left} tokens")
        if sequence.logits is None:
            self._check_open()
        logits = yield from sequence.next_logits()
        self._left -= 1
        token_id = self._choose(logits)
        told = None if self._num_likeliest is None else likeliest(logits, token_id, self._num_likeliest)
        piece = self._take(token_id)
        self.is_finished = piece.finish_reason is not None
        return replace(piece, log_probabilities=told)

    def _choose(self, logits: NDArray[np.float32]) -> int:
        lowest = np.finfo(np.float32).min
        if self._constraint is not None:
            logits = np.where(self._constraint.allowed(), logits, lowest)
        if len(self._missing_ids):
            logits = logits.copy()
            logits[self._missing_ids] = lowest
        token_id = self._sampler.next(logits, self._sequence.tokens)
        if self._constraint is not None:
            self._constraint.accept(token_id)
        return token_id

    def _take(self, token_id: int) -> Piece:
        """Add a token to the sequence and to the text; whether that ends the generation."""
        sequence, text = self._sequence, self._text
        sequence.follows_text = True
        reason: FinishReason | None = None
        if token_id in text.end_ids:
            sequence.append(token_id)
            return Piece(text=text.rest(), token_id=token_id, finish_reason="stop")
        new, is_stopped = text.push(token_id)
        if sequence.is_full:
            reason = "context"
        else:
            sequence.append(token_id)
            reason = None if self._left else "length"
        if is_stopped:
            return Piece(text=new, token_id=token_id, finish_reason="stop")
        return Piece(text=new + text.rest() if reason else new, token_id=token_id, finish_reason=reason)


class _Text:
    """The text of one generation: of its tokens as far as it is certain, up to a stop string. Empty without a
    tokenizer."""

    def __init__(self, tokenizer: Tokenizer | None, stops: StopStrings, *, follows_text: bool) -> None:
        self.end_ids = frozenset[int]()
        if tokenizer is not None:  # control tokens have no text, so a stop string that is one is met as a token
            spelled = frozenset(map(tokenizer.special_id, stops.strings))
            self.end_ids = tokenizer.eos_ids.union(token_id for token_id in spelled if token_id is not None)
        self._decoder = IncrementalDecoder(tokenizer, follows_text=follows_text) if tokenizer else None
        self._stops = stops

    def push(self, token_id: int) -> tuple[str, bool]:
        """What a token makes certain, and whether a stop string was met."""
        return self._stops.push(self._decoder.push(token_id)) if self._decoder else ("", False)

    def rest(self) -> str:
        """What was held back, now that nothing follows."""
        if self._decoder is None:
            return ""
        text, is_stopped = self._stops.push(self._decoder.flush())
        return text if is_stopped else text + self._stops.flush()
