"""Answers in OpenAI's form: the common part of chats and completions."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, ClassVar, Protocol
from uuid import uuid4

from chunkrt.engine.generation import FinishReason
from chunkrt.engine.scoring import TokenLogProbabilities
from chunkrt.server.answers import Admitted, Event, Prefilled, PromptProgress, Said, Wanted, answers
from chunkrt.server.requests import Generating
from chunkrt.server.service import Service

Json = dict[str, Any]


class LogProbabilities(Protocol):
    """Log-probabilities of a choice's tokens, in the form in which they are reported."""

    def add(self, token_id: int, told: TokenLogProbabilities | None) -> None:
        """Add a token; the first token of a prompt has no log-probability."""
        ...

    def take(self) -> Json:
        """Return the entries since the last call."""
        ...


class AnswerForm(ABC):
    """A request, and the text of its choices so far."""

    id_prefix: ClassVar[str]
    kind: ClassVar[str]
    """`object` field of a complete answer; `event_kind` is that of an event of a stream."""
    event_kind: ClassVar[str]

    def __init__(self, service: Service, request: Generating, prompts: Sequence[Sequence[int]], wanted: Wanted) -> None:
        self._service, self._request, self._prompts, self._wanted = service, request, prompts, wanted
        self._id, self._created = f"{self.id_prefix}-{uuid4().hex}", int(time.time())
        self._begin = time.perf_counter()
        self._choices_each = len(wanted.sampling)
        number = len(prompts) * self._choices_each
        self._texts = [""] * number
        self._reasons: list[str | None] = [None] * number
        self._told = [self._log_probabilities() for _ in range(number)]
        self._num_prompt = self._num_new = self._num_cached = 0

    async def whole(self) -> Json:
        """Return all choices, once they are finished."""
        async for event in answers(self._service, self._prompts, self._wanted):
            self._note(event)
        choices = [self._choice(index, text) for index, text in enumerate(self._texts)]
        return self._object(self.kind, choices, usage=self._usage())

    async def events(self) -> AsyncGenerator[Json | None]:
        """Yield None once the request is admitted, then an object for each event of a stream.

        Errors are those of `answers`; errors of the request itself are raised before the first event.
        """
        async with aclosing(answers(self._service, self._prompts, self._wanted)) as events:
            async for event in events:
                self._note(event)
                if isinstance(event, Admitted):
                    yield None
                elif isinstance(event, PromptProgress):
                    yield self._object(self.event_kind, [], **self._progress(event))
                elif isinstance(event, Prefilled):
                    for index in self._choices_of(event):
                        if (choice := self._begun(index)) is not None:
                            yield self._event(choice)
                else:
                    yield self._event(self._continued(event.choice, event.piece.text))
        if self._request.usage:
            yield self._object(self.event_kind, [], usage=self._usage())

    @abstractmethod
    def _log_probabilities(self) -> LogProbabilities:
        """Return an empty record of a choice's log-probabilities."""

    @abstractmethod
    def _choice(self, index: int, text: str) -> Json:
        """Return a finished choice."""

    @abstractmethod
    def _begun(self, index: int) -> Json | None:
        """Return a choice's event after its prompt has been run; None for no event."""

    @abstractmethod
    def _continued(self, index: int, text: str) -> Json:
        """Return a choice's event with new text."""

    def _event(self, choice: Json) -> Json:
        usage = {"usage": self._usage()} if self._request.continuous_usage else {}
        return self._object(self.event_kind, [choice], **usage)

    def _choices_of(self, event: Prefilled) -> range:
        first = event.prompt * self._choices_each
        return range(first, first + self._choices_each)

    def _note(self, event: Event) -> None:
        if isinstance(event, Prefilled):
            self._num_prompt += event.num_tokens
            self._num_cached += event.num_cached
        elif isinstance(event, Said):
            piece = event.piece
            self._texts[event.choice] += piece.text
            self._reasons[event.choice] = _finish_reason(piece.finish_reason)
            if piece.token_id is not None:
                self._num_new += 1
                if piece.log_probabilities is not None:
                    self._told[event.choice].add(piece.token_id, piece.log_probabilities)

    def _progress(self, event: PromptProgress) -> Json:
        """Describe a prompt's progress. If the request uses llama.cpp's option, llama.cpp's names are included."""
        found: Json = {"progress": {"tokens_done": event.num_done, "tokens": event.num_tokens}}
        if self._request.return_progress:
            time_ms = 1000 * (time.perf_counter() - self._begin)
            found["prompt_progress"] = {"total": event.num_tokens, "processed": event.num_done, "time_ms": time_ms}
        return found

    def _take_told(self, index: int) -> Json | None:
        """Return new log-probabilities, if the request asks for them."""
        return None if self._wanted.likeliest is None else self._told[index].take()

    def _usage(self) -> Json:
        return {
            "prompt_tokens": self._num_prompt,
            "completion_tokens": self._num_new,
            "total_tokens": self._num_prompt + self._num_new,
            "prompt_tokens_details": {"cached_tokens": self._num_cached},
        }

    def _object(self, kind: str, choices: list[Json], **more: Mapping[str, Any]) -> Json:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._wanted.adapter or self._service.name,
            "choices": choices,
            **more,
        }


def _finish_reason(reason: FinishReason | None) -> str | None:
    """Return the finish reason in OpenAI's terms. An answer that ends at the context length has the reason "length"."""
    return "length" if reason == "context" else reason
