"""Streams on the wire: an immediate status, comments while idle, errors as events."""

import json
from threading import Event

import httpx
import openai
import pytest
from server_of_tests import Raw, events_of, occupancy, serving, wait_until

from chunkrt.errors import BusyError

BODY = {"prompt": "hello there", "max_tokens": 2, "temperature": 0, "stream": True}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_stream_begins_before_its_prompt_has_been_run(engine, path):
    body = dict(BODY)
    if path != "/v1/completions":
        del body["prompt"]
        body["messages"] = [{"role": "user", "content": "hi"}]
    with serving(engine, ping_seconds=0.05) as (_, url):
        with engine.loaded.scheduler.held():
            raw = Raw(url, body, path)
            raw.read_until(b"\r\n\r\n")
            head = raw.received.partition(b"\r\n\r\n")[0].lower()
            assert head.startswith(b"http/1.1 200")
            assert b"content-type: text/event-stream" in head
            raw.read_until(b": ping\n\n")
            assert b"data:" not in raw.received
        assert b"data: [DONE]" in raw.read_all()


def test_a_stream_that_waits_for_a_place_begins_too_and_a_full_queue_has_a_status(engine):
    with serving(engine, ping_seconds=0.05, max_sessions=1, queue=1) as (_, url):
        with engine.loaded.scheduler.held():
            first, second = Raw(url, BODY), Raw(url, BODY)
            for raw in (first, second):
                raw.read_until(b": ping\n\n")
            assert occupancy(url) == (1, 1)
            for stream in (False, True):
                answer = httpx.post(f"{url}/v1/completions", json=BODY | {"stream": stream})
                assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
                assert answer.json()["error"]["type"] == "server_busy"
        for raw in (first, second):
            assert b"data: [DONE]" in raw.read_all()


def test_comments_come_between_events_too(engine, monkeypatch):
    go_on, fork_state = Event(), engine.loaded.fork_state

    def wait(state):
        assert go_on.wait(30)
        return fork_state(state)

    monkeypatch.setattr(engine.loaded, "fork_state", wait)
    with serving(engine, ping_seconds=0.05) as (_, url):
        raw = Raw(url, BODY | {"n": 2, "stream_options": {"include_progress": True}})
        raw.read_until(b'"progress":')
        raw.received = b""
        raw.read_until(b": ping\n\n")
        go_on.set()
        assert b"data: [DONE]" in raw.read_all()


def test_events_are_separated_as_in_openais_api(served):
    """Clients that split a stream at two newlines would find no event if lines ended with a carriage return, too."""
    content = httpx.post(f"{served[1]}/v1/completions", json=BODY).content
    *events, done, rest = content.split(b"\n\n")
    assert len(events) >= 2
    assert all("choices" in json.loads(event.removeprefix(b"data: ")) for event in events)
    assert (done, rest) == (b"data: [DONE]", b"")


def test_failure_after_the_start_is_an_event(engine, monkeypatch):
    """OpenAI's clients raise an APIError at an event with an error."""

    def full(state):
        raise BusyError("no room")

    monkeypatch.setattr(engine.loaded, "fork_state", full)
    with serving(engine) as (_, url):
        lines = httpx.post(f"{url}/v1/completions", json=BODY | {"n": 2}).text.splitlines()
        events = [line for line in lines if line.startswith("data: ")]
        error = {"message": "no room", "type": "server_busy", "param": None, "code": "busy"}
        assert json.loads(events[-2][6:]) == {"error": error}
        assert events[-1] == "data: [DONE]"
        with (
            openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
            pytest.raises(openai.APIError, match="no room"),
        ):
            list(client.completions.create(model="toy", **BODY | {"n": 2}))
        assert httpx.post(f"{url}/v1/completions", json=BODY | {"n": 2, "stream": False}).status_code == 503


@pytest.mark.parametrize(
    "wrong", [{"prompt": "hello " * 99}, {"max_tokens": 500}, {"n": 17}, {"temperature": -1}, {"stop": [""]}], ids=str
)
def test_an_error_of_a_request_has_a_status_in_a_stream(engine, wrong):
    """It is detected before the prompt runs."""
    with serving(engine) as (_, url), engine.loaded.scheduler.held():
        assert httpx.post(f"{url}/v1/completions", json=BODY | wrong).status_code == 400


@pytest.mark.parametrize("waits", [False, True], ids=["runs", "waits"])
def test_client_that_disconnects_before_the_first_event_leaves_no_state(engine, waits):
    with serving(engine, ping_seconds=0.05, max_sessions=1) as (_, url):
        with engine.loaded.scheduler.held():
            raws = [Raw(url, BODY) for _ in range(1 + waits)]
            for raw in raws:
                raw.read_until(b": ping")
            raws[-1].close()
        for raw in raws[:-1]:
            raw.read_all()
        wait_until(lambda: occupancy(url) == (0, 0))
        wait_until(lambda: engine.stats().sessions == 0)


def test_progress_under_the_names_of_llama_cpp(served):
    text = httpx.post(f"{served[1]}/v1/completions", json=BODY | {"return_progress": True}).text
    told = [event for event in events_of(text) if "prompt_progress" in event]
    assert [event["progress"]["tokens_done"] for event in told] == [e["prompt_progress"]["processed"] for e in told]
    assert told[-1]["prompt_progress"]["processed"] == told[-1]["prompt_progress"]["total"] > 0
