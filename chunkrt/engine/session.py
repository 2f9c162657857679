"""A session: one conversation with an engine. It owns the state, the tokens behind it, and the next logits.

The state may lag behind the tokens: after a generation, whose last token was not run, or where it could not go back as
far as was asked and no further. The tokens between are run with whatever comes next.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from chunkrt.engine.sampling import GREEDY, PluginSampler, Sampler, SamplingOptions, StopStrings
from chunkrt.errors import ClosedError, ConfigError
from chunkrt.runtime.record import RunRecord
from chunkrt.runtime.state import State
from chunkrt.runtime.tasks import TaskEvent
from chunkrt.tokenizer import IncrementalDecoder

if TYPE_CHECKING:
    from chunkrt.engine.engine import Engine


Float32 = NDArray[np.float32]
FinishReason = Literal["stop", "length", "context"]


@dataclass(frozen=True, kw_only=True)
class PrefillResult:
    """What a prefill gave.

    `logits`: float32 [vocab] of the last token, [T, vocab] if all were asked for, None if none were. `num_tokens`: that
    were run, earlier ones that the state had lost among them. `seconds`: wall time. `events`: one record a task, for
    figures and traces.
    """

    logits: Float32 | None
    num_tokens: int
    num_chunks: int
    seconds: float
    events: Sequence[TaskEvent]


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A step of generation: text that is now certain (perhaps none), and why it ended if this is the last.

    `finish_reason`: "stop" at an end-of-generation token or a stop string, "length" at max_new_tokens, "context" when
    the context is full and does not shift; None before the last piece. `token_id` is None on a closing piece that no
    token made.
    """

    text: str
    token_id: int | None
    finish_reason: FinishReason | None = None


