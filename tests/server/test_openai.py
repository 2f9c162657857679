"""The server through OpenAI's own client; its answers are the engine's."""

import base64
import hashlib
import json
import threading
import time
from html.parser import HTMLParser

import httpx
import numpy as np
import openai
import pytest
from server_of_tests import serving, wait_until
from states import note_runs

import chunkrt
from chunkrt.engine.scoring import encode_pair, log_softmax
from chunkrt.runtime.buffers import BoundSubgraph

PROMPT = "hello"
LONG_PROMPT = ("hello there " * 9).strip()
MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello there"}]


def alone(engine, tokens, count, **options):
    """Return the engine's own answer: the text, and the pieces."""
    with engine.session() as session:
        session.prefill(tokens)
        pieces = list(session.generate(max_new_tokens=count, **options))
    return "".join(piece.text for piece in pieces), pieces


def encoded(engine, prompt):
    return engine.tokenizer.encode(prompt, add_special=True, parse_special=False)


def test_the_model_is_listed(client):
    assert [model.id for model in client.models.list()] == ["toy"]
    assert client.models.retrieve("toy").id == "toy"
    with pytest.raises(openai.NotFoundError, match="not served here"):
        client.models.retrieve("other/model")


def test_chat_equals_the_engines_answer(client, engine):
    tokens = engine.tokenizer.encode_chat(MESSAGES)
    text, pieces = alone(engine, tokens, 9)
    answer = client.chat.completions.create(model="toy", messages=MESSAGES, max_tokens=9, temperature=0)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", text)
    assert choice.finish_reason == ("length" if pieces[-1].finish_reason == "length" else "stop")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(tokens), len(pieces))
    assert answer.usage.total_tokens == len(tokens) + len(pieces)


def test_content_may_come_in_parts_of_text_alone(client):
    whole = client.chat.completions.create(model="toy", messages=MESSAGES, max_tokens=4, temperature=0)
    parts = [{"type": "text", "text": "hello "}, {"type": "text", "text": "there"}]
    messages = [MESSAGES[0], {"role": "user", "content": parts}]
    found = client.chat.completions.create(model="toy", messages=messages, max_tokens=4, temperature=0)
    assert found.choices[0].message.content == whole.choices[0].message.content
    parts[1] = {"type": "image_url", "image_url": {"url": "data:"}}
    with pytest.raises(openai.BadRequestError, match="a part of type 'image_url'"):
        client.chat.completions.create(model="toy", messages=messages)


def test_stream_equals_the_answer_and_has_counts(client, engine):
    whole = client.chat.completions.create(model="toy", messages=MESSAGES, max_tokens=9, temperature=0)
    options = {"include_usage": True}
    events = list(
        client.chat.completions.create(
            model="toy", messages=MESSAGES, max_tokens=9, temperature=0, stream=True, stream_options=options
        )
    )
    assert events[0].choices[0].delta.role == "assistant"
    text = "".join(event.choices[0].delta.content or "" for event in events[:-1])
    assert text == whole.choices[0].message.content
    assert [event.choices[0].finish_reason for event in events[-2:-1]] == [whole.choices[0].finish_reason]
    assert (events[-1].choices, events[-1].usage) == ([], whole.usage)


def test_stream_reports_prompt_progress(client):
    progress, _ = told_progress(client)
    assert len(progress) > 1
    assert progress[-1]["tokens_done"] == progress[-1]["tokens"]
    assert [one["tokens_done"] for one in progress] == sorted({one["tokens_done"] for one in progress})


def test_cached_tokens_of_a_prompt_are_done(chat_folder):
    with (
        chunkrt.load(chat_folder, npu="native", chunk_length=8, threads=2, prefix_cache="memory") as engine,
        serving(engine) as (_, url),
        openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client,
    ):
        told_progress(client)
        progress, usage = told_progress(client)
    assert progress[0]["tokens_done"] == usage.prompt_tokens_details.cached_tokens > 0
    assert progress[-1]["tokens_done"] == progress[-1]["tokens"] == usage.prompt_tokens


