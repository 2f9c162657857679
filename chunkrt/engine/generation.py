"""A generation, which produces the tokens of an answer one by one, and their text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from chunkrt.engine.sampling import EXCLUDED, PluginSampler, Sampler, StopStrings
from chunkrt.engine.scoring import TokenLogProbabilities, likeliest
from chunkrt.engine.sequence import TokenSequence
from chunkrt.errors import ClosedError, ConstraintError
from chunkrt.gate import Outbox
from chunkrt.runtime.request import Request, Tokens
from chunkrt.tokenizer import IncrementalDecoder, Tokenizer

if TYPE_CHECKING:
    from chunkrt.engine.loaded import LoadedModel

FinishReason = Literal["stop", "length", "context"]


class Constraint(Protocol):
    """Constraint on the next token, for example by a grammar. An object may be used for one generation only.

    Any thread may call the methods. They must not use the engine or its sessions, which is an error if the generation
    shares chunks with others. An exception that a method raises ends the generation, and propagates.
    """

    def allowed(self) -> NDArray[np.bool_]:
        """Return a mask of the tokens that may come next, bool [V], with at least one True."""
        ...

    def accept(self, token_id: int) -> None:
        """Accept a drawn token, which is one of the allowed tokens."""
        ...


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A step of a generation.

    Attributes:
        text: the text that later tokens can no longer change, possibly empty.
        token_id: the token; None for a last piece without a token.
        finish_reason: "stop" at an end-of-generation token or a stop string, "length" at max_new_tokens, "context" if
            the context is full and does not shift; None before the last piece.
        log_probabilities: if requested, the log-probabilities of the model before the sampling options are applied.
    """

    text: str
    token_id: int | None
    finish_reason: FinishReason | None = None
    log_probabilities: TokenLogProbabilities | None = field(default=None, repr=False)

    def __str__(self) -> str:
        """Return the text."""
        return self.text


