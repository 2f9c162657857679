"""POST /v1/chat/completions: the next message of a conversation."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

from chunkrt.engine.scoring import TokenLogProbabilities
from chunkrt.server.answers import Wanted
from chunkrt.server.constraints import constraint_maker
from chunkrt.server.errors import RequestError
from chunkrt.server.form import AnswerForm, Json, LogProbabilities
from chunkrt.server.requests import ChatRequest
from chunkrt.server.service import Service
from chunkrt.server.tool_calls import Call, CallReader, tool_names


class Chat(AnswerForm):
    """A chat request, and the text of its choices so far."""

    id_prefix = "chatcmpl"
    kind = "chat.completion"
    event_kind = "chat.completion.chunk"

    _readers: Sequence[CallReader] = ()
    """Readers of tool calls, one for each choice, if the request has tools."""

    @staticmethod
    async def of(service: Service, request: ChatRequest, cache_salt: str | None) -> Chat:
        """Check the request. Raise RequestError if it asks for something unsupported."""
        adapter = service.check_model(request)
        request.check_stream()
        tools = request.tools if request.tools and request.tool_choice != "none" else None
        if not tools and request.tool_choice not in (None, "auto", "none"):
            raise RequestError("tool_choice: the request has no tools to choose from", param="tool_choice")
        names = None if tools is None else _check_tools(service, request, tools)
        max_new_tokens = request.max_new_tokens
        request.check_ends(service.engine.context_length if max_new_tokens is None else max_new_tokens)
        wanted = Wanted(
            max_new_tokens=max_new_tokens,
            sampling=service.sampling(request),
            stop=request.stops,
            likeliest=request.num_likeliest,
            constraint=await service.beside(constraint_maker, service, request.response_format),
            progress=request.progress,
            cache_salt=cache_salt,
            adapter=adapter,
        )
        prompt = await service.beside(service.encode_chat, request.messages, tools, request.chat_template_kwargs)
        chat = Chat(service, request, [prompt], wanted)
        if names is not None:
            chat._readers = [CallReader(names) for _ in wanted.sampling]
        return chat

    def _log_probabilities(self) -> LogProbabilities:
        tokenizer = self._service.tokenizer
        return _LogProbabilityObjects(self._service, tokenizer.eos_ids | tokenizer.special_ids(self._wanted.stop))

    def _choice(self, index: int, text: str) -> Json:
        content, calls = self._divide(index, text)
        message: Json = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            message |= {"content": content or None, "tool_calls": calls}
        reason = self._reasons[index]
        return {"index": index, "message": message, "logprobs": self._take_told(index), "finish_reason": reason}

    def _begun(self, index: int) -> Json:
        return self._delta(index, {"role": "assistant", "content": ""}, None)

    def _continued(self, index: int, text: str) -> Json:
        content, calls = self._divide(index, text)
        delta: Json = {"content": content} if content else {}
        if calls:
            delta["tool_calls"] = [{"index": number, **call} for number, call in enumerate(calls)]
        return self._delta(index, delta, self._take_told(index))

    def _divide(self, index: int, text: str) -> tuple[str, list[Call]]:
        """Return the text of a choice, and its tool calls if the choice has finished."""
        if not self._readers:
            return text, []
        reader, calls = self._readers[index], list[Call]()
        text = reader.push(text)
        if self._reasons[index] is not None:
            rest, calls = reader.finish()
            text += rest
        if calls and self._reasons[index] == "stop":
            self._reasons[index] = "tool_calls"
        return text, calls

    def _delta(self, index: int, delta: Mapping[str, Any], told: Json | None) -> Json:
        return {"index": index, "delta": delta, "logprobs": told, "finish_reason": self._reasons[index]}


def _check_tools(service: Service, request: ChatRequest, tools: Sequence[Mapping[str, Any]]) -> frozenset[str]:
    """Return the names of the tools. Raise RequestError if the model or this server does not support the request."""
    if not service.tokenizer.takes_tools:
        raise RequestError("tools: this model's chat template does not support tools", param="tools")
    if request.tool_choice not in (None, "auto"):
        raise RequestError("tool_choice: this server cannot force a call; send 'auto' or 'none'", param="tool_choice")
    if request.parallel_tool_calls is False:
        raise RequestError(
            "parallel_tool_calls: the number of calls cannot be limited; omit it", param="parallel_tool_calls"
        )
    return tool_names(tools)


class _LogProbabilityObjects:
    """Log-probabilities as a list with an object per token. Parts of characters may have the same text but different
    bytes.

    Args:
        end_ids: ids of tokens that end the message and do not belong to its content.
    """

    def __init__(self, service: Service, end_ids: Container[int]) -> None:
        self._service, self._end_ids = service, end_ids
        self._content: list[Json] = []

    def add(self, token_id: int, told: TokenLogProbabilities | None) -> None:
        """See `LogProbabilities.add`."""
        assert told is not None, "a chat is not echoed"
        if token_id in self._end_ids:
            return
        top = [self._token(other, value) for other, value in told.top]
        self._content.append({**self._token(token_id, told.own), "top_logprobs": top})

    def take(self) -> Json:
        """See `LogProbabilities.take`."""
        content, self._content = self._content, []
        return {"content": content}

    def _token(self, token_id: int, value: float) -> Json:
        token = self._service.token_bytes(token_id)
        return {"token": token.decode(errors="replace"), "logprob": value, "bytes": list(token)}
