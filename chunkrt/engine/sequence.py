"""A sequence: a state, the tokens it has seen, and those that wait to be run.

The state may lag behind the tokens: after a generation, whose last token was not run, or where it could not go back as
far as was asked and no further. The tokens between are run with whatever comes next. Tokens are taken before they are
run, so that an interrupt leaves a sequence whose state is at most behind.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from chunkrt.engine.options import EngineOptions
from chunkrt.engine.prefill_result import PrefillResult, joined
from chunkrt.engine.prefix_cache.cache import PrefixCache
from chunkrt.engine.prefix_cache.reuse import Reuse
from chunkrt.engine.session_file import Conversation, SessionFile
from chunkrt.errors import ClosedError, ConfigError, ModelError
from chunkrt.graph.plan import Plan
from chunkrt.runtime.record import RunRecord
from chunkrt.runtime.run import OF_ALL, Cancel, Logits, Run, RunResult
from chunkrt.runtime.state import State

Float32 = NDArray[np.float32]

Result = TypeVar("Result")


class Work(NamedTuple):
    """What may wait for a disk. `do` is called once; what it raises is raised in the sequence."""

    do: Callable[[], None]


Steps = Generator[Run | Work, RunResult | None, Result]
"""What a sequence does, run by run: it yields each, is sent what came of it, and returns in the end. Who drives it
computes the runs: at once, in turn with others, or while an event loop goes on (`engine/driving.py`). Beside runs it
yields work, and is sent None: an event loop leaves that to a thread."""


class SequenceEngine(Protocol):
    """What a sequence takes of an engine."""

    plan: Plan
    options: EngineOptions
    context_length: int
    chunk_length: int
    prefix_cache: PrefixCache | None

    def fork_state(self, state: State) -> State:
        """A copy of a state. Raises BusyError if there is no room for it."""
        ...


class TokenSequence:
    """Tokens, and the state that follows them.

    Args:
        engine: whose options they go by.
        state: empty, or of the first of `tokens`.
        tokens: those there are already.
        cache_salt: prefixes are shared only with sequences of the same salt.
    """

    def __init__(
        self, engine: SequenceEngine, state: State, tokens: Iterable[int] = (), *, cache_salt: str = ""
    ) -> None:
        self._engine = engine
        self._state: State | None = state
        self.tokens = list(tokens)
        """Those in the context: all so far, unless it has been shifted."""
        self.logits: Float32 | None = None
        """After the last token, if that has been run."""
        self.cancel = Cancel()
        self.follows_text = False
        """Whether the last token is one of plain text."""
        self.on_run: Callable[[RunRecord], None] | None = None
        self.on_tokens: Callable[[int], object] | None = None
        """Told, from any thread, how many tokens another chunk of a run has computed, or the prefix cache gave."""
        self._dropped: list[int] = []
        """What shifts of the context took away, from behind the tokens that stay for good."""
        self._reuse = Reuse(engine.prefix_cache, cache_salt)
        self._unreported: list[RunRecord] = []
        """Records of runs that `on_run` has not been given yet: it is called when all tokens have been taken."""
        self._after_prompt: tuple[int, Float32] | None = None
        """Where the last prompt ended, and the logits there: a state that cannot go back by a token need not."""

    @property
    def state(self) -> State:
        """What it has seen. Raises ClosedError once it has been released."""
        if self._state is None:
            raise ClosedError("the session is closed; make a new one with engine.session()")
        return self._state

    @property
    def history(self) -> tuple[int, ...]:
        """Every token so far, with those that shifts of the context have dropped."""
        keep = self._num_kept
        return (*self.tokens[:keep], *self._dropped, *self.tokens[keep:])

    @property
    def context_length(self) -> int:
        """How many tokens there can be in the context."""
        return self._engine.context_length

    @property
    def vocab_size(self) -> int:
        """Logits of a token."""
        return self._engine.plan.vocab_size

    @property
    def is_full(self) -> bool:
        """Whether it takes no further token: the context is full and does not shift."""
        return not self._room and not self._shifts

    def extend(self, new: Sequence[int], logits: Logits) -> Steps[PrefillResult]:
        """Take the tokens of a prompt, and run them after those that the state has not seen yet.

        Raises:
            ConfigError: they do not fit. Whatever is raised, the sequence is as it was.
            ModelError: logits are wanted of a model without a head.
        """
        self._check_head(logits)
        self._unreported.clear()
        if len(new) <= self._room:
            result = yield from self._extend(new, logits)
        elif self._shifts:
            result = yield from self._extend_in_parts(new, logits)
        else:
            length, most = self._engine.context_length, self._engine.plan.context_length
            longer = f" take a context of up to {most} (--context)," if length < most else ""
            raise ConfigError(
                f"the prompt has {len(new)} tokens, but the context of {length} has room for {self._room}; shorten the "
                f"prompt,{longer} or let the context shift (--context-shift)"
            )
        self.state.keep_snapshot()
        self._after_prompt = None if self.logits is None else (len(self.tokens), self.logits)
        self._report_runs()
        return result

    def append(self, token_id: int) -> None:
        """Take a token that was generated; it is run when the next is wanted. None is taken if there is no room."""
        if not self._room and self._shifts:
            self.shift()
        if self._room:
            self.logits = None
            self.tokens.append(token_id)

    def next_logits(self) -> Steps[Float32]:
        """Logits after the last token; if that was not run yet, it is now. Raises ModelError without a head."""
        self._check_head("last")
        if self.logits is None:
            if self.state.position == len(self.tokens):
                self.state.rewind(self.state.position - 1)
            self._unreported.clear()
            yield from self._catch_up(0, "last")
            computed = self.logits
            assert computed is not None
            self._report_runs()  # it may use the session itself
            return computed if self.logits is None else self.logits
        return self.logits

    def _check_head(self, logits: Logits) -> None:
        if logits in ("last", "all") and not self._engine.plan.has_head:
            raise ModelError(
                "the checkpoint has no head (lm_head.weight), so it gives embeddings and no logits; use engine.embed, "
                "or `chunkrt serve`"
            )

    def rewind(self, position: int) -> None:
        """Forget every token from `position` on; see `Session.rewind`."""
        self.keep_prefix()
        self.state.rewind(min(position, self.state.position))
        kept = self._after_prompt
        if kept is not None and position < kept[0]:
            kept = self._after_prompt = None
        if position <= self._num_kept:
            self._dropped.clear()
        if position < len(self.tokens):
            self.logits = None  # before the tokens go: an interrupt may fall between
            del self.tokens[position:]
            self.logits = kept[1] if kept is not None and position == kept[0] else None

    def fork(self) -> TokenSequence:
        """One of its own that has seen the same tokens."""
        copy = TokenSequence(self._engine, self._engine.fork_state(self.state), self.tokens)
        copy._dropped = self._dropped.copy()
        copy.logits, copy._after_prompt = self.logits, self._after_prompt
        copy.follows_text = self.follows_text
        copy._reuse = self._reuse.copy()
        return copy

    @property
    def conversation(self) -> Conversation:
        """What there is beside the state."""
        return Conversation(
            tokens=np.array(self.tokens, np.int64),
            dropped=np.array(self._dropped, np.int64),
            logits=self.logits,
            follows_text=self.follows_text,
        )

    def load(self, file: SessionFile) -> None:
        """Be what a file holds. Raises as `State.load`; nothing has changed then. Broken off, all is run again."""
        reuse = self._reuse.copy()
        self._reuse.before_run(0)  # what is loaded, nobody knows to be exact
        try:
            self.state.load(file)
            said = file.conversation
            assert said is not None
            self.logits = self._after_prompt = None
            self.tokens, self._dropped = said.tokens.tolist(), said.dropped.tolist()
            self.logits, self.follows_text = said.logits, said.follows_text
        except ModelError:
            self._reuse = reuse
            raise
        except BaseException:
            self.logits = self._after_prompt = None
            self.state.reset(self.state.rope_offset)
            raise

    def keep_prefix(self) -> None:
        """Give the prefix cache what it lacks of the state."""
        self._reuse.keep(self.tokens, self.state)

    def release(self) -> None:
        """Let the state go, and the memory of its caches; nothing can be run any more."""
        self.cancel.set()
        self._state = None

    def shift(self) -> None:
        """Drop the oldest half of the tokens, except for the first few. Broken off, all are run again."""
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
        return self._engine.context_length - len(self.tokens)

    @property
    def _shifts(self) -> bool:
        return self._engine.options.context_shift

    @property
    def _num_kept(self) -> int:
        return self._engine.options.context_keep

    def _extend(self, new: Sequence[int], logits: Logits) -> Steps[PrefillResult]:
        """Take and run tokens for which there is room."""
        num_before, before = len(self.tokens), self.logits
        self.keep_prefix()
        self.logits = None
        self.tokens += new
        try:
            result = yield from self._catch_up(len(new), logits)
        except BaseException:
            if self.state.position <= num_before:  # else the state has seen them
                del self.tokens[num_before:]
                self.logits = before
            raise
        if logits == "all" and result.logits is not None:
            return replace(result, logits=result.logits[-len(new) :])
        if result.hidden is not None:
            return replace(result, hidden=result.hidden[-len(new) :])
        return result

    def _extend_in_parts(self, new: Sequence[int], logits: Logits) -> Steps[PrefillResult]:
        """Take and run tokens for which there is no room: as many as fit, then a shift, and so on."""
        tokens, dropped, last_logits = self.tokens.copy(), self._dropped.copy(), self.logits
        state, reuse, results = self.state.snapshot(), self._reuse.copy(), list[PrefillResult]()
        try:
            while new:
                if not self._room:
                    self.shift()
                part, new = new[: self._room], new[self._room :]
                wanted: Logits = "none" if new and logits == "last" else logits
                results.append((yield from self._extend(part, wanted)))
        except BaseException:
            self.tokens, self._dropped, self.logits = tokens, dropped, last_logits
            self._reuse.before_run(0)  # an interrupt may fall before the state is what it was
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

    def _catch_up(self, num_new: int, logits: Logits) -> Steps[PrefillResult]:
        """Run the tokens that the state has not seen, of which the last `num_new` are new ones, but for those that the
        prefix cache has. Whatever is raised, the state is as it was, or has seen them all."""
        start, state, reuse = time.perf_counter(), self.state, self._reuse
        before, num_cached, num_left = None, 0, len(self._pending())
        limit = len(self.tokens) - (num_new if logits in OF_ALL else 0)

        def take_prefix() -> None:
            nonlocal before, num_cached
            if (prefix := reuse.find(self.tokens, state, limit)) is not None:
                before = state.mark()
                num_cached = reuse.take(prefix, state)

        try:
            if reuse.may_find(self.tokens, state, limit):
                yield Work(take_prefix)
                if num_cached and self.on_tokens is not None:
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
                results.append((yield from self._run(part, wanted, 0 if results else num_cached)))
                reuse.after_run(position, length)
                if num_new:
                    reuse.keep(self.tokens, state)
        except BaseException:
            if before is not None and state.position < len(self.tokens):
                state.return_to(before)
            raise
        seconds = time.perf_counter() - start
        return replace(results[0] if len(results) == 1 else joined(results), num_cached=num_cached, seconds=seconds)

    def _report_runs(self) -> None:
        """Give `on_run` the records of the runs since the last report. Whatever it raises comes through."""
        records, self._unreported = self._unreported, []
        for record in records:
            if self.on_run is not None:
                self.on_run(record)

    def _pending(self) -> list[int]:
        """The tokens that the state has not seen: all, if with so many the rotary tables are others than before."""
        rope_offset = self._engine.plan.rope_offset(len(self.tokens))
        if rope_offset != self.state.rope_offset:
            self.state.reset(rope_offset)
        return self.tokens[self.state.position :]

    def _run(self, token_ids: Sequence[int], logits: Logits, num_cached: int) -> Steps[PrefillResult]:
        start = time.perf_counter()
        ids = np.array(token_ids, np.int64)
        run = yield Run(ids, self.state, logits=logits, cancel=self.cancel, on_tokens=self.on_tokens)
        assert run is not None
        seconds = time.perf_counter() - start
        self.logits = run.logits[-1].copy() if run.logits is not None else None
        if self.on_run is not None:
            first, *others = run.records
            self._unreported += [replace(first, num_cached=num_cached), *others]
        wanted = run.logits[-1] if logits == "last" and run.logits is not None else run.logits
        return PrefillResult(
            logits=wanted,
            hidden=run.hidden,
            position=self.state.position,
            num_tokens=len(token_ids),
            num_chunks=sum(record.num_chunks for record in run.records),
            seconds=seconds,
            events=[event for record in run.records for event in record.events],
        )
