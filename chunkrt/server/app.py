"""The application: routes, access checks and error responses."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import aclosing, suppress
from dataclasses import asdict
from functools import cache, partial
from importlib.resources import files
from typing import Any, TypeVar

from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from chunkrt.errors import ConfigError, ModelError
from chunkrt.server import embeddings, scores
from chunkrt.server.access import ANONYMOUS, Client, check_access
from chunkrt.server.answers import end
from chunkrt.server.chat import Chat
from chunkrt.server.completions import Completion
from chunkrt.server.errors import RequestError, as_request_error, error_body, error_response
from chunkrt.server.form import AnswerForm
from chunkrt.server.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    LoadAdapterRequest,
    RequestBody,
    RerankRequest,
    ScoreRequest,
    TokenizeRequest,
    UnloadAdapterRequest,
    read,
)
from chunkrt.server.service import Service

Result = TypeVar("Result")
Answer = Callable[[Service, HttpRequest], Awaitable[Response]]

OPEN_PATHS = ("/", "/health")
"""Paths that need no key."""
LINE_END = "\n"
"""End of a line of a stream, as in OpenAI's API: many clients split a stream where two of them follow each other."""
LOG = logging.getLogger("chunkrt.server")


class ClientGoneError(Exception):
    """The client has disconnected."""


def make_app(service: Service) -> Starlette:
    """Return the server's application."""
    answers: dict[str, tuple[str, Answer]] = {
        "/": ("GET", _page),
        "/health": ("GET", _health),
        "/metrics": ("GET", _metrics),
        "/stats": ("GET", _stats),
        "/v1/models": ("GET", _models),
        "/v1/models/{name:path}": ("GET", _model),
        "/v1/load_lora_adapter": ("POST", _load_adapter),
        "/v1/unload_lora_adapter": ("POST", _unload_adapter),
        "/v1/chat/completions": ("POST", _chat),
        "/v1/completions": ("POST", _completions),
        "/v1/embeddings": ("POST", _embeddings),
        "/v1/score": ("POST", _score),
        "/v1/rerank": ("POST", _rerank),
        "/tokenize": ("POST", _tokenize),
        "/detokenize": ("POST", _detokenize),
    }
    routes = [
        Route(written, _endpoint(service, path, answer), methods=[method])
        for path, (method, answer) in answers.items()
        for written in ((path,) if path.endswith(("/", "}")) else (path, f"{path}/"))
    ]
    middleware = []
    if service.options.allow_origin is not None:
        origins = [service.options.allow_origin]
        middleware = [
            Middleware(CORSMiddleware, allow_origins=origins, allow_methods=["GET", "POST"], allow_headers=["*"])
        ]
    app = Starlette(routes=routes, middleware=middleware, exception_handlers={HTTPException: _no_such_thing})
    app.router.redirect_slashes = False  # few clients repeat a body after a redirect
    return app


def _endpoint(service: Service, path: str, answer: Answer) -> Callable[[HttpRequest], Awaitable[Response]]:
    """Return an endpoint that checks access, reports errors as OpenAI's API does, and counts requests."""

    async def endpoint(http: HttpRequest) -> Response:
        try:
            http.state.client = client = check_access(service.options, http, needs_key=path not in OPEN_PATHS)
            if client.name:
                service.metrics.client_requests.labels(client.name).inc()
            response = await answer(service, http)
        except (ClientGoneError, ClientDisconnect):
            response = Response(status_code=499)
        except Exception as error:
            response = error_response(_noted(f"{http.method} {http.url.path}{_sent_by(http)}", error))
        service.metrics.requests.labels(path, response.status_code).inc()
        return response

    return endpoint


def _noted(what: str, error: Exception) -> RequestError:
    """Convert an error to the client's form; log it if the server caused it."""
    told = as_request_error(error)
    if told.status == 500:
        LOG.error("%s failed", what, exc_info=error)
    return told


def _sent_by(http: HttpRequest) -> str:
    """Return the name of the client's key, for the log."""
    client: Client = getattr(http.state, "client", ANONYMOUS)
    return f" of {client.name}" if client.name else ""


