"""State that all requests share: the engine, the requests in progress, and metrics."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from chunkrt.engine.arguments import checked_salt
from chunkrt.engine.embedding import Pooling, check_hidden
from chunkrt.engine.engine import Engine
from chunkrt.engine.sampling import SamplingOptions
from chunkrt.engine.session import Session
from chunkrt.errors import ClosedError, ConfigError, ModelError
from chunkrt.server.errors import RequestError
from chunkrt.server.metrics import Metrics
from chunkrt.server.requests import Generating, RequestBody
from chunkrt.server.tool_calls import with_arguments_read
from chunkrt.tokenizer import Tokenizer

if TYPE_CHECKING:
    from chunkrt.server.access import Client

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Settings of a server.

    Args:
        api_keys: the keys of clients, by names for logs and metrics; without keys, all clients are accepted. Each key
            has a separate prefix cache.
        max_sessions: maximum number of sequences of the engine in progress at a time.
        queue: maximum number of requests that wait for places; it replaces `EngineOptions.queue`.
        max_body_bytes: limit of a request's body.
        body_seconds: time within which a request's body has to arrive.
        header_seconds: time within which a request's headers have to arrive.
        max_connections: maximum number of connections at a time; lower if the process may open fewer than twice as many
            files.
        stall_seconds: age at which a running task counts as stuck, so that /health answers 503.
        ping_seconds: interval of the comments that keep proxies and clients from closing an idle stream.
        allow_origin: another origin whose pages may send requests ("*" for any); None for no other origin.
        allow_hosts: host names that a server without keys accepts in addition to addresses and "localhost" ("*" for
            any).
        embeddings: pooling of embeddings; None for the pooling that the model's files specify. If the files specify
            none either, the server has no embeddings.
        template_options: variables of the chat template for all requests; the variables of a request override them.
        adapter_folder: folder whose adapters clients may load and unload; None if they may not.
    """

    api_keys: Mapping[str, str] = field(default_factory=dict)
    max_sessions: int = 16
    queue: int = 64
    max_body_bytes: int = 16 * 2**20
    body_seconds: float = 30.0
    header_seconds: float = 10.0
    max_connections: int = 8192
    ping_seconds: float = 1.0
    stall_seconds: float = 60.0
    allow_origin: str | None = None
    allow_hosts: Sequence[str] = ()
    embeddings: Pooling | None = None
    template_options: Mapping[str, Any] = field(default_factory=dict)
    adapter_folder: Path | None = None


