"""Answers: their content, and fairness to other requests."""

import asyncio
import contextlib
import itertools
import threading
import weakref

import httpx
import pytest
from collector import without_collector
from server_of_tests import events_of, occupancy, serving, wait_until
from small_vocabularies import REFERENCE, make_tokenizer

from chunkrt.engine.session import in_thread
from chunkrt.server import chat as chats
from chunkrt.server import completions as completed
from chunkrt.server.errors import RequestError
from chunkrt.server.service import Service

SPACE = "6"
"""The token of a space, in the model's SentencePiece vocabulary."""


def complete(url, **body):
    answer = httpx.post(f"{url}/v1/completions", json={"max_tokens": 4, "temperature": 0} | body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("echo", [False, True])
def test_the_space_that_a_continuation_begins_with_is_kept(served, engine, echo):
    tokens = engine.tokenizer.encode("hello", parse_special=False)
    for prompt in ("hello", tokens):
        for logprobs in (None, 1):
            body = {"prompt": prompt, "logit_bias": {SPACE: 100}, "echo": echo, "n": 2, "logprobs": logprobs}
            for choice in complete(served[1], **body)["choices"]:
                assert choice["text"] == "hello" * echo + " " * 4


def test_where_a_token_is_in_the_text(served):
    (choice,) = complete(served[1], prompt="hello", logit_bias={SPACE: 100}, logprobs=1, echo=True)["choices"]
    told = choice["logprobs"]
    assert len(told["tokens"]) == len(told["text_offset"])
    places = list(zip(told["tokens"], told["text_offset"], strict=True))[2:]  # after <s> and a space without text
    assert all(choice["text"][place:].startswith(token) for token, place in places)


def test_bytes_that_are_no_characters_have_names_of_their_own(engine, monkeypatch):
    """If all shared a name, the dictionary would hold one of them."""
    tokenizer = make_tokenizer("byte_level")
    parts = [i for i in range(128) if not tokenizer.token_bytes[i].isascii()]
    assert len(parts) >= 3
    monkeypatch.setattr(engine.loaded, "tokenizer", tokenizer)
    with serving(engine) as (_, url):
        body = {"prompt": [80, 81], "logit_bias": {str(parts[0]): 100}, "logprobs": 20, "max_tokens": 1}
        (choice,) = complete(url, **body)["choices"]
    (top,), (token,) = choice["logprobs"]["top_logprobs"], choice["logprobs"]["tokens"]
    assert token == f"bytes:\\x{tokenizer.token_bytes[parts[0]][0]:02x}"
    assert sum(name.startswith("bytes:") for name in top) >= 2
    assert len(top) in (20, 21)


def test_stream_without_new_tokens_has_a_finish_reason(served):
    body = {"prompt": ["hello", "there"], "max_tokens": 0, "stream": True, "stream_options": {"include_usage": True}}
    events = events_of(httpx.post(f"{served[1]}/v1/completions", json=body).text)
    choices = [choice for event in events for choice in event["choices"]]
    assert sorted((c["index"], c["text"], c["finish_reason"]) for c in choices) == [
        (0, "", "length"),
        (1, "", "length"),
    ]
    assert events[-1]["usage"]["completion_tokens"] == 0


def test_batch_admits_other_requests_in_between(engine):
    finished = []

    def batch(url):
        complete(url, prompt=["hello"] * 12, max_tokens=40, logit_bias={"2": -100})
        finished.append("batch")

    with serving(engine, max_sessions=1, queue=2) as (_, url):
        thread = threading.Thread(target=batch, args=(url,))
        thread.start()
        while engine.stats().sessions == 0:
            assert thread.is_alive()
        complete(url, prompt="there")
        finished.append("one")
        thread.join()
    assert finished == ["one", "batch"]


def test_copies_and_grammars_do_not_block_the_event_loop(engine, monkeypatch):
    loops, threads = set(), {}

    def noting(name, function):
        def noted(*arguments):
            threads[name] = threading.get_ident()
            return function(*arguments)

        return noted

    def check_model(self, request):
        loops.add(threading.get_ident())

    monkeypatch.setattr(Service, "check_model", check_model)
    monkeypatch.setattr(engine.loaded, "fork_state", noting("fork", engine.loaded.fork_state))
    for room in (chats, completed):
        monkeypatch.setattr(room, "constraint_maker", noting(room.__name__, room.constraint_maker))
    with serving(engine) as (_, url):
        complete(url, prompt="hello", n=2)
        httpx.post(
            f"{url}/v1/chat/completions", json={"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
        )
    assert len(threads) == 3
    assert len(loops) == 1
    assert loops.isdisjoint(threads.values())


def test_abandoned_copy_finishes_before_its_source_is_released(engine, monkeypatch):
    copying, go_on, copied = threading.Event(), threading.Event(), []
    fork_state = engine.loaded.fork_state

    def slowly(state):
        copying.set()
        assert go_on.wait(30)
        copied.append(fork_state(state))
        return copied[0]

    monkeypatch.setattr(engine.loaded, "fork_state", slowly)

    async def test():
        async with await engine.asession() as session:
            await session.aprefill("hello")
            task = asyncio.create_task(session.afork())
            await asyncio.to_thread(copying.wait, 30)
            task.cancel()
            task.cancel()
            await asyncio.sleep(0.05)
            assert not task.done()
            go_on.set()
            await asyncio.wait([task])
            assert task.cancelled()
            copy = weakref.ref(copied.pop())
            del task
            await asyncio.to_thread(wait_until, lambda: copy() is None)

    with without_collector():
        asyncio.run(test())


def test_failed_answer_leaves_no_reference_cycle(engine, monkeypatch):
    """A reference cycle would keep states, with their caches, until a garbage collection."""
    kept = []

    class MadeToFailError(RequestError):
        def __init__(self):
            super().__init__("made to fail")
            kept.append(weakref.ref(self))

    def fail(*_):
        raise MadeToFailError

    monkeypatch.setattr(Service, "check_model", fail)
    with serving(engine) as (_, url), without_collector():
        assert "made to fail" in httpx.post(f"{url}/v1/completions", json={"prompt": "hello"}).text
        wait_until(lambda: kept[0]() is None)


def test_failure_in_a_thread_keeps_no_references():
    class Held:
        pass

    def fail():
        held = Held()
        kept.append(weakref.ref(held))
        raise ValueError

    async def test():
        with contextlib.suppress(ValueError):
            await in_thread(fail)
        await asyncio.to_thread(wait_until, lambda: kept[0]() is None)

    kept = []
    with without_collector():
        asyncio.run(test())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("more", [{"n": 2}, {"prompt": ["hello there"] * 2, "echo": True, "logprobs": 1}])
def test_client_that_disconnects_at_any_time_leaves_no_state(engine, stream, more):
    """A state counts as long as it exists, so others would wait for its room."""
    body = {"prompt": "hello there you good day", "max_tokens": 60, "logit_bias": {"2": -100}, "stream": stream} | more
    with serving(engine) as (_, url), httpx.Client(base_url=url) as http, without_collector():
        for moment in range(1, 25):
            with (
                contextlib.suppress(httpx.TimeoutException),
                http.stream("POST", "/v1/completions", json=body, timeout=moment / 1000) as answer,
            ):
                lines = answer.iter_lines()
                assert sum(1 for _ in itertools.islice(lines, moment)) >= (not stream)
        wait_until(lambda: engine.stats().sessions == 0)
        wait_until(lambda: occupancy(url) == (0, 0))


def test_character_of_several_tokens_is_reported_token_by_token(engine, monkeypatch):
    """Like in a stream: each token with its bytes, and the next ones with their place in the text."""
    vocabulary = list(REFERENCE["vocabularies"]["byte_level"]["tokenizer.ggml.tokens"])
    for low, high in zip(range(120, 123), (161, 249, 228), strict=True):  # among the 128 tokens of the model
        vocabulary[low], vocabulary[high] = vocabulary[high], vocabulary[low]
    template = "{{ messages[0].content }}"
    tokenizer = make_tokenizer("byte_level", tokens=vocabulary, chat_template=template)
    monkeypatch.setattr(engine.loaded, "tokenizer", tokenizer)
    of_bytes = {tokenizer.token_bytes[i]: i for i in range(128)}
    tokens = [of_bytes[bytes([byte])] for byte in "a☃b".encode()]
    chat = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 2, "max_tokens": 1}
    with serving(engine) as (_, url):
        (choice,) = complete(url, prompt=tokens, max_tokens=0, echo=True, logprobs=2)["choices"]
        answer = httpx.post(f"{url}/v1/chat/completions", json=chat | {"logit_bias": {str(tokens[1]): 100}}).json()
    told = choice["logprobs"]
    assert choice["text"] == "a☃b"
    assert told["tokens"] == ["a", "bytes:\\xe2", "bytes:\\x98", "bytes:\\x83", "b"]
    assert told["text_offset"] == [0, 1, 1, 1, 2]
    assert all(name in top for name, top in zip(told["tokens"][1:], told["top_logprobs"][1:], strict=True))
    (content,) = answer["choices"][0]["logprobs"]["content"]
    assert content["bytes"] == [0xE2]
    assert len(content["top_logprobs"]) == 2
