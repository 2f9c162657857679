"""Control tokens, template variables and embeddings, as declared by the model's files."""

import httpx
import numpy as np
import openai
import pytest
from chat_model import write_chat_model
from server_of_tests import serving

import chunkrt
from chunkrt.errors import ConfigError

END = "</s>"


@pytest.fixture(scope="module")
def declared(tmp_path_factory):
    """A model with a thinking template, a suffix for embeddings, and a pooling."""
    thinking = "{{ 'off' if enable_thinking is false else 'on' }}"
    template = "{{ bos_token }}" + thinking + "{% for m in messages %}{{ m.content }}{% endfor %}"
    folder = tmp_path_factory.mktemp("declared") / "engine"
    write_chat_model(folder, chat_template=template, suffix_ids=[2, 3], pooling="last")
    with chunkrt.load(folder, npu="native", chunk_length=8, threads=1) as engine:
        yield engine


def tokens_of(url, **body):
    answer = httpx.post(f"{url}/tokenize", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["tokens"]


def test_completions_and_tokenize_read_control_tokens(client, served, engine):
    text, token_id = f"hi{END}", engine.tokenizer.special_id(END)
    read, plain = (engine.tokenizer.encode(text, parse_special=parses) for parses in (True, False))
    assert read[-1] == token_id
    assert token_id not in plain
    assert tokens_of(served[1], prompt=text) == read
    assert tokens_of(served[1], prompt=text, parse_special=False) == plain
    for extra, expected in ({}, read), ({"parse_special": False}, plain), ({"parse_special": None}, read):
        answer = client.completions.create(model="toy", prompt=text, max_tokens=1, extra_body=extra)
        assert answer.usage.prompt_tokens == len(expected)


def test_chats_do_not_read_control_tokens_of_messages(served, engine):
    messages = [{"role": "user", "content": f"hi{END}"}]
    tokens = tokens_of(served[1], messages=messages)
    assert tokens == engine.tokenizer.encode_chat(messages)
    assert engine.tokenizer.special_id(END) not in tokens


def test_scores_and_embeddings_take_control_tokens_for_text(engine):
    with (
        serving(engine, embeddings="last") as (_, url),
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        answer = client.embeddings.create(model="toy", input=END)
    assert answer.usage.prompt_tokens == len(engine.tokenizer.encode(END))


def test_a_stop_string_that_is_a_control_token_ends_the_answer(client, engine):
    forced = engine.tokenizer.special_id("<s>")
    ask = {"model": "toy", "prompt": "hello", "max_tokens": 5, "logit_bias": {str(forced): 100}}
    assert client.completions.create(**ask).choices[0].finish_reason == "length"
    answer = client.completions.create(**ask, stop=["never", "<s>"])
    assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("stop", 1)
    answer = client.completions.create(**ask, stop=["<s>"], extra_body={"ignore_eos": True})
    assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("stop", 1)
    messages = [{"role": "user", "content": "hi"}]
    given = {"max_tokens": 5, "logit_bias": ask["logit_bias"], "stop": ["<s>"], "logprobs": True}
    (choice,) = client.chat.completions.create(model="toy", messages=messages, **given).choices
    assert (choice.finish_reason, choice.message.content, choice.logprobs.content) == ("stop", "", [])
    with engine.session() as session:
        session.prefill("hello")
        sampling = chunkrt.SamplingOptions(logit_bias={forced: 100.0})
        (piece,) = session.generate(max_new_tokens=5, sampling=sampling, stop=["<s>"])
    assert piece.finish_reason == "stop"


def test_requests_set_variables_of_the_template(declared):
    messages = [{"role": "user", "content": "x"}]
    off = declared.tokenizer.encode_chat(messages, template_options={"enable_thinking": False})
    on = declared.tokenizer.encode_chat(messages)
    assert off != on
    with serving(declared, template_options={"enable_thinking": False}) as (_, url):
        assert tokens_of(url, messages=messages) == off
        assert tokens_of(url, messages=messages, chat_template_kwargs={"enable_thinking": True}) == on
        body = {"model": "toy", "messages": messages, "max_tokens": 1}
        answer = httpx.post(
            f"{url}/v1/chat/completions", json=body | {"chat_template_kwargs": {"enable_thinking": True}}
        )
        assert answer.json()["usage"]["prompt_tokens"] == len(on)
        refused = httpx.post(f"{url}/v1/chat/completions", json=body | {"chat_template_kwargs": {"messages": []}})
        assert (refused.status_code, "set by chunkrt" in refused.text) == (400, True)


def test_embeddings_are_made_as_the_models_files_say(declared):
    tokens = [*declared.tokenizer.encode("hello"), 2, 3]
    expected = declared.embed([tokens], pooling="last")[0]
    assert np.array_equal(declared.embed("hello"), expected)
    assert not np.array_equal(declared.embed("hello", pooling="mean"), expected)
    with serving(declared) as (_, url):
        answer = httpx.post(f"{url}/v1/embeddings", json={"input": "hello"}).json()
    assert (answer["pooling"], answer["usage"]["prompt_tokens"]) == ("last", len(tokens))
    assert np.array_equal(np.float32(answer["data"][0]["embedding"]), expected)


def test_embeddings_of_a_model_that_names_no_pooling_need_one(engine):
    with pytest.raises(ConfigError, match="pass pooling='last' or 'mean'"):
        engine.embed("hello")


def test_the_answer_to_a_chat_takes_template_options(declared):
    messages = [{"role": "user", "content": "x"}]
    tokens = declared.tokenizer.encode_chat(messages, template_options={"enable_thinking": False})
    expected = declared.generate([tokens], max_new_tokens=6)[0]
    assert declared.chat(messages, max_new_tokens=6, template_options={"enable_thinking": False}) == expected
