"""Asynchronous counterparts of the session methods that wait."""

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
    """The part of a session for event loops."""

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
        """Prefill like `Session.prefill` without blocking the event loop. Cancelling the task ends the prefill at the
        next chunk; the session is then unchanged.

        Args:
            prompt, logits, progress: see `Session.prefill`.
            follows_text: True if the generation continues a text, so that a leading space is kept, which SentencePiece
                would otherwise drop. The default is True if the prompt is text; token ids may be those of a text, too.
        """
        with self._one_user(), self._telling(progress, prompt):
            return await drive_async(self._extension(prompt, logits, follows_text), self._engine.arun)

    async def atell(self, prompt: Sequence[int], number: int, before: Sequence[TokenLogProbabilities] = ()) -> Told:
        """Prefill the tokens of a text in a session without other tokens, and return the model's log-probabilities from
        the second token on.

        Args:
            prompt: token ids.
            number: number of likeliest tokens in each place to report in addition.
            before: the results for the text that the session holds, with the same number: the session goes back only as
                far as this text differs from that, and the shared beginning is not run again.
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
        """Return the steps of a score."""

    @abstractmethod
    def _extension(
        self, prompt: str | Sequence[int], logits: Logits, follows_text: bool | None = None
    ) -> Steps[PrefillResult]:
        """Return the steps of a prefill."""

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
        """Return a context manager that reports how many of a prompt's tokens are done."""

    @abstractmethod
    def _encode(self, prompt: str | Sequence[int]) -> list[int]:
        """Return a prompt's tokens. Raises ConfigError if there are none, or ids outside the vocabulary."""

    @abstractmethod
    def _check_open(self) -> None:
        """Raise ClosedError if the session is closed."""

    @abstractmethod
    def _copy(self) -> Session:
        """Return another session that has seen the same tokens."""

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
