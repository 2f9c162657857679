"""Tests of prompts of `chunkrt run`: text, files, standard input, chats as JSON, many prompts as JSON lines."""

import json

import pytest
from chat_model import write_chat_model
from fixture_checkpoints import checkpoint
from one_line import expect_one_line

import chunkrt

GGUF = checkpoint("llama_biased_gguf")


def answer(prompt, count=8, model=GGUF, parse_special=False):
    """Return the Python interface's answer to a raw text."""
    with chunkrt.load(model) as engine:
        tokens = engine.tokenizer.encode(prompt, add_special=not parse_special, parse_special=parse_special)
        return engine.generate([tokens], max_new_tokens=count)[0]


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory):
    """Write an engine directory whose chat template marks each role with one letter."""
    return write_chat_model(tmp_path_factory.mktemp("chat") / "engine")


@pytest.mark.parametrize(
    ("arguments", "stdin", "whole"),
    [
        ((), "hello", "hello"),
        (("-p", "-"), "hello", "hello"),
        (("-f", "-"), "hello", "hello"),
        (("-p", "@{file}"), "", "one"),
        (("-f", "{file}"), "", "one"),
        (("-f", "{other}"), "", "\ntwo"),
        (("-f", "{marked}"), "", "three"),
        ((), "hello\n", "hello"),
        ((), "hello\n\n", "hello\n"),
        ((), "\ufeffhello", "hello"),
        (("-p", "@@file"), "", "@file"),
        (("-p", "hello"), "not read", "hello"),
        (("-f", "{file}", "-p", "hello"), "", "one\n\nhello"),
        (("-f", "{file}", "-f", "{other}"), "", "one\n\ntwo"),
        (("-f", "{file}", "-f", "-", "-p", "end"), "in\n", "one\n\nin\n\nend"),
    ],
)
def test_prompt_from_option_file_and_stdin(command, tmp_path, arguments, stdin, whole):
    paths = {"file": tmp_path / "one.txt", "other": tmp_path / "two.txt", "marked": tmp_path / "three.txt"}
    paths["file"].write_text("one\n")
    paths["other"].write_text("\ntwo")
    paths["marked"].write_bytes(b"\xef\xbb\xbfthree\r\n")  # written by Windows PowerShell
    given = [argument.format(**paths) for argument in arguments]
    finished = command("run", GGUF, "-n", 8, *given, stdin=stdin)
    assert finished.out == answer(whole) + "\n"


def test_prompt_options_of_llama_cpp(command):
    usual = command(
        "run", GGUF, "-p", "hello", "-n", 8, "--temperature", 2, "--seed", 3, "--context", 64, "--threads", 1
    )
    peers = ("-m", GGUF, "-p", "hello", "-n", 8, "--temp", 2, "-s", 3, "-c", 64, "-t", 1, "--top-k", 0)
    assert command("run", *peers).out == usual.out
    endless = command("run", "-m", GGUF, "-p", "hello", "-n", -1, "-c", 40, "--seed", -1, "--json")
    result = json.loads(endless.out)
    assert result["finish_reason"] == "context"
    assert result["new_tokens"] == 40 - 7 + 1
    narrow = command("run", GGUF, "-p", "hello", "-n", 8, "-ctk", "q8_0")
    with chunkrt.load(GGUF, cache_dtype="int8") as engine:
        assert narrow.out == engine.generate("hello", max_new_tokens=8) + "\n"


def test_messages_are_followed_by_the_prompt(command, chat_model, tmp_path):
    path = tmp_path / "chat.json"
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    for written in (messages, {"messages": messages}):
        path.write_text(json.dumps(written))
        finished = command("run", chat_model, "--messages", path, "-p", "more", "-n", 8, "--system", "S")
        assert finished.out == answer("s:S;u:hi;a:yes;u:more;a:", model=chat_model, parse_special=True) + "\n"
    path.write_text(json.dumps([{"role": "user", "content": "hi"}]))
    finished = command("run", chat_model, "--messages", "-", "-n", 8, stdin=path.read_text())
    assert finished.out == answer("u:hi;a:", model=chat_model, parse_special=True) + "\n"


def test_prefill_answer_is_part_of_the_answer(command, chat_model):
    expected = "Sure" + answer("u:hi;a:Sure", model=chat_model, parse_special=True)
    asked = ("run", chat_model, "-p", "hi", "-n", 8, "--prefill-answer", "Sure")
    assert command(*asked).out == expected + "\n"
    assert json.loads(command(*asked, "--json").out)["text"] == expected


def test_many_prompts_are_answered_in_order(command, chat_model, tmp_path):
    path = tmp_path / "prompts.jsonl"
    lines = [
        "hello",
        {"prompt": "a longer prompt than that", "id": "second"},
        {"messages": [{"role": "user", "content": "hi"}], "id": 3, "prefill_answer": "Sure"},
    ]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    finished = command("run", chat_model, "--prompts", path, "-n", 8, "--chunk", 8)
    assert (finished.status, finished.err) == (0, "")
    rows = [json.loads(line) for line in finished.out.splitlines()]
    prompts = ["u:hello;a:", "u:a longer prompt than that;a:", "u:hi;a:Sure"]
    alone = [answer(prompt, model=chat_model, parse_special=True) for prompt in prompts]
    assert [row["text"] for row in rows] == [alone[0], alone[1], "Sure" + alone[2]]
    assert [(row["index"], row["id"]) for row in rows] == [(0, None), (1, "second"), (2, 3)]
    assert {(row["finish_reason"], row["new_tokens"]) for row in rows} == {("length", 8)}
    path.write_text("\ufeff" + path.read_text(), encoding="utf-8")  # a byte order mark is ignored
    assert command("run", chat_model, "--prompts", path, "-n", 8, "--chunk", 8).out == finished.out
    piped = command(
        "run", chat_model, "--prompts", "-", "-n", 8, "--batcher", "sequential", stdin=path.read_text("utf-8")
    )
    assert piped.out == finished.out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no prompts"),
        ("{", "line 1: "),
        ('"a"\n[1]', 'line 2: expected a text, or an object with either "prompt" or "messages"'),
        ('{"prompt": "a", "messages": []}', 'either "prompt" or "messages"'),
        ('{"prompt": " "}', "expected a text that is not empty"),
        ('{"prompt": "a", "temperature": 1}', "unknown key 'temperature'"),
        ('{"prompt": "a", "id": [1]}', '"id" is [1], expected a text or a whole number'),
        ('{"messages": [{"content": "a"}]}', "a message is "),
        (json.dumps("a b " * 100), "prompt 1 has "),
    ],
)
def test_wrong_batch_is_refused_before_anything_runs(command, tmp_path, text, message):
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    expect_one_line(command("run", GGUF, "--prompts", path), message)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"messages": 3}', '[{"role": "user"}]', '["hi"]'])
def test_wrong_messages_print_one_line(command, tmp_path, text):
    path = tmp_path / "chat.json"
    path.write_text(text)
    expect_one_line(command("run", GGUF, "--messages", path), "chat.json")
