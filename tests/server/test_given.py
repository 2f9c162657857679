"""Fields that request nothing, whole numbers, and messages in the form in which clients return answers."""

import json

import httpx
import pytest
from chat_model import TEMPLATE, write_chat_model
from openai.types.chat import ChatCompletionMessage
from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsNonStreaming as CompletionParams
from openai.types.embedding_create_params import EmbeddingCreateParams
from server_of_tests import serving

import chunkrt
from chunkrt.server.given import NEUTRAL

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "temperature": 0}
COMPLETION = {"prompt": "hi", "max_tokens": 2, "temperature": 0}
PATHS = {"chat/completions": CHAT, "completions": COMPLETION}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}


def post(url, path, body):
    return httpx.post(f"{url}/v1/{path}", json=body, timeout=60)


def said(answer):
    """Return the choices of a successful answer."""
    assert answer.status_code == 200, answer.text
    return [{k: v for k, v in choice.items() if k != "id"} for choice in answer.json()["choices"]]


def fields(params):
    return {name for cls in params.__mro__ for name in getattr(cls, "__annotations__", {})}


@pytest.mark.parametrize(
    ("path", "params", "required"),
    [("chat/completions", ChatParams, {"messages"}), ("completions", CompletionParams, {"prompt"})],
)
def test_every_field_of_openais_may_be_null(served, path, params, required):
    body = PATHS[path]
    nulls = dict.fromkeys(fields(params) - required)
    assert "stream" in nulls
    assert said(post(served[1], path, nulls | body)) == said(post(served[1], path, body))


def test_every_field_of_openais_embeddings_may_be_null(engine):
    body = dict.fromkeys(fields(EmbeddingCreateParams)) | {"input": "hi"}
    with serving(engine, embeddings="last") as (_, url):
        answers = [post(url, "embeddings", one) for one in (body, {"input": "hi"})]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert answers[0].json()["data"] == answers[1].json()["data"]


@pytest.mark.parametrize(("path", "body"), PATHS.items())
def test_nulls_within_options_request_nothing(served, path, body):
    options = {"response_format": {"type": "text", "json_schema": None}, "nobodys_field": None}
    assert said(post(served[1], path, body | options)) == said(post(served[1], path, body))
    stream = {"stream": True, "stream_options": {"include_usage": None, "include_obfuscation": None}}
    assert "[DONE]" in post(served[1], path, body | stream).text


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in NEUTRAL.items() for value in values])
@pytest.mark.parametrize(("path", "body"), PATHS.items())
def test_field_with_default_behaviour_is_accepted(served, path, body, name, value):
    expected = said(post(served[1], path, {"temperature": 1, "seed": 3} | body))
    assert said(post(served[1], path, {"temperature": 1, "seed": 3} | body | {name: value} | body)) == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("use_beam_search", True),
        ("typical_p", 0.5),
        ("typical_p", True),  # not a number
        ("cache_prompt", False),
        ("add_generation_prompt", False),
        ("repeat_penalty", 1.1),
        ("length_penalty", 2),
        ("skip_special_tokens", 1),  # not a Boolean
        ("functions", [{"name": "f"}]),
        ("function_call", {"name": "f"}),
        ("prediction", {"type": "content", "content": "hi"}),
        ("audio", {"voice": "alloy", "format": "wav"}),
        ("web_search_options", {}),
        ("reasoning_effort", "high"),
        ("verbosity", "low"),
        ("nobodys_field", 0),
    ],
)
@pytest.mark.parametrize(("path", "body"), PATHS.items())
def test_a_field_that_would_change_the_answer_is_refused_by_name(served, path, body, name, value):
    answer = post(served[1], path, body | {name: value})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)


def test_a_prompt_of_null_is_missing(served):
    answer = post(served[1], "completions", {"prompt": None})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")


@pytest.mark.parametrize(("path", "body"), PATHS.items())
def test_whole_numbers_may_be_floating_point(served, path, body):
    numbers = {"max_tokens": 3, "seed": 1, "n": 2, "top_k": -1, "temperature": 1, "top_p": 1, "logit_bias": {"5": 1}}
    floats = {name: float(value) if not isinstance(value, dict) else value for name, value in numbers.items()}
    assert "16.0" in json.dumps({"max_tokens": 16.0})  # as the client writes them
    assert said(post(served[1], path, body | floats)) == said(post(served[1], path, body | numbers))


def test_token_ids_may_be_floating_point(served):
    whole = said(post(served[1], "completions", COMPLETION | {"prompt": [[5, 6], [7]], "logprobs": 2}))
    assert said(post(served[1], "completions", COMPLETION | {"prompt": [[5.0, 6.0], [7.0]], "logprobs": 2.0})) == whole
    texts = [httpx.post(f"{served[1]}/detokenize", json={"tokens": ids}).json() for ids in ([5, 6], [5.0, 6.0])]
    assert texts[0] == texts[1]
    assert post(served[1], "completions", COMPLETION | {"prompt": [5.5]}).status_code == 400


@pytest.mark.parametrize(("path", "body"), PATHS.items())
def test_max_tokens_of_minus_one_is_no_limit(served, engine, path, body):
    """The answer continues to the end of the context, which this bias makes possible."""
    answer = post(served[1], path, body | {"max_tokens": -1, "logit_bias": {"2": -100}}).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == engine.context_length + 1


