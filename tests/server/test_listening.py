"""A server in a process of its own: start and shutdown."""

import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress

import httpx
import pytest
from one_line import expect_one_line
from server_of_tests import events_of

SECONDS = 60
LONG = {"prompt": "hello", "max_tokens": 110, "temperature": 0, "logit_bias": {"2": -100}, "stream": True}

if sys.platform == "win32":
    pytest.skip("signals of processes are POSIX's", allow_module_level=True)


class Process:
    def __init__(self, process):
        self.process = process
        self.err = process.stderr.readline()
        self.url = self.err.partition(" is served at ")[2].partition(" ")[0]

    def signal(self, number=signal.SIGTERM):
        self.process.send_signal(number)

    def wait_until_it_ends(self):
        """Wait until the server accepts no more connections."""
        url = httpx.URL(self.url)
        with suppress(ConnectionRefusedError, ConnectionResetError):
            while True:
                socket.create_connection((url.host, url.port), timeout=SECONDS).close()

    def end(self):
        """Return its exit status, and its output apart from the URL; fail if it takes too long."""
        _, err = self.process.communicate(timeout=SECONDS)
        return self.process.returncode, err


@pytest.fixture
def serve(chat_folder):
    @contextmanager
    def serve(*arguments, model=chat_folder):
        command = [sys.executable, "-P", "-m", "chunkrt", "serve", str(model), "--port", "0", "--threads", "1"]
        process = subprocess.Popen([*command, *map(str, arguments)], stderr=subprocess.PIPE, text=True)
        try:
            yield Process(process)
        finally:
            process.kill()
            process.wait()
            process.stderr.close()

    return serve


HUNG = """
import sys, threading
from chunkrt.runtime.buffers import BoundSubgraph
BoundSubgraph.run = lambda *_: threading.Event().wait()
from chunkrt.__main__ import main
sys.argv = ["chunkrt", *sys.argv[1:]]
main()
"""
"""The command, with a device that never answers."""


def test_server_with_a_hanging_device_ends_after_its_grace_period(chat_folder):
    command = [sys.executable, "-P", "-c", HUNG, "serve", str(chat_folder), "--port", "0", "--threads", "1"]
    process = subprocess.Popen([*command, "--grace", "0.2"], stderr=subprocess.PIPE, text=True)
    try:
        server = Process(process)

        def ask():
            with suppress(httpx.HTTPError):
                httpx.post(f"{server.url}/v1/completions", json={"prompt": "hello"}, timeout=SECONDS)

        thread = threading.Thread(target=ask)
        thread.start()
        while httpx.get(f"{server.url}/stats").json()["longest_task_s"] == 0:
            pass
        server.signal()
        status, err = server.end()
        thread.join()
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
    assert (status, err.splitlines()[-1]) == (
        1,
        "chunkrt: a task did not end within 5.2 s; is the device stuck?",
    )


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_shutdown_finishes_running_requests_and_refuses_waiting_ones(serve, number):
    refused = []

    def wait(url):
        refused.append(httpx.post(f"{url}/v1/completions", json=LONG | {"stream": False}, timeout=SECONDS))

    with serve("--max-sessions", 16) as server:
        assert server.err.startswith("engine is served at http://127.0.0.1:")
        with httpx.stream("POST", f"{server.url}/v1/completions", json=LONG | {"n": 16}, timeout=SECONDS) as answer:
            lines = answer.iter_lines()
            next(lines)
            thread = threading.Thread(target=wait, args=(server.url,))
            thread.start()
            while httpx.get(f"{server.url}/stats").json()["waiting_requests"] == 0:
                assert thread.is_alive()
            server.signal(number)
            thread.join()
            events = events_of("\n".join(lines))
        status, err = server.end()
    assert (refused[0].status_code, refused[0].json()["error"]["code"]) == (503, "closing")
    reasons = [choice["finish_reason"] for event in events for choice in event["choices"]]
    assert reasons.count("length") == 16
    assert (status, err) == (0, "")


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("again", [False, True], ids=["the time is over", "a second signal"])
def test_shutdown_reports_interrupted_requests(serve, again):
    """Within the given grace period, also a fraction of a second, and without a traceback."""
    with serve("--grace", 300 if again else 0.3, "--max-waiting", 2000) as server:
        body = LONG | {"prompt": ["hello"] * 2000}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=SECONDS) as answer:
            lines = answer.iter_lines()
            next(lines)
            server.signal()
            if again:
                server.wait_until_it_ends()  # a pending signal hides another one
                server.signal()
            events = events_of("\n".join(lines))
        status, err = server.end()
    assert events[-1]["error"]["code"] == "closing"
    assert (status, err) == (0, "")


