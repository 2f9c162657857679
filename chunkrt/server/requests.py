"""Bodies of requests, with the fields of OpenAI's API.

An unknown field is refused by name, unless it requests nothing (`given.py`), so no request is ignored silently. Fields
that do not affect the answer (`user`, `metadata`, `store` and the like) are accepted and ignored.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from chunkrt.engine.sampling import SamplingOptions
from chunkrt.errors import ConfigError
from chunkrt.files import BYTE_ORDER_MARK
from chunkrt.server.errors import RequestError
from chunkrt.server.given import given

MOST_PROMPTS = 2048
MOST_CHOICES = 64
MOST_LIKELIEST = 20

Count = Annotated[int, msgspec.Meta(ge=1)]
Limit = Annotated[int, msgspec.Meta(ge=-1)]
Choices = Annotated[int, msgspec.Meta(ge=1, le=MOST_CHOICES)]
Likeliest = Annotated[int, msgspec.Meta(ge=0, le=MOST_LIKELIEST)]
Texts = Annotated[list[str], msgspec.Meta(min_length=1, max_length=MOST_PROMPTS)]
Body = TypeVar("Body", bound=msgspec.Struct)

DRAWN_SEED = -1
"""Value of `seed` that means no seed, as in other servers."""
UNLIMITED = -1
"""Value of `max_tokens` that means the rest of the context, as in other servers."""
DEFAULT_COMPLETION_TOKENS = 16
"""Default of `max_tokens` for completions, as in OpenAI's API."""


class RequestBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Fields of every request. `model` is the name of the served model or of an adapter, or omitted; `adapter` is the
    name of an adapter.
    """

    model: str | None = None
    adapter: str | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    cache_salt: str | None = None
    prompt_cache_retention: str | None = None


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Options of a stream.

    Attributes:
        include_usage: the last event contains the token counts.
        continuous_usage_stats: every event with a choice contains the token counts so far.
        include_progress: events report the progress of the prompt.
    """

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_progress: bool = False
    include_obfuscation: bool = False