class Service:
    """A served engine and its name. Raises ConfigError if embeddings are set and the engine has none."""

    def __init__(self, engine: Engine, name: str, options: ServerOptions) -> None:
        self.engine, self.name, self.options = engine, name, options
        self.pooling = options.embeddings
        if self.pooling is None and engine.loaded.tokenizer is not None:
            has_hidden = engine.plan.flow.hidden is not None and not engine.scheme.is_rotated
            self.pooling = engine.loaded.tokenizer.settings.pooling if has_hidden else None
        if options.embeddings is not None:
            check_hidden(engine.scheme)
            if engine.plan.flow.hidden is None:
                raise ConfigError("this decoder's plan does not mark its hidden states; remove --embeddings")
        if engine.loaded.tokenizer is not None:
            engine.loaded.tokenizer.fewest_tokens("")  # the first call reads the vocabulary
        self.created = int(time.time())
        self._admission = engine.loaded.admission
        self._admission.max_sequences, self._admission.max_waiting = options.max_sessions, options.queue
        self._is_closed = False
        self._requests: dict[asyncio.Timeout, bool] = {}
        """Waiting requests (False), and those that have begun (True). `close` sets the deadlines of timeouts."""
        self.metrics = Metrics(engine)

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises ModelError if the model has none."""
        return self.engine.tokenizer

    @property
    def names(self) -> list[str]:
        """Names that the field `model` takes: that of the model, and those of its adapters."""
        return [self.name, *self.engine.adapters]

    def adapter_folder(self) -> Path:
        """Return the folder whose adapters clients may load. Raise RequestError if there is none."""
        if (folder := self.options.adapter_folder) is None:
            raise RequestError(
                "clients may not load or unload adapters; start the server with --adapter-folder", status=403
            )
        return folder

    def check_model(self, request: RequestBody) -> str | None:
        """Return the name of a request's adapter: its field `adapter`, or its field `model` after the name of the model
        and a colon or alone; None for the model alone.

        Raises RequestError if the request names a model or an adapter that is not served here.
        """
        model = request.model or self.name
        named = None if model == self.name else model.removeprefix(f"{self.name}:")
        for chosen, param in ((named, "model"), (request.adapter, "adapter")):
            if chosen is not None and chosen not in self.engine.adapters:
                value = model if param == "model" else chosen
                raise RequestError(
                    f"the {param} {value!r:.200} is not served here; available: {', '.join(self.names)}",
                    status=404,
                    param=param,
                    code="model_not_found",
                )
        if None not in (named, request.adapter) and named != request.adapter:
            raise RequestError(f"model and adapter name different adapters: {named!r}, {request.adapter!r}")
        return request.adapter or named

    def cache_salt(self, client: Client, request: RequestBody) -> str | None:
        """Return the salt of a request's prefixes; None for prefixes that all clients of a server without keys share.

        Raises RequestError if the request gives an empty salt.
        """
        if request.cache_salt == "":
            raise RequestError("cache_salt: found an empty string; give some text, or omit it", param="cache_salt")
        parts = client.cache_salt, request.cache_salt or "", request.prompt_cache_key or ""
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest() if any(parts) else None

    def sampling(self, request: Generating) -> list[SamplingOptions]:
        """Return the sampling options of each choice. Raise RequestError if an option is out of its range."""
        vocab_size = self.engine.plan.vocab_size
        return [request.sampling(choice, vocab_size) for choice in range(request.n or 1)]

    async def in_sessions(
        self,
        parts: Iterable[Callable[[Session], Coroutine[Any, Any, None]]],
        *,
        num_choices: int = 1,
        cache_salt: str | None,
        adapter: str | None,
        on_entry: Callable[[], object] = bool,
    ) -> None:
        """Run the coroutines of a request, each in a session with room for its choices.

        They wait for their places one after the other, so the request counts as one waiting request. After an error,
        the others are cancelled.

        Args:
            parts: functions that return the coroutine for a session.
            num_choices: number of sequences of each coroutine: its session and copies of it.
            on_entry: called when the request has its first places, or waits in the queue.

        Raises:
            BusyError: all places are taken, and the queue is full.
            ClosedError: the server is shutting down, or accepts no new requests.
            RequestError: the number of choices exceeds the number of places.
            Exception: the first error of a coroutine.
        """
        if self._is_closed:
            raise ClosedError("the server accepts no new requests")
        most = self._admission.most
        if most is not None and num_choices > most:
            raise RequestError(
                f"n is {num_choices}, but at most {most} sequences run at a time (--max-sessions, --cache-memory)",
                param="n",
            )
        loaded, salt, failed, bound = self.engine.loaded, checked_salt(cache_salt), None, asyncio.timeout(None)
        chosen = loaded.adapters.find(adapter)
        try:
            async with bound, asyncio.TaskGroup() as group:
                self._requests[bound] = False
                for part in parts:
                    has_entered = self._requests[bound]
                    state = await self._admission.await_room(
                        loaded.make_state, num_choices, has_entered=has_entered, on_entry=on_entry
                    )
                    self._requests[bound], on_entry = True, bool
                    group.create_task(_run_part(part, Session(loaded, state, cache_salt=salt, adapter=chosen)))
                    del state
        except* Exception as several:
            failed = _first_of(several)
        finally:
            self._requests.pop(bound, None)
        if bound.expired() and isinstance(failed, TimeoutError):
            failed = ClosedError("the server is shutting down")
        if failed is not None:
            try:
                raise failed
            finally:
                del failed  # its traceback holds this frame

    def close(self, *, ends_all: bool = False) -> None:
        """Admit no further requests, including those that wait. Requests in progress continue, unless `ends_all`."""
        self._is_closed = True
        for bound, has_begun in self._requests.items():
            if bound.when() is None and (ends_all or not has_begun):
                bound.reschedule(0)

    async def beside(self, work: Callable[..., Result], *arguments: Any) -> Result:
        """Run slow work in a thread, so that the event loop continues."""
        return await asyncio.to_thread(work, *arguments)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_options: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return a chat's tokens up to the start of the answer. Raise RequestError if the messages are malformed."""
        knows_developers = "developer" in (self.tokenizer.settings.chat_template or "")
        options = {**self.options.template_options, **(template_options or {})}
        taken = [_as_template_takes_it(message, knows_developers=knows_developers) for message in messages]
        try:
            prompt = self.tokenizer.render_chat(taken, tools=tools, template_options=options)
            self.check_length(prompt.text, "messages")
            return self.tokenizer.encode_prompt(prompt)
        except (ConfigError, ModelError) as error:  # the template may refuse the messages, too
            raise RequestError(str(error), param="messages") from error

    def check_length(self, text: str, param: str, *, shifts: bool = True) -> None:
        """Check by the number of bytes that a text may fit the context, because encoding is slow.

        Args:
            shifts: accept a longer text if the context shifts.

        Raises:
            RequestError: the text has more tokens than the context holds.
        """
        length = self.engine.context_length
        if shifts and self.engine.options.context_shift:
            return
        if (fewest := self.tokenizer.fewest_tokens(text)) > length:
            raise RequestError(
                f"this model's context holds {length} tokens, and the text of {len(text)} characters has at least "
                f"{fewest}; shorten it",
                param=param,
                code="context_length_exceeded",
            )

    async def encode_all(
        self,
        prompts: Sequence[str | Sequence[int]],
        param: str,
        encode: Callable[[str], list[int]],
        *,
        shifts: bool = True,
    ) -> list[list[int]]:
        """Encode plain prompts, after checking the lengths of all.

        Args:
            encode: returns the tokens of a text.

        Raises RequestError for a text that `check_length` refuses, or for token ids outside the vocabulary.
        """

        def check() -> None:
            for prompt in prompts:
                if isinstance(prompt, str):
                    self.check_length(prompt, param, shifts=shifts)

        await self.beside(check)
        encoded = [await self.beside(encode, p) if isinstance(p, str) else list(p) for p in prompts]
        vocab_size = self.engine.plan.vocab_size
        if outside := [token for tokens in encoded for token in tokens if not 0 <= token < vocab_size]:
            raise RequestError(f"token id {outside[0]} is outside the vocabulary of {vocab_size}", param=param)
        return encoded

    def token_bytes(self, token_id: int) -> bytes:
        """Return a token's bytes; none for a padding token, which only the model has."""
        return self.tokenizer.token_bytes[token_id]


