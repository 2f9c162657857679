"""POST /v1/completions: prompts without a template, continued."""

from __future__ import annotations

from chunkrt.engine.scoring import TokenLogProbabilities
from chunkrt.server.answers import Event, Prefilled, Wanted
from chunkrt.server.constraints import constraint_maker
from chunkrt.server.errors import RequestError
from chunkrt.server.form import AnswerForm, Json, LogProbabilities
from chunkrt.server.requests import CompletionRequest
from chunkrt.server.service import Service
from chunkrt.tokenizer import IncrementalDecoder


class Completion(AnswerForm):
    """A completion request, and the text of its choices so far."""

    id_prefix = "cmpl"
    kind = event_kind = "text_completion"

    @staticmethod
    async def of(service: Service, request: CompletionRequest, cache_salt: str | None) -> Completion:
        """Check the request. Raise RequestError if it asks for something unsupported."""
        adapter = service.check_model(request)
        request.check_stream()
        if request.suffix:
            raise RequestError("suffix: not supported; this model only continues texts", param="suffix")
        if request.best_of not in (None, request.n or 1):
            raise RequestError("best_of: not supported, because all choices are returned; use n", param="best_of")
        if request.echo and request.stream:
            raise RequestError("echo: not supported in a stream, which contains only new tokens", param="echo")
        max_new_tokens = request.max_new_tokens
        request.check_ends(service.engine.context_length if max_new_tokens is None else max_new_tokens)
        wanted = Wanted(
            max_new_tokens=max_new_tokens,
            sampling=service.sampling(request),
            stop=request.stops,
            likeliest=request.logprobs,
            constraint=await service.beside(constraint_maker, service, request.response_format),
            echo=bool(request.echo),
            progress=request.progress,
            cache_salt=cache_salt,
            adapter=adapter,
            follows_text=True,
        )

        def encode(text: str) -> list[int]:
            return service.tokenizer.encode(text, parse_special=request.parse_special is not False)

        prompts = await service.encode_all(request.prompts, "prompt", encode)
        return Completion(service, request, prompts, wanted)

    def _log_probabilities(self) -> LogProbabilities:
        return _LogProbabilityLists(self._service, follows_text=not self._wanted.echo)

    def _note(self, event: Event) -> None:
        super()._note(event)
        if not isinstance(event, Prefilled):
            return
        for choice in self._choices_of(event):
            if self._wanted.max_new_tokens == 0:
                self._reasons[choice] = "length"
            if self._wanted.echo:
                tokens = self._prompts[event.prompt]
                self._texts[choice] = self._service.tokenizer.decode(tokens)
                for token_id, told in zip(tokens, (None, *event.log_probabilities), strict=False):
                    self._told[choice].add(token_id, told)

    def _choice(self, index: int, text: str) -> Json:
        reason = self._reasons[index]
        return {"index": index, "text": text, "logprobs": self._take_told(index), "finish_reason": reason}

    def _begun(self, index: int) -> Json | None:
        return None if self._reasons[index] is None else self._choice(index, "")

    def _continued(self, index: int, text: str) -> Json:
        return self._choice(index, text)


class _LogProbabilityLists:
    """Log-probabilities as parallel lists: the tokens of a choice, and their log-probabilities."""

    def __init__(self, service: Service, *, follows_text: bool) -> None:
        self._service = service
        self._decoder = IncrementalDecoder(service.tokenizer, follows_text=follows_text)
        self._length = 0
        self._tokens: list[str] = []
        self._values: list[float | None] = []
        self._top: list[dict[str, float] | None] = []
        self._offsets: list[int] = []

    def add(self, token_id: int, told: TokenLogProbabilities | None) -> None:
        """See `LogProbabilities.add`."""
        self._tokens.append(self._name(token_id))
        self._values.append(None if told is None else told.own)
        top: dict[str, float] | None = None
        if told is not None:
            top = dict[str, float]()
            for other, value in (*told.top, (token_id, told.own)):
                name = self._name(other)  # tokens of a letter and of its byte have the same text
                top[name] = max(value, top.get(name, value))
        self._top.append(top)
        self._offsets.append(self._length)
        self._length += len(self._decoder.push(token_id))

    def take(self) -> Json:
        """See `LogProbabilities.take`."""
        found: Json = {
            "tokens": self._tokens,
            "token_logprobs": self._values,
            "top_logprobs": self._top,
            "text_offset": self._offsets,
        }
        self._tokens, self._values, self._top, self._offsets = [], [], [], []
        return found

    def _name(self, token_id: int) -> str:
        """Return the text of a token, or its bytes in OpenAI's notation if it does not consist of complete
        characters."""
        token = self._service.token_bytes(token_id)
        try:
            return token.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)
