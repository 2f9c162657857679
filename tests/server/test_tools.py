"""Tools: the template presents them to the model, and the model's calls are parsed."""

import json
from dataclasses import replace

import openai
import pytest
from chat_model import TEMPLATE
from server_of_tests import serving

from chunkrt.server.tool_calls import CallReader
from chunkrt.tokenizer import Tokenizer
from chunkrt.tokenizer.tokenizer import VOCABULARY_FILE, read_vocabulary

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
JSON_CALL = '{"name": "f", "parameters": {"a": "\u00e4"}}'
MARKS_INSIDE = '<tool_call>{"name": "f", "arguments": {"a": "<tool_call>{}</tool_call>"}}</tool_call>'
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
MESSAGES = [{"role": "user", "content": "hi"}]


def read(text, size):
    """An answer in parts: its immediate text, the rest, and the calls."""
    reader = CallReader({"f"})
    told = "".join(reader.push(text[start : start + size]) for start in range(0, len(text), size))
    rest, calls = reader.finish()
    return told, rest, [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (CALL, "", [("f", {"a": 1})]),
        (f"\n{CALL}\n{CALL}", "", [("f", {"a": 1})] * 2),
        (f"I look. {CALL}", "I look. ", [("f", {"a": 1})]),
        (CALL.removesuffix("\n</tool_call>"), "", [("f", {"a": 1})]),
        (
            '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}</tool_call>',
            "",
            [("f", {"a": "</tool_call>"})],
        ),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", {"a": 1})]),
        (f"I look. {MARKS_INSIDE}\n{CALL}", "I look. ", [("f", {"a": "<tool_call>{}</tool_call>"}), ("f", {"a": 1})]),
        (JSON_CALL, "", [("f", {"a": "\u00e4"})]),
        (f"\n {JSON_CALL} ", "", [("f", {"a": "\u00e4"})]),
    ],
)
def test_calls_are_read(text, content, calls, size):
    told, rest, found = read(text, size)
    assert (told + rest, found) == (content, calls)


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    "text",
    [
        "hello <tool_cal",
        "a < b <tool_call",
        "<tool_call>no JSON</tool_call> and more",
        '{"answer": 1}',
        '{"name": "g", "parameters": {}}',
        '{"name": "f"}',
        '{"name": "f", "parameters": 1}',
        '{"name": ["f"], "parameters": {}}',
        '{"name": "f", "parameters": {"a": NaN}}',
        '{"name": "f", "parameters": {"a": "\\ud800"}}',
        f"Like this: {JSON_CALL}",
        '<tool_call>{"name": "g", "arguments": {}}</tool_call>',
        f"{CALL}<tool_call>[</tool_call>",
        '<tool_call>{"name": "f", "arguments": {}} and more</tool_call>',
        f"Write <tool_call> before it. {CALL}",
        '<tool_call>{"name": "f", "arguments": "a = 1"}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "[1]"}</tool_call>',
        "{" * 3000,
        "",
        "  ",
    ],
)
def test_malformed_calls_stay_text(text, size):
    told, rest, calls = read(text, size)
    assert (told + rest, calls) == (text, [])


def test_text_comes_as_soon_as_it_can_be_no_call():
    reader = CallReader({"f"})
    assert [reader.push(part) for part in ("a", "b<", "tool", "s", "<tool_call>")] == ["a", "b", "", "<tools", ""]


@pytest.fixture
def client(engine, chat_folder, monkeypatch):
    """A client of a server whose model's template lists the tools, and the arguments of calls."""
    template = (
        "{% for t in tools or [] %}{{ t.function.name }}!{% endfor %}"
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.arguments.a + 1 }}{% endfor %}"
        "{% endfor %}" + TEMPLATE
    )
    settings = replace(engine.tokenizer.settings, chat_template=template)
    monkeypatch.setattr(engine.loaded, "tokenizer", Tokenizer(read_vocabulary(chat_folder / VOCABULARY_FILE), settings))
    with serving(engine) as (_, url), openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(client, **more):
    return client.chat.completions.create(
        **{"model": "toy", "messages": MESSAGES, "temperature": 0, "max_tokens": 2} | more
    )


def test_template_receives_the_tools(client, engine):
    tokens = engine.tokenizer.encode_chat(MESSAGES)
    told = ask(client, tools=[TOOL]).usage.prompt_tokens
    assert told == len(engine.tokenizer.encode_chat(MESSAGES, tools=[TOOL])) == len(tokens) + len("f!")
    for options in ({}, {"tools": []}, {"tools": [TOOL], "tool_choice": "none"}):
        assert ask(client, **options).usage.prompt_tokens == len(tokens)


def test_a_call_and_its_result_go_back_to_the_model(client, engine):
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        *MESSAGES,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "x", "content": "3"},
    ]
    answer = ask(client, messages=messages, tools=[TOOL])
    assert answer.usage.prompt_tokens == len(engine.tokenizer.encode("f!2u:hi;a:;t:3;a:", add_special=False))
    call["function"]["arguments"] = "{"
    with pytest.raises(openai.BadRequestError, match="arguments of a call are not JSON"):
        ask(client, messages=messages, tools=[TOOL])


def test_a_call_that_the_model_writes(client):
    pytest.importorskip("llguidance")
    schema = {"const": {"name": "f", "parameters": {"a": 1}}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    options = {"tools": [TOOL], "response_format": form, "max_tokens": 60, "temperature": 1}
    (choice,) = ask(client, **options).choices
    (call,) = choice.message.tool_calls
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    assert (call.type, call.function.name, json.loads(call.function.arguments)) == ("function", "f", {"a": 1})
    events = list(ask(client, **options, stream=True, n=2))
    assert "".join(event.choices[0].delta.content or "" for event in events) == ""
    last = [event.choices[0] for event in events if event.choices[0].finish_reason]
    assert sorted(choice.index for choice in last) == [0, 1]
    for choice in last:
        (call,) = choice.delta.tool_calls
        assert (choice.finish_reason, call.index, call.function.name) == ("tool_calls", 0, "f")
    (choice,) = ask(client, **options | {"tools": []}).choices
    assert (choice.finish_reason, choice.message.tool_calls) == ("stop", None)
    assert json.loads(choice.message.content)["name"] == "f"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"tool_choice": "required"}, "cannot force a call"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "cannot force a call"),
        ({"parallel_tool_calls": False}, "cannot be limited"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools: expected"),
        ({"tools": [{"type": "other", "function": {"name": "f"}}]}, "tools: expected"),
    ],
)
def test_unsupported_tool_requests_are_refused(client, more, message):
    with pytest.raises(openai.BadRequestError, match=message):
        ask(client, **{"tools": [TOOL]} | more)


def test_a_template_without_a_place_for_tools_refuses_them(served):
    with (
        openai.OpenAI(base_url=f"{served[1]}/v1", api_key="none", max_retries=0) as client,
        pytest.raises(openai.BadRequestError, match="does not support tools"),
    ):
        ask(client, tools=[TOOL])
