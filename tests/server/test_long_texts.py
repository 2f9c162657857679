"""Texts that cannot fit the context are refused before they are encoded, because encoding is slow."""

import httpx
import pytest
from server_of_tests import serving

import chunkrt
from chunkrt.tokenizer import Tokenizer

LONG = "a b" * 100_000
PROMPTS = {
    "/v1/completions": {"prompt": LONG},
    "/v1/completions of many": {"prompt": ["hello"] * 50 + [LONG]},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}, {"role": "user", "content": LONG}]},
    "/v1/embeddings": {"input": ["hello", LONG]},
    "/v1/score": {"text_1": LONG, "text_2": "hello"},
    "/v1/score of a long end": {"text_1": "hello", "text_2": ["hello", LONG]},
    "/v1/rerank": {"query": "hello", "documents": ["hello", {"text": LONG}]},
    "/v1/rerank of a long query": {"query": LONG, "documents": ["hello"]},
    "/tokenize": {"prompt": LONG},
    "/tokenize of a chat": {"messages": [{"role": "user", "content": LONG}]},
}


def ask(url, path, body):
    return httpx.post(f"{url}{path.partition(' ')[0]}", json=body, timeout=60)


@pytest.mark.parametrize("path", PROMPTS)
@pytest.mark.parametrize("stream", [False, True])
def test_a_text_beyond_the_context_is_refused_before_it_is_encoded(engine, monkeypatch, path, stream):
    def fail(*arguments, **more):
        raise AssertionError("a text was encoded")

    body = PROMPTS[path] | ({"stream": True} if stream and "completions" in path else {})
    with serving(engine, embeddings="last") as (_, url):
        for name in ("encode", "encode_chat"):
            monkeypatch.setattr(Tokenizer, name, fail)
        answer = ask(url, path, body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert "holds 128 tokens, and the text of " in answer.json()["error"]["message"]


def test_a_context_that_shifts_takes_longer_texts(chat_folder):
    with (
        chunkrt.load(chat_folder, npu="native", chunk_length=8, threads=2, context_shift=True) as engine,
        serving(engine, embeddings="last") as (_, url),
    ):
        text = "hello there " * 400
        assert engine.tokenizer.fewest_tokens(text) > engine.context_length
        assert ask(url, "/v1/completions", {"prompt": text, "max_tokens": 1}).status_code == 200
        assert ask(url, "/tokenize", {"prompt": text}).json()["count"] > engine.context_length
        for path in ("/v1/embeddings", "/v1/score", "/v1/rerank"):  # these run a text completely
            assert ask(url, path, PROMPTS[path]).json()["error"]["code"] == "context_length_exceeded"


def test_a_text_as_long_as_the_context_is_taken(served, engine):
    """The bound refuses no text that fits, for any tokens."""
    for token in range(3, 128):
        text = engine.tokenizer.decode([token] * (engine.context_length - 4))
        if text and len(engine.tokenizer.encode(text)) <= engine.context_length:
            answer = ask(served[1], "/tokenize", {"prompt": text})
            assert answer.status_code == 200
