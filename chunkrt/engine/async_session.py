"""Asynchronous counterparts of the session methods that block."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from chunkrt.engine.driving import OneUser, drive_async, in_thread
from chunkrt.engine.generation import Constraint, Generation, Piece
from chunkrt.engine.prefill_result import PrefillResult
from chunkrt.engine.sampling import GREEDY, SamplingOptions
from chunkrt.engine.scoring import Score, TokenLogProbabilities, Told, tell_of_tokens
from chunkrt.engine.sequence import Steps, TokenSequence
from chunkrt.engine.session_engine import SessionEngine
from chunkrt.files import Progress
from chunkrt.runtime.run import Logits

if TYPE_CHECKING:
    from typing import Self

    from chunkrt.engine.session import Session


class AsyncSession(ABC):
    """Base class of sessions with the methods for event loops."""

    _engine: SessionEngine
    _sequence: TokenSequence
    _one_user: OneUser

    async def aprefill(
        self,
        prompt: str | Sequence[int],
        *,
        logits: Logits = "last",
        progress: Progress | bool | None = None,
        follows_text: bool | None = None,
    ) -> PrefillResult:
        """Prefill like `Session.prefill` without blocking the event loop.

        If the task is cancelled, the prefill ends at the next chunk, and the session is unchanged.

        Args:
            prompt, logits, progress: see `Session.prefill`.
            follows_text: True if the generation continues a text. A leading space is then kept, which SentencePiece
            would
                otherwise drop. By default True if the prompt is text. Pass True for token ids of a text.
        """
        with self._one_user(), self._telling(progress, prompt):
            return await drive_async(self._extension(prompt, logits, follows_text), self._engine.arun)

    async def atell(self, prompt: Sequence[int], number: int, before: Sequence[TokenLogProbabilities] = ()) -> Told:
        """Prefill the tokens of a text, and return the model's log-probabilities from the second token on. The session
        must contain no other tokens.

        Args:
            prompt: token ids.
            number: number of likeliest tokens to report at each position, in addition to the prompt's token.
            before: the results for the text that the session contains, with the same `number`. The session is rewound
                only to the first difference between the texts, so their shared beginning is not run again.
        """
        with self._one_user():
            told = await drive_async(self._told(prompt, number, before), self._engine.arun, in_threads=True)
            self._sequence.follows_text = True
            return told

    def agenerate(
        self,
        *,
        max_new_tokens: int = 256,
        sampling: SamplingOptions = GREEDY,
        stop: Sequence[str] = (),
        log_probabilities: int | None = None,
        constraint: Constraint | None = None,
    ) -> AsyncIterator[Piece]:
        """Generate like `Session.generate` without blocking the event loop."""
        return self._apieces(self._generation(max_new_tokens, sampling, stop, log_probabilities, constraint))

    async def ascore(self, context: Sequence[int], continuation: Sequence[int]) -> Score:
        """Score like `Session.score` without blocking the event loop."""
        with self._one_user():
            return await drive_async(self.scoring(context, continuation), self._engine.arun, in_threads=True)

    async def afork(self) -> Session:
        """Fork like `Session.fork` without blocking the event loop: a thread copies the caches."""
        with self._one_user():
            return await in_thread(self._copy)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None:
        """Close the session."""

    @abstractmethod
    def scoring(self, context: Sequence[int], continuation: Sequence[int]) -> Steps[Score]:
        """Return the steps that compute a score."""

    @abstractmethod
    def _extension(
        self, prompt: str | Sequence[int], logits: Logits, follows_text: bool | None = None
    ) -> Steps[PrefillResult]:
        """Return the steps that compute a prefill."""

    @abstractmethod
    def _generation(
        self,
        max_new_tokens: int,
        sampling: SamplingOptions,
        stop: Sequence[str],
        log_probabilities: int | None = None,
        constraint: Constraint | None = None,
    ) -> Generation:
        """Check the arguments, and return a generation."""

    @abstractmethod
    def _telling(self, progress: Progress | bool | None, prompt: str | Sequence[int]) -> AbstractContextManager[object]:
        """Return a context manager that reports the number of computed tokens of a prompt."""

    @abstractmethod
    def _encode(self, prompt: str | Sequence[int]) -> list[int]:
        """Return the tokens of a prompt. Raise ConfigError if the prompt is empty, or an id is outside the
        vocabulary."""

    @abstractmethod
    def _check_open(self) -> None:
        """Raise ClosedError if the session is closed."""

    @abstractmethod
    def _copy(self) -> Session:
        """Return another session with the same tokens and state."""

    def _told(self, prompt: Sequence[int], number: int, before: Sequence[TokenLogProbabilities]) -> Steps[Told]:
        self._check_open()
        self._sequence.cancel.clear()
        tokens, chunk_length = self._encode(prompt), self._engine.chunk_length
        told = yield from tell_of_tokens(self._sequence, tokens, number, chunk_length=chunk_length, before=before)
        return told

    async def _apieces(self, generation: Generation) -> AsyncIterator[Piece]:
        while not generation.is_finished:
            with self._one_user():
                piece = await drive_async(generation.next_piece(), self._engine.arun)
            yield piece
