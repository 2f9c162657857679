"""Tests of `chunkrt cache` and `--prefix-cache`: stored, listed and removed files."""

import gc
import json
import os
import time

import numpy as np
import pytest
from fixture_checkpoints import checkpoint
from one_line import expect_one_line

import chunkrt
from chunkrt.backends.qnn.contexts import ContextFolder

GGUF = checkpoint("llama_biased_gguf")
PROMPT = "hello " * 12


@pytest.fixture
def own_home(monkeypatch, tmp_path):
    monkeypatch.setenv("CHUNKRT_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def answer(command, *options):
    finished = command("run", GGUF, "-p", PROMPT, "--raw", "-n", 2, "--json", *options)
    assert (finished.status, finished.err) == (0, "")
    return json.loads(finished.out)


def sizes(command):
    return {one["kind"]: one for one in json.loads(command("cache", "list", "--json").out)}


def test_prefix_cache_on_disk_serves_a_second_process(command, own_home):
    first, second = (answer(command, "--prefix-cache", "disk") for _ in range(2))
    assert first["cached_tokens"] == 0
    assert second["cached_tokens"] == first["prompt_tokens"] // 32 * 32
    assert second["cached_tokens"] + second["prompt_tokens"] == first["prompt_tokens"]
    assert second["text"] == first["text"]
    figures = command("run", GGUF, "-p", PROMPT, "--raw", "-n", 2, "--prefix-cache", "disk").err
    assert f"prompt {second['prompt_tokens']} tokens and {second['cached_tokens']} cached, prefill" in figures


def test_cache_lists_shows_and_clears_files(command, own_home):
    assert sizes(command)["prefixes"]["entries"] == 0
    tokens = answer(command, "--prefix-cache", "disk")["prompt_tokens"]
    kept = sizes(command)
    assert (kept["prefixes"]["entries"], kept["engines"]["entries"]) == (1, 1)
    shown = json.loads(command("cache", "show", "--json").out)
    (model,) = shown["models"]
    assert (model["tokens"], model["bytes"]) == (tokens // 32 * 32, kept["prefixes"]["bytes"])
    assert f"{model['tokens']} tokens in 1 files" in command("cache", "show").out
    assert command("cache", "list").out.splitlines()[0].startswith("prefixes          1")
    cleared = json.loads(command("cache", "clear", "--json").out)
    assert cleared == {"cleared": ["prefixes"], "bytes": kept["prefixes"]["bytes"]}
    assert sizes(command)["prefixes"]["bytes"] == 0
    assert sizes(command)["engines"]["entries"] == 1
    gc.collect()  # Windows removes no mapped file, so the engine of this process must be gone
    assert command("cache", "clear", "--all").status == 0
    assert sizes(command)["engines"]["entries"] == 0


def test_cleared_engine_of_another_process_is_compiled_again(command, own_home):
    with chunkrt.load(GGUF) as engine, engine.session() as session:
        expected = session.prefill([1, 2, 3]).logits
        assert command("cache", "clear", "--all").status == 0
        assert sizes(command)["engines"]["entries"] == 0
        assert answer(command)["text"]
        session.rewind(0)
        assert np.array_equal(session.prefill([1, 2, 3]).logits, expected)


def test_cache_of_another_folder(command, own_home, tmp_path):
    folder = tmp_path / "mine"
    answer(command, "--prefix-cache", folder)
    (folder / "thesis.txt").write_text("")
    assert len(json.loads(command("cache", "show", "--folder", folder, "--json").out)["models"]) == 1
    assert command("cache", "clear", "--folder", folder).status == 0
    assert json.loads(command("cache", "show", "--folder", folder, "--json").out)["models"] == []
    assert (folder / "thesis.txt").exists()
    expect_one_line(command("cache", "clear", "engines", "--folder", folder), "omit the kinds")


def test_trace_counts_cached_tokens(command, own_home, tmp_path):
    answer(command, "--prefix-cache", "disk")
    second = answer(command, "--prefix-cache", "disk", "--trace", tmp_path / "trace")
    groups = json.loads(command("trace", tmp_path / "trace", "--json").out)["groups"]
    assert sum(group["cached"] for group in groups) == second["cached_tokens"] > 0
    assert f"{second['cached_tokens']} tokens cached" in command("trace", tmp_path / "trace").out


@pytest.mark.parametrize("options", [("--prefix-cache", ""), ("--prefix-cache-memory", "0"), ("--prefix-cache", GGUF)])
def test_cache_refuses_contradicting_options(command, options):
    expect_one_line(command("run", GGUF, "-p", "hello", *options), "prefix")


@pytest.mark.parametrize(("options", "num_tokens"), [((), 64), (("--prefix-cache", "memory"), 1)])
def test_bench_uses_no_prefix_cache_by_default(command, tmp_path, options, num_tokens):
    arguments = ("-p", 64, "-n", 0, "-r", 1, "--trace", tmp_path / "trace", *options)
    assert command("bench", GGUF, *arguments).status == 0
    groups = json.loads(command("trace", tmp_path / "trace", "--json").out)["groups"]
    assert sum(group["tokens"] for group in groups) == num_tokens


@pytest.fixture
def contexts(own_home):
    """Three contexts of 1000 bytes and more, unused for 9, 5 and 1 days."""
    folder = ContextFolder(own_home / "contexts")
    for name, days in (("old", 9), ("newer", 5), ("newest", 1)):
        record = folder.make(name, lambda wrapper: wrapper.write_bytes(bytes(1000))).with_name("context.json")
        used_at = time.time() - days * 86_400
        os.utime(record, (used_at, used_at))
    return folder


def left(contexts):
    return {path.name for path in contexts.path.iterdir() if not path.name.startswith(".")}


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        (("--unused-days", 4), {"newest"}),
        (("--unused-days", 7, "--most", "2.9KB"), {"newer", "newest"}),
        (("--most", "1.5KB"), {"newest"}),
        (("--most", "1GB"), {"old", "newer", "newest"}),
        ((), set()),
    ],
)
def test_cache_clear_evicts_contexts_by_age_and_size(command, contexts, options, kept):
    before = sizes(command)["contexts"]["bytes"]
    freed = json.loads(command("cache", "clear", "contexts", "--json", *options).out)["bytes"]
    assert left(contexts) == kept
    assert freed == before - sizes(command)["contexts"]["bytes"]


def test_context_that_was_used_is_evicted_last(command, contexts):
    assert contexts.find("old") is not None
    assert command("cache", "clear", "contexts", "--most", "1.5KB").status == 0
    assert left(contexts) == {"old"}
    expect_one_line(command("cache", "clear", "engines", "--most", "1GB"), "are for contexts", status=2)