def told_progress(client):
    options = {"include_progress": True, "include_usage": True}
    *events, last = client.completions.create(
        model="toy", prompt="hello there " * 6, max_tokens=1, stream=True, extra_body={"stream_options": options}
    )
    return [event.progress for event in events if not event.choices], last.usage


def test_log_probabilities_are_those_of_the_logits(client, engine):
    answer = client.chat.completions.create(
        model="toy", messages=MESSAGES, max_tokens=5, temperature=0, logprobs=True, top_logprobs=3
    )
    tokens = engine.tokenizer.encode_chat(MESSAGES)
    _, pieces = alone(engine, tokens, 5)
    with engine.session() as session:
        logits = [session.prefill(tokens).logits]
        for piece in pieces[:-1]:
            logits.append(session.prefill([piece.token_id]).logits)
    expected = log_softmax(np.stack(logits))
    told = answer.choices[0].logprobs.content
    assert len(told) == len(pieces)
    for row, token, piece in zip(expected, told, pieces, strict=True):
        assert token.logprob == pytest.approx(row[piece.token_id], abs=1e-4)
        top = sorted(row, reverse=True)[:3]
        assert [one.logprob for one in token.top_logprobs] == pytest.approx(top, abs=1e-4)
        assert bytes(token.bytes) == engine.tokenizer.token_bytes[piece.token_id]


@pytest.mark.parametrize("prompt", [PROMPT, LONG_PROMPT], ids=["at once", "in pieces"])
def test_an_echo_scores_the_prompt(client, engine, prompt):
    """A long prompt is run in pieces, so that its logits take bounded memory."""
    answer = client.completions.create(model="toy", prompt=prompt, max_tokens=0, echo=True, logprobs=2)
    (choice,) = answer.choices
    tokens = encoded(engine, prompt)
    assert (len(tokens) > 64) == (prompt == LONG_PROMPT)
    with engine.session() as session:
        expected = log_softmax(session.prefill(tokens, logits="all").logits)
    values = choice.logprobs.token_logprobs
    assert values[0] is None
    assert values[1:] == pytest.approx([expected[i, token] for i, token in enumerate(tokens[1:])], abs=1e-4)
    assert "".join(choice.logprobs.tokens).endswith(prompt)
    assert choice.text == engine.tokenizer.decode(tokens)
    assert choice.finish_reason == "length"
    assert answer.usage.completion_tokens == 0


def test_prompts_of_an_echo_that_begin_alike_run_their_beginning_once(client, engine, monkeypatch):
    """Like lm-evaluation-harness: the same context before several endings, as token ids, without generation."""
    context = encoded(engine, "hello there " * 3)
    prompts = [[*context, *encoded(engine, ending)] for ending in ("you", "there you", "hello")] + [[5, 6], context]
    options = {"model": "toy", "max_tokens": 0, "echo": True, "logprobs": 2}
    alone = [client.completions.create(prompt=[prompt], **options).choices[0] for prompt in prompts]
    ran = note_runs(engine, monkeypatch)
    answer = client.completions.create(prompt=prompts, **options)
    assert [choice.logprobs for choice in answer.choices] == [choice.logprobs for choice in alone]
    assert [choice.text for choice in answer.choices] == [choice.text for choice in alone]
    num_cached = answer.usage.prompt_tokens_details.cached_tokens
    assert num_cached >= 3 * (len(context) - 1)
    assert sum(ran) == sum(map(len, prompts)) - num_cached


def test_several_prompts_of_several_choices(client, engine):
    prompts = ["hello", encoded(engine, "there")]
    answer = client.completions.create(model="toy", prompt=prompts[:1], max_tokens=6, temperature=0, n=3)
    text, _ = alone(engine, encoded(engine, "hello"), 6)
    assert [(c.index, c.text) for c in answer.choices] == [(0, text), (1, text), (2, text)]
    answer = client.completions.create(model="toy", prompt=["hello", "there"], max_tokens=6, temperature=0)
    assert [c.text for c in answer.choices] == [text, alone(engine, prompts[1], 6)[0]]
    answer = client.completions.create(model="toy", prompt=prompts[1], max_tokens=6, temperature=0)
    assert answer.choices[0].text == alone(engine, prompts[1], 6)[0]