class Generation:
    """Generation that continues a sequence.

    The sampling takes place in the scheduler's loop, so the sequence stays with the scheduler between tokens. A caller
    that pulls pieces gets each one as soon as it is sampled, and while other requests share the chunks, the scheduler
    already computes the logits after it.

    Args:
        model: the loaded model of the sequence.
        sequence: a sequence with at least one token.
        sampler: draws tokens.
        stops: strings that end the generation.
        max_new_tokens: maximum number of tokens.
        num_likeliest: number of likeliest tokens for which a piece contains log-probabilities, in addition to that of
            its own token; None for no log-probabilities.
        constraint: restricts the tokens; by default all tokens are allowed.
        ignore_eos, min_new_tokens: see `SamplingOptions`.
        deliver: called in any thread with each piece, and with None when no further piece follows until the generation
            is continued. By default `next_piece` returns the pieces.
        is_eager: True if the scheduler need not wait for the caller between pieces.
    """

    def __init__(
        self,
        model: LoadedModel,
        sequence: TokenSequence,
        sampler: Sampler | PluginSampler,
        stops: StopStrings,
        *,
        max_new_tokens: int,
        num_likeliest: int | None = None,
        constraint: Constraint | None = None,
        ignore_eos: bool = False,
        min_new_tokens: int = 0,
        deliver: Callable[[Piece | None], object] | None = None,
        is_eager: bool = False,
    ) -> None:
        self._num_likeliest, self._constraint = num_likeliest, constraint
        self._model, self._scheduler, self._sequence = model, model.scheduler, sequence
        self._sampler = sampler
        tokenizer = model.tokenizer  # without one the text is empty
        self._text = _TextStream(tokenizer, stops, follows_text=sequence.follows_text)
        self._num_drawn, self._fewest, self._most = 0, min_new_tokens, max_new_tokens
        missing = tokenizer.missing_ids if tokenizer else np.empty(0, np.int64)
        ends, ignored = self._text.end_ids, self._text.end_ids - self._text.stop_ids if ignore_eos else ()
        self._excluded_before = np.concatenate((missing, np.array(list(ends), np.int64)))
        """Tokens that cannot be one of the first `min_new_tokens`, int64 [n]."""
        self._excluded = np.concatenate((missing, np.array(list(ignored), np.int64)))
        """Tokens that cannot be drawn after these, int64 [n]."""
        self._masked: NDArray[np.float32] | None = None
        """Memory for logits of which some are excluded, which is reused because new pages take longer than the copy."""
        self._outbox: Outbox[Piece | None] = Outbox()
        self._deliver = deliver or self._outbox.put
        self._is_eager = is_eager
        self.is_wanted = is_eager
        """True if the caller waits for a piece."""
        self._request: Request | None = None
        self.is_submitted = False
        """True if the scheduler will deliver a piece, or None."""

    def next_piece(self) -> Piece:
        """Return the next piece.

        Raises:
            ClosedError: the sequence was cancelled.
            ConstraintError: the constraint allows no token.
        """
        self.is_wanted = True
        try:
            if self._sequence.ahead is not None and not self.is_submitted:
                self._sequence.settle()  # another generation may have been left while it computed ahead
            if self.is_submitted:
                self._model.check_process()
            while True:
                if self.is_submitted and (piece := self._outbox.get()) is not None:
                    return piece
                if self.is_submitted:
                    self.note_end()
                if (drawn := self.draw_known()) is not None:
                    return drawn
                if self._scheduler.is_shared:
                    self.submit()
                else:
                    self._scheduler.run(self._renewed())
        finally:
            self.is_wanted = self._is_eager

    def draw_known(self) -> Piece | None:
        """Return the next piece if the logits after the last token are known; first compute them if this would take
        more than one token. Otherwise return None.
        """
        sequence = self._sequence
        if sequence.cancel.is_set():
            raise ClosedError(f"the generation was cancelled after {self._num_drawn} tokens")
        if sequence.logits is None:
            self._model.check_open()
            if sequence.is_ready or (self._num_drawn and sequence.has_pending):
                return None
        return self._draw(sequence.next_logits())

    def submit(self) -> None:
        """Let the scheduler compute the logits after the last token, and continue."""
        request = self._renewed()
        self.is_submitted, self._sequence.ahead = True, request
        try:
            self._scheduler.submit(request, self._end)
        except BaseException:
            self.is_submitted = False
            if not request.is_queued:
                self._sequence.ahead = None
            raise

    def note_end(self) -> None:
        """Note that the scheduler has delivered None. Raise the error of the request, if it failed."""
        self.is_submitted = False
        self._sequence.settle()
        if self._request is not None:
            self._request.raise_error()

    def close(self) -> None:
        """Stop a computation whose results are no longer needed. The sequence waits for it before its next use. The
        garbage collector may call this method in any thread, so it takes no lock.
        """
        self._is_eager = self.is_wanted = False
        request = self._request
        if request is not None:
            request.is_unwanted = True
            if request.is_released or not self.is_submitted:
                request.abandon()  # otherwise `_end` does it

    def _renewed(self) -> Request:
        """Return a request for the logits after the last token."""
        sequence, request = self._sequence, self._request
        tokens = sequence.begin_next()
        if request is None:
            request = self._request = Request(tokens, sequence.state, cancel=sequence.cancel, then=self._advance)
        else:
            request.renew(tokens, sequence.state)
        return request

    def _advance(self, request: Request) -> Tokens | None:
        """Draw the next token after a request's tokens have been computed, and return the tokens to compute next. The
        thread that drives the scheduler calls this method.
        """
        sequence = self._sequence
        sequence.end_next(request)
        assert request.logits is not None
        logits = request.logits[-1]
        # The caller draws the token itself, or raises the error of a cancellation.
        if not (self.is_submitted and self.is_wanted) or sequence.cancel.is_set():
            sequence.logits = logits  # the request does not write into them before the token is drawn
            return None
        try:
            piece = self._draw(logits)
        except BaseException:
            sequence.logits = logits
            raise
        self.is_wanted = self._is_eager
        self._deliver(piece)
        if piece.finish_reason is not None or sequence.logits is not None:
            return None
        return sequence.begin_next()

    def _end(self) -> None:
        if self._request is not None and self._request.is_unwanted:
            self._request.abandon()
        self._deliver(None)

    def _draw(self, logits: NDArray[np.float32]) -> Piece:
        """Draw a token, and add it to the sequence and to the text."""
        token_id = self._choose(logits)
        self._num_drawn += 1
        told = None if self._num_likeliest is None else likeliest(logits, token_id, self._num_likeliest)
        piece = self._take(token_id)
        return piece if told is None else replace(piece, log_probabilities=told)

    def _choose(self, logits: NDArray[np.float32]) -> int:
        """Draw one of the allowed tokens. Raise ConstraintError if no token is allowed, or a sampler draws another
        token.
        """
        excluded = self._excluded_before if self._num_drawn < self._fewest else self._excluded
        allowed = None if self._constraint is None else _mask(self._constraint, len(logits))
        if allowed is not None or excluded.size:
            if self._masked is None:
                self._masked = np.empty_like(logits)
            np.copyto(self._masked, logits)
            logits = self._masked
            if allowed is not None:
                logits[~allowed] = EXCLUDED
            logits[excluded] = EXCLUDED
            if allowed is not None and (logits == EXCLUDED).all():
                raise ConstraintError(f"the constraint allows no token after {self._num_drawn} tokens of the answer")
        token_id = self._sampler.next(logits, self._sequence.tokens)
        if (excluded.size and token_id in excluded) or not (allowed is None or allowed[token_id]):
            raise ConstraintError(f"the sampler chose token {token_id}, which is not allowed here; use another sampler")
        if self._constraint is not None:
            self._constraint.accept(token_id)
        return token_id

    def _take(self, token_id: int) -> Piece:
        """Add a token to the sequence and to the text, and return the resulting piece."""
        sequence, text = self._sequence, self._text
        sequence.follows_text = True
        reason: FinishReason | None = None
        if token_id in text.end_ids:
            sequence.append(token_id)
            return Piece(text=text.rest(), token_id=token_id, finish_reason="stop")
        new, is_stopped = text.push(token_id, may_stop=self._num_drawn > self._fewest)
        if sequence.is_full:
            reason = "context"
        else:
            sequence.append(token_id)
            reason = "length" if self._num_drawn == self._most else None
        if is_stopped:
            return Piece(text=new, token_id=token_id, finish_reason="stop")
        return Piece(text=new + text.rest() if reason else new, token_id=token_id, finish_reason=reason)


