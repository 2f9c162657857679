"""A session: one conversation with an engine. It owns a sequence, and converts between text and tokens."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING, Self, TypeVar, Unpack, get_args

from chunkrt.backends.low_rank import LoadedAdapter
from chunkrt.engine.arguments import as_token_ids, require_whole
from chunkrt.engine.embedding import check_hidden
from chunkrt.engine.generation import Constraint, Generation, Piece
from chunkrt.engine.keywords import GenerationOptions, read_generation_options, shows_generation_options
from chunkrt.engine.prefill_result import PrefillResult, telling
from chunkrt.engine.sampling import StopStrings
from chunkrt.engine.scoring import Score, TokenLogProbabilities, score_continuation, tell_of_tokens
from chunkrt.engine.sequence import TokenSequence
from chunkrt.errors import ChunkrtError, ClosedError, ConfigError
from chunkrt.files import Progress
from chunkrt.runtime.record import RunRecord
from chunkrt.runtime.request import Logits
from chunkrt.runtime.state import State

if TYPE_CHECKING:
    import asyncio

    from chunkrt.engine.loaded import LoadedModel

Result = TypeVar("Result")

_phases: dict[str, object] = {}
"""The phases of the garbage collector, the present one last."""
_of_thread = threading.local()
"""The last phases in this thread."""

# These callbacks are C functions, because a Ctrl-C that arrives in a callback in Python is lost.
gc.callbacks += [partial(setattr, _of_thread), _phases.pop, _phases.__setitem__]


def _is_collecting() -> bool:
    """Return True if the garbage collector runs in this thread, at any point of any function."""
    return next(reversed(_phases), "") == "start" and _phases["start"] is getattr(_of_thread, "start", None)


class Session:
    """Conversation with an engine, which takes prompts and returns text.

    Only one thread or task may use a session at a time; a concurrent use is an error. Concurrent sessions of an engine
    share chunks. The methods whose names begin with "a" do the same as those without, and do not block the event loop.
    If a task that awaits one of them is cancelled, the computation ends at the next chunk.
    """

    def __init__(
        self, model: LoadedModel, state: State, *, cache_salt: str = "", adapter: LoadedAdapter | None = None
    ) -> None:
        self._model = model
        if adapter is not None:
            state.choose_adapter(adapter)
            cache_salt = adapter.salted(cache_salt)
        self._sequence = TokenSequence(model, state, cache_salt=cache_salt)
        self._using = _Use(self._sequence)
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
    def adapter(self) -> str | None:
        """Name of the session's adapter, or None."""
        chosen = self._sequence.state.adapter
        return None if chosen is None else chosen.name

    @property
    def tokens(self) -> tuple[int, ...]:
        """Prompt tokens and generated tokens in the context. These are all tokens so far, unless the context has been
        shifted.
        """
        self._sequence.settle_left()
        return tuple(self._sequence.tokens)

    @property
    def history(self) -> tuple[int, ...]:
        """All tokens so far, including those that shifts of the context have dropped."""
        self._sequence.settle_left()
        return self._sequence.history

    @property
    def num_kept(self) -> int:
        """The first tokens of the context, which shifts neither drop nor move."""
        return self._model.options.context_keep

    @property
    def position(self) -> int:
        """Number of tokens in the context, which is the position of the next token."""
        self._sequence.settle_left()
        return len(self._sequence.tokens)

    @property
    def context_length(self) -> int:
        """Maximum number of tokens in the context."""
        return self._model.context_length

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
        with self._using:
            self._sequence.cancel.clear()
            result = self._extend(prompt, logits, progress)
            self._sequence.report_runs()
            return result

    async def aprefill(
        self,
        prompt: str | Sequence[int],
        *,
        logits: Logits = "last",
        progress: Progress | bool | None = None,
        follows_text: bool | None = None,
    ) -> PrefillResult:
        """Prefill like `prefill`. If the task is cancelled, the session is unchanged.

        Args:
            prompt, logits, progress: see `prefill`.
            follows_text: True if the generation continues a text. A leading space is then kept, which SentencePiece
                would otherwise drop. By default True if the prompt is text. Pass True for token ids of a text.
        """
        import asyncio

        position = self.position
        try:
            return await self._in_thread(partial(self._extend, prompt, logits, progress, follows_text))
        except asyncio.CancelledError:
            if self.position > position:  # the last chunk had ended already
                self.rewind(position)
            raise

    @shows_generation_options
    def generate(
        self,
        *,
        log_probabilities: int | None = None,
        constraint: Constraint | None = None,
        **options: Unpack[GenerationOptions],
    ) -> Iterator[Piece]:
        """Generate tokens after the last prefill, one at a time.

        Args:
            log_probabilities: number of likeliest tokens for which each piece contains log-probabilities, in addition
                to that of its own token; None for no log-probabilities.
            constraint: restricts the tokens; by default all tokens are allowed.
            options: `max_new_tokens` (or `max_tokens`), the maximum number of tokens, 256 by default; `stop`, strings
                that end the generation and are not part of the text; and the fields of `SamplingOptions`, such as
                `temperature`, or `sampling=SamplingOptions(...)`. Greedy by default.

        Yields:
            Pieces whose texts concatenate to the answer. The last one has a `finish_reason`.

        Raises:
            ConfigError: the session contains no tokens yet; or an argument is unknown, out of range, or contradicts
                another one.
            ConstraintError: the constraint allows no token, or returned no mask. Exceptions that it raises propagate.
        """
        return self._pieces(self._generation(options, log_probabilities, constraint))

    @shows_generation_options
    def agenerate(
        self,
        *,
        log_probabilities: int | None = None,
        constraint: Constraint | None = None,
        **options: Unpack[GenerationOptions],
    ) -> AsyncIterator[Piece]:
        """Generate like `generate`."""
        return self._apieces(options, log_probabilities, constraint)

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
        with self._using:
            self._sequence.cancel.clear()
            found = self._score(context, continuation)
            self._sequence.report_runs()
            return found

    async def ascore(self, context: Sequence[int], continuation: Sequence[int]) -> Score:
        """Score like `score`."""
        return await self._in_thread(partial(self._score, context, continuation))

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
        with self._using:
            if not 0 <= require_whole("position", position) <= self.position:
                raise ConfigError(f"cannot rewind to position {position}; the session is at {self.position}")
            self._sequence.rewind(position)

    def fork(self) -> Session:
        """Return another session with the same tokens and a copy of the state."""
        with self._using:
            return self._copy()

    async def afork(self) -> Session:
        """Fork like `fork`: a thread copies the caches."""
        return await self._in_thread(self._copy)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the conversation to a temporary file, and then rename the file.

        `Engine.load_session` continues the conversation, also in another process and with any chunk length.

        Raises:
            ConfigError: the file cannot be written, or the engine is one of several ranks.
        """
        self._check_open()
        with self._using:
            self._sequence.state.save(self._model.session_file(path, self._sequence.state, self._sequence.conversation))

    def load(self, path: str | os.PathLike[str]) -> None:
        """Restore a session from a file that `save` wrote. `Engine.load_session` opens a session and calls this method.

        Raises:
            ConfigError: the engine is one of several ranks.
            ModelError: the file is missing or damaged, belongs to another model, scheme or cache type, or contains more
                tokens than the context. The session is unchanged.
        """
        self._check_open()
        with self._using:
            self._sequence.load(self._model.session_file(path, self._sequence.state))

    def cancel(self) -> None:
        """Stop the prefill or generation that another thread runs in this session. That thread then raises
        ClosedError."""
        self._sequence.cancel.set()

    def close(self) -> None:
        """Close the session, and return its memory to the engine. Every later use is an error, but repeated calls are
        allowed.
        """
        if self._is_closed:
            return
        try:
            with suppress(ChunkrtError):  # the engine is closed, or another thread still runs here
                self._check_open()
                # The garbage collector may close a session in a thread that computes or holds a lock, and that must not
                # wait for itself.
                is_inside = self._model.scheduler.is_driver or _is_collecting()
                if not sys.is_finalizing() and not is_inside:
                    with self._using:
                        self._sequence.keep_prefix()
        finally:
            self._is_closed = True
            self._sequence.release()

    async def aclose(self) -> None:
        """Close like `close`: a thread copies the tokens for the prefix cache."""
        if not self._is_closed:
            await in_thread(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def _generation(
        self,
        options: GenerationOptions,
        log_probabilities: int | None = None,
        constraint: Constraint | None = None,
        *,
        deliver: Callable[[Piece | None], object] | None = None,
        is_eager: bool = False,
    ) -> Generation:
        self._check_open()
        max_new_tokens, sampling, stop = read_generation_options(options, "log_probabilities", "constraint")
        vocab_size = self._model.plan.vocab_size
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
            self._model.require_tokenizer()
        with self._using.by_generation:
            self._sequence.cancel.clear()
        sampler = self._model.make_sampler(sampling)
        return Generation(
            self._model,
            self._sequence,
            sampler,
            stops,
            max_new_tokens=max_new_tokens,
            num_likeliest=log_probabilities,
            constraint=constraint,
            ignore_eos=sampling.ignore_eos,
            min_new_tokens=sampling.min_new_tokens,
            deliver=deliver,
            is_eager=is_eager,
        )

    def _pieces(self, generation: Generation) -> Iterator[Piece]:
        piece = None
        try:
            while piece is None or piece.finish_reason is None:
                with self._using.by_generation:
                    piece = generation.next_piece()
                    if self._sequence.unreported:
                        self._sequence.report_runs()
                yield piece
        finally:
            generation.close()

    async def _apieces(
        self, options: GenerationOptions, log_probabilities: int | None, constraint: Constraint | None
    ) -> AsyncIterator[Piece]:
        import asyncio

        loop, pieces = asyncio.get_running_loop(), asyncio.Queue[Piece | None]()
        generation = self._generation(
            options,
            log_probabilities,
            constraint,
            deliver=lambda piece: loop.call_soon_threadsafe(pieces.put_nowait, piece),
        )
        if self._model.scheduler.takes_turns:
            raise ConfigError(_NOT_ASYNCHRONOUS)
        piece = None
        try:
            while piece is None or piece.finish_reason is None:
                with self._using.by_generation:
                    if self._sequence.ahead is not None and not generation.is_submitted:
                        await in_thread(self._sequence.settle)
                    if not self._sequence.is_ready:
                        await in_thread(self._sequence.next_logits, self._sequence.cancel.set)
                    piece = await self._next_piece(generation, pieces)
                    self._sequence.report_runs()
                yield piece
        finally:
            generation.close()

    async def _next_piece(self, generation: Generation, pieces: asyncio.Queue[Piece | None]) -> Piece:
        generation.is_wanted = True
        try:
            while True:
                if generation.is_submitted and (piece := await pieces.get()) is not None:
                    return piece
                if generation.is_submitted:
                    generation.note_end()
                if (drawn := generation.draw_known()) is not None:
                    return drawn
                generation.submit()
        finally:
            generation.is_wanted = False

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        """Do work of this session in a thread. If the task is cancelled, the work ends at the next chunk."""
        if self._model.scheduler.takes_turns:
            raise ConfigError(_NOT_ASYNCHRONOUS)

        def settled() -> Result:
            self._sequence.settle()
            return work()

        with self._using.by_generation:
            self._sequence.cancel.clear()
            result = await in_thread(settled, self._sequence.cancel.set)
            self._sequence.report_runs()
            return result

    def _copy(self) -> Session:
        self._check_open()
        sequence = self._sequence.fork()
        copy = Session(self._model, sequence.state)
        copy._sequence, copy._using = sequence, _Use(sequence)
        return copy

    def _extend(
        self,
        prompt: str | Sequence[int],
        logits: Logits,
        progress: Progress | bool | None,
        follows_text: bool | None = None,
    ) -> PrefillResult:
        self._check_open()
        if not isinstance(logits, str):
            raise ConfigError(f"logits is {logits!r}, expected one of: {', '.join(get_args(Logits))}")
        if logits == "hidden":
            check_hidden(self._model.scheme)
        tokens = self._encode(prompt)
        if progress is None:
            result = self._sequence.extend(tokens, logits)
        else:
            with telling(self._sequence, progress, len(tokens)):
                result = self._sequence.extend(tokens, logits)
        self._sequence.follows_text = isinstance(prompt, str) if follows_text is None else follows_text
        return result

    def _score(self, context: Sequence[int], continuation: Sequence[int]) -> Score:
        self._check_open()
        return score_continuation(self._sequence, context, continuation, chunk_length=self._model.chunk_length)

    def _tell(
        self, prompt: Sequence[int], number: int, before: Sequence[TokenLogProbabilities]
    ) -> tuple[Sequence[TokenLogProbabilities], int]:
        self._check_open()
        tokens, chunk_length = self._encode(prompt), self._model.chunk_length
        told = tell_of_tokens(self._sequence, tokens, number, chunk_length=chunk_length, before=before)
        self._sequence.follows_text = True
        return told

    def _encode(self, prompt: str | Sequence[int]) -> list[int]:
        if isinstance(prompt, str):
            tokenizer = self._model.require_tokenizer()
            ids = tokenizer.encode(prompt, add_special=self.position == 0, parse_special=False)
        else:
            ids = as_token_ids(prompt)
        if not ids:
            raise ConfigError("the prompt is empty; pass at least one token")
        vocab_size = self._model.plan.vocab_size
        if outside := [token for token in ids if not 0 <= token < vocab_size]:
            raise ConfigError(f"token id {outside[0]} is outside the vocabulary of {vocab_size}")
        return ids

    def _check_open(self) -> None:
        self._model.check_open()
        if self._is_closed:
            raise ClosedError("the session is closed; open a new one with engine.session()")


def answer(session: Session, prompt: str | Sequence[int], options: GenerationOptions) -> Iterator[Piece]:
    """Prefill a prompt, and yield the pieces of the answer, for which the computation does not wait."""
    session.prefill(prompt)
    yield from session._pieces(session._generation(options, is_eager=True))


async def prompt_log_probabilities(
    session: Session, prompt: Sequence[int], number: int, before: Sequence[TokenLogProbabilities] = ()
) -> tuple[Sequence[TokenLogProbabilities], int]:
    """Prefill the tokens of a text, and return the model's log-probabilities from the second token on, and the number
    of first tokens that were not run again. The session must contain no other tokens.

    Args:
        session: the session of the text.
        prompt: token ids.
        number: number of likeliest tokens to report at each position, in addition to the prompt's token.
        before: the results for the text that the session contains, with the same `number`. The session is rewound only
            to the first difference between the texts, so their shared beginning is not run again.
    """
    return await session._in_thread(partial(session._tell, prompt, number, before))


_NOT_ASYNCHRONOUS = (
    "ranks without a leader cannot compute asynchronously; use prefill and generate, or start the ranks with mpiexec"
)


class _Use:
    """Guard of a session, which rejects a second thread or task while another one uses the session, and waits for a
    generation that computes ahead. After an interrupt the same thread may enter again.
    """

    def __init__(self, sequence: TokenSequence) -> None:
        self._sequence = sequence
        self.by_generation = _Guard()

    def __enter__(self) -> None:
        self.by_generation.__enter__()
        try:
            self._sequence.settle()
        except BaseException:
            self.by_generation.__exit__(None, None, None)
            raise

    def __exit__(self, *error: object) -> None:
        self.by_generation.__exit__(None, None, None)


class _Guard:
    """The part of `_Use` that does not wait for a generation."""

    def __init__(self) -> None:
        self._user: object = None

    def __enter__(self) -> None:
        asyncio, me = sys.modules.get("asyncio"), None
        if asyncio is not None:
            with suppress(RuntimeError):  # no event loop runs in this thread
                me = asyncio.current_task()  # None also for a callback of an event loop, which belongs to no task
        if me is None:
            me = threading.get_ident()
        if self._user is not None and self._user != me:
            raise ConfigError("the session is in use by another thread or task; create one for each")
        self._user = me

    def __exit__(self, *error: object) -> None:
        self._user = None


async def in_thread(work: Callable[[], Result], cancel: Callable[[], object] = bool) -> Result:
    """Do slow work in a thread, without blocking the event loop. If the task is cancelled, call `cancel`, and wait for
    the end of the work, because the work uses objects that would otherwise be deleted.
    """
    import asyncio

    loop = asyncio.get_running_loop()
    working: asyncio.Future[Result] = loop.create_future()
    arguments = (loop, working, partial(copy_context().run, work))
    threading.Thread(target=_settle, args=arguments, name="chunkrt-session", daemon=True).start()
    del arguments
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        cancel()
        while not working.done():
            with suppress(asyncio.CancelledError):  # the work has begun already
                await asyncio.wait([working])
        working.cancelled() or working.exception()  # the result is no longer needed
        raise
    finally:
        del working  # it refers to an error, whose traceback refers to this frame


def _settle(loop: asyncio.AbstractEventLoop, working: asyncio.Future[Result], work: Callable[[], Result]) -> None:
    """Do work, and complete a future of an event loop."""
    try:
        settle = partial(working.set_result, work())
    except BaseException as error:
        settle = partial(working.set_exception, error)
    with suppress(RuntimeError):  # the event loop has ended
        loop.call_soon_threadsafe(settle)
    del settle, working  # they may refer to an error, whose traceback refers to this frame
