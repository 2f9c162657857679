"""What clients may send: the bodies of requests, field by field, as OpenAI's API has them.

A field that is not here is refused by name: nothing that a client asks for is left out in silence. Those that say
nothing about the answer (`user`, `metadata`, `store` and the like) are taken and not looked at.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from chunkrt.engine.sampling import SamplingOptions
from chunkrt.errors import ConfigError
from chunkrt.server.errors import RequestError

MOST_PROMPTS = 2048
MOST_CHOICES = 64
MOST_LIKELIEST = 20

Count = Annotated[int, msgspec.Meta(ge=1)]
Choices = Annotated[int, msgspec.Meta(ge=1, le=MOST_CHOICES)]
Likeliest = Annotated[int, msgspec.Meta(ge=0, le=MOST_LIKELIEST)]
Texts = Annotated[list[str], msgspec.Meta(min_length=1, max_length=MOST_PROMPTS)]
Body = TypeVar("Body", bound="Request")

DRAWN_SEED = -1
"""Stands for no seed, as in other servers."""


class Request(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What every request may say. `model`: the one that is served, or nothing."""

    model: str | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    cache_salt: str | None = None
    prompt_cache_retention: str | None = None


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`include_usage`: a last event has the counts. `include_progress`: events tell how far the prompt is."""

    include_usage: bool = False
    include_progress: bool = False
    include_obfuscation: bool = False


class JsonSchema(msgspec.Struct, kw_only=True):
    """A schema that the answer follows."""

    name: str = "answer"
    schema: dict[str, Any] = msgspec.field(default_factory=dict)
    strict: bool | None = None
    description: str | None = None


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What form the answer has."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Generating(Request, kw_only=True):
    """How an answer is made."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_progress: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    n: Choices | None = None
    response_format: ResponseFormat | None = None

    def sampling(self, choice: int, vocab_size: int) -> SamplingOptions:
        """How the tokens of a choice are drawn: each by random numbers of its own.

        Raises:
            RequestError: an option is out of its range.
        """
        try:
            bias = {int(token): value for token, value in (self.logit_bias or {}).items()}
            if outside := [token for token in bias if not 0 <= token < vocab_size]:
                raise ValueError(f"token id {outside[0]} is outside the vocabulary of {vocab_size}")
        except ValueError as error:
            raise RequestError(f"logit_bias: {error}; its keys are token ids", param="logit_bias") from error
        given = {
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k or None,  # 0 and -1 keep all, as in other servers
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "seed": None if self.seed in (None, DRAWN_SEED) else (self.seed + choice) % 2**64,
        }
        if given["top_k"] == -1:
            del given["top_k"]
        try:
            return SamplingOptions(logit_bias=bias, **{k: v for k, v in given.items() if v is not None})  # type: ignore[arg-type]
        except ConfigError as error:
            raise RequestError(str(error), param=str(error).partition(":")[0]) from error

    @property
    def stops(self) -> list[str]:
        """Strings that end the answer."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if not all(stops):
            raise RequestError("stop: a stop string is empty", param="stop")
        return stops

    def check_stream(self) -> None:
        """Raises RequestError if there are options for a stream, and none is asked for."""
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options: only with stream", param="stream_options")

    @property
    def progress(self) -> bool:
        """True if a stream reports the progress of the prompt; `return_progress` is llama.cpp's name."""
        in_options = self.stream_options is not None and self.stream_options.include_progress
        return in_options or bool(self.return_progress)

    @property
    def usage(self) -> bool:
        """Whether a stream tells the counts at its end."""
        return self.stream_options is not None and self.stream_options.include_usage


class ChatRequest(Generating, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1)]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Likeliest | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    modalities: list[Literal["text"]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def num_likeliest(self) -> int | None:
        """Of how many tokens log-probabilities are wanted beside the answer's; None: of none."""
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(Generating, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[Any]
    max_tokens: Annotated[int, msgspec.Meta(ge=0)] | None = None
    echo: bool | None = None
    logprobs: Likeliest | None = None
    suffix: str | None = None
    best_of: int | None = None
    parse_special: bool | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """Each text, or token ids."""
        return _several("prompt", self.prompt)


class ScoreRequest(Request, kw_only=True):
    """POST /v1/score: `text_1` before `text_2`, one or several of each, as many or one of the first."""

    text_1: str | Texts
    text_2: str | Texts


class RerankRequest(Request, kw_only=True):
    """POST /v1/rerank."""

    query: str
    documents: Annotated[list[str | dict[str, Any]], msgspec.Meta(min_length=1, max_length=MOST_PROMPTS)]
    top_n: Count | None = None
    return_documents: bool = False


class EmbeddingRequest(Request, kw_only=True):
    """POST /v1/embeddings."""

    input: str | list[Any]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Count | None = None

    @property
    def inputs(self) -> list[str | list[int]]:
        """Each text, or token ids."""
        return _several("input", self.input)


class TokenizeRequest(Request, kw_only=True):
    """POST /tokenize: a text, or the messages of a chat."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True
    parse_special: bool = True
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(Request, kw_only=True):
    """POST /detokenize."""

    tokens: list[int]


def _several(param: str, given: str | list[Any]) -> list[str | list[int]]:
    """Each text, or token ids."""
    if isinstance(given, str):
        return [given]
    if given and all(type(token) is int for token in given):
        return [given]
    for one in given:
        if not isinstance(one, str) and not (isinstance(one, list) and all(type(token) is int for token in one)):
            raise RequestError(f"{param}: expected text, token ids, or a list of either", param=param)
    if not 1 <= len(given) <= MOST_PROMPTS:
        raise RequestError(f"{param}: the list has {len(given)}, expected 1 to {MOST_PROMPTS}", param=param)
    return given


def read(body: bytes | bytearray, kind: type[Body]) -> Body:
    """A request's body.

    Raises:
        RequestError: it is not JSON, or not such a request; the message names the field.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise RequestError(str(error), param=_field(str(error))) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the body is not JSON: {error}") from error


def _field(problem: str) -> str | None:
    """Which field msgspec complains of: it tells where, and of what is missing or unknown there the name."""
    place = re.search(r"at `\$\.?(.*?)`$", problem)
    name = re.search(r"(?:missing required|contains unknown) field `(.*?)`", problem)
    return ".".join(found[1] for found in (place, name) if found is not None and found[1]) or None
