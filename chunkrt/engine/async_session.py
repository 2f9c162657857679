"""What a session does while an event loop goes on: the twins of its methods that wait."""

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
    """The part of a session that is for event loops."""

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
        """As `Session.prefill`, while the event loop goes on. Cancelling the task ends it at the next chunk; the
        session is as it was.

        Args:
            prompt, logits, progress: as `Session.prefill` takes them.
            follows_text: what is generated then continues a text, so that a space that it begins with is kept, which
                SentencePiece would take for its own. By default if the prompt is text; ids may be of one, too.
        """
        with self._one_user(), self._telling(progress, prompt):
            return await drive_async(self._extension(prompt, logits, follows_text), self._engine.arun)

    async def atell(self, prompt: Sequence[int], number: int, before: Sequence[TokenLogProbabilities] = ()) -> Told:
        """As `aprefill` of the tokens of a text, in a session that holds no other; what the model says of each from
        the second on.

        Args:
            prompt: token ids.
            number: of the tokens that were likeliest in its place, which are told as well.
            before: what was told of the text that the session holds, with the same number: the session goes back as
                far as this text differs from that, and what both begin with is not run again.
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
        """As `Session.generate`, while the event loop goes on."""
        return self._apieces(self._generation(max_new_tokens, sampling, stop, log_probabilities, constraint))

    async def ascore(self, context: Sequence[int], continuation: Sequence[int]) -> Score:
        """As `Session.score`, while the event loop goes on."""
        with self._one_user():
            return await drive_async(self.scoring(context, continuation), self._engine.arun, in_threads=True)

    async def afork(self) -> Session:
        """As `Session.fork`, while the event loop goes on: a thread copies the caches."""
        with self._one_user():
            return await in_thread(self._copy)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None:
        """End it."""

    @abstractmethod
    def scoring(self, context: Sequence[int], continuation: Sequence[int]) -> Steps[Score]:
        """The steps of a score."""

    @abstractmethod
    def _extension(
        self, prompt: str | Sequence[int], logits: Logits, follows_text: bool | None = None
    ) -> Steps[PrefillResult]:
        """The steps of a prefill."""

    @abstractmethod
    def _generation(
        self,
        max_new_tokens: int,
        sampling: SamplingOptions,
        stop: Sequence[str],
        log_probabilities: int | None = None,
        constraint: Constraint | None = None,
    ) -> Generation:
        """A generation, once its arguments are found to be right."""

    @abstractmethod
    def _telling(self, progress: Progress | bool | None, prompt: str | Sequence[int]) -> AbstractContextManager[object]:
        """Have it told how many of a prompt's tokens are done."""

    @abstractmethod
    def _encode(self, prompt: str | Sequence[int]) -> list[int]:
        """A prompt's tokens. Raises ConfigError if there are none, or ids outside the vocabulary."""

    @abstractmethod
    def _check_open(self) -> None:
        """Raises ClosedError if it is closed."""

    @abstractmethod
    def _copy(self) -> Session:
        """A session of its own that has seen the same tokens."""

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
