"""Hostile arguments of the Python interface: every call raises one of chunkrt's own errors, or accepts the value."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fixture_checkpoints import checkpoint

import chunkrt
from chunkrt import SamplingOptions
from chunkrt.engine.options import EngineOptions
from chunkrt.errors import ChunkrtError, ConfigError

GGUF = checkpoint("llama_biased_gguf")
HOSTILE = [
    *(
        None,
        True,
        -1,
        0,
        1.5,
        float("nan"),
        float("inf"),
        10**30,
        "",
        "x" * 5000,
        "\ud800",
        "nul\0",
        b"x",
        bytearray(b"x"),
    ),
    *([], [1.5], ["a"], [None], [[1]], [10**30], [-1], [True], ["\ud800"], (), (1, 2), {}, {"a": 1}, {1, 2}),
    *(np.array(3), np.array([1, 2]), np.array([[1, 2]]), np.array([1.5]), np.array([], int), np.array(["a"])),
    *(np.int64(3), np.float32(1), np.bool_(True), np.int8(3), np.uint64(2**63)),
    *(object(), object, 3 + 4j, range(3), memoryview(b"x"), slice(1), ..., "/", ".", "/dev/null", "9" * 5000),
]


def take(value: Any) -> None:
    """Take up to two items from an iterator that a call returned."""
    if hasattr(value, "__next__"):
        for _ in zip(range(2), value, strict=False):
            pass
        value.close()


@pytest.fixture(scope="module")
def engine() -> Any:
    with chunkrt.load(GGUF) as engine:
        yield engine


def engine_calls(engine: Any, value: Any) -> list[Callable[[], Any]]:
    few = {"max_new_tokens": 1}
    return [
        lambda: engine.generate(value, **few),
        lambda: engine.generate([value], **few),
        *(
            lambda name=name: engine.generate("a", **{**few, name: value})
            for name in ("max_new_tokens", "sampling", "stop")
        ),
        lambda: engine.generate("a", max_sessions=value, **few),
        lambda: engine.stream(value, **few),
        lambda: engine.chat(value, **few),
        *(lambda pairs=pairs: engine.score(pairs) for pairs in (value, [value], [(value, [1])], [([1], value)])),
        lambda: engine.embed(value, pooling="mean"),
        lambda: engine.embed([value], pooling="mean"),
        lambda: engine.embed("a", pooling=value),
        lambda: engine.load_session(value),
        lambda: engine.tokenizer.encode(value),
        lambda: engine.tokenizer.decode(value),
        lambda: engine.tokenizer.encode_chat(value),
    ]


def session_calls(session: Any, value: Any) -> list[Callable[[], Any]]:
    names = ("max_new_tokens", "sampling", "stop", "log_probabilities", "constraint")
    return [
        lambda: session.prefill(value),
        lambda: session.prefill([1], logits=value),
        *(lambda name=name: session.generate(**{"max_new_tokens": 2, name: value}) for name in names),
        lambda: session.score(value, [1]),
        lambda: session.score([1], value),
        lambda: session.rewind(value),
        lambda: session.load(value),
    ]


@pytest.mark.parametrize("index", range(len(HOSTILE)))
def test_calls_raise_only_chunkrt_errors(engine: Any, index: int) -> None:
    value = HOSTILE[index]
    with engine.session() as session:
        session.prefill([1, 2, 3])
        for call in engine_calls(engine, value) + session_calls(session, value):
            with contextlib.suppress(ChunkrtError):
                take(call())


@pytest.mark.parametrize("kind", [SamplingOptions, EngineOptions])
def test_options_raise_only_chunkrt_errors(kind: type) -> None:
    for name in kind.__dataclass_fields__:
        for value in HOSTILE:
            with contextlib.suppress(ChunkrtError):
                kind(**{name: value})


SURROGATE = pytest.param(
    "\ud800", marks=pytest.mark.skipif(sys.platform == "win32", reason="names of files may hold it on Windows")
)


@pytest.mark.parametrize("name", [SURROGATE, "nul\0", b"x", 5, None, ""])
def test_save_rejects_values_that_are_not_paths(engine: Any, name: Any) -> None:
    with engine.session() as session, pytest.raises(ConfigError, match="path is"):
        session.save(name)


def test_score_rejects_token_ids_that_are_not_whole_numbers(engine: Any) -> None:
    with engine.session() as session:
        with pytest.raises(ConfigError, match=r"contains 1\.9"):
            session.score([1.9], [2.9])
        by_list, by_array = session.score([1, 2], [3]), session.score(np.array([1, 2]), np.array([3]))
    assert by_list == by_array


def test_log_probabilities_are_checked_and_converted(engine: Any) -> None:
    with engine.session() as session:
        session.prefill([1, 2, 3])
        with pytest.raises(ConfigError, match="log_probabilities is -1"):
            session.generate(log_probabilities=-1)
        (piece,) = session.generate(log_probabilities=np.int8(3), max_new_tokens=1)
    assert len(piece.log_probabilities.top) == 3


def test_sampling_options_accept_numpy_numbers() -> None:
    options = SamplingOptions(
        seed=np.int64(1), temperature=np.float32(0.5), logit_bias={np.int64(3): 1.0}, top_k=np.int8(2)
    )
    assert options == SamplingOptions(seed=1, temperature=0.5, logit_bias={3: 1.0}, top_k=2)


@pytest.mark.parametrize("name", ["x" * 5000, "nul\0", "\ud800"])
def test_load_reports_an_impossible_file_name(name: str) -> None:
    with pytest.raises(ChunkrtError):
        chunkrt.load(name)
