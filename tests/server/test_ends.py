"""Ends of answers: tokens that end them, the fewest tokens, and counts of a stream until then."""

import httpx
import pytest
from server_of_tests import events_of

END = 2
MESSAGES = [{"role": "user", "content": "hi"}]
PATHS = {"chat/completions": {"messages": MESSAGES}, "completions": {"prompt": "hi"}}
ENDS_AT_ONCE = {"logit_bias": {str(END): 100, "0": -100, "1": -100}, "temperature": 0}


def post(served, path, **body):
    return httpx.post(f"{served[1]}/v1/{path}", json=PATHS[path] | body, timeout=60)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("more", "number", "reason"),
    [
        ({}, 1, "stop"),
        ({"ignore_eos": False, "min_tokens": 0}, 1, "stop"),
        ({"ignore_eos": True}, 9, "length"),
        ({"min_tokens": 4}, 5, "stop"),
        ({"min_tokens": 9}, 9, "length"),
        ({"min_tokens": 4, "ignore_eos": True}, 9, "length"),
    ],
)
def test_end_tokens_come_when_they_may(served, path, more, number, reason):
    answer = post(served, path, max_tokens=9, **ENDS_AT_ONCE, **more).json()
    assert answer["usage"]["completion_tokens"] == number
    assert answer["choices"][0]["finish_reason"] == reason


@pytest.mark.parametrize("path", PATHS)
def test_stop_strings_come_after_the_fewest_tokens(served, path):
    bias = {"logit_bias": {"75": 100}, "temperature": 0, "max_tokens": 9, "stop": [served[0].tokenizer.decode([75])]}
    assert post(served, path, **bias).json()["usage"]["completion_tokens"] == 1
    assert post(served, path, **bias, min_tokens=3).json()["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"ignore_eos": True, "response_format": {"type": "json_object"}}, "ignore_eos"),
        ({"min_tokens": 1, "response_format": {"type": "json_object"}}, "min_tokens"),
        ({"min_tokens": 3, "max_tokens": 2}, "min_tokens"),
        ({"min_tokens": 1000, "max_tokens": -1}, "min_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"ignore_eos": 1}, "ignore_eos"),
    ],
)
def test_ends_that_contradict_each_other_are_refused(served, path, more, param):
    answer = post(served, path, **more)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("path", PATHS)
def test_a_text_format_may_go_on(served, path):
    answer = post(served, path, max_tokens=3, ignore_eos=True, response_format={"type": "text"})
    assert answer.json()["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("include", [True, False])
def test_every_event_may_have_the_counts(served, path, include):
    options = {"include_usage": include, "continuous_usage_stats": True}
    body = {"max_tokens": 5, "ignore_eos": True, "temperature": 0}
    prompt = post(served, path, **body).json()["usage"]["prompt_tokens"]
    events = events_of(post(served, path, **body, stream=True, stream_options=options).text)
    assert all(event["usage"]["prompt_tokens"] == prompt for event in events)
    assert all(e["usage"]["total_tokens"] == prompt + e["usage"]["completion_tokens"] for e in events)
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts[-5:] == ([2, 3, 4, 5, 5] if include else [1, 2, 3, 4, 5])
    assert [bool(event["choices"]) for event in events][-1] is not include
    events = events_of(post(served, path, **body, stream=True, stream_options={"include_usage": include}).text)
    assert sum(event.get("usage") is not None for event in events) == include


@pytest.mark.parametrize("stream", [False, True])
def test_an_end_token_is_not_among_a_chats_log_probabilities(served, stream):
    body = {"logprobs": True, "top_logprobs": 1, "min_tokens": 3, "max_tokens": 9, "stream": stream, **ENDS_AT_ONCE}
    answer = post(served, "chat/completions", **body)
    choices = [event["choices"][0] for event in events_of(answer.text)] if stream else answer.json()["choices"]
    tokens = [token for choice in choices if choice["logprobs"] for token in choice["logprobs"]["content"]]
    content = "".join((choice["delta"] if stream else choice["message"]).get("content") or "" for choice in choices)
    assert choices[-1]["finish_reason"] == "stop"
    assert len(tokens) == 3
    assert bytes(byte for token in tokens for byte in token["bytes"]).decode() == content
