"""Errors in the form of OpenAI's API: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

from typing import Any

from starlette.responses import JSONResponse

from chunkrt.errors import BusyError, ChunkrtError, ClosedError, ConfigError, ConstraintError

RETRY_SECONDS = 1


class RequestError(Exception):
    """A refused request.

    Args:
        message: one line, with the suggested fix.
        status: HTTP status.
        param: name of the wrong field.
        code: an identifier for programs.
    """

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message, self.status, self.param, self.code = message, status, param, code


def as_request_error(error: Exception) -> RequestError:
    """Convert an error of the engine to the client's form."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, BusyError):
        return RequestError(str(error), status=503, code="busy")
    if isinstance(error, ClosedError):
        return RequestError("the server is shutting down", status=503, code="closing")
    if isinstance(error, ConstraintError):
        return RequestError(str(error), param="response_format", code="constraint_failed")
    if isinstance(error, ConfigError):
        return RequestError(str(error))
    if isinstance(error, ChunkrtError):
        return RequestError(str(error), status=500, code=type(error).__name__)
    return RequestError("the server failed; see its log", status=500, code="internal_error")


def error_body(error: RequestError) -> dict[str, Any]:
    """Return the body of an error response."""
    kinds = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 503: "server_busy"}
    kind = kinds.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def error_response(error: RequestError) -> JSONResponse:
    """Return an error response; if the cause is temporary, it says when to retry."""
    headers = {}
    if error.status == 503:
        headers["Retry-After"] = str(RETRY_SECONDS)
    elif error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(error_body(error), error.status, headers)
