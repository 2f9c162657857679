"""Access control: programs authenticate with a key; web pages are restricted to allowed origins.

A browser sends requests to a server on this machine for any page that it displays. Two headers reveal such a page: the
`Origin` that browsers add, and, if the page's own name was made to resolve to this machine (DNS rebinding), the `Host`.
A server with keys does not check the host, because a page cannot send an unknown key. A body that is declared as JSON
cannot come from another page unless the server allows its origin in a preflight request.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.requests import Request as HttpRequest

from chunkrt.server.errors import RequestError
from chunkrt.server.service import ServerOptions


@dataclass(frozen=True, kw_only=True)
class Client:
    """The sender of a request.

    Attributes:
        name: name of the client's key, for logs and metrics.
        cache_salt: salt that separates the prefixes of this client from those of others.
    """

    name: str = ""
    cache_salt: str = ""


ANONYMOUS = Client()


def check_access(options: ServerOptions, http: HttpRequest, *, needs_key: bool) -> Client:
    """Return the sender of a request if it is allowed.

    Raises:
        RequestError: the host or origin is not allowed, the key is missing or wrong, or the body is not declared as
            JSON.
    """
    host = http.headers.get("host")
    if not options.api_keys:
        _check_host(options, host)
    _check_origin(options, http.headers.get("origin"), host)
    client = ANONYMOUS
    if needs_key and options.api_keys:
        client = _find_client(options.api_keys, http.headers.get("authorization", ""))
    if http.method == "POST":
        _check_content_type(http.headers.get("content-type", ""))
        _check_encoding(http.headers.get("content-encoding", ""))
    return client


def _check_host(options: ServerOptions, host: str | None) -> None:
    """Raise RequestError for a host name that is not allowed. Addresses are safe, because DNS cannot redirect them."""
    if host is None or "*" in options.allow_hosts:
        return
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        name = ""
    allowed = ("localhost", *(one.lower() for one in options.allow_hosts))
    if not _is_address(name) and name.rstrip(".") not in allowed:
        raise RequestError(
            f"host {host!r} is not allowed; use the address, or start the server with --allow-host",
            status=403,
            code="host_not_allowed",
        )


def _check_origin(options: ServerOptions, origin: str | None, host: str | None) -> None:
    """Raise RequestError unless the origin is the server's own page or is allowed."""
    if origin is None or options.allow_origin in ("*", origin):
        return
    scheme, _, place = origin.partition("://")
    if scheme not in ("http", "https") or place != host:
        raise RequestError(
            f"origin {origin!r} is not allowed; start the server with --allow-origin",
            status=403,
            code="origin_not_allowed",
        )


def _find_client(keys: Mapping[str, str], authorization: str) -> Client:
    """Return the client whose key was sent, in a time that does not depend on the number of correct characters."""
    scheme, _, given = authorization.partition(" ")
    digest = _digest(given)
    matches = [name for name, key in keys.items() if hmac.compare_digest(digest, _digest(key))]
    if scheme.lower() != "bearer" or not matches:
        raise RequestError(
            "the API key is missing or wrong; send it as 'Authorization: Bearer KEY'",
            status=401,
            code="invalid_api_key",
        )
    # The salt is derived from the key and not from its name: a new key under an old name must not find the old key's
    # prefixes.
    return Client(name=matches[0], cache_salt=digest.hex())


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogatepass")).digest()


def _check_content_type(content_type: str) -> None:
    if content_type.partition(";")[0].strip().lower() != "application/json":
        raise RequestError(
            f"the body is {content_type or 'of no declared type'}; send JSON as 'Content-Type: application/json'",
            status=415,
        )


def _check_encoding(encoding: str) -> None:
    if encoding.strip().lower() not in ("", "identity"):
        raise RequestError(
            f"the body is encoded as {encoding!r}, which is not supported; send it without Content-Encoding",
            status=415,
        )


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
