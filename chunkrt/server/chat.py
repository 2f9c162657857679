"""POST /v1/chat/completions: the next message of a conversation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from chunkrt.engine.scoring import TokenLogProbabilities
from chunkrt.server.answers import Wanted
from chunkrt.server.constraints import constraint_maker
from chunkrt.server.errors import RequestError
from chunkrt.server.form import Form, Json, LogProbabilities
from chunkrt.server.requests import ChatRequest
from chunkrt.server.service import Service


class Chat(Form):
    """One request, and what its choices have said so far."""

    id_prefix = "chatcmpl"
    kind = "chat.completion"
    event_kind = "chat.completion.chunk"

    @staticmethod
    async def of(service: Service, request: ChatRequest) -> Chat:
        """Raises RequestError if the request asks for what cannot be done."""
        service.check_model(request)
        if request.tools and request.tool_choice != "none":
            raise RequestError("tools: this server does not parse calls of tools", param="tools")
        if request.max_tokens is not None and request.max_completion_tokens is not None:
            raise RequestError("give max_completion_tokens or max_tokens, one of them", param="max_tokens")
        wanted = Wanted(
            max_new_tokens=request.max_completion_tokens or request.max_tokens,
            sampling=[request.sampling(choice) for choice in range(request.n or 1)],
            stop=request.stops,
            likeliest=request.num_likeliest,
            constraint=await service.beside(constraint_maker, service, request.response_format),
            progress=request.progress,
        )
        return Chat(service, request, [await service.beside(service.encode_chat, request.messages)], wanted)

    def _log_probabilities(self) -> LogProbabilities:
        return _LogProbabilities(self._service)

    def _choice(self, index: int, text: str) -> Json:
        return {
            "index": index,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": self._take_told(index),
            "finish_reason": self._reasons[index],
        }

    def _begun(self, index: int) -> Json:
        return self._delta(index, {"role": "assistant", "content": ""}, None)

    def _continued(self, index: int, text: str) -> Json:
        return self._delta(index, {"content": text} if text else {}, self._take_told(index))

    def _delta(self, index: int, delta: Mapping[str, Any], told: Json | None) -> Json:
        return {"index": index, "delta": delta, "logprobs": told, "finish_reason": self._reasons[index]}


class _LogProbabilities:
    """A list with an object for each token. Parts of characters may have one text; their bytes tell them apart."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._content: list[Json] = []

    def add(self, token_id: int, told: TokenLogProbabilities | None) -> None:
        """See `LogProbabilities.add`."""
        assert told is not None, "a chat is not echoed"
        top = [self._token(other, value) for other, value in told.top]
        self._content.append({**self._token(token_id, told.own), "top_logprobs": top})

    def take(self) -> Json:
        """See `LogProbabilities.take`."""
        content, self._content = self._content, []
        return {"content": content}

    def _token(self, token_id: int, value: float) -> Json:
        token = self._service.token_bytes(token_id)
        return {"token": token.decode(errors="replace"), "logprob": value, "bytes": list(token)}
