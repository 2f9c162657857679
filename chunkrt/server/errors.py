"""Errors as OpenAI's API tells them: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

from typing import Any

from starlette.responses import JSONResponse

from chunkrt.errors import BusyError, ChunkrtError, ClosedError, ConfigError, ConstraintError

RETRY_SECONDS = 1


class RequestError(Exception):
    """What was asked for is refused.

    Args:
        message: one line, and what to send instead.
        status: of HTTP.
        param: the field that is wrong.
        code: a word for programs.
    """

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message, self.status, self.param, self.code = message, status, param, code


def as_request_error(error: Exception) -> RequestError:
    """An error of the engine's, as a client is told of it."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, BusyError):
        return RequestError(str(error), status=503, code="busy")
    if isinstance(error, ClosedError):
        return RequestError("the server is about to end", status=503, code="closing")
    if isinstance(error, ConstraintError):
        return RequestError(str(error), param="response_format", code="constraint_failed")
    if isinstance(error, ConfigError):
        return RequestError(str(error))
    if isinstance(error, ChunkrtError):
        return RequestError(str(error), status=500, code=type(error).__name__)
    return RequestError("the server failed; its log says more", status=500, code="internal_error")


def error_body(error: RequestError) -> dict[str, Any]:
    """The body that tells an error."""
    kinds = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 503: "server_busy"}
    kind = kinds.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def error_response(error: RequestError) -> JSONResponse:
    """The answer that tells an error; one that may be gone in a moment says when to come again."""
    headers = {}
    if error.status == 503:
        headers["Retry-After"] = str(RETRY_SECONDS)
    elif error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(error_body(error), error.status, headers)
