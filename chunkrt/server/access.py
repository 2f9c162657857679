"""Who may ask: programs with the key, and pages of the server's own.

A browser sends whatever any page has it send to a server on this machine. Two things tell of such a page: the `Origin`
that browsers add, and, where a page's own name was made to lead here (DNS rebinding), the `Host`. A body that is
declared to be JSON cannot come from another page unless the server allows it beforehand.
"""

from __future__ import annotations

import hmac
import ipaddress
from urllib.parse import urlsplit

from starlette.requests import Request as HttpRequest

from chunkrt.server.errors import RequestError
from chunkrt.server.service import ServerOptions


def check_access(options: ServerOptions, http: HttpRequest, *, needs_key: bool) -> None:
    """Whether a request may be answered.

    Raises:
        RequestError: its host or its page is none that may ask, its key is not the right one, or its body not JSON.
    """
    host = http.headers.get("host")
    _check_host(options, host)
    _check_origin(options, http.headers.get("origin"), host)
    if needs_key and options.api_key is not None:
        _check_key(options.api_key, http.headers.get("authorization", ""))
    if http.method == "POST":
        _check_content_type(http.headers.get("content-type", ""))


def _check_host(options: ServerOptions, host: str | None) -> None:
    """An address cannot be made to lead elsewhere, as a name can. Browsers always send a host."""
    if host is None or "*" in options.allow_hosts:
        return
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        name = ""
    allowed = ("localhost", *(one.lower() for one in options.allow_hosts))
    if not _is_address(name) and name.rstrip(".") not in allowed:
        raise RequestError(
            f"the host {host!r} is not served here; ask by the address, or have the server allow it (--allow-host)",
            status=403,
            code="host_not_allowed",
        )


def _check_origin(options: ServerOptions, origin: str | None, host: str | None) -> None:
    """The server's own page may ask, and what is allowed to."""
    if origin is None or options.allow_origin in ("*", origin):
        return
    scheme, _, place = origin.partition("://")
    if scheme not in ("http", "https") or place != host:
        raise RequestError(
            f"pages of {origin!r} may not ask here; the server can allow it (--allow-origin)",
            status=403,
            code="origin_not_allowed",
        )


def _check_key(key: str, authorization: str) -> None:
    """In a time that does not tell how much of it is right."""
    scheme, _, given = authorization.partition(" ")
    if scheme.lower() != "bearer" or not hmac.compare_digest(given.encode(), key.encode()):
        raise RequestError(
            "the API key is missing or wrong; send it as 'Authorization: Bearer KEY'",
            status=401,
            code="invalid_api_key",
        )


def _check_content_type(content_type: str) -> None:
    if content_type.partition(";")[0].strip().lower() != "application/json":
        raise RequestError(
            f"the body is {content_type or 'of no declared type'}; send JSON as 'Content-Type: application/json'",
            status=415,
        )


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