class JsonSchema(msgspec.Struct, kw_only=True):
    """A JSON schema for the answer."""

    name: str = "answer"
    schema: dict[str, Any] = msgspec.field(default_factory=dict)
    strict: bool | None = None
    description: str | None = None


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Form of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Generating(RequestBody, kw_only=True):
    """Settings of generation."""

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
    max_tokens: Limit | None = None
    min_tokens: Annotated[int, msgspec.Meta(ge=0)] | None = None
    ignore_eos: bool | None = None
    response_format: ResponseFormat | None = None

    def sampling(self, choice: int, vocab_size: int) -> SamplingOptions:
        """Return the sampling options of all choices; each choice has separate random numbers.

        Raises:
            RequestError: an option is out of its range.
        """
        try:
            given_bias = self.logit_bias or {}
            if wrong := [token for token in given_bias if not (token.isascii() and token.isdigit())]:
                raise ValueError(f"{wrong[0]!r:.40} is not a token id")
            bias = {int(token): value for token, value in given_bias.items()}
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
            "min_new_tokens": self.min_tokens,
            "ignore_eos": self.ignore_eos,
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
            raise RequestError("stop: found an empty stop string", param="stop")
        return stops

    def check_stream(self) -> None:
        """Raise RequestError if a request without streaming has options for a stream."""
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options needs stream: true", param="stream_options")

    @property
    def progress(self) -> bool:
        """True if a stream reports the progress of the prompt; `return_progress` is llama.cpp's name."""
        in_options = self.stream_options is not None and self.stream_options.include_progress
        return in_options or bool(self.return_progress)

    @property
    def usage(self) -> bool:
        """True if a stream reports the counts at its end."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        """True if every event of a stream reports the counts so far."""
        return self.stream_options is not None and self.stream_options.continuous_usage_stats

    def check_ends(self, max_new_tokens: int) -> None:
        """Check the conditions under which an answer of at most `max_new_tokens` tokens ends.

        Raises:
            RequestError: an option conflicts with `response_format`, or `min_tokens` exceeds `max_new_tokens`.
        """
        formed = self.response_format is not None and self.response_format.type != "text"
        for name in ("ignore_eos", "min_tokens"):
            if formed and getattr(self, name):
                raise RequestError(
                    f"{name}: not supported with response_format, whose form ends the answer", param=name
                )
        if (self.min_tokens or 0) > max_new_tokens:
            raise RequestError(
                f"min_tokens is {self.min_tokens}, but the answer has at most {max_new_tokens} tokens",
                param="min_tokens",
            )


class ChatRequest(Generating, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1)]
    max_completion_tokens: Limit | None = None
    logprobs: bool | None = None
    top_logprobs: Likeliest | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    modalities: list[Literal["text"]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def max_new_tokens(self) -> int | None:
        """Maximum number of tokens of an answer; None for the rest of the context.

        Raises RequestError if `max_tokens` and `max_completion_tokens` differ.
        """
        older, newer = self.max_tokens, self.max_completion_tokens
        if older is not None and newer is not None and older != newer:
            raise RequestError(
                f"max_completion_tokens is {newer}, and max_tokens, its older name, is {older}; give one of them",
                param="max_tokens",
            )
        limit = older if newer is None else newer
        if limit == 0:
            raise RequestError("max_tokens: found 0, expected at least 1, or -1 for no limit", param="max_tokens")
        return None if limit == UNLIMITED else limit

    @property
    def num_likeliest(self) -> int | None:
        """Number of alternative tokens with log-probabilities; None if no log-probabilities are requested."""
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(Generating, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[Any]
    echo: bool | None = None
    logprobs: Likeliest | None = None
    suffix: str | None = None
    best_of: int | None = None
    parse_special: bool | None = None

    @property
    def max_new_tokens(self) -> int | None:
        """Maximum number of tokens of an answer; None for the rest of the context."""
        if self.max_tokens is None:
            return DEFAULT_COMPLETION_TOKENS
        return None if self.max_tokens == UNLIMITED else self.max_tokens

    @property
    def prompts(self) -> list[str | list[int]]:
        """Return the prompts; each prompt is a text or a list of token ids."""
        return _several("prompt", self.prompt)


class ScoreRequest(RequestBody, kw_only=True):
    """POST /v1/score: `text_1` before `text_2`, each one or several; the same number of both, or a single `text_1`."""

    text_1: str | Texts
    text_2: str | Texts


class RerankRequest(RequestBody, kw_only=True):
    """POST /v1/rerank."""

    query: str
    documents: Annotated[list[str | dict[str, Any]], msgspec.Meta(min_length=1, max_length=MOST_PROMPTS)]
    top_n: Count | None = None
    return_documents: bool = False


class EmbeddingRequest(RequestBody, kw_only=True):
    """POST /v1/embeddings."""

    input: str | list[Any]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Count | None = None

    @property
    def inputs(self) -> list[str | list[int]]:
        """Return the inputs; each input is a text or a list of token ids."""
        return _several("input", self.input)


class LoadAdapterRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/load_lora_adapter: a name, the path of an adapter in the server's folder of adapters, and a factor of
    its products.
    """

    lora_name: str
    lora_path: str
    lora_scale: float = 1.0


class UnloadAdapterRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/unload_lora_adapter: the name of an adapter."""

    lora_name: str


class TokenizeRequest(RequestBody, kw_only=True):
    """POST /tokenize: a text, or the messages of a chat."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True
    parse_special: bool = True
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(RequestBody, kw_only=True):
    """POST /detokenize."""

    tokens: list[int]


def _several(param: str, given: str | list[Any]) -> list[str | list[int]]:
    """Return the prompts; each prompt is a text or a list of token ids."""
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
    """Decode a request's body, without a leading byte order mark.

    Raises:
        RequestError: the body is not JSON, or not a valid request of the kind; the message names the field.
    """
    try:
        fields = given(msgspec.json.decode(body.removeprefix(BYTE_ORDER_MARK.encode())), set(kind.__struct_fields__))
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise RequestError(str(error), param=_field(str(error))) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the body is not JSON: {error}") from error


def _field(problem: str) -> str | None:
    """Return the field of a msgspec error: its path, with the name of a missing or unknown field appended."""
    place = re.search(r"at `\$\.?(.*?)`$", problem)
    name = re.search(r"(?:missing required|contains unknown) field `(.*?)`", problem)
    return ".".join(found[1] for found in (place, name) if found is not None and found[1]) or None