def test_a_bias_forbids_a_token(client, engine):
    _, pieces = alone(engine, encoded(engine, PROMPT), 1)
    bias = {str(pieces[0].token_id): -100}
    answer = client.completions.create(
        model="toy", prompt=PROMPT, max_tokens=1, temperature=0, logprobs=1, logit_bias=bias
    )
    assert answer.choices[0].logprobs.tokens != [engine.tokenizer.token_bytes[pieces[0].token_id].decode()]


def test_scores_are_the_engines(served, engine):
    body = {"text_1": "hello", "text_2": [" there", " you"]}
    answer = httpx.post(f"{served[1]}/v1/score", json=body).json()
    expected = engine.score([("hello", " there"), ("hello", " you")])
    assert [one["score"] for one in answer["data"]] == [one.log_probability for one in expected]
    assert [one["is_greedy"] for one in answer["data"]] == [one.is_greedy for one in expected]
    documents = ["hello", "good day", "there"]
    answer = httpx.post(f"{served[1]}/v1/rerank", json={"query": "you", "documents": documents, "top_n": 2}).json()
    pairs = [encode_pair(engine.tokenizer, f"{text}\n\n", "you") for text in documents]
    means = [s.log_probability / len(p[1]) for s, p in zip(engine.score(pairs), pairs, strict=True)]
    best = sorted(range(3), key=lambda i: -means[i])[:2]
    assert [one["index"] for one in answer["results"]] == best
    assert [one["relevance_score"] for one in answer["results"]] == pytest.approx([means[i] for i in best])


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("rerank", {"query": "", "documents": ["hello"]}, "query"),
        ("rerank", {"query": "you", "documents": [""]}, "documents"),
        ("score", {"text_1": "hello", "text_2": ["you", ""]}, "text_2"),
    ],
)
def test_text_that_is_empty_is_named(served, path, body, param):
    answer = httpx.post(f"{served[1]}/v1/{path}", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert answer.json()["error"]["message"].startswith(f"{param}: ")


@pytest.mark.parametrize("max_tokens", [0, 1, 5, -1])
def test_prompt_that_exceeds_the_context_is_refused_with_advice(served, engine, max_tokens):
    """No `max_tokens` would help, so the message suggests none."""
    prompt = [5] * (engine.context_length + 1)
    error = httpx.post(f"{served[1]}/v1/completions", json={"prompt": prompt, "max_tokens": max_tokens}).json()["error"]
    assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")
    assert error["message"] == "this model's context holds 128 tokens, and the prompt has 129; shorten the prompt"


def test_tokens_and_back(served, engine):
    found = httpx.post(f"{served[1]}/tokenize", json={"prompt": PROMPT}).json()
    assert found["tokens"] == encoded(engine, PROMPT)
    assert found["count"] == len(found["tokens"])
    found = httpx.post(f"{served[1]}/tokenize", json={"messages": MESSAGES}).json()
    assert found["tokens"] == engine.tokenizer.encode_chat(MESSAGES)
    text = httpx.post(f"{served[1]}/detokenize", json={"tokens": found["tokens"]}).json()["prompt"]
    assert text == engine.tokenizer.decode(found["tokens"])


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"model": "other"}, "model", "is not served here"),
        ({"temperature": -1}, "temperature", "at least 0"),
        ({"temperature": "hot"}, "temperature", "Expected `float"),
        ({"max_tokens": -2}, "max_tokens", ">= -1"),
        ({"max_tokens": 2.5}, "max_tokens", "got `float`"),
        ({"max_tokens": 1e30}, "max_tokens", "got `float`"),
        ({"seed": "1"}, "seed", "got `str`"),
        ({"suffix": "end"}, "suffix", "suffix: not supported; this model only continues texts"),
        ({"best_of": 4}, "best_of", "use n"),
        ({"n": 65}, "n", "<= 64"),
        ({"n": 17}, "n", "at most 16 sequences run at a time"),
        ({"stop": [""]}, "stop", "empty"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "token ids"),
        ({"logit_bias": {"1": 101}}, "logit_bias", "-100, 100"),
        ({"logit_bias": {"1_0": 1}}, "logit_bias", "is not a token id"),
        ({"logit_bias": {"\u0665": 1}}, "logit_bias", "is not a token id"),
        ({"prompt": []}, "prompt", "expected 1 to 2048"),
        ({"prompt": ["a"] * 2049}, "prompt", "expected 1 to 2048"),
        ({"prompt": [[1.5]]}, "prompt", "token ids"),
        ({"prompt": [999]}, "prompt", "outside the vocabulary"),
        ({"prompt": "hello " * 99}, "prompt", "holds 128 tokens"),
        ({"max_tokens": 500}, "max_tokens", "holds 128 tokens"),
        ({"no_such_field": 1}, "no_such_field", "unknown field"),
    ],
)
def test_unsupported_requests_are_refused_by_field(client, body, param, message):
    request = {"model": "toy", "prompt": PROMPT, "max_tokens": 2, **body}
    expected = openai.NotFoundError if param == "model" else openai.BadRequestError
    with pytest.raises(expected) as refused:
        client.post("/completions", body=request, cast_to=object)
    error = refused.value.body
    assert set(error) == {"message", "type", "param", "code"}
    assert message in error["message"]
    assert error["param"] == param