def _mask(constraint: Constraint, vocab_size: int) -> NDArray[np.bool_]:
    """Return the mask of a constraint, bool [V]. Raise ConstraintError if the constraint returns another type or
    shape."""
    allowed = np.asarray(constraint.allowed())
    if allowed.shape != (vocab_size,) or allowed.dtype != np.bool_:
        raise ConstraintError(
            f"the constraint's allowed() returned {allowed.dtype} of shape {list(allowed.shape)}; return bool of shape "
            f"[{vocab_size}]"
        )
    return allowed


class _TextStream:
    """Converter of the tokens of one generation to text, up to a stop string. Without a tokenizer the text is empty."""

    def __init__(self, tokenizer: Tokenizer | None, stops: StopStrings, *, follows_text: bool) -> None:
        # Control tokens have no text, so a stop string that is a control token is recognised as a token.
        self.stop_ids = tokenizer.special_ids(stops.strings) if tokenizer else frozenset[int]()
        self.end_ids = self.stop_ids | tokenizer.eos_ids if tokenizer else self.stop_ids
        self._decoder = IncrementalDecoder(tokenizer, follows_text=follows_text) if tokenizer else None
        self._stops = stops

    def push(self, token_id: int, *, may_stop: bool) -> tuple[str, bool]:
        """Return the text that is final after a token, and True if a stop string ended the text."""
        if self._decoder is None:
            return "", False
        text = self._decoder.push(token_id)
        return self._stops.push(text) if may_stop else (text, False)

    def rest(self) -> str:
        """Return the withheld text at the end of the generation."""
        if self._decoder is None:
            return ""
        text, is_stopped = self._stops.push(self._decoder.flush())
        return text if is_stopped else text + self._stops.flush()