def test_client_that_does_not_read_delays_no_shutdown(serve):
    with serve("--grace", 0) as server:
        body = LONG | {"prompt": ["hello"] * 2000, "logprobs": 20}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=SECONDS):
            time.sleep(1)
            server.signal()
            status, err = server.end()
    assert (status, err) == (0, "")


def test_a_port_that_is_taken_prints_one_line(command, chat_folder):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        expect_one_line(command("serve", chat_folder, "--port", port), f"cannot listen at 127.0.0.1:{port} (")


@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_an_address_of_ipv6_may_be_in_brackets(serve, host):
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"this machine has no IPv6: {error}")
    with serve("--host", host) as server:
        assert server.url.startswith("http://[::1]:")
        assert httpx.get(f"{server.url}/health").status_code == 200


def test_an_address_of_ipv6_that_is_not_here_prints_one_line(command, chat_folder):
    outcome = command("serve", chat_folder, "--host", "[2001:db8::1]", "--port", "1", "--no-api-key")
    expect_one_line(outcome, "cannot listen at [2001:db8::1]:1 (")


def test_allow_host_accepts_a_name(serve):
    with serve("--allow-host", "box.lan") as server:
        assert httpx.get(f"{server.url}/health", headers={"Host": "box.lan"}).status_code == 200
        assert httpx.get(f"{server.url}/health", headers={"Host": "other.lan"}).status_code == 403


def test_served_name_of_a_folder_is_its_last_part(serve, chat_folder, monkeypatch):
    monkeypatch.chdir(chat_folder)
    with serve(model=".") as server:
        assert server.err.startswith(f"{chat_folder.name} is served at ")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *(
            (f"# the keys\none: sound\n{key}", "line 3, holds no API key: expected")
            for key in ("two words", "schlüssel", "ключ", "a\x01b", "name: two words", ": key")
        ),
        *((text, "holds no API key; expected lines") for text in ("", "\n", "# only a comment\n")),
        *((text, "line 2: the name or the key") for text in ("one: a\none: b", "one: a\ntwo: a", "a\na")),
    ],
)
def test_a_file_without_keys_that_clients_could_send_is_refused(command, chat_folder, tmp_path, text, message):
    (tmp_path / "key").write_text(text, "utf-8")
    expect_one_line(command("serve", chat_folder, "--api-key-file", tmp_path / "key"), message)


def test_a_key_file_of_several_keys(serve, tmp_path):
    file = tmp_path / "keys"
    file.write_text("\ufeff# of the team\nalice: a-1\n\n  b:2  \n", "utf-8")
    file.chmod(0o600)
    with serve("--api-key-file", file) as server:
        for key, status in (("a-1", 200), ("b:2", 200), ("alice", 401), ("alice: a-1", 401), ("", 401), ("# of", 401)):
            answer = httpx.get(f"{server.url}/v1/models", headers={"Authorization": f"Bearer {key}".strip()})
            assert answer.status_code == status
            assert answer.headers.get("www-authenticate") == (None if status == 200 else "Bearer")
        counts = httpx.get(f"{server.url}/metrics", headers={"Authorization": "Bearer b:2"}).text
        assert 'chunkrt_client_requests_total{client="alice"} 1.0' in counts
        assert 'chunkrt_client_requests_total{client="key-4"} 2.0' in counts


def test_a_key_file_that_everybody_can_read_is_warned_of(serve, tmp_path):
    (tmp_path / "keys").write_text("a")
    (tmp_path / "keys").chmod(0o644)
    with serve("--api-key-file", tmp_path / "keys") as server:
        assert server.err.startswith("warning: every user of this machine can read ")
