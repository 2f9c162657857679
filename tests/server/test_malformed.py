"""Malformed requests of all kinds: each is answered with a client error, and the server continues."""

import contextlib
import json
import logging
import socket
from random import Random

import httpx
import psutil
import pytest
from server_of_tests import occupancy, wait_until

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/score", "/v1/rerank", "/v1/embeddings", "/tokenize")
SOUND = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1},
    "/v1/completions": {"prompt": "hi", "max_tokens": 1},
    "/v1/score": {"text_1": "hi", "text_2": ["you", "there"]},
    "/v1/rerank": {"query": "hi", "documents": ["you", "there"]},
    "/v1/embeddings": {"input": "hi"},
    "/tokenize": {"prompt": "hi"},
}
VALUES = (
    None, True, -1, 0, 1, 2**63, -(2**70), 1e308, -0.0, "", "a", "\ud800", "\0", [], [[]], [None], [1, "a"], {},
    {"a": 1}, {"role": "user"}, [{"role": 1, "content": {}}], {"type": "json_schema"}, [[[[1]]]], "x" * 5000, [0] * 300,
)  # fmt: skip
FIELDS = (
    "model", "prompt", "messages", "n", "max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "stream",
    "stream_options", "logprobs", "top_logprobs", "logit_bias", "response_format", "tools", "echo", "suffix", "text_1",
    "documents", "query", "top_n", "input", "user", "nothing", "presence_penalty", "max_completion_tokens", "best_of",
)  # fmt: skip


def make_body(random, path):
    """Return a valid body with one changed value."""
    body = dict(SOUND[path])
    for _ in range(random.randint(1, 3)):
        body[random.choice(FIELDS)] = random.choice(VALUES)
    text = json.dumps(body).encode()
    kind = random.randrange(6)
    if kind == 0:
        place = random.randrange(len(text))
        text = text[:place] + bytes([random.randrange(256)]) + text[place + 1 :]
    elif kind == 1:
        text = text[: random.randrange(len(text))]
    return text


@pytest.mark.parametrize("number", [200, pytest.param(10_000, marks=pytest.mark.slow)])
def test_malformed_requests(served, number, caplog):
    _, url = served
    random, statuses = Random(5), set()
    process, before = psutil.Process(), None
    with httpx.Client(base_url=url, timeout=60) as client, caplog.at_level(logging.ERROR):
        for count in range(number):
            path = random.choice(PATHS)
            body = make_body(random, path)
            answer = client.post(path, content=body, headers={"Content-Type": "application/json"})
            assert answer.status_code in (200, 400, 404), (path, body, answer.text)
            if answer.status_code != 200:
                assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
            statuses.add(answer.status_code)
            if count == number // 5:
                before = process.memory_info().rss
        assert client.get("/health").status_code == 200
    assert statuses >= {200, 400}
    assert caplog.records == []
    wait_until(lambda: occupancy(url) == (0, 0))
    assert process.memory_info().rss < before + 64 * 2**20


@pytest.mark.parametrize(
    "raw",
    [
        b"\r\n\r\n",
        b"GET\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999999999999\r\n\r\n{}",
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n",
        b"GET / HTTP/1.1\r\n" + b"X: " + b"a" * 200_000 + b"\r\n\r\n",
        b"GET /\xff\xfe HTTP/1.1\r\nHost: a\r\n\r\n",
    ],
)
def test_invalid_http_ends_only_its_connection(served, raw):
    _, url = served
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        received = b""
        with contextlib.suppress(OSError):  # the server may have ended it already
            connection.sendall(raw)
            connection.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            while part := connection.recv(65536):
                received += part
    assert received == b"" or received.startswith(b"HTTP/1.1 4")
    assert httpx.get(f"{url}/health").status_code == 200


@pytest.mark.parametrize("is_answered", [False, True], ids=["at once", "after the answer"])
def test_malformed_body_of_an_unknown_path_is_answered_once(served, caplog, is_answered):
    """The application answers an unknown path without reading the body."""
    address = httpx.URL(served[1])
    errors = logging.getLogger("uvicorn.error")
    errors.addHandler(caplog.handler)
    try:
        with socket.create_connection((address.host, address.port), timeout=20) as connection:
            head = b"POST /nothing HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n"
            connection.sendall(head if is_answered else head + b"ZZ\r\n")
            received = connection.recv(65536)
            if is_answered:
                connection.sendall(b"ZZ\r\n")
            with contextlib.suppress(ConnectionResetError):
                while part := connection.recv(65536):
                    received += part
    finally:
        errors.removeHandler(caplog.handler)
    assert received.startswith(b"HTTP/1.1 404" if is_answered else b"HTTP/1.1 400")
    assert received.count(b"HTTP/1.1") == 1
    assert [record.getMessage() for record in caplog.records] == []


def test_errors_do_not_repeat_a_long_path_or_name(served):
    long = "x" * 20000
    for answer in (
        httpx.get(f"{served[1]}/{long}"),
        httpx.get(f"{served[1]}/v1/models/{long}"),
        httpx.post(f"{served[1]}/v1/completions", json=SOUND["/v1/completions"] | {"model": long}),
    ):
        assert answer.status_code == 404
        assert len(answer.text) < 500
