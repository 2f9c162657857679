"""Prefix cache of a server with several clients: no client can find out prompts of others."""

import httpx
import pytest
from server_of_tests import serving

import chunkrt
from chunkrt.errors import ConfigError

KEYS = {"alice": "a-key", "bob": "b-key"}
HEAD = list(range(5, 45))
SECRET = [9, 4, 6, 4, 2, 8]


def ask(url, tokens, *, key=None, **body):
    """Return the prompt tokens that the server had computed before."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    answer = httpx.post(
        f"{url}/v1/completions", json={"prompt": tokens, "max_tokens": 0, **body}, headers=headers, timeout=60
    )
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.fixture
def load(chat_folder, tmp_path):
    def load(place):
        folder = tmp_path / "prefixes" if place == "disk" else "memory"
        return chunkrt.load(chat_folder, npu="native", chunk_length=8, threads=1, prefix_cache=folder)

    return load


@pytest.mark.parametrize("place", ["memory", "disk"])
@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        ({"key": "a-key"}, {"key": "b-key"}),
        ({"key": "a-key", "cache_salt": "s"}, {"key": "b-key", "cache_salt": "s"}),
        ({"key": "a-key", "cache_salt": "s"}, {"key": "a-key", "cache_salt": "t"}),
        ({"cache_salt": "s"}, {"cache_salt": "t"}),
        ({"cache_salt": "s"}, {}),
        ({"prompt_cache_key": "s"}, {"prompt_cache_key": "t"}),
        ({"prompt_cache_key": "s"}, {"cache_salt": "s"}),
        ({}, {"cache_salt": "s"}),
    ],
    ids=str,
)
def test_a_prompt_cannot_be_guessed_from_another_tree(load, place, mine, theirs):
    """Neither in another process, whose memory is empty, by its files."""
    keys = KEYS if "key" in mine else {}
    prompt = [*HEAD, *SECRET, *range(60, 80)]
    with load(place) as engine, serving(engine, api_keys=keys) as (_, url):
        assert ask(url, prompt, **mine) == 0
        assert ask(url, prompt, **theirs) == 0
        assert ask(url, [*HEAD, *SECRET, 50, 50], **mine) == len(HEAD) + len(SECRET)
    if place == "disk":
        with load(place) as engine, serving(engine, api_keys=keys) as (_, url):
            other = theirs | {"cache_salt": "of nobody"}
            assert ask(url, prompt, **other) == 0
            assert ask(url, [*HEAD, *SECRET, 50, 50], **mine) > 0


@pytest.mark.parametrize("place", ["memory", "disk"])
def test_scores_and_embeddings_have_the_trees_of_their_keys(load, place):
    """Their answers do not report cached tokens, but the time that they take does, and the counts of the engine."""
    bodies = {
        "score": {"text_1": "hello there " * 4, "text_2": "you"},
        "rerank": {"documents": ["hello there " * 4], "query": "you"},
        "embeddings": {"input": "hello there " * 4},
    }
    with load(place) as engine, serving(engine, api_keys=KEYS, embeddings="last") as (_, url):
        for path, body in bodies.items():
            for key in KEYS.values():
                before = engine.stats().shared_rows, engine.stats().cached_tokens
                headers = {"Authorization": f"Bearer {key}"}
                assert httpx.post(f"{url}/v1/{path}", json=body, headers=headers, timeout=60).status_code == 200
                if path == "score":
                    assert engine.stats().cached_tokens == before[1]
        before = engine.stats().cached_tokens
        httpx.post(
            f"{url}/v1/score", json=bodies["score"], headers={"Authorization": f"Bearer {KEYS['alice']}"}, timeout=60
        )
        assert engine.stats().cached_tokens > before


def test_a_session_finds_the_prefixes_of_its_salt_alone(load):
    with load("memory") as engine:
        for salt, expected in (("a", 0), (None, 0), ("b", 0), ("a", 47), (None, 47)):
            with engine.session(cache_salt=salt) as session:
                assert session.prefill([*HEAD, *SECRET, 50, 50]).num_cached == expected, salt
        with engine.session(cache_salt="a") as session, session.fork() as copy:
            copy.prefill([*HEAD, *SECRET, 50, 50])
            assert copy.prefill([1, 2, 3]).num_cached == 0
        before = engine.stats().cached_tokens
        engine.generate([[*HEAD, *SECRET, 50, 50]], max_new_tokens=1, cache_salt="c")
        assert engine.stats().cached_tokens == before
        engine.generate([[*HEAD, *SECRET, 50, 50]], max_new_tokens=1, cache_salt="a")
        assert engine.stats().cached_tokens == before + 47
        for salt in ("", 5, b"a"):
            with pytest.raises(ConfigError, match="cache_salt is"):
                engine.session(cache_salt=salt)


def test_trees_of_unused_salts_are_evicted(load, chat_folder):
    """Each request may have a salt of its own; all together stay within the budget."""
    with chunkrt.load(
        chat_folder, npu="native", chunk_length=8, threads=1, prefix_cache="memory", prefix_cache_memory=100_000
    ) as engine:
        for number in range(40):
            with engine.session(cache_salt=str(number)) as session:
                session.prefill(list(range(5, 100)))
            assert engine.stats().prefix_bytes <= 100_000
        with engine.session(cache_salt="39") as session:
            assert session.prefill(list(range(5, 100))).num_cached > 0
        with engine.session(cache_salt="0") as session:
            assert session.prefill(list(range(5, 100))).num_cached == 0


def test_an_empty_salt_is_refused(served):
    answer = httpx.post(f"{served[1]}/v1/completions", json={"prompt": "hello", "cache_salt": ""})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "cache_salt")
