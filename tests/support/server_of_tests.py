"""A server in a thread of this process, at a free port."""

import asyncio
import json
import socket
import threading
import time
from contextlib import contextmanager

import httpx
import uvicorn

from chunkrt.server.connections import Connections
from chunkrt.server.listening import make_config
from chunkrt.server.service import ServerOptions, Service

MOST_SECONDS_AT_END = 300


@contextmanager
def serving(engine, name="toy", **options):
    """Serve an engine in a thread; yield the service and its URL."""
    service = Service(engine, name, ServerOptions(**options))
    connections = Connections(service.options.max_connections, service.options.header_seconds)
    server = uvicorn.Server(make_config(service, "127.0.0.1", 0, connections))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()), daemon=True)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield service, f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(MOST_SECONDS_AT_END)
        assert not thread.is_alive(), "the server waits for a request or a connection"


class Raw:
    """An HTTP request over a socket, and the answer part by part."""

    def __init__(self, url, body, path="/v1/completions"):
        address = httpx.URL(url)
        self._socket = socket.create_connection((address.host, address.port), timeout=30)
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: {address.host}\r\nContent-Type: application/json\r\n"
        self._socket.sendall(f"{head}Connection: close\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content)
        self.received = b""

    def read_until(self, text):
        latest = time.monotonic() + 30
        while text not in self.received:
            part = self._socket.recv(65536)
            if not part or time.monotonic() > latest:
                self.close()
                raise AssertionError(self.received[:1000])
            self.received += part

    def read_all(self):
        while part := self._socket.recv(65536):
            self.received += part
        self.close()
        return self.received

    def close(self):
        self._socket.close()


def wait_until(holds):
    """Wait at most 30 seconds for a condition that other threads cause."""
    latest = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < latest
        time.sleep(0.01)


def occupancy(url):
    """Return the numbers of sequences in progress and of waiting requests, as the server reports them."""
    stats = httpx.get(f"{url}/stats").json()
    return stats["active_sequences"], stats["waiting_requests"]


def events_of(text):
    """Return the events of a stream that contain an object."""
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
