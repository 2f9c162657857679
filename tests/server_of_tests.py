"""A server in a thread of this process, at a free port."""

import asyncio
import threading
import time
from contextlib import contextmanager

import uvicorn

from chunkrt.server.app import make_app
from chunkrt.server.service import ServerOptions, Service


@contextmanager
def serving(engine, name="toy", **options):
    """Serves an engine; the service and its URL."""
    service = Service(engine, name, ServerOptions(**options))
    server = uvicorn.Server(uvicorn.Config(make_app(service), port=0, log_level="error", lifespan="off"))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()))
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield service, f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()


def wait_until(holds):
    """Wait for what comes about in other threads, at most 30 seconds."""
    latest = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < latest
        time.sleep(0.01)