async def _run_part(part: Callable[[Session], Coroutine[Any, Any, None]], session: Session) -> None:
    async with session:
        await part(session)


def _first_of(several: BaseException) -> BaseException:
    """Return the first error of a group, and break the group's reference cycle, which would keep states."""
    while isinstance(several, BaseExceptionGroup):
        several.__traceback__ = None  # it refers to a frame of the task group, which refers to the error group
        several = several.exceptions[0]
    return several


def _as_template_takes_it(message: Mapping[str, Any], *, knows_developers: bool) -> dict[str, Any]:
    """Return a message whose content is text: text parts are joined, and other parts are refused.

    If the template does not distinguish developer messages, they become system messages.
    """
    message = with_arguments_read(_without_empty(message))
    if message.get("role") == "developer" and not knows_developers:
        message["role"] = "system"
    is_assistant = message.get("role") == "assistant"
    content = message.get("content")
    if content is None and is_assistant:
        content = message["content"] = message.get("refusal", "")
    if isinstance(content, str):
        return message
    if not isinstance(content, list):
        found = "missing" if content is None else type(content).__name__
        raise RequestError(
            f"messages: the content is {found}; expected text, or a list of text parts", param="messages"
        )
    return {**message, "content": "".join(_text_of(part, is_assistant=is_assistant) for part in content)}


def _without_empty(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message without nulls and empty lists, which templates may take for values.

    Raises RequestError if the message has an unsupported field.
    """
    taken = {name: value for name, value in message.items() if value is not None and (name == "content" or value != [])}
    if unread := [name for name in ("function_call", "audio") if name in taken]:
        hint = "send tool_calls" if unread[0] == "function_call" else "this model reads only text"
        raise RequestError(f"messages: {unread[0]} is not supported; {hint}", param="messages")
    return taken


def _text_of(part: Any, *, is_assistant: bool) -> str:
    """Return the text of a content part. Raise RequestError if it is not text."""
    kind = part.get("type") if isinstance(part, Mapping) else part
    if kind == "text" or (kind == "refusal" and is_assistant):
        text = part.get(kind)
        if isinstance(text, str):
            return text
    raise RequestError(f"messages: a part of type {kind!r}; this model reads only text", param="messages")