async def _no_such_thing(http: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what = f"{http.method} {http.url.path:.200}: {str(error.detail).lower()}"
    response = error_response(RequestError(what, status=error.status_code))
    response.headers.update(error.headers or {})
    return response


async def _body(service: Service, http: HttpRequest) -> bytearray:
    """Return the body. Raise RequestError if it is too long or arrives too late."""
    most = service.options.max_body_bytes
    too_long = RequestError(f"the body has more than {most} bytes", status=413)
    with suppress(ValueError):
        if int(http.headers.get("content-length", 0)) > most:
            raise too_long
    body = bytearray()
    try:
        async with asyncio.timeout(service.options.body_seconds):
            async for part in http.stream():
                body += part
                if len(body) > most:
                    raise too_long
    except TimeoutError as error:
        seconds = service.options.body_seconds
        raise RequestError(f"the body did not arrive within {seconds:g} s", status=408) from error
    return body


async def _while_connected(http: HttpRequest, work: Coroutine[Any, Any, Result]) -> Result:
    """Compute an answer. If the client disconnects, cancel the work and raise ClientGoneError."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(http))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return await task
    finally:
        await end([task, gone])
        del task, gone  # the traceback of the error refers to this frame, and this frame refers to the error


async def _disconnected(http: HttpRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


async def _respond(
    service: Service, http: HttpRequest, making: Coroutine[Any, Any, AnswerForm], *, stream: bool | None
) -> Response:
    answer = await _while_connected(http, making)
    if not stream:
        return JSONResponse(await _while_connected(http, answer.whole()))
    events = answer.events()
    await anext(events)  # an error of the request itself has a status; later errors are events
    return _EventStream(events, service.options.ping_seconds)


class _EventStream(EventSourceResponse):
    """Stream an admitted request: send its status at once and then its events, with comments in between."""

    def __init__(self, events: AsyncGenerator[Mapping[str, Any] | None], ping_seconds: float) -> None:
        super().__init__(
            _stream(events),
            ping=ping_seconds,
            ping_message_factory=lambda: ServerSentEvent(comment="ping", sep=LINE_END),
            headers={"Cache-Control": "no-store"},
        )
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._events.aclose()  # the client may disconnect before it requests the first event


async def _stream(events: AsyncGenerator[Mapping[str, Any] | None]) -> AsyncIterator[ServerSentEvent]:
    async with aclosing(events):
        try:
            async for event in events:
                if event is not None:
                    yield _event(event)
        except Exception as error:
            yield _event(error_body(_noted("a stream", error)))
        yield ServerSentEvent("[DONE]", sep=LINE_END)


def _event(value: Mapping[str, Any]) -> ServerSentEvent:
    return ServerSentEvent(json.dumps(value, ensure_ascii=False, separators=(",", ":")), sep=LINE_END)


async def _page(service: Service, http: HttpRequest) -> Response:
    text, policy = _read_page()
    return HTMLResponse(text, headers={"Content-Security-Policy": policy, "Referrer-Policy": "no-referrer"})


@cache
def _read_page() -> tuple[str, str]:
    """Return the chat page, with a policy that allows only the page's own script and style, and requests to this
    server."""
    text = files("chunkrt.server").joinpath("page.html").read_text("utf-8")
    rules = ["default-src 'none'", "img-src data:", "connect-src 'self'"]
    for tag in ("script", "style"):
        digest = base64.b64encode(hashlib.sha256(_between(text, tag).encode()).digest()).decode()
        rules.append(f"{tag}-src 'sha256-{digest}'")
    return text, "; ".join([*rules, "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'"])


def _between(text: str, tag: str) -> str:
    return text.partition(f"<{tag}>")[2].partition(f"</{tag}>")[0]


async def _health(service: Service, http: HttpRequest) -> Response:
    await service.beside(service.engine.loaded.check_ready)
    stats = service.engine.stats()
    seconds, most = stats.longest_task_s, service.options.stall_seconds
    if seconds > most:
        detail = f"a task has been running for {seconds:.0f} s; the limit is {most:g} s"
        return JSONResponse({"status": "stalled", "detail": detail}, status_code=503)
    npu = {} if stats.npu is None else {"npu": asdict(stats.npu)}
    return JSONResponse({"status": "ok", **npu})


async def _metrics(service: Service, http: HttpRequest) -> Response:
    return Response(service.metrics.text(), media_type=service.metrics.content_type)


async def _stats(service: Service, http: HttpRequest) -> Response:
    admission = service.engine.loaded.admission
    waits = {"active_sequences": admission.num_taken, "waiting_requests": admission.num_waiting}
    return JSONResponse({"model": service.name, **waits, **asdict(service.engine.stats())})


def _described(service: Service, adapter: str | None = None) -> dict[str, Any]:
    return {
        "id": adapter or service.name,
        "object": "model",
        "created": service.created,
        "owned_by": "chunkrt",
        "max_model_len": service.engine.context_length,
        **({} if adapter is None else {"parent": service.name}),
    }


async def _models(service: Service, http: HttpRequest) -> Response:
    described = [_described(service), *(_described(service, name) for name in service.engine.adapters)]
    return JSONResponse({"object": "list", "data": described})


async def _model(service: Service, http: HttpRequest) -> Response:
    name = http.path_params["name"].removesuffix("/")
    if name not in service.names:
        raise RequestError(
            f"the model {name!r:.200} is not served here; available: {', '.join(service.names)}",
            status=404,
            code="model_not_found",
        )
    return JSONResponse(_described(service, None if name == service.name else name))


async def _load_adapter(service: Service, http: HttpRequest) -> Response:
    request = read(await _body(service, http), LoadAdapterRequest)
    folder = service.adapter_folder().resolve()
    path = (folder / request.lora_path).resolve()
    if path == folder or not path.is_relative_to(folder):
        raise RequestError(
            f"lora_path: {request.lora_path!r:.200} is not in the server's folder of adapters", param="lora_path"
        )
    try:
        if request.lora_name == service.name:
            raise ConfigError(f"{request.lora_name!r} is the name of the model; choose another name")
        load = partial(service.engine.load_adapter, path, name=request.lora_name, scale=request.lora_scale)
        await service.beside(load)
    except (ConfigError, ModelError) as error:
        raise RequestError(str(error)) from error
    return JSONResponse(_described(service, request.lora_name))


async def _unload_adapter(service: Service, http: HttpRequest) -> Response:
    request = read(await _body(service, http), UnloadAdapterRequest)
    service.adapter_folder()
    try:
        service.engine.unload_adapter(request.lora_name)
    except ConfigError as error:
        raise RequestError(str(error), param="lora_name", status=404) from error
    return JSONResponse({"id": request.lora_name, "object": "model", "deleted": True})


def _salt(service: Service, http: HttpRequest, request: RequestBody) -> str | None:
    return service.cache_salt(http.state.client, request)


async def _chat(service: Service, http: HttpRequest) -> Response:
    request = read(await _body(service, http), ChatRequest)
    making = Chat.of(service, request, _salt(service, http, request))
    return await _respond(service, http, making, stream=request.stream)


async def _completions(service: Service, http: HttpRequest) -> Response:
    request = read(await _body(service, http), CompletionRequest)
    making = Completion.of(service, request, _salt(service, http, request))
    return await _respond(service, http, making, stream=request.stream)


async def _embeddings(service: Service, http: HttpRequest) -> Response:
    request = read(await _body(service, http), EmbeddingRequest)
    work = embeddings.embeddings(service, request, _salt(service, http, request))
    return JSONResponse(await _while_connected(http, work))


async def _score(service: Service, http: HttpRequest) -> Response:
    request = read(await _body(service, http), ScoreRequest)
    return JSONResponse(await _while_connected(http, scores.score(service, request, _salt(service, http, request))))


async def _rerank(service: Service, http: HttpRequest) -> Response:
    request = read(await _body(service, http), RerankRequest)
    return JSONResponse(await _while_connected(http, scores.rerank(service, request, _salt(service, http, request))))


async def _tokenize(service: Service, http: HttpRequest) -> Response:
    request = read(await _body(service, http), TokenizeRequest)
    if (request.prompt is None) == (request.messages is None):
        raise RequestError("give either a prompt or messages", param="prompt")
    if request.messages is not None:
        tokens = await service.beside(service.encode_chat, request.messages, None, request.chat_template_kwargs)
    else:
        assert request.prompt is not None
        prompt, special = request.prompt, request.add_special_tokens

        def encode() -> list[int]:
            service.check_length(prompt, "prompt")
            return service.tokenizer.encode(prompt, add_special=special, parse_special=request.parse_special)

        tokens = await service.beside(encode)
    length = service.engine.context_length
    return JSONResponse({"count": len(tokens), "max_model_len": length, "tokens": tokens})


async def _detokenize(service: Service, http: HttpRequest) -> Response:
    request = read(await _body(service, http), DetokenizeRequest)
    try:
        return JSONResponse({"prompt": await service.beside(service.tokenizer.decode, request.tokens)})
    except ConfigError as error:
        raise RequestError(str(error), param="tokens") from error