class Session:
    """Tokens in, text out. Not for use by two threads at once; make one session a thread."""

    def __init__(self, engine: Engine, state: State, tokens: Sequence[int] = ()) -> None:
        self._engine = engine
        self._state = state
        self._tokens = list(tokens)
        self._dropped: list[int] = []
        """What shifts of the context took away, from behind the tokens that stay for good."""
        self._logits: Float32 | None = None
        self._after_prompt: tuple[int, Float32] | None = None
        """Where the last prompt ended, and the logits there: a state that cannot go back by a token need not."""
        self._follows_text = False
        self._is_closed = False
        self._cancel = threading.Event()
        self.on_run: Callable[[RunRecord], None] | None = None
        """Given the record of every prefill and of every token's step; for traces. What it raises comes through; the
        tokens have been taken by then."""

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens in the context, prompt and generated: all so far, unless the context has been shifted."""
        return tuple(self._tokens)

    @property
    def history(self) -> tuple[int, ...]:
        """Every token so far, with those that shifts of the context have dropped."""
        keep = self.num_kept
        return (*self._tokens[:keep], *self._dropped, *self._tokens[keep:])

    @property
    def num_kept(self) -> int:
        """The first tokens of the context, which shifts leave where they are."""
        return self._engine.options.context_keep

    @property
    def position(self) -> int:
        """How many tokens there are in the context; the position of the next."""
        return len(self._tokens)

    @property
    def context_length(self) -> int:
        """How many tokens the session can hold."""
        return self._engine.context_length

    def prefill(self, prompt: str | Sequence[int], *, logits: Literal["last", "all", "none"] = "last") -> PrefillResult:
        """Stream a prompt through the decoder in chunks.

        If the engine shifts its context (`EngineOptions.context_shift`), a prompt may be of any length: what does not
        fit is taken in parts, and between them the oldest half of what is in the context is dropped, except for its
        first tokens.

        Args:
            prompt: text, or token ids. Text is plain: special tokens in it are not interpreted.
            logits: of the last token, of all tokens, or none.

        Raises:
            ConfigError: the prompt is empty, does not fit the context, or holds ids outside the vocabulary. The
                session is as it was.
            ClosedError: the session or the engine is closed, or `cancel` was called.
            BackendError: a subgraph failed. The session is as it was.
        """
        self._check_open()
        self._cancel.clear()
        new = self._encode(prompt)
        available = self.context_length - len(self._tokens)
        if len(new) <= available:
            result = self._extend(new, logits)
        elif self._engine.options.context_shift:
            result = self._extend_in_parts(new, logits)
        else:
            raise ConfigError(
                f"the prompt has {len(new)} tokens, but the context of {self.context_length} has room for "
                f"{available}; shorten the prompt, load the model with a longer context, or let the context shift"
            )
        self._state.keep_snapshot()
        self._follows_text = isinstance(prompt, str)
        self._after_prompt = None if self._logits is None else (len(self._tokens), self._logits)
        return result

    def generate(
        self,
        *,
        max_new_tokens: int = 256,
        sampling: SamplingOptions = GREEDY,
        stop: Sequence[str] = (),
    ) -> Iterator[Piece]:
        """Continue from the last prefill, one token at a time.

        Args:
            max_new_tokens: at most so many, at least 1.
            sampling: how a token is drawn; greedy by default.
            stop: strings that end the generation; they are not part of the text.

        Yields:
            Pieces whose texts concatenate to the answer. The last one has a `finish_reason`.

        Raises:
            ConfigError: nothing was prefilled yet, or an argument is out of range.
        """
        self._check_open()
        if max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens is {max_new_tokens}, expected at least 1")
        if not self._tokens:
            raise ConfigError("there is nothing to continue; call prefill first")
        if stop:
            self._engine.require_tokenizer()
        self._cancel.clear()
        return self._generate(max_new_tokens, self._engine.make_sampler(sampling), StopStrings(stop))

    def rewind(self, position: int) -> None:
        """Forget every token from `position` on.

        A state that cannot go back there (its rings or recurrent tensors have moved on) goes back further, and what
        lies between is run again with the next prefill or generation.

        Raises:
            ConfigError: the position is outside 0..the present one.
        """
        self._check_open()
        if not 0 <= position <= self.position:
            raise ConfigError(f"cannot rewind to position {position}; the session is at {self.position}")
        self._state.rewind(min(position, self._state.position))
        kept = self._after_prompt
        if kept is not None and position < kept[0]:
            kept = self._after_prompt = None
        if position <= self.num_kept:
            self._dropped.clear()
        if position < len(self._tokens):
            self._logits = None  # before the tokens go: an interrupt may fall between
            del self._tokens[position:]
            self._logits = kept[1] if kept is not None and position == kept[0] else None

    def fork(self) -> Session:
        """A session of its own that has seen the same tokens."""
        self._check_open()
        copy = Session(self._engine, self._state.fork(), self._tokens)
        copy._dropped = self._dropped.copy()
        copy._logits, copy._after_prompt = self._logits, self._after_prompt
        copy._follows_text = self._follows_text
        return copy

    def cancel(self) -> None:
        """Stop the prefill or generation that another thread runs in this session; it raises ClosedError there."""
        self._cancel.set()

    def close(self) -> None:
        """End the session: every later use is refused. Its caches go with the object. Closing twice is allowed."""
        self._is_closed = True

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _generate(self, max_new_tokens: int, sampler: Sampler | PluginSampler, stops: StopStrings) -> Iterator[Piece]:
        tokenizer = self._engine.tokenizer
        decoder = IncrementalDecoder(tokenizer, follows_text=self._follows_text) if tokenizer else None
        end_ids = tokenizer.eos_ids if tokenizer else frozenset[int]()
        for count in range(1, max_new_tokens + 1):
            if self._cancel.is_set():
                raise ClosedError(f"the generation was cancelled after {count - 1} tokens")
            token_id = sampler.next(self._next_logits(), self._tokens)
            self._follows_text = True
            if token_id in end_ids:
                self._accept(token_id)
                yield Piece(text=_rest(decoder, stops), token_id=token_id, finish_reason="stop")
                return
            text, is_stopped = stops.push(decoder.push(token_id)) if decoder else ("", False)
            is_full = len(self._tokens) == self.context_length and not self._engine.options.context_shift
            if not is_full:
                self._accept(token_id)
            if is_stopped:
                yield Piece(text=text, token_id=token_id, finish_reason="stop")
                return
            if is_full or count == max_new_tokens:
                reason: FinishReason = "context" if is_full else "length"
                yield Piece(text=text + _rest(decoder, stops), token_id=token_id, finish_reason=reason)
                return
            yield Piece(text=text, token_id=token_id)

    def _accept(self, token_id: int) -> None:
        if len(self._tokens) == self.context_length and self._engine.options.context_shift:
            self._shift()
        if len(self._tokens) < self.context_length:
            self._logits = None
            self._tokens.append(token_id)

    def _shift(self) -> None:
        """Drop the oldest half of the tokens, except for the first few. Broken off, all are run again."""
        keep, tokens = self.num_kept, self._tokens
        dropped = slice(keep, keep + (len(tokens) - keep) // 2)
        self._logits = self._after_prompt = None
        try:
            self._state.shift(keep, dropped.stop - keep)
            self._tokens = tokens[: dropped.start] + tokens[dropped.stop :]
        except BaseException:
            self._tokens = tokens
            self._state.reset(self._state.rope_offset)
            raise
        self._dropped += tokens[dropped]

    def _next_logits(self) -> Float32:
        """Logits after the last token; those of a token that was generated but not yet run are computed now."""
        if self._logits is None:
            self._check_open()
            if self._state.position == len(self._tokens):
                self._state.rewind(self._state.position - 1)
            self._run(self._pending(), "last")
        assert self._logits is not None
        return self._logits

    def _extend(self, new: Sequence[int], logits: Literal["last", "all", "none"]) -> PrefillResult:
        """Run new tokens for which there is room, after those that the state has not seen yet."""
        num_before, before = len(self._tokens), self._logits
        self._logits = None
        self._tokens += new
        try:
            pending = self._pending()
            result = self._run(pending, logits)
        except BaseException:
            if self._state.position <= num_before:  # else the state has seen them
                del self._tokens[num_before:]
                self._logits = before
            raise
        if logits == "all" and result.logits is not None and len(pending) > len(new):
            return PrefillResult(**{**vars(result), "logits": result.logits[-len(new) :]})
        return result

    def _extend_in_parts(self, new: Sequence[int], logits: Literal["last", "all", "none"]) -> PrefillResult:
        """Run new tokens for which there is no room: as many as fit, then a shift, and so on."""
        tokens, dropped, last_logits = self._tokens.copy(), self._dropped.copy(), self._logits
        state, results = self._state.snapshot(), list[PrefillResult]()
        try:
            while new:
                if len(self._tokens) == self.context_length:
                    self._shift()
                room = self.context_length - len(self._tokens)
                part, new = new[:room], new[room:]
                results.append(self._extend(part, "none" if new and logits == "last" else logits))
        except BaseException:
            self._tokens, self._dropped, self._logits = tokens, dropped, last_logits
            self._state.restore(state)
            raise
        rows = [result.logits for result in results if result.logits is not None]
        return PrefillResult(
            logits=np.concatenate(rows) if logits == "all" else results[-1].logits,
            num_tokens=sum(result.num_tokens for result in results),
            num_chunks=sum(result.num_chunks for result in results),
            seconds=sum(result.seconds for result in results),
            events=[event for result in results for event in result.events],
        )

    def _pending(self) -> list[int]:
        """The tokens that the state has not seen: all, if with so many the rotary tables are others than before."""
        rope_offset = self._engine.plan.rope_offset(len(self._tokens))
        if rope_offset != self._state.rope_offset:
            self._state.reset(rope_offset)
        return self._tokens[self._state.position :]

    def _run(self, token_ids: Sequence[int], logits: Literal["last", "all", "none"]) -> PrefillResult:
        start = time.perf_counter()
        run = self._engine.run(np.array(token_ids, np.int64), self._state, logits=logits, cancel=self._cancel)
        seconds = time.perf_counter() - start
        if self.on_run is not None:
            self.on_run(run.record)
        self._logits = run.logits[-1].copy() if run.logits is not None else None
        wanted = run.logits[-1] if logits == "last" and run.logits is not None else run.logits
        num_chunks = -(-len(token_ids) // self._engine.chunk_length)
        return PrefillResult(
            logits=wanted, num_tokens=len(token_ids), num_chunks=num_chunks, seconds=seconds, events=run.events
        )

    def _encode(self, prompt: str | Sequence[int]) -> list[int]:
        if isinstance(prompt, str):
            tokenizer = self._engine.require_tokenizer()
            ids = tokenizer.encode(prompt, add_special=self.position == 0, parse_special=False)
        else:
            ids = [int(token) for token in prompt]
        if not ids:
            raise ConfigError("the prompt is empty; give at least one token")
        vocab_size = self._engine.plan.vocab_size
        if outside := [token for token in ids if not 0 <= token < vocab_size]:
            raise ConfigError(f"token id {outside[0]} is outside the vocabulary of {vocab_size}")
        return ids

    def _check_open(self) -> None:
        if self._is_closed or self._engine.is_closed:
            raise ClosedError("the session is closed; make a new one with engine.session()")
        self._engine.check_process()


def _rest(decoder: IncrementalDecoder | None, stops: StopStrings) -> str:
    """What was held back, now that nothing follows."""
    if decoder is None:
        return ""
    text, is_stopped = stops.push(decoder.flush())
    return text if is_stopped else text + stops.flush()