def test_both_names_of_max_tokens_may_agree(served):
    for one in (2, -1):
        body = CHAT | {"max_tokens": one}
        assert said(post(served[1], "chat/completions", body | {"max_completion_tokens": one})) == said(
            post(served[1], "chat/completions", body)
        )
    error = post(served[1], "chat/completions", CHAT | {"max_completion_tokens": 3}).json()["error"]
    assert error["param"] == "max_tokens"
    assert "max_completion_tokens is 3" in error["message"]
    for zero in ({"max_tokens": 0}, {"max_tokens": None, "max_completion_tokens": 0}):
        assert post(served[1], "chat/completions", CHAT | zero).status_code == 400


@pytest.mark.parametrize(("path", "body"), PATHS.items())
def test_top_p_of_zero_is_greedy(served, path, body):
    drawn = body | {"max_tokens": 12, "temperature": 1.7, "seed": 1}
    assert said(post(served[1], path, drawn | {"top_p": 0})) == said(post(served[1], path, drawn | {"temperature": 0}))


@pytest.mark.parametrize("path", ["/v1/chat/completions/", "/v1/completions/", "/tokenize/"])
def test_a_trailing_slash_changes_nothing(served, path):
    body = CHAT if "chat" in path else COMPLETION if "v1" in path else {"prompt": "hi"}
    answer = httpx.post(f"{served[1]}{path}", json=body, follow_redirects=False)
    assert answer.status_code == 200
    assert httpx.get(f"{served[1]}/v1/models/", follow_redirects=False).json()["data"][0]["id"] == "toy"


def test_a_byte_order_mark_before_a_body_is_skipped(served):
    body, headers = json.dumps(COMPLETION).encode(), {"Content-Type": "application/json"}
    for content in (b"\xef\xbb\xbf" + body, body):
        answer = httpx.post(f"{served[1]}/v1/completions", content=content, headers=headers)
        assert answer.status_code == 200


STRICT = TEMPLATE.replace(
    "{% for m in messages %}",
    "{% for m in messages %}{% if 'tool_calls' in m %}{{ m.tool_calls | length }}{% for c in m.tool_calls %}"
    "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }};{% endfor %}{% endfor %}{% endif %}"
    "{% if 'refusal' in m and m.refusal is none %}{{ raise_exception('null') }}{% endif %}",
)
"""Templates like Llama 3.1's require the field, those like Qwen3-Coder's iterate over the arguments of calls."""


@pytest.fixture(scope="module")
def strict(tmp_path_factory):
    folder = write_chat_model(tmp_path_factory.mktemp("strict") / "engine", chat_template=STRICT)
    with chunkrt.load(folder, npu="native", chunk_length=8, threads=2) as engine, serving(engine) as (_, url):
        yield url


def prompt_of(url, message):
    """Return the tokens of a conversation that contains a message."""
    messages = [{"role": "user", "content": "hi"}, message, {"role": "user", "content": "you"}]
    answer = httpx.post(f"{url}/tokenize", json={"messages": messages})
    assert answer.status_code == 200, answer.text
    return answer.json()["tokens"]


def test_an_answer_may_be_given_back_as_the_client_has_it(strict):
    answer = ChatCompletionMessage(role="assistant", content="hello").model_dump()
    assert answer["tool_calls"] is None
    assert prompt_of(strict, answer) == prompt_of(strict, {"role": "assistant", "content": "hello"})


@pytest.mark.parametrize("name", ["tool_calls", "name", "refusal", "audio", "function_call", "annotations"])
@pytest.mark.parametrize("value", [None, []])
def test_optional_fields_of_messages_may_be_empty(strict, name, value):
    plain = {"role": "assistant", "content": "hello"}
    assert prompt_of(strict, plain | {name: value}) == prompt_of(strict, plain)


@pytest.mark.parametrize("arguments", ["null", "", " ", "{}", None, {}])
def test_a_call_without_arguments_has_none(strict, arguments):
    def message(**function):
        return {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", **function}}]}

    assert prompt_of(strict, message(arguments=arguments)) == prompt_of(strict, message())
    assert prompt_of(strict, message()) != prompt_of(strict, message(arguments='{"x": 1}'))


@pytest.mark.parametrize(
    ("message", "content"),
    [
        ({"content": None}, ""),
        ({}, ""),
        ({"content": []}, ""),
        ({"content": [{"type": "refusal", "refusal": "no"}]}, "no"),
        ({"content": [{"type": "text", "text": "I "}, {"type": "refusal", "refusal": "no"}]}, "I no"),
        ({"content": None, "refusal": "no"}, "no"),
    ],
)
def test_assistant_message_may_be_empty(served, message, content):
    assert prompt_of(served[1], {"role": "assistant", **message}) == prompt_of(
        served[1], {"role": "assistant", "content": content}
    )


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": None},
        {"role": "user"},
        {"role": "user", "content": [{"type": "refusal", "refusal": "no"}]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": None}]},
        {"role": "assistant", "refusal": 5},
        {"role": "assistant", "content": "a", "function_call": {"name": "f", "arguments": "{}"}},
        {"role": "assistant", "content": "a", "audio": {"id": "b"}},
        {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": "{"}}]},
    ],
)
def test_messages_with_unsupported_content_are_refused(served, message):
    answer = post(served[1], "chat/completions", CHAT | {"messages": [message]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")
