"""bfloat16 caches: bfloat16 attention finds the same bits there that it makes of float32 ones, after any operations."""

from __future__ import annotations

from pathlib import Path
from random import Random

import numpy as np
import pytest
from fixture_checkpoints import ONE_OF_EACH_STATE, checkpoint

import chunkrt
from chunkrt.engine.engine import Engine
from chunkrt.engine.session import Session
from chunkrt.errors import ClosedError, ConfigError

CONTEXT = 120


def load(name: str = "llama_gqa", cache_dtype: str | None = "bfloat16", **options: object) -> Engine:
    defaults = {"npu": "native", "scheme": "w8a8-dynamic", "threads": 2, "context_length": CONTEXT, "chunk_length": 8}
    return chunkrt.load(
        checkpoint(name),
        attention_math="bfloat16",
        cache_dtype=cache_dtype,
        **{"prefix_cache": "off", **defaults, **options},
    )


def step(engine: Engine, other: Engine, session: Session, folder: Path, random: Random) -> tuple[Session, np.ndarray]:
    """Perform a random operation on a session, then a prompt; return the session to continue with, and logits."""
    match random.choice(["prefill", "rewind", "fork", "save", "reset"]):
        case "rewind":
            session.rewind(random.randint(0, session.position))
        case "fork":
            fork = session.fork()
            if session.position + 3 <= session.context_length:
                session.prefill([1, 2, 3], logits="none")  # leaves the fork unchanged
            session = fork
        case "save":
            session.save(folder / "session")
            session = random.choice([engine, other]).session()
            session.load(folder / "session")
        case "reset":
            session = engine.session()
    room = session.context_length - session.position
    if room < 2:
        session.rewind(random.randint(0, 40))
        room = session.context_length - session.position
    vocab_size = engine.plan.vocab_size
    tokens = [random.randrange(vocab_size) for _ in range(random.randint(1, min(room, 70)))]
    logits = session.prefill(tokens, logits="all").logits
    assert logits is not None
    return session, logits


def story(name: str, cache_dtype: str, folder: Path, seed: int) -> list[np.ndarray]:
    """Return the logits of one story; the reader of a file may have another context and other chunks."""
    random, found = Random(seed), []
    with (
        load(name, cache_dtype) as engine,
        load(name, cache_dtype, context_length=CONTEXT - 9, chunk_length=32) as other,
    ):
        session = engine.session()
        for _ in range(12):
            session, logits = step(engine, other, session, folder, random)
            found.append(logits)
    return found


@pytest.mark.sampled(seed=(0, 1))
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("name", [*ONE_OF_EACH_STATE, "mistral_window_95"])
def test_bits_equal_those_of_float32_caches_after_any_operations(tmp_path: Path, name: str, seed: int) -> None:
    for number, (found, expected) in enumerate(
        zip(story(name, "bfloat16", tmp_path, seed), story(name, "float32", tmp_path, seed), strict=True)
    ):
        np.testing.assert_array_equal(found, expected, err_msg=f"prompt {number}")


@pytest.mark.parametrize("name", ["llama_gqa", "gemma3_window_5"])
def test_kept_prefix_gives_the_same_bits(name: str, tmp_path: Path) -> None:
    random = Random(0)
    with load(name) as plain, load(name, prefix_cache=str(tmp_path / "kept"), chunk_length=32) as cached:
        begin = [random.randrange(plain.plan.vocab_size) for _ in range(90)]
        num_cached = 0
        for length in (90, 90, 33, 65, 71, 90):
            prompt = [*begin[:length], length % 7, 3]
            result = cached.session().prefill(prompt)
            num_cached += result.num_cached
            np.testing.assert_array_equal(result.logits, plain.session().prefill(prompt).logits)
        assert num_cached > 150


def test_aborted_prompt_leaves_a_ring_unchanged() -> None:
    with load("gemma3_window_5", chunk_length=16) as engine:
        tokens = [number % 40 for number in range(100)]
        session, expected = engine.session(), engine.session()
        for each in (session, expected):
            each.prefill(tokens[:70])

        with pytest.raises(ClosedError):
            session.prefill(tokens[70:], progress=lambda *_: session.cancel())
        np.testing.assert_array_equal(session.prefill(tokens[70:]).logits, expected.prefill(tokens[70:]).logits)


def test_bfloat16_caches_are_the_default_of_bfloat16_attention() -> None:
    with load(cache_dtype=None) as engine:
        assert engine.cache_dtype == "bfloat16"
        cache = next(iter(engine.loaded.make_state().tensors.values()))
        assert (cache.dtype, cache.shape[1] % 64, cache.shape[2] % 32) == (np.uint16, 0, 0)
    with load(cache_dtype=None, context_shift=True) as engine:
        assert engine.cache_dtype == "float16"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention_math": "float32"}, "`cache_dtype='bfloat16'` needs"),
        ({"attention_math": "bfloat16", "context_shift": True}, "bfloat16 caches cannot shift"),
    ],
)
def test_incompatible_options_are_rejected(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        chunkrt.load(checkpoint("llama_gqa"), cache_dtype="bfloat16", **options)
