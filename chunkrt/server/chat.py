"""POST /v1/chat/completions: the next message of a conversation."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from typing import Any
from uuid import uuid4

from chunkrt.engine.generation import Piece
from chunkrt.server.answers import Prefilled, Progress, Said, Wanted, answers
from chunkrt.server.completions import finish_reason, usage
from chunkrt.server.constraints import constraint_maker
from chunkrt.server.errors import RequestError
from chunkrt.server.requests import ChatRequest
from chunkrt.server.service import Service


class Chat:
    """One request, and what its choices have said so far."""

    def __init__(self, service: Service, request: ChatRequest, prompt: list[int]) -> None:
        self._service, self._request, self._prompt = service, request, prompt
        self._id, self._created = f"chatcmpl-{uuid4().hex}", int(time.time())
        number = request.n or 1
        self._texts = [""] * number
        self._told: list[list[dict[str, Any]]] = [[] for _ in range(number)]
        self._reasons: list[str | None] = [None] * number
        self._counts = [0, 0, 0]

    @staticmethod
    async def of(service: Service, request: ChatRequest) -> Chat:
        """Raises RequestError if the request asks for what cannot be done."""
        service.check_model(request)
        if request.tools and request.tool_choice != "none":
            raise RequestError("tools: this server does not parse calls of tools", param="tools")
        if request.max_tokens is not None and request.max_completion_tokens is not None:
            raise RequestError("give max_completion_tokens or max_tokens, one of them", param="max_tokens")
        return Chat(service, request, await service.beside(service.encode_chat, request.messages))

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """What a stream tells, one object an event; texts and counts gather here meanwhile."""
        request = self._request
        wanted = Wanted(
            max_new_tokens=request.max_completion_tokens or request.max_tokens,
            sampling=[request.sampling(choice) for choice in range(request.n or 1)],
            stop=request.stops,
            likeliest=request.num_likeliest,
            constraint=constraint_maker(self._service, request.response_format),
            progress=request.progress,
        )
        async for event in answers(self._service, [self._prompt], wanted):
            if isinstance(event, Progress):
                progress = {"tokens_done": event.num_done, "tokens": event.num_tokens}
                yield self._object("chat.completion.chunk", [], progress=progress)
            elif isinstance(event, Prefilled):
                self._counts[0], self._counts[2] = event.num_tokens, event.num_cached
                for index in range(len(self._texts)):
                    yield self._chunk(index, {"role": "assistant", "content": ""}, None, None)
            else:
                yield self._note(event)
        if request.usage:
            yield self._object("chat.completion.chunk", [], usage=usage(*self._counts))

    async def whole(self) -> dict[str, Any]:
        """All choices, once they are finished."""
        async for _ in self.events():
            pass
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": text, "refusal": None},
                "logprobs": {"content": self._told[index]} if self._request.logprobs else None,
                "finish_reason": self._reasons[index],
            }
            for index, text in enumerate(self._texts)
        ]
        return self._object("chat.completion", choices, usage=usage(*self._counts))

    def _note(self, said: Said) -> dict[str, Any]:
        piece, index = said.piece, said.choice
        self._texts[index] += piece.text
        self._reasons[index] = finish_reason(piece.finish_reason)
        self._counts[1] += piece.token_id is not None
        told = self._tell(piece)
        self._told[index] += told
        return self._chunk(index, {"content": piece.text} if piece.text else {}, told, self._reasons[index])

    def _tell(self, piece: Piece) -> list[dict[str, Any]]:
        told = piece.log_probabilities
        if told is None or piece.token_id is None:
            return []
        top = [self._token(token_id, value) for token_id, value in told.top]
        return [{**self._token(piece.token_id, told.own), "top_logprobs": top}]

    def _token(self, token_id: int, value: float) -> dict[str, Any]:
        token = self._service.token_bytes(token_id)
        return {"token": token.decode(errors="replace"), "logprob": value, "bytes": list(token)}

    def _chunk(
        self, index: int, delta: Mapping[str, Any], told: list[dict[str, Any]] | None, reason: str | None
    ) -> dict[str, Any]:
        logprobs = {"content": told} if self._request.logprobs and told is not None else None
        choice = {"index": index, "delta": dict(delta), "logprobs": logprobs, "finish_reason": reason}
        return self._object("chat.completion.chunk", [choice])

    def _object(self, kind: str, choices: list[dict[str, Any]], **more: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._service.name,
            "choices": choices,
            **more,
        }