def test_embeddings_want_a_flag(client):
    with pytest.raises(openai.BadRequestError, match="--embeddings last, or mean"):
        client.embeddings.create(model="toy", input="hello")


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_embeddings_are_the_engines(engine, pooling):
    texts = ["hello", "hello there " * 4, "you"]
    expected = engine.embed(texts, pooling=pooling)
    with (
        serving(engine, embeddings=pooling) as (_, url),
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        for encoding in ("float", "base64", openai.omit):  # the client itself requests base64
            answer = client.embeddings.create(model="toy", input=texts, encoding_format=encoding)
            rows = [one.embedding for one in answer.data]
            if encoding == "base64":
                rows = [np.frombuffer(base64.b64decode(row), "<f4") for row in rows]
            assert np.array_equal(np.array(rows, np.float32), expected)
        tokens = [encoded(engine, text) for text in texts]
        assert (answer.model, answer.pooling) == ("toy", pooling)
        assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, tokens))
        width = expected.shape[1]
        for given in (tokens[1], texts[1]):
            answer = client.embeddings.create(model="toy", input=given, dimensions=width)
            assert np.array_equal(np.float32(answer.data[0].embedding), expected[1])
        for body, param in (
            ({"dimensions": width - 1}, "dimensions"),
            ({"encoding_format": "int8"}, "encoding_format"),
            ({"input": []}, "input"),
            ({"input": [[]]}, "input"),
            ({"input": "hello " * 99}, "input"),
            ({"input": [999]}, "input"),
            ({"input": [1.5]}, "input"),
        ):
            with pytest.raises(openai.BadRequestError) as refused:
                client.post("/embeddings", body={"model": "toy", "input": "hello", **body}, cast_to=object)
            assert refused.value.body["param"] == param
        with pytest.raises(openai.NotFoundError):
            client.embeddings.create(model="other", input="hello")
    assert engine.stats().sessions == 0


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'{"prompt": 1}', b"\xff\xfe", b"[" * 100_000])
def test_arbitrary_bodies_get_client_errors(served, body):
    answer = httpx.post(f"{served[1]}/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_paths_and_methods(served):
    assert httpx.get(f"{served[1]}/health").json() == {"status": "ok"}
    assert httpx.get(f"{served[1]}/v1/nothing").status_code == 404
    answer = httpx.get(f"{served[1]}/v1/completions")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert answer.json()["error"]["message"].startswith("GET /v1/completions")
    metrics = httpx.get(f"{served[1]}/metrics").text
    assert "chunkrt_prompt_tokens_total" in metrics
    assert 'chunkrt_requests_total{path="/health",status="200"}' in metrics
    assert "<title>chunkrt</title>" in httpx.get(served[1]).text
    assert httpx.get(f"{served[1]}/stats").json()["model"] == "toy"


class Parts(HTMLParser):
    """Return the contents of a page's scripts and styles, and all parts of its tags that a policy of hashes forbids."""

    def __init__(self):
        super().__init__()
        self.inside, self.contents, self.forbidden = None, {"script": [], "style": []}, []

    def handle_starttag(self, tag, attributes):
        self.inside = tag
        self.forbidden += [(tag, name) for name, _ in attributes if name in ("style", "src") or name.startswith("on")]

    def handle_endtag(self, tag):
        self.inside = None

    def handle_data(self, data):
        if self.inside in self.contents:
            self.contents[self.inside].append(data)


def test_the_page_cannot_be_framed_and_runs_its_own_script_alone(served):
    """A hash covers the text between the tags; Content Security Policy Level 3."""
    answer = httpx.get(served[1])
    rules = dict(rule.split(" ", 1) for rule in answer.headers["content-security-policy"].split("; "))
    assert rules["frame-ancestors"] == rules["default-src"] == rules["base-uri"] == "'none'"
    assert rules["connect-src"] == "'self'"
    parts = Parts()
    parts.feed(answer.text)
    for tag, contents in parts.contents.items():
        (digest,) = [base64.b64encode(hashlib.sha256(one.encode()).digest()).decode() for one in contents]
        assert rules[f"{tag}-src"] == f"'sha256-{digest}'"
    assert parts.forbidden == []


@pytest.mark.parametrize("path", ["/", "/health", "/v1/models", "/v1/nothing", "/v1/completions"])
def test_no_answer_is_taken_for_another_type(served, path):
    assert httpx.get(f"{served[1]}{path}").headers["x-content-type-options"] == "nosniff"


def test_key_is_required(engine):
    with serving(engine, api_keys={"one": "right"}) as (_, url):
        for key in ("wrong", "righ"):
            with openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
                with pytest.raises(openai.AuthenticationError) as refused:
                    client.models.list()
                assert refused.value.body["code"] == "invalid_api_key"
        with openai.OpenAI(base_url=f"{url}/v1", api_key="right") as client:
            assert [model.id for model in client.models.list()] == ["toy"]


def test_a_body_that_is_too_long_or_too_slow(engine):
    def slowly():
        yield b'{"prompt": '
        time.sleep(1.5)
        yield b'"hello"}'

    with serving(engine, max_body_bytes=1000, body_seconds=0.3) as (_, url):
        answer = httpx.post(f"{url}/v1/completions", json={"prompt": "a" * 2000})
        assert (answer.status_code, answer.json()["error"]["type"]) == (413, "request_too_large")
        answer = httpx.post(f"{url}/v1/completions", content=slowly(), headers={"Content-Type": "application/json"})
        assert answer.status_code == 408
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "hello", "max_tokens": 1}).status_code == 200


