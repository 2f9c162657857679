"""Ctrl-C at any point of code that uses the prefix cache: session and cache continue, with the bits of a fresh
engine."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from functools import cache

import numpy as np
import pytest
from fixture_checkpoints import checkpoint
from interrupt_at import CALLER, InterruptAt

import chunkrt
from chunkrt.engine.engine import Engine
from chunkrt.engine.prefix_cache import cache as prefix_cache
from chunkrt.engine.prefix_cache import tree
from chunkrt.engine.session import Session
from chunkrt.errors import ClosedError
from chunkrt.runtime import prefix

MODULES = (*CALLER, prefix_cache, tree, prefix)
MODELS = ("llama_gqa", "mistral_window_5", "lfm2", "qwen3_next")
TOKENS = [(5 * i) % 40 for i in range(90)]
OTHERS = [*TOKENS[:40], *((3 * i + 1) % 40 for i in range(40))]
LIMIT = 60_000


@cache
def load(name: str, place: str) -> Engine:
    options = {"prefix_cache": place, "prefix_cache_memory": LIMIT}
    return chunkrt.load(
        checkpoint(name), npu="native", scheme="w8a8-dynamic", chunk_length=32, threads=1, context_length=120, **options
    )


@cache
def truth(name: str, tokens: tuple[int, ...]) -> np.ndarray:
    return load(name, "off").session().prefill(tokens).logits


def hit(session: Session) -> None:
    session.prefill(OTHERS)


def evict(session: Session) -> None:
    session.prefill([(11 * i + 7) % 40 for i in range(100)])


def rewind(session: Session) -> None:
    session.prefill(OTHERS)
    session.rewind(20)


def close(session: Session) -> None:
    session.prefill(OTHERS[:50])
    list(session.generate(max_new_tokens=2))
    session.close()


@pytest.mark.parametrize("step", [307, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("act", [hit, evict, rewind, close])
def test_interrupt_at_any_point_leaves_session_and_cache_consistent(act: object, name: str, step: int) -> None:
    engine, at, was_interrupted = load(name, "memory"), 1, True
    while was_interrupted:
        assert engine.loaded.prefix_cache is not None
        engine.loaded.prefix_cache.clear()
        engine.session().prefill(TOKENS)
        session, was_interrupted = engine.session(), False
        try:
            with InterruptAt(at, MODULES):
                act(session)  # type: ignore[operator]
        except KeyboardInterrupt:
            was_interrupted = True
        where = f"place {at}"
        with suppress(ClosedError) if act is close else nullcontext():
            assert session.position == len(session.tokens)
            tokens = (*session.tokens, 7, 11)
            found = session.prefill([7, 11]).logits
            if name != "qwen3_next" or len(tokens) == 2:
                np.testing.assert_array_equal(found, truth(name, tokens), err_msg=where)
        for tokens in (tuple(TOKENS), tuple(OTHERS)):
            with engine.session() as other:
                np.testing.assert_array_equal(other.prefill(tokens).logits, truth(name, tokens), err_msg=where)
        assert engine.stats().prefix_bytes <= LIMIT
        at += step
    assert at > 5 * step
