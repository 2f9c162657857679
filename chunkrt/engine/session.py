"""A session: one conversation with an engine. It owns a sequence, and converts between text and tokens."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import get_args

from chunkrt.engine.arguments import as_token_ids, require_whole
from chunkrt.engine.async_session import AsyncSession
from chunkrt.engine.driving import OneUser, drive
from chunkrt.engine.embedding import Float32, Pooling, check_hidden, pooled
from chunkrt.engine.generation import Constraint, Generation, Piece
from chunkrt.engine.prefill_progress import telling
from chunkrt.engine.prefill_result import PrefillResult
from chunkrt.engine.sampling import GREEDY, SamplingOptions, StopStrings
from chunkrt.engine.scoring import Score, score_continuation
from chunkrt.engine.sequence import Steps, TokenSequence
from chunkrt.engine.session_engine import SessionEngine
from chunkrt.errors import ChunkrtError, ClosedError, ConfigError
from chunkrt.files import Progress
from chunkrt.runtime.record import RunRecord
from chunkrt.runtime.run import Logits
from chunkrt.runtime.state import State


class Session(AsyncSession):
    """Conversation with an engine, which takes prompts and returns text.

    Only one thread or task may use a session at a time; a concurrent use is an error. Concurrent sessions of an engine
    share chunks.
    """

    def __init__(self, engine: SessionEngine, state: State, *, cache_salt: str = "") -> None:
        self._engine = engine
        self._sequence = TokenSequence(engine, state, cache_salt=cache_salt)
        self._one_user = OneUser("the session")
        self._is_closed = False

    @property
    def on_run(self) -> Callable[[RunRecord], None] | None:
        """Function that receives the record of every prefill and of every token's step, for traces.

        The function is called after the prefill or step has completed, and may use the session. Exceptions that it
        raises propagate; the tokens stay in the session.
        """
        return self._sequence.on_run

    @on_run.setter
    def on_run(self, on_run: Callable[[RunRecord], None] | None) -> None:
        if on_run is not None and not callable(on_run):
            raise ConfigError(f"on_run is {on_run!r}, expected a function or None")
        self._sequence.on_run = on_run

    @property
    def tokens(self) -> tuple[int, ...]:
        """Prompt tokens and generated tokens in the context. These are all tokens so far, unless the context has been
        shifted.
        """
        return tuple(self._sequence.tokens)

    @property
    def history(self) -> tuple[int, ...]:
        """All tokens so far, including those that shifts of the context have dropped."""
        return self._sequence.history

    @property
    def num_kept(self) -> int:
        """The first tokens of the context, which shifts neither drop nor move."""
        return self._engine.options.context_keep

    @property
    def position(self) -> int:
        """Number of tokens in the context, which is the position of the next token."""
        return len(self._sequence.tokens)

    @property
    def context_length(self) -> int:
        """Maximum number of tokens in the context."""
        return self._engine.context_length

    def prefill(
        self, prompt: str | Sequence[int], *, logits: Logits = "last", progress: Progress | bool | None = None
    ) -> PrefillResult:
        """Stream a prompt through the decoder in chunks.

        If the engine shifts its context (`EngineOptions.context_shift`), a prompt may have any length. A prompt that
        does not fit is processed in slices. Between two slices the oldest half of the context is dropped, except for
        its first tokens.

        Args:
            prompt: text, or token ids. Text is plain: special tokens in it are not interpreted.
            logits: "last", "all" or "none": the tokens for which logits are returned; or "hidden": no logits, but the
                hidden states of all tokens after the last norm, which are the input of the LM head
                (`PrefillResult.hidden`).
            progress: called, from computing threads, with ("prefill", tokens done, total tokens) after every chunk; it
                must not raise. True displays a progress bar if the prefill takes longer than a second.

        Raises:
            ConfigError: the prompt is empty, exceeds the context, or contains ids outside the vocabulary; or hidden
                states are requested, but the scheme rotates them. The session is unchanged.
            ClosedError: the session or the engine is closed, or `cancel` was called.
            BackendError: a subgraph failed. The session is unchanged.
        """
        with self._one_user(), self._telling(progress, prompt):
            return drive(self._extension(prompt, logits), self._engine.run)

    def generate(
        self,
        *,
        max_new_tokens: int = 256,
        sampling: SamplingOptions = GREEDY,
        stop: Sequence[str] = (),
        log_probabilities: int | None = None,
        constraint: Constraint | None = None,
    ) -> Iterator[Piece]:
        """Generate tokens after the last prefill, one at a time.

        Args:
            max_new_tokens: maximum number of tokens, at least 1.
            sampling: sampling options; greedy by default.
            stop: strings that end the generation; they are not part of the text.
            log_probabilities: number of likeliest tokens for which each piece contains log-probabilities, in addition
                to that of its own token; None for no log-probabilities.
            constraint: restricts the tokens; by default all tokens are allowed.

        Yields:
            Pieces whose texts concatenate to the answer. The last one has a `finish_reason`.

        Raises:
            ConfigError: the session contains no tokens yet, or an argument is out of range.
            ConstraintError: the constraint allows no token, or failed.
        """
        return self._pieces(self._generation(max_new_tokens, sampling, stop, log_probabilities, constraint))

    def score(self, context: Sequence[int], continuation: Sequence[int]) -> Score:
        """Compute the log-probability of a continuation after a context.

        The context replaces the tokens of the session, which is rewound to the first different token. So if several
        continuations are scored after the same context, the context is run only once.

        Args:
            context: ids of at least one token.
            continuation: ids of at least one token.

        Raises:
            ConfigError: one of the two is empty, or both together exceed the context length.
            BackendError: a subgraph failed.
        """
        with self._one_user():
            return drive(self.scoring(context, continuation), self._engine.run)

    def answer(
        self, prompt: str | Sequence[int], *, max_new_tokens: int, sampling: SamplingOptions, stop: Sequence[str]
    ) -> Generator[Steps[Piece | None], None, None]:
        """Yield the steps of a prefill, whose result is None, and the steps of each piece of a generation, for
        `drive_many`.
        """
        yield self._taking(prompt)
        generation = self._generation(max_new_tokens, sampling, stop)
        while not generation.is_finished:
            yield generation.next_piece()

    def __repr__(self) -> str:
        """Return a text with the number of tokens and the context length."""
        state = "closed" if self._is_closed else f"{self.position} of {self.context_length} tokens"
        return f"Session({state})"

    def rewind(self, position: int) -> None:
        """Remove every token from `position` on.

        Rings and recurrent tensors may no longer contain the data for `position`. The state is then rewound further,
        and the tokens in between are run again with the next prefill or generation.

        Raises:
            ConfigError: the position is negative, or after the present one.
        """
        self._check_open()
        with self._one_user():
            if not 0 <= require_whole("position", position) <= self.position:
                raise ConfigError(f"cannot rewind to position {position}; the session is at {self.position}")
            self._sequence.rewind(position)

    def fork(self) -> Session:
        """Return another session with the same tokens and a copy of the state."""
        with self._one_user():
            return self._copy()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the conversation to a temporary file, and then rename the file.

        `Engine.load_session` continues the conversation, also in another process and with any chunk length.

        Raises:
            ConfigError: the file cannot be written, or the engine is one of several ranks.
        """
        self._check_open()
        with self._one_user():
            self._sequence.state.save(self._engine.session_file(path, self._sequence.conversation))

    def load(self, path: str | os.PathLike[str]) -> None:
        """Restore a session from a file that `save` wrote. `Engine.load_session` opens a session and calls this method.

        Raises:
            ConfigError: the engine is one of several ranks.
            ModelError: the file is missing or damaged, belongs to another model, scheme or cache type, or contains more
                tokens than the context. The session is unchanged.
        """
        self._check_open()
        with self._one_user():
            self._sequence.load(self._engine.session_file(path))

    def cancel(self) -> None:
        """Stop the prefill or generation that another thread runs in this session. That thread then raises
        ClosedError."""
        self._sequence.cancel.set()

    def close(self) -> None:
        """Close the session, and free its caches. Every later use is an error, but repeated calls are allowed."""
        if self._is_closed:
            return
        try:
            with suppress(ChunkrtError):  # the engine is closed, or another thread still runs here
                self._check_open()
                if not sys.is_finalizing():  # no thread can still write into the caches
                    with self._one_user():
                        self._sequence.keep_prefix()
        finally:
            self._is_closed = True
            self._sequence.release()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _generation(
        self,
        max_new_tokens: int,
        sampling: SamplingOptions,
        stop: Sequence[str],
        log_probabilities: int | None = None,
        constraint: Constraint | None = None,
    ) -> Generation:
        self._check_open()
        if require_whole("max_new_tokens", max_new_tokens) < 1:
            raise ConfigError(f"max_new_tokens is {max_new_tokens}, expected at least 1")
        if not isinstance(sampling, SamplingOptions):
            raise ConfigError(f"sampling is {sampling!r}, expected SamplingOptions")
        if sampling.min_new_tokens > max_new_tokens:
            raise ConfigError(
                f"min_new_tokens is {sampling.min_new_tokens}, more than max_new_tokens, which is {max_new_tokens}"
            )
        vocab_size = self._engine.plan.vocab_size
        if log_probabilities is not None:
            log_probabilities = require_whole("log_probabilities", log_probabilities)
            if not 0 <= log_probabilities <= vocab_size:
                raise ConfigError(f"log_probabilities is {log_probabilities}, expected 0 to {vocab_size}")
        if constraint is not None and not all(callable(getattr(constraint, n, None)) for n in ("allowed", "accept")):
            raise ConfigError(f"constraint is {constraint!r:.80}, expected an object with allowed() and accept()")
        stops = StopStrings(stop)
        if not self._sequence.tokens:
            raise ConfigError("the session has no tokens to continue; call prefill first")
        if stops:
            self._engine.require_tokenizer()
        self._sequence.cancel.clear()
        sampler = self._engine.make_sampler(sampling)
        return Generation(
            self._sequence,
            self._engine.tokenizer,
            sampler,
            stops,
            max_new_tokens=max_new_tokens,
            check_open=self._check_open,
            num_likeliest=log_probabilities,
            constraint=constraint,
            ignore_eos=sampling.ignore_eos,
            min_new_tokens=sampling.min_new_tokens,
        )

    def _pieces(self, generation: Generation) -> Iterator[Piece]:
        while not generation.is_finished:
            with self._one_user():
                piece = drive(generation.next_piece(), self._engine.run)
            yield piece

    def _copy(self) -> Session:
        self._check_open()
        sequence = self._sequence.fork()
        copy = Session(self._engine, sequence.state)
        copy._sequence = sequence
        return copy

    def _extension(
        self, prompt: str | Sequence[int], logits: Logits, follows_text: bool | None = None
    ) -> Steps[PrefillResult]:
        self._check_open()
        if not isinstance(logits, str):
            raise ConfigError(f"logits is {logits!r}, expected one of: {', '.join(get_args(Logits))}")
        if logits == "hidden":
            check_hidden(self._engine.scheme)
        self._sequence.cancel.clear()
        result = yield from self._sequence.extend(self._encode(prompt), logits)
        self._sequence.follows_text = isinstance(prompt, str) if follows_text is None else follows_text
        return result

    def _telling(self, progress: Progress | bool | None, prompt: str | Sequence[int]) -> AbstractContextManager[object]:
        """Return a context manager that reports the number of computed tokens of a prompt."""
        return nullcontext() if progress is None else telling(self._sequence, progress, len(self._encode(prompt)))

    def _taking(self, prompt: str | Sequence[int]) -> Steps[None]:
        yield from self._extension(prompt, "last")

    def embedding(self, prompt: str | Sequence[int], pooling: Pooling) -> Steps[Float32]:
        """Return the steps that compute an embedding in an empty session; see `ManyPrompts.embed`."""
        if isinstance(prompt, str):
            prompt = self._engine.require_tokenizer().encode_for_embedding(prompt)
        tokens = self._encode(prompt)
        if len(tokens) > self.context_length:  # even if the context shifts
            raise ConfigError(f"a text of {len(tokens)} tokens does not fit the context of {self.context_length}")
        result = yield from self._extension(tokens, "hidden")
        assert result.hidden is not None
        return pooled(result.hidden, pooling)

    def scoring(self, context: Sequence[int], continuation: Sequence[int]) -> Steps[Score]:
        """Return the steps that compute `score`."""
        self._check_open()
        self._sequence.cancel.clear()
        chunk_length = self._engine.chunk_length
        score = yield from score_continuation(self._sequence, context, continuation, chunk_length=chunk_length)
        return score

    def _encode(self, prompt: str | Sequence[int]) -> list[int]:
        if isinstance(prompt, str):
            tokenizer = self._engine.require_tokenizer()
            ids = tokenizer.encode(prompt, add_special=self.position == 0, parse_special=False)
        else:
            ids = as_token_ids(prompt)
        if not ids:
            raise ConfigError("the prompt is empty; pass at least one token")
        vocab_size = self._engine.plan.vocab_size
        if outside := [token for token in ids if not 0 <= token < vocab_size]:
            raise ConfigError(f"token id {outside[0]} is outside the vocabulary of {vocab_size}")
        return ids

    def _check_open(self) -> None:
        self._engine.check_open()
        if self._is_closed:
            raise ClosedError("the session is closed; open a new one with engine.session()")
