"""POST /v1/completions: prompts as they are, continued."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any
from uuid import uuid4

from chunkrt.engine.generation import FinishReason
from chunkrt.engine.scoring import TokenLogProbabilities
from chunkrt.server.answers import Prefilled, Progress, Said, Wanted, answers
from chunkrt.server.constraints import constraint_maker
from chunkrt.server.errors import RequestError
from chunkrt.server.requests import CompletionRequest
from chunkrt.server.service import Service

MOST_NEW_TOKENS = 16
"""Unless told otherwise; OpenAI's."""


def finish_reason(reason: FinishReason | None) -> str | None:
    """As OpenAI's API has it: an answer that ends with the context ends for its length."""
    return "length" if reason == "context" else reason


def usage(num_prompt: int, num_new: int, num_cached: int) -> dict[str, Any]:
    """The counts of a request."""
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_new,
        "total_tokens": num_prompt + num_new,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }


class _LogProbabilities:
    """The lists that a choice has, token by token."""

    def __init__(self, service: Service, number: int) -> None:
        self._service, self._number = service, number
        self._length = 0
        self.tokens: list[str] = []
        self.values: list[float | None] = []
        self.top: list[dict[str, float] | None] = []
        self.offsets: list[int] = []

    def add(self, token_id: int, told: TokenLogProbabilities | None) -> None:
        """A token; the first of a prompt has nothing before it that could tell of it."""
        text = self._service.token_text(token_id)
        self.tokens.append(text)
        self.values.append(None if told is None else told.own)
        top: dict[str, float] | None = None
        if told is not None:
            top = dict[str, float]()
            for other, value in (*told.top[: self._number], (token_id, told.own)):
                name = self._service.token_text(other)  # parts of characters may have one name
                top[name] = max(value, top.get(name, value))
        self.top.append(top)
        self.offsets.append(self._length)
        self._length += len(text)

    def take(self) -> dict[str, Any]:
        """What has come since the last time."""
        found = {
            "tokens": self.tokens,
            "token_logprobs": self.values,
            "top_logprobs": self.top,
            "text_offset": self.offsets,
        }
        self.tokens, self.values, self.top, self.offsets = [], [], [], []
        return found


class Completion:
    """One request, and what its choices have said so far."""

    def __init__(self, service: Service, request: CompletionRequest, prompts: Sequence[Sequence[int]]) -> None:
        self._service, self._request, self._prompts = service, request, prompts
        self._choices = request.n or 1
        self._id, self._created = f"cmpl-{uuid4().hex}", int(time.time())
        number = len(prompts) * self._choices
        self.texts = [""] * number
        self.reasons: list[str | None] = [None] * number
        self.told = [_LogProbabilities(service, request.logprobs or 0) for _ in range(number)]
        self.counts = [0, 0, 0]

    @staticmethod
    async def of(service: Service, request: CompletionRequest) -> Completion:
        """Raises RequestError if the request asks for what cannot be done."""
        service.check_model(request)
        if request.suffix:
            raise RequestError("suffix: this model continues texts; it fills no gaps", param="suffix")
        if request.best_of not in (None, request.n or 1):
            raise RequestError("best_of: every choice is returned; ask for n", param="best_of")
        if request.echo and request.stream:
            raise RequestError("echo: a stream tells what is new alone", param="echo")
        prompts = [await service.beside(service.encode, prompt) for prompt in request.prompts]
        return Completion(service, request, prompts)

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """What a stream tells, one object an event; texts and counts gather here meanwhile."""
        request = self._request
        wanted = Wanted(
            max_new_tokens=MOST_NEW_TOKENS if request.max_tokens is None else request.max_tokens,
            sampling=[request.sampling(choice) for choice in range(request.n or 1)],
            stop=request.stops,
            likeliest=request.logprobs,
            constraint=constraint_maker(self._service, request.response_format),
            echo=bool(request.echo and request.logprobs is not None),
            progress=request.progress,
        )
        async for event in answers(self._service, self._prompts, wanted):
            if isinstance(event, Progress):
                progress = {"tokens_done": event.num_done, "tokens": event.num_tokens}
                yield self._object([], progress=progress)
            elif isinstance(event, Prefilled):
                self._note_prompt(event)
            else:
                yield self._object([self._note(event)])
        if request.usage:
            yield self._object([], usage=usage(*self.counts))

    async def whole(self) -> dict[str, Any]:
        """All choices, once they are finished."""
        async for _ in self.events():
            pass
        return self._object(
            [self._choice(index, text) for index, text in enumerate(self.texts)], usage=usage(*self.counts)
        )

    def _note_prompt(self, event: Prefilled) -> None:
        self.counts[0] += event.num_tokens
        self.counts[2] += event.num_cached
        first = event.prompt * self._choices
        for choice in range(first, first + self._choices):
            if self._request.max_tokens == 0:
                self.reasons[choice] = "length"
            if self._request.echo:
                tokens = self._prompts[event.prompt]
                self.texts[choice] = self._service.tokenizer.decode(tokens)
                for token_id, told in zip(tokens, (None, *event.log_probabilities), strict=False):
                    self.told[choice].add(token_id, told)

    def _note(self, said: Said) -> dict[str, Any]:
        piece = said.piece
        self.texts[said.choice] += piece.text
        self.reasons[said.choice] = finish_reason(piece.finish_reason)
        if piece.token_id is not None:
            self.counts[1] += 1
            if piece.log_probabilities is not None:
                self.told[said.choice].add(piece.token_id, piece.log_probabilities)
        return self._choice(said.choice, piece.text) if self._request.stream else {}

    def _choice(self, index: int, text: str) -> dict[str, Any]:
        told = self.told[index].take() if self._request.logprobs is not None else None
        return {"index": index, "text": text, "logprobs": told, "finish_reason": self.reasons[index]}

    def _object(self, choices: list[dict[str, Any]], **more: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": self._service.name,
            "choices": choices,
            **more,
        }
