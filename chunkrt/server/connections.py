"""Bounds on connections: their number is limited, and a client has to send its request in time.

Each connection takes a file descriptor. Clients that connect and send nothing, or one byte a second, would exhaust the
descriptors and block all other clients. So a connection without a request ends after `header_seconds`. If too many
connections are open, the one that has waited for its client the longest is closed at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from itertools import islice
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

LOG = logging.getLogger("chunkrt.server")
WANTED_FILES = 16384
MACOS_FILES = 10240
"""Maximum number of open files of a process on macOS, where the reported limit is higher."""
FEWEST_CONNECTIONS = 8
BUSY = b"503 Service Unavailable"


def raise_file_limit() -> int | None:
    """Raise the soft limit of open files as far as the hard limit allows; return it, or None if no limit exists."""
    if sys.platform == "win32":
        return None
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    for wanted in (WANTED_FILES, MACOS_FILES):
        wanted = wanted if hard == unlimited else min(wanted, hard)
        if soft == unlimited or soft >= wanted:
            break
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    return None if soft == unlimited else soft


class Connections:
    """Bounds of a server's connections.

    Args:
        most: maximum number of connections at a time.
        header_seconds: time within which the headers of a request have to arrive.
        files: maximum number of files that the process may open; half of this number is reserved for the model and its
            caches. None for no limit.
    """

    def __init__(self, most: int, header_seconds: float, files: int | None = None) -> None:
        self.header_seconds = header_seconds
        self.most = most if files is None else min(most, max(files // 2, FEWEST_CONNECTIONS))
        self.waiting: dict[BoundedProtocol, None] = {}
        """Connections that wait for their client; the longest wait is first."""
        self._next_complaint = 0.0

    @property
    def backlog(self) -> int:
        """Number of connections that the event loop accepts at once, before the protocol handles the first one."""
        return min(2048, max(self.most // 4, FEWEST_CONNECTIONS))

    def protocol(self) -> type[H11Protocol]:
        """Return the protocol of a connection, as uvicorn expects it."""
        return type("BoundedProtocol", (BoundedProtocol,), {"bounds": self})

    def end_oldest(self, number: int) -> None:
        """Close connections that wait for their client, the oldest first."""
        for protocol in list(islice(self.waiting, number)):
            protocol.dismiss(BUSY if protocol.has_begun else None)

    def handle_exception(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Handle errors of an event loop. If no connection can be accepted, close some, and log the problem once a
        second."""
        if "accept" not in context.get("message", "").lower():
            loop.default_exception_handler(context)
            return
        if (now := time.monotonic()) >= self._next_complaint:  # the loop reports each connection in the backlog
            self._next_complaint = now + 1
            self.end_oldest(max(1, len(self.waiting) // 2))
            error = context.get("exception")
            LOG.error("cannot accept connections: %s; raise the limit of open files (ulimit -n)", error)


class BoundedProtocol(H11Protocol):
    """Uvicorn's protocol of a connection, with bounds."""

    bounds: Connections
    _timer: asyncio.TimerHandle | None = None
    has_begun = False
    """True if a part of a request's headers has arrived."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See `asyncio.Protocol`."""
        super().connection_made(transport)
        self._follow()
        if len(self.connections) > self.bounds.most:
            if next(iter(self.bounds.waiting), self) is self:  # the other connections have requests in progress
                self.dismiss(BUSY)
            else:
                self.bounds.end_oldest(1)

    def connection_lost(self, error: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._forget()
        super().connection_lost(error)

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        self.has_begun = True
        super().data_received(data)
        self._follow()

    def on_response_complete(self) -> None:
        """See `H11Protocol`."""
        super().on_response_complete()
        self._follow()

    def send_400_response(self, msg: str) -> None:
        """Refuse a malformed request, unless its answer has begun. The application sends no further answer."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()

    def dismiss(self, status: bytes | None) -> None:
        """Close the connection, after sending a status if one is given and no answer has begun."""
        self._forget()
        self.connections.discard(self)
        if status is not None and self.conn.our_state is h11.IDLE:
            self.transport.write(b"HTTP/1.1 %s\r\nConnection: close\r\nContent-Length: 0\r\n\r\n" % status)
        self.transport.close()

    def _time_out(self) -> None:
        self.dismiss(b"408 Request Timeout" if self.has_begun else None)

    def _follow(self) -> None:
        """Update whether the connection waits for its client, and its deadline."""
        if self.transport.is_closing():
            self._forget()
            return
        has_request = self.cycle is not None and not self.cycle.response_complete
        if has_request and not self.cycle.more_body:
            self.bounds.waiting.pop(self, None)
        else:
            self.bounds.waiting.setdefault(self)
        if has_request:
            self.has_begun = False
            self._stop_timer()
        elif self._timer is None:
            self._timer = self.loop.call_later(self.bounds.header_seconds, self._time_out)

    def _forget(self) -> None:
        self.bounds.waiting.pop(self, None)
        self._stop_timer()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
