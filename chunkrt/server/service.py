"""What all requests share: the engine, who may begin, what is counted."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from chunkrt.engine.embedding import Pooling, check_hidden
from chunkrt.engine.engine import Engine
from chunkrt.engine.sampling import SamplingOptions
from chunkrt.errors import ConfigError, ModelError
from chunkrt.server.admission import Admission
from chunkrt.server.errors import RequestError
from chunkrt.server.metrics import Metrics
from chunkrt.server.requests import Generating, Request
from chunkrt.server.tool_calls import with_arguments_read
from chunkrt.tokenizer import Tokenizer

if TYPE_CHECKING:
    from chunkrt.server.access import Client

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """How a server behaves.

    Args:
        api_keys: the keys of clients, by names for logs and metrics; none: anybody may ask. Each key has a prefix
            cache of its own.
        max_sessions: sequences under way at a time.
        queue: requests that wait for places.
        max_body_bytes: of a request.
        body_seconds: in which a request's body has to come.
        header_seconds: in which a request's headers have to come.
        max_connections: at a time; fewer where the process may open fewer than twice as many files.
        stall_seconds: after which a task that has not ended counts as stuck, so that /health answers 503.
        ping_seconds: the interval of comments in streams, which keep proxies and clients from giving up.
        allow_origin: what pages of other origins may be at ("*" for any); None: none.
        allow_hosts: names by which a server without keys may be asked, beside addresses and "localhost" ("*" for any).
        embeddings: how they are made; None: as the model's files say, or not at all if they say nothing.
        template_options: variables of the chat template for all requests; a request's own come before them.
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


class Service:
    """An engine that is served under a name. Raises ConfigError if it gives no embeddings and shall."""

    def __init__(self, engine: Engine, name: str, options: ServerOptions) -> None:
        self.engine, self.name, self.options = engine, name, options
        self.pooling = options.embeddings
        if self.pooling is None and engine.tokenizer is not None:
            has_hidden = engine.plan.flow.hidden is not None and not engine.scheme.is_rotated
            self.pooling = engine.tokenizer.settings.pooling if has_hidden else None
        if options.embeddings is not None:
            check_hidden(engine.scheme)
            if engine.plan.flow.hidden is None:
                raise ConfigError(
                    "this decoder's plan does not tell which values are its hidden states; leave --embeddings away"
                )
        if engine.tokenizer is not None:
            engine.tokenizer.fewest_tokens("")  # the first call reads the vocabulary
        self.created = int(time.time())
        self.admission = Admission(options.max_sessions, options.queue)
        self.metrics = Metrics(engine, self.admission)

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's. Raises ModelError if it has none."""
        return self.engine.require_tokenizer()

    def check_model(self, request: Request) -> None:
        """Raises RequestError if another model is asked for than the one there is."""
        if request.model not in (None, "", self.name):
            raise RequestError(
                f"the model {request.model!r} is not served here; there is: {self.name}",
                status=404,
                param="model",
                code="model_not_found",
            )

    def cache_salt(self, client: Client, request: Request) -> str | None:
        """Return the salt of a request's prefixes; None for those that all clients of a server without keys share.

        Raises RequestError if it gives one that is empty.
        """
        if request.cache_salt == "":
            raise RequestError("cache_salt: found an empty string; give some text, or omit it", param="cache_salt")
        parts = client.cache_salt, request.cache_salt or "", request.prompt_cache_key or ""
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest() if any(parts) else None

    def sampling(self, request: Generating) -> list[SamplingOptions]:
        """How each choice of a request is drawn. Raises RequestError if an option is out of its range."""
        vocab_size = self.engine.plan.vocab_size
        return [request.sampling(choice, vocab_size) for choice in range(request.n or 1)]

    async def beside(self, work: Callable[..., Result], *arguments: Any) -> Result:
        """Do what takes a while in a thread, while the event loop goes on."""
        return await asyncio.to_thread(work, *arguments)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_options: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The tokens of a chat up to where the answer begins. Raises RequestError if the messages are malformed."""
        knows_developers = "developer" in (self.tokenizer.settings.chat_template or "")
        options = {**self.options.template_options, **(template_options or {})}
        taken = [_as_template_takes_it(message, knows_developers=knows_developers) for message in messages]
        try:
            prompt = self.tokenizer.render_chat(taken, tools=tools, template_options=options)
            self.check_length(prompt.text, "messages")
            return self.tokenizer.encode_prompt(prompt)
        except (ConfigError, ModelError) as error:  # a template may refuse them, too
            raise RequestError(str(error), param="messages") from error

    def check_length(self, text: str, param: str, *, shifts: bool = True) -> None:
        """Check that a text may fit the context, by its bytes: encoding takes long.

        Args:
            shifts: whether a longer text is taken where the context shifts.

        Raises:
            RequestError: it has more tokens than the context holds.
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
        """Encode plain prompts, after none of them is found to be too long for its bytes.

        Args:
            encode: gives the tokens of a text.

        Raises RequestError as `check_length`, and if token ids are outside the vocabulary.
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
        """A token's bytes; none for one that only the model has, for padding."""
        return self.tokenizer.token_bytes[token_id]


def _as_template_takes_it(message: Mapping[str, Any], *, knows_developers: bool) -> dict[str, Any]:
    """A message whose content is text: parts of text are joined, others refused. What developers say is the system's,
    where a template does not tell them apart."""
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
        raise RequestError(f"messages: the content is {found}; expected text, or parts of it", param="messages")
    return {**message, "content": "".join(_text_of(part, is_assistant=is_assistant) for part in content)}


def _without_empty(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message without nulls and empty lists, which say nothing, but which templates may take for values.

    Raises RequestError if it has a field that is not read.
    """
    taken = {name: value for name, value in message.items() if value is not None and (name == "content" or value != [])}
    if unread := [name for name in ("function_call", "audio") if name in taken]:
        hint = "send tool_calls" if unread[0] == "function_call" else "this model reads text alone"
        raise RequestError(f"messages: {unread[0]} is not read; {hint}", param="messages")
    return taken


def _text_of(part: Any, *, is_assistant: bool) -> str:
    """Return the text of a part of a message. Raises RequestError if it is none."""
    kind = part.get("type") if isinstance(part, Mapping) else part
    if kind == "text" or (kind == "refusal" and is_assistant):
        text = part.get(kind)
        if isinstance(text, str):
            return text
    raise RequestError(f"messages: a part of type {kind!r}; this model reads text alone", param="messages")
