"""Connections that send no data, or too slowly, and more connections than files."""

import socket
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager, suppress

import httpx
import pytest
from server_of_tests import serving, wait_until

SECONDS = 60
REQUEST = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
BEGIN = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX-A: "


def connect(url):
    parsed = httpx.URL(url)
    return socket.create_connection((parsed.host, parsed.port), timeout=SECONDS)


def rest_of(connection):
    """Return everything that a connection receives until its end."""
    received = b""
    with suppress(ConnectionResetError):
        while part := connection.recv(65536):
            received += part
    return received


def is_open(connection):
    """Return True unless the server has ended a connection."""
    connection.setblocking(False)
    try:
        return connection.recv(1) != b""
    except BlockingIOError:
        return True
    except ConnectionResetError:
        return False
    finally:
        connection.settimeout(SECONDS)


def trickles_until_it_ends(connection):
    """Send a byte now and then; return True once the server has ended the connection."""
    with suppress(ConnectionError):
        for _ in range(SECONDS * 10):
            connection.sendall(b"a")
            time.sleep(0.1)
        return False
    return True


@pytest.fixture(scope="module")
def hurried(engine):
    with serving(engine, header_seconds=0.5) as (_, url):
        yield url


def test_a_connection_that_sends_nothing_is_ended(hurried):
    with connect(hurried) as silent:
        assert rest_of(silent) == b""


@pytest.mark.parametrize("before", [b"", REQUEST], ids=["the first request", "another one"])
def test_headers_that_trickle_are_ended(hurried, before):
    with connect(hurried) as slow:
        slow.sendall(before + BEGIN)
        assert trickles_until_it_ends(slow)


def test_headers_that_stop_are_answered_408(hurried):
    with connect(hurried) as slow:
        slow.sendall(BEGIN)
        received = rest_of(slow)
    assert received.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
    assert b"connection: close" in received.lower()


def test_a_request_may_take_longer_than_its_headers(hurried):
    body = {"prompt": "hello", "max_tokens": 100, "ignore_eos": True, "stream": True, "n": 8}
    with httpx.Client(base_url=hurried, timeout=SECONDS) as client:
        for _ in range(3):  # over one connection
            assert client.post("/v1/completions", json=body).text.count("[DONE]") == 1
            time.sleep(0.3)

        def slowly():
            for part in (b'{"prompt": ', b'"hello", ', b'"max_tokens": 1}'):
                time.sleep(0.4)
                yield part

        headers = {"Content-Type": "application/json"}
        assert client.post("/v1/completions", content=slowly(), headers=headers).status_code == 200


def test_requests_over_one_connection_may_come_together(hurried):
    with connect(hurried) as connection:
        connection.sendall(REQUEST * 3)
        assert rest_of(connection).count(b"HTTP/1.1 200") == 3


def test_surplus_connections_end_the_one_that_waited_longest(engine):
    with serving(engine, max_connections=4) as (_, url), ExitStack() as stack:
        silent = [stack.enter_context(connect(url)) for _ in range(4)]
        time.sleep(0.2)
        assert all(map(is_open, silent))
        assert httpx.get(f"{url}/health").status_code == 200
        wait_until(lambda: not is_open(silent[0]))
        assert all(map(is_open, silent[1:]))


def test_surplus_connections_leave_requests_in_progress_alone(engine):
    body = {"prompt": ["hello"] * 50, "max_tokens": 100, "ignore_eos": True, "stream": True, "temperature": 0}
    with serving(engine, max_connections=4) as (_, url), ExitStack() as stack:
        streams = []
        for _ in range(4):
            request = httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=SECONDS)
            streams.append(stack.enter_context(request).iter_lines())
            next(streams[-1])
        with connect(url) as refused:
            assert rest_of(refused).startswith(b"HTTP/1.1 503 ")
        for lines in streams:
            assert "error" not in "".join(next(lines) for _ in range(8))


if sys.platform != "win32":
    LIMITED = """
import os, resource, sys
soft, hard, taken = map(int, sys.argv[1:4])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
files = [os.open("/dev/null", os.O_RDONLY) for _ in range(taken)]
sys.argv = ["chunkrt", *sys.argv[4:]]
from chunkrt.cli import main
main()
"""


@contextmanager
def limited(folder, soft, hard, taken=0):
    """Serve in a process with a limit of open files, some of which are taken; return the process and its URL."""
    command = [sys.executable, "-P", "-c", LIMITED, str(soft), str(hard), str(taken)]
    command += ["serve", str(folder), "--port", "0", "--threads", "1", "--npu", "native"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        line = process.stderr.readline()
        assert " is served at " in line, line + process.stderr.read()
        yield process, line.partition(" is served at ")[2].partition(" ")[0]
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def errors_of(process):
    process.terminate()
    return process.communicate(timeout=SECONDS)[1]


@pytest.mark.skipif(sys.platform == "win32", reason="limits of open files are POSIX's")
def test_the_limit_of_open_files_is_raised(chat_folder):
    with limited(chat_folder, 100, 1000) as (process, url), ExitStack() as stack:
        silent = [stack.enter_context(connect(url)) for _ in range(300)]
        assert httpx.get(f"{url}/health", timeout=SECONDS).status_code == 200
        assert all(map(is_open, silent))
        assert errors_of(process) == ""


@pytest.mark.skipif(sys.platform == "win32", reason="limits of open files are POSIX's")
@pytest.mark.parametrize("taken", [0, 100], ids=["half of the files", "fewer files than connections"])
def test_silent_connections_do_not_stop_the_service(chat_folder, taken):
    with limited(chat_folder, 200, 200, taken) as (process, url), ExitStack() as stack:
        for _ in range(250):
            stack.enter_context(connect(url))
        for _ in range(3):
            assert httpx.get(f"{url}/health", timeout=SECONDS).status_code == 200
        body = {"prompt": "hello", "max_tokens": 3}
        assert httpx.post(f"{url}/v1/completions", json=body, timeout=SECONDS).status_code == 200
        errors = errors_of(process)
    assert "Traceback" not in errors
    assert len(errors.splitlines()) < 30
    assert [line for line in errors.splitlines() if "cannot accept connections: " not in line] == []
    assert bool(errors) == bool(taken)
