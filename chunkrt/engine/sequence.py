"""A sequence: a state, the tokens that it contains, and the pending tokens.

The state may lack the last tokens of the sequence. This is the case after a generation, because its last token is not
run, and after a rewind to an earlier position than requested. The pending tokens are run with the next tokens. Tokens
are added to the sequence before they are run, so after an interrupt the state may lack tokens, but never contains
others.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from chunkrt.engine.prefill_result import PrefillResult, joined
from chunkrt.engine.prefix_cache.cache import Reuse
from chunkrt.engine.session_file import Conversation, SessionFile
from chunkrt.errors import ClosedError, ConfigError, ModelError
from chunkrt.runtime.record import RunRecord
from chunkrt.runtime.request import OF_ALL, Cancel, Logits, Request, Tokens
from chunkrt.runtime.state import State

if TYPE_CHECKING:
    from chunkrt.engine.loaded import LoadedModel

Float32 = NDArray[np.float32]


class TokenSequence:
    """Tokens of a conversation, with their state.

    Args:
        model: the loaded model that computes the runs.
        state: an empty state, or one that contains the first tokens of `tokens`.
        tokens: the tokens so far.
        cache_salt: salt of the prefix cache; prefixes are shared only between sequences with the same salt.
    """

    def __init__(self, model: LoadedModel, state: State, tokens: Iterable[int] = (), *, cache_salt: str = "") -> None:
        self._model = model
        self._state: State | None = state
        self.tokens = list(tokens)
        """Tokens in the context. These are all tokens so far, unless the context has been shifted."""
        self.logits: Float32 | None = None
        """Logits after the last token, if this token has been run."""
        self.cancel = Cancel()
        self.follows_text = False
        """True if the last token belongs to plain text."""
        self.on_run: Callable[[RunRecord], None] | None = None
        self.on_tokens: Callable[[int], object] | None = None
        """Function that is called, in any thread, after every chunk with its number of tokens, and with the number of
        tokens from the prefix cache.
        """
        self._dropped: list[int] = []
        """Tokens that shifts of the context have dropped. They followed the permanent tokens."""
        self._reuse = Reuse(model.prefix_cache, cache_salt)
        self.unreported: deque[RunRecord] = deque()
        """Records that were not passed to `on_run` yet. It is called after all tokens of a prefill or step are done."""
        self.ahead: Request | None = None
        """Request of a generation, which another thread may be computing."""
        self._after_prompt: tuple[int, Float32] | None = None
        """End of the last prompt, with the logits at that position, for a state that cannot be rewound by one token."""

    @property
    def state(self) -> State:
        """The state. Access after `release` raises ClosedError."""
        if self._state is None:
            raise ClosedError("the session is closed; open a new one with engine.session()")
        return self._state

    @property
    def has_pending(self) -> bool:
        """True if the state lacks some of the tokens."""
        return self._state is not None and self._state.position < len(self.tokens)

    @property
    def is_ready(self) -> bool:
        """True if at most one token must be run to get the logits after the last token."""
        return self.logits is not None or len(self.tokens) - self.state.position == 1

    @property
    def history(self) -> tuple[int, ...]:
        """All tokens so far, including those that shifts of the context have dropped."""
        keep = self._num_kept
        return (*self.tokens[:keep], *self._dropped, *self.tokens[keep:])

    @property
    def context_length(self) -> int:
        """Maximum number of tokens in the context."""
        return self._model.context_length

    @property
    def vocab_size(self) -> int:
        """Number of logits for a token, i.e. the size of the vocabulary."""
        return self._model.plan.vocab_size

    @property
    def is_full(self) -> bool:
        """True if no further token can be added, because the context is full and does not shift."""
        return len(self.tokens) >= self._model.context_length and not self._shifts

    def settle(self) -> None:
        """Wait until no other thread computes tokens of this sequence."""
        ahead = self.ahead
        if ahead is not None:
            self._model.check_process()
            ahead.wait()
            self.ahead = None
            with suppress(AttributeError):  # another thread settles it, too
                del ahead.state  # a caller may keep the generation, while the memory of the state can be freed

    def settle_left(self) -> None:
        """Wait like `settle` if a generation that has been left, for example by an interrupt, may still add a token."""
        ahead = self.ahead
        if ahead is not None and ahead.is_unwanted and not self._model.scheduler.is_driver:
            self.settle()

    def holds_for(self, num_tokens: int) -> bool:
        """Return whether the state would be the same as the first part of a prompt of `num_tokens` tokens."""
        return self.state.rope_offset == self._model.plan.rope_offset(num_tokens)

    def extend(self, new: Sequence[int], logits: Logits, *, num_left: int = 0) -> PrefillResult:
        """Add the tokens of a prompt, and run them after the pending tokens.

        Args:
            num_left: number of tokens of the same prompt that later calls add.

        Raises:
            ConfigError: the tokens exceed the context. After any error the sequence is unchanged.
            ModelError: logits are requested from a model without LM head.
        """
        self._check_head(logits)
        num_reported = len(self.unreported)
        if len(new) > self._room and not self._shifts:
            length, most = self._model.context_length, self._model.plan.context_length
            longer = f" choose a context of up to {most} (`context_length`)," if length < most else ""
            raise ConfigError(
                f"the prompt has {len(new)} tokens, but the context of {length} has room for {self._room}; shorten the "
                f"prompt,{longer} or let the context shift (`context_shift`)"
            )
        try:
            fits = len(new) <= self._room
            result = self._extend(new, logits, num_left) if fits else self._extend_in_parts(new, logits)
        except BaseException:
            while len(self.unreported) > num_reported:
                self.unreported.pop()
            raise
        self.state.keep_snapshot()
        self._after_prompt = None if self.logits is None else (len(self.tokens), self.logits)
        return result

    def append(self, token_id: int) -> None:
        """Add a generated token, which is run when the next token is requested. If the context is full, the token is
        not added.
        """
        length = self._model.context_length
        if len(self.tokens) >= length and self._shifts:
            self.shift()
        if len(self.tokens) < length:
            self.logits = None
            self.tokens.append(token_id)

    def next_logits(self) -> Float32:
        """Return the logits after the last token, and first run the pending tokens.

        Raises:
            ConfigError: the sequence has no tokens.
            ModelError: the model has no LM head.
        """
        self._check_head("last")
        if not self.tokens:
            raise ConfigError("the session has no tokens to continue; call prefill first")
        if self.logits is None:
            if self.state.position == len(self.tokens):
                self.state.rewind(self.state.position - 1)
            self._catch_up(0, "last")
            assert self.logits is not None
        return self.logits

    def begin_next(self) -> Tokens:
        """Return the pending tokens, int64 [n], for a request that computes the logits after the last token."""
        state = self.state
        position = state.position
        pending = self.tokens[position:]
        if len(pending) != 1 or self._model.plan.long_context_from is not None:
            pending, position = self._pending(), state.position
        self._reuse.before_run(position)
        return np.array(pending, np.int64)

    def end_next(self, request: Request) -> None:
        """Record that the tokens that `begin_next` returned have been computed."""
        self._reuse.after_run(request.position, request.token_ids.size)
        if self.on_run is not None:
            self.unreported += request.records

    def _check_head(self, logits: Logits) -> None:
        if logits in ("last", "all") and not self._model.plan.has_head:
            raise ModelError(
                "the checkpoint has no LM head (lm_head.weight), so it gives embeddings and no logits; use "
                "engine.embed, or `chunkrt serve`"
            )

    def rewind(self, position: int) -> None:
        """Remove every token from `position` on; see `Session.rewind`."""
        self.keep_prefix()
        self.state.rewind(min(position, self.state.position))
        kept = self._after_prompt
        if kept is not None and position < kept[0]:
            kept = self._after_prompt = None
        if position <= self._num_kept:
            self._dropped.clear()
        if position < len(self.tokens):
            self.logits = None  # before the tokens are deleted, because an interrupt may occur in between
            del self.tokens[position:]
            self.logits = kept[1] if kept is not None and position == kept[0] else None

    def fork(self) -> TokenSequence:
        """Return another sequence with the same tokens and a copy of the state."""
        copy = TokenSequence(self._model, self._model.fork_state(self.state), self.tokens)
        copy._dropped = self._dropped.copy()
        copy.logits = None if self.logits is None else self.logits.copy()  # a generation may reuse their memory
        copy._after_prompt = self._after_prompt
        copy.follows_text = self.follows_text
        copy._reuse = self._reuse.copy()
        return copy

    @property
    def conversation(self) -> Conversation:
        """Data of the conversation in addition to the state."""
        tokens, dropped = np.array(self.tokens, np.int64), np.array(self._dropped, np.int64)
        return Conversation(tokens, dropped, self.logits, self.follows_text)

    def load(self, file: SessionFile) -> None:
        """Replace the contents by those of a file. After an error of `State.load` the sequence is unchanged. After an
        interrupt all tokens are run again.
        """
        reuse = self._reuse.copy()
        self._reuse.before_run(0)  # it is unknown whether the loaded data are exact
        try:
            self.state.load(file)
            assert file.conversation is not None
            tokens, dropped, logits, follows_text = file.conversation
            self.logits = self._after_prompt = None
            self.tokens, self._dropped = tokens.tolist(), dropped.tolist()
            self.logits, self.follows_text = logits, follows_text
        except ModelError:
            self._reuse = reuse
            raise
        except BaseException:
            self.logits = self._after_prompt = None
            self.state.reset(self.state.rope_offset)
            raise

    def keep_prefix(self) -> None:
        """Copy the part of the state that is not in the prefix cache yet to the cache."""
        self._reuse.keep(self.tokens, self.state)

    def release(self) -> None:
        """Release the state, and the memory of its caches. The sequence cannot run tokens afterwards."""
        self.cancel.set()
        self._state = None
        ahead, self.ahead = self.ahead, None
        if ahead is not None:  # another thread uses the session, and may settle it, or the garbage collector closes it
            ahead.abandon()

    def shift(self) -> None:
        """Drop the oldest half of the tokens, except for the permanent first tokens. After an interrupt all tokens are
        run again.
        """
        keep, tokens = self._num_kept, self.tokens
        dropped = slice(keep, keep + (len(tokens) - keep) // 2)
        self.logits = self._after_prompt = None
        self._reuse.shifted(keep)
        try:
            self.state.shift(keep, dropped.stop - keep)
            self.tokens = tokens[: dropped.start] + tokens[dropped.stop :]
        except BaseException:
            self.tokens = tokens
            self.state.reset(self.state.rope_offset)
            raise
        self._dropped += tokens[dropped]

    @property
    def _room(self) -> int:
        return self._model.context_length - len(self.tokens)

    @property
    def _shifts(self) -> bool:
        return self._model.options.context_shift

    @property
    def _num_kept(self) -> int:
        return self._model.options.context_keep

    def _extend(self, new: Sequence[int], logits: Logits, num_left: int = 0) -> PrefillResult:
        """Add and run tokens that fit into the context."""
        num_before, before, rope_offset = len(self.tokens), self.logits, self.state.rope_offset
        self.keep_prefix()
        self.logits = None
        self.tokens += new
        try:
            result = self._catch_up(len(new), logits, num_left)
        except BaseException:
            if self.state.position <= num_before:  # otherwise the state contains the tokens
                del self.tokens[num_before:]
                self.logits = before
                if self.state.rope_offset != rope_offset:
                    self.state.reset(rope_offset)
            raise
        if logits == "all" and result.logits is not None:
            return replace(result, logits=result.logits[-len(new) :])
        if result.hidden is not None:
            return replace(result, hidden=result.hidden[-len(new) :])
        return result

    def _extend_in_parts(self, new: Sequence[int], logits: Logits) -> PrefillResult:
        """Add and run tokens that exceed the context: run as many as fit, shift the context, and repeat."""
        tokens, dropped, last_logits = self.tokens.copy(), self._dropped.copy(), self.logits
        state, reuse, results = self.state.snapshot(), self._reuse.copy(), list[PrefillResult]()
        try:
            while new:
                if not self._room:
                    self.shift()
                part, new = new[: self._room], new[self._room :]
                wanted: Logits = "none" if new and logits == "last" else logits
                results.append(self._extend(part, wanted))
        except BaseException:
            self.tokens, self._dropped, self.logits = tokens, dropped, last_logits
            self._reuse.before_run(0)  # an interrupt may occur before the state is restored
            self.state.restore(state)
            self._reuse = reuse
            raise
        rows = [result.logits for result in results if result.logits is not None]
        hidden = [result.hidden for result in results if result.hidden is not None]
        return replace(
            joined(results),
            logits=np.concatenate(rows) if logits == "all" else results[-1].logits,
            hidden=np.concatenate(hidden) if hidden else None,
        )

    def _catch_up(self, num_new: int, logits: Logits, num_later: int = 0) -> PrefillResult:
        """Run the pending tokens except those in the prefix cache. The last `num_new` pending tokens are new, and
        `num_later` tokens of their prompt are still to come. After an error the state is either unchanged, or contains
        all tokens.
        """
        start, state, reuse = time.perf_counter(), self.state, self._reuse
        num_prompt = len(self.tokens) + num_later if num_new else None
        before, num_cached, num_left = None, 0, len(self._pending(num_prompt))
        limit = len(self.tokens) - (num_new if logits in OF_ALL else 0)
        try:
            if (prefix := reuse.find(self.tokens, state, limit)) is not None:
                before = state.mark()
                num_cached = reuse.take(prefix, state)
                if self.on_tokens is not None:
                    self.on_tokens(num_cached)
            parts = [num_left - num_cached] if logits in OF_ALL else reuse.part_lengths(self.tokens, state)
            if len(parts) > 1 and before is None:
                before = state.mark()
            results = list[PrefillResult]()
            for length in parts:
                position = state.position
                reuse.before_run(position)
                part = self.tokens[position : position + length]
                wanted: Logits = logits if position + length == len(self.tokens) else "none"
                results.append(self._run(part, wanted, 0 if results else num_cached))
                reuse.after_run(position, length)
                if num_new:
                    reuse.keep(self.tokens, state)
        except BaseException:
            if before is not None and state.position < len(self.tokens):
                state.return_to(before)
            raise
        seconds = time.perf_counter() - start
        return replace(results[0] if len(results) == 1 else joined(results), num_cached=num_cached, seconds=seconds)

    def report_runs(self) -> None:
        """Pass the records of the runs since the last call to `on_run`. Exceptions that it raises propagate."""
        while self.unreported:
            record = self.unreported.popleft()
            if self.on_run is not None:
                self.on_run(record)

    def _pending(self, num_prompt: int | None = None) -> list[int]:
        """Return the tokens that the state does not contain. If the number of tokens selects another rotary table than
        before, or another factor of queries and keys, return all tokens.

        Args:
            num_prompt: number of tokens of the prompt that the last tokens belong to. None if they were generated; then
                the earlier prompt keeps its factor.
        """
        plan, present = self._model.plan, self.state.rope_offset
        if plan.rope_period and num_prompt is None and present <= len(self.tokens):
            return self.tokens[self.state.position :]
        rope_offset = plan.rope_offset(num_prompt or len(self.tokens))
        if rope_offset != present:
            self.state.reset(rope_offset)
        return self.tokens[self.state.position :]

    def _run(self, token_ids: Sequence[int], logits: Logits, num_cached: int) -> PrefillResult:
        start = time.perf_counter()
        ids = np.array(token_ids, np.int64)
        request = Request(ids, self.state, logits=logits, cancel=self.cancel, on_tokens=self.on_tokens)
        self._model.run(request)
        seconds = time.perf_counter() - start
        rows = request.logits
        self.logits = rows[-1].copy() if rows is not None else None
        if self.on_run is not None:
            first, *others = request.records
            self.unreported += [replace(first, num_cached=num_cached), *others]
        return PrefillResult(
            logits=rows[-1] if logits == "last" and rows is not None else rows,
            hidden=request.hidden,
            position=self.state.position,
            num_tokens=len(token_ids),
            num_chunks=request.num_chunks,
            seconds=seconds,
            events=[event for record in request.records for event in record.events],
        )