def test_an_answer_follows_a_schema(client, engine, monkeypatch):
    pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"a": {"enum": ["e", "t"]}}, "required": ["a"]}
    schema["additionalProperties"] = False
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    for seed in range(20):
        answer = client.chat.completions.create(
            model="toy", messages=MESSAGES, response_format=form, temperature=1.5, seed=seed
        )
        assert json.loads(answer.choices[0].message.content)["a"] in ("e", "t")
        assert answer.choices[0].finish_reason == "stop"
    form["json_schema"]["schema"] = {"type": "nothing"}
    with pytest.raises(openai.BadRequestError, match="response_format"):
        client.chat.completions.create(model="toy", messages=MESSAGES, response_format=form)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("completions", {}, "prompt"),
        ("chat/completions", {"max_tokens": 1}, "messages"),
        ("completions", {"prompt": "a", "stream_options": {"nope": 1}}, "stream_options.nope"),
        ("completions", {"prompt": "a", "stop": ["a", None]}, "stop[1]"),
        ("completions", {"prompt": "a", "response_format": {}}, "response_format.type"),
        ("completions", {"prompt": "a", "nope": 1}, "nope"),
        ("completions", {"prompt": "a", "logit_bias": {"-1": 1}}, "logit_bias"),
        ("completions", {"prompt": "a", "logit_bias": {"128": 1}, "stream": True}, "logit_bias"),
        ("completions", {"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"),
        ("chat/completions", {"messages": MESSAGES, "stream_options": {}}, "stream_options"),
        ("chat/completions", {"messages": MESSAGES, "tool_choice": "required"}, "tool_choice"),
        ("chat/completions", {"messages": MESSAGES, "modalities": ["audio"]}, "modalities[0]"),
        ("chat/completions", {"messages": [{"role": "user", "content": 5}]}, "messages"),
        ("chat/completions", {"messages": [{"role": "user", "content": {"type": "text"}}]}, "messages"),
        ("chat/completions", {"messages": [{"role": "user"}]}, "messages"),
        ("chat/completions", {"messages": [{"role": "assistant", "tool_calls": "x"}]}, "messages"),
        ("chat/completions", {"messages": [{"role": "assistant", "tool_calls": [5]}]}, "messages"),
        ("chat/completions", {"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}, "messages"),
        ("score", {"text_1": [], "text_2": []}, "text_1"),
    ],
)
def test_an_error_names_the_field(served, path, body, param):
    answer = httpx.post(f"{served[1]}/v1/{path}", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_tokens_without_text_are_refused_by_field(served):
    answer = httpx.post(f"{served[1]}/detokenize", json={"tokens": [10**9]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tokens")


def test_fields_without_effect_on_the_answer_are_accepted(client):
    answer = client.chat.completions.create(
        model="toy",
        messages=MESSAGES,
        max_completion_tokens=1,
        modalities=["text"],
        service_tier="auto",
        safety_identifier="somebody",
        prompt_cache_key="here",
        top_logprobs=0,
        store=False,
        metadata={"a": "b"},
    )
    assert answer.usage.completion_tokens == 1


@pytest.mark.parametrize("seed", [-5, 0, 2**63, 2**64 - 1, 10**30])
def test_any_seed_gives_the_same_answer_again(client, seed):
    """Except -1, which means no seed."""
    texts = [
        client.completions.create(model="toy", prompt=PROMPT, max_tokens=12, n=2, seed=seed, temperature=2).choices
        for _ in range(2)
    ]
    assert [choice.text for choice in texts[0]] == [choice.text for choice in texts[1]]
    assert texts[0][0].text != texts[0][1].text


def test_developer_messages_become_system_messages(client):
    said = [{"role": "developer", "content": "be brief"}, MESSAGES[1]]
    answers = [
        client.chat.completions.create(model="toy", messages=messages, max_tokens=6, temperature=0, logprobs=True)
        for messages in (said, MESSAGES)
    ]
    assert answers[0].usage == answers[1].usage
    assert answers[0].choices == answers[1].choices


def test_prompts_of_token_ids_are_a_batch_with_choices_of_each(client):
    whole = client.completions.create(
        model="toy", prompt=[[5, 6, 7], [8]], max_tokens=3, n=2, best_of=2, stop=list("abcdef"), temperature=0
    )
    one = client.completions.create(model="toy", prompt=[8], max_tokens=3, stop=list("abcdef"), temperature=0)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert whole.choices[2].text == whole.choices[3].text == one.choices[0].text
    assert whole.usage.prompt_tokens == 4


def test_health_reports_a_task_that_does_not_end(chat_folder, monkeypatch):
    held, run = threading.Event(), BoundSubgraph.run

    def wait(*arguments):
        held.wait()
        return run(*arguments)

    monkeypatch.setattr(BoundSubgraph, "run", wait)
    with chunkrt.load(chat_folder, npu="native") as engine, serving(engine, stall_seconds=0.01) as (_, url):
        assert httpx.get(f"{url}/health").json() == {"status": "ok"}
        body = {"prompt": "hello", "max_tokens": 1}
        thread = threading.Thread(target=httpx.post, args=(f"{url}/v1/completions",), kwargs={"json": body})
        thread.start()
        wait_until(lambda: httpx.get(f"{url}/health").status_code == 503)
        found = httpx.get(f"{url}/health").json()
        held.set()
        thread.join()
        assert (found["status"], "a task has been running for" in found["detail"]) == ("stalled", True)
        assert httpx.get(f"{url}/health").status_code == 200
