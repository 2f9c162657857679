"""Serve at an address until a signal arrives, with uvicorn and our own shutdown sequence.

At the end of the grace period, uvicorn cancels the remaining requests, which is logged as failures with tracebacks.
From Python 3.12 on, a second signal still waits for clients. With our sequence, clients get an error that reports the
shutdown, and then the connections are closed.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from socket import socket

import uvicorn

from chunkrt.errors import ConfigError
from chunkrt.server.app import make_app
from chunkrt.server.connections import Connections, raise_file_limit
from chunkrt.server.service import Service

LOG = logging.getLogger("uvicorn.error")
LAST_SECONDS = 1.0
"""Number of seconds in which clients are informed that their answers were ended."""


def make_config(service: Service, host: str, port: int, connections: Connections) -> uvicorn.Config:
    """Return uvicorn's configuration of a service."""
    return uvicorn.Config(
        make_app(service),
        host=host,
        port=port,
        headers=[("X-Content-Type-Options", "nosniff")],
        http=connections.protocol(),
        ws="none",
        backlog=connections.backlog,
        log_level="error",
        access_log=False,
        lifespan="off",
    )


async def listen(
    service: Service,
    host: str,
    port: int,
    *,
    grace_seconds: float,
    tell: Callable[[str], None],
    on_end: Callable[[], None] = lambda: None,
) -> None:
    """Serve until SIGTERM or an interrupt.

    After the signal, accept no new requests, refuse the waiting requests, and let requests in progress finish within
    `grace_seconds`. A second signal ends these at once.

    Args:
        port: the port; 0 for a free one.
        `tell`: called with the URL once the server accepts requests.
        on_end: called when the shutdown begins. A task that never returns delays it.

    Raises:
        ConfigError: the server cannot listen at the address.
    """
    options = service.options
    connections = Connections(options.max_connections, options.header_seconds, raise_file_limit())
    asyncio.get_running_loop().set_exception_handler(connections.handle_exception)
    server = _Server(make_config(service, host, port, connections), service, grace_seconds, tell, on_end)
    try:
        await server.serve()
    except SystemExit as error:  # from uvicorn, if it cannot listen
        where, problem = _authority(host, port), "; ".join(server.complaints)
        raise ConfigError(f"cannot listen at {where} ({problem}); choose another --host or --port") from error


class _Server(uvicorn.Server):
    def __init__(
        self,
        config: uvicorn.Config,
        service: Service,
        grace_seconds: float,
        tell: Callable[[str], None],
        on_end: Callable[[], None],
    ) -> None:
        super().__init__(config)
        self._on_end = on_end
        self._service, self._grace_seconds, self._tell = service, grace_seconds, tell
        self._hurry = asyncio.Event()
        self.complaints: list[str] = []
        """Log messages of uvicorn that explain why it cannot listen; the caller reports them in one line."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do not raise the signal again at the end, as uvicorn does."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                loop.add_signal_handler(number, self._end)
            except NotImplementedError:  # Windows
                signal.signal(number, lambda *_: loop.call_soon_threadsafe(self._end))
                wakeup = signal.set_wakeup_fd(-1)
                signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)  # a full buffer wakes the loop, too
        yield

    async def startup(self, sockets: list[socket] | None = None) -> None:
        """Report the URL once the server listens."""
        LOG.addFilter(self._keep)
        try:
            await super().startup(sockets)
        finally:
            LOG.removeFilter(self._keep)
        if not self.should_exit:
            host, port, *_ = self.servers[0].sockets[0].getsockname()
            self._tell(f"http://{_authority(host, port)}")

    async def shutdown(self, sockets: list[socket] | None = None) -> None:
        """Stop without uvicorn's own wait for connections."""
        self._on_end()
        ending = asyncio.create_task(self._end_in_time())
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()

    def _keep(self, record: logging.LogRecord) -> bool:
        self.complaints.append(record.getMessage())
        return False

    def _end(self) -> None:
        if self.should_exit:
            self._hurry.set()
        self.should_exit = True
        self._service.close()

    async def _end_in_time(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(self._grace_seconds):
                await self._hurry.wait()
        self._service.close(ends_all=True)
        await asyncio.sleep(LAST_SECONDS)
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def _authority(host: str, port: int) -> str:
    """Return a host and a port as they appear in URLs."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
