"""A context that shifts: the remaining tokens, and attention to them at their new positions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fixture_checkpoints import checkpoint
from random_folders import load_on, write_folder
from states import saved_arrays

from chunkrt.cli.chat import reuse_prefix
from chunkrt.engine.engine import Engine
from chunkrt.errors import BackendError, ConfigError

CONTEXT, KEEP, CHUNK = 64, 4, 8
TOKENS = np.random.default_rng(5).integers(0, 61, 300).tolist()
GGUF = str(checkpoint("llama_biased_gguf"))
TOLERANCE = 1e-4
"""Tolerance in float32: two layers of sums over at most 64 products and 64 keys."""


def after_shifts(tokens: list[int], keep: int = KEEP) -> list[int]:
    """Return the tokens that remain of a prompt that was processed in parts."""
    left: list[int] = []
    for token in tokens:
        if len(left) == CONTEXT:
            del left[keep : keep + (CONTEXT - keep) // 2]
        left.append(token)
    return left


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Random decoders: with one layer, where keys depend on their own token alone, with two, and with windows."""
    root = tmp_path_factory.mktemp("random")
    window = {"model_type": "mistral", "num_hidden_layers": 1, "max_position_embeddings": 512}
    return {
        "one": write_folder(root / "one", num_hidden_layers=1),
        "two": write_folder(root / "two", num_hidden_layers=2),
        "narrow": write_folder(root / "narrow", **window, sliding_window=8),
        "wide": write_folder(root / "wide", **window, sliding_window=100),
    }


def load(folder: Path, npu: str, **options: Any) -> Engine:
    options = {"chunk_length": CHUNK, "context_shift": True, "context_length": CONTEXT, **options}
    return load_on(npu, folder, **options)


on_all_backends = pytest.mark.parametrize("npu", ["reference", "onnxrt", "native"])


@on_all_backends
def test_keys_rotated_at_use_equal_keys_rotated_once(folders: dict[str, Path], npu: str) -> None:
    oracle = npu if npu == "native" else "onnxrt"
    with load(folders["two"], npu) as raw, load(folders["two"], oracle, context_shift=False) as rotated:
        found = raw.session().prefill(TOKENS[:CONTEXT], logits="all").logits
        expected = rotated.session().prefill(TOKENS[:CONTEXT], logits="all").logits
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)


@on_all_backends
@pytest.mark.parametrize("num_tokens", [CONTEXT + 1, CONTEXT + 30, CONTEXT + 31, 300])
def test_one_layer_after_a_shift_equals_a_fresh_session_of_the_remaining_tokens(
    folders: dict[str, Path], num_tokens: int, npu: str
) -> None:
    with load(folders["one"], npu) as engine:
        session, fresh = engine.session(), engine.session()
        session.prefill(TOKENS[:40])
        found = session.prefill(TOKENS[40:num_tokens], logits="all")
        assert list(session.tokens) == after_shifts(TOKENS[:num_tokens])
        assert list(session.history) == TOKENS[:num_tokens]
        assert found.num_tokens == num_tokens - 40
        assert found.logits is not None
        assert len(found.logits) == num_tokens - 40
        expected = fresh.prefill(session.tokens, logits="all").logits
        shifted, cached = (saved_arrays(each) for each in (session, fresh))
        caches = [name for name in cached if name.endswith("cache")]
        assert caches
        for name in caches:
            np.testing.assert_allclose(shifted[name], cached[name], rtol=0, atol=TOLERANCE)
    assert expected is not None
    np.testing.assert_allclose(found.logits[-1], expected[-1], rtol=0, atol=TOLERANCE)


@on_all_backends
def test_generation_continues_past_the_context(folders: dict[str, Path], npu: str) -> None:
    with load(folders["one"], npu) as engine:
        session = engine.session()
        session.prefill(TOKENS[:50])
        pieces = list(session.generate(max_new_tokens=100))
        assert [piece.finish_reason for piece in pieces] == [None] * 99 + ["length"]
        answer = [piece.token_id for piece in pieces]
        assert list(session.history) == [*TOKENS[:50], *answer]
        assert list(session.tokens) == after_shifts([*TOKENS[:50], *answer])
        logits = engine.session().prefill(session.tokens[:-1]).logits
        assert logits is not None
        assert int(np.argmax(logits)) == answer[-1]


@on_all_backends
def test_several_layers_shift_equally_with_any_chunks(folders: dict[str, Path], npu: str) -> None:
    outcomes = []
    for chunk_length in (CHUNK, CHUNK, 5, 64):
        with load(folders["two"], npu, chunk_length=chunk_length) as engine:
            session = engine.session()
            logits = session.prefill(TOKENS, logits="all").logits
            assert logits is not None
            assert np.isfinite(logits).all()
            outcomes.append((logits, session.tokens))
    np.testing.assert_array_equal(outcomes[0][0], outcomes[1][0])
    for logits, tokens in outcomes[2:]:
        np.testing.assert_allclose(logits, outcomes[0][0], rtol=0, atol=TOLERANCE)
        assert tokens == outcomes[0][1]


@pytest.mark.parametrize("cache_dtype", ["float16", "int8"])
def test_caches_of_every_type_shift(folders: dict[str, Path], cache_dtype: str) -> None:
    with load(folders["one"], "native", cache_dtype=cache_dtype) as engine:
        session = engine.session()
        found = session.prefill(TOKENS[:200]).logits
        expected = engine.session().prefill(session.tokens).logits
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)


@on_all_backends
@pytest.mark.parametrize(
    ("folder", "context", "keep", "num_run"),
    [*(("narrow", 256, keep, 14) for keep in (0, 1, 4)), ("wide", 150, 4, 77 + 14)],
)
def test_shift_runs_again_the_positions_that_rings_have_lost_and_windows_see(
    folders: dict[str, Path], folder: str, context: int, keep: int, num_run: int, npu: str
) -> None:
    """The narrow context has four times the length of a ring. In the wide one, with a window of 100, a row at 78 after
    the shift sees the 4 kept tokens, which a ring of 128 has lost.
    """
    with load(folders[folder], npu, context_length=context, context_keep=keep) as engine:
        session, run = engine.session(), list[int]()
        session.on_run = lambda record: run.append(record.num_tokens)
        session.prefill(TOKENS[:context])
        found = session.prefill(TOKENS[context : context + 14]).logits
        assert run == [context, num_run]
        expected = engine.session().prefill(session.tokens).logits
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)


def test_rewind_after_a_shift(folders: dict[str, Path]) -> None:
    with load(folders["one"], "reference") as engine:
        session = engine.session()
        session.prefill(TOKENS[:100])
        left = list(session.tokens)
        session.rewind(30)
        assert list(session.history) == TOKENS[: 100 - len(left) + 30]
        found = session.fork().prefill(TOKENS[200:210]).logits
        expected = engine.session().prefill([*left[:30], *TOKENS[200:210]]).logits
        np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)
        session.rewind(KEEP)
        assert list(session.history) == TOKENS[:KEEP]


def test_failure_between_shifts_leaves_the_session_unchanged(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with load(folders["two"], "reference") as engine:
        session = engine.session()
        session.prefill(TOKENS[:60])
        subgraph, num_calls = engine.loaded.scheduler.executors.prompts.subgraphs[3], 0
        run = subgraph.run

        def fail_late(*arguments: Any) -> None:
            nonlocal num_calls
            num_calls += 1
            if num_calls == 8:
                raise ValueError("on purpose")
            run(*arguments)

        before, tokens = session.fork().prefill(TOKENS[200:204]).logits, session.tokens
        with monkeypatch.context() as patch:
            patch.setattr(subgraph, "run", fail_late)
            with pytest.raises(BackendError, match="on purpose"):
                session.prefill(TOKENS[60:200])
        assert num_calls >= 8
        assert session.tokens == session.history == tokens
        np.testing.assert_array_equal(session.fork().prefill(TOKENS[200:204]).logits, before)
        fresh = engine.session()
        fresh.prefill(TOKENS[:60])
        np.testing.assert_array_equal(session.prefill(TOKENS[60:200]).logits, fresh.prefill(TOKENS[60:200]).logits)


def test_prompt_that_does_not_fit_is_rejected_without_a_shift(folders: dict[str, Path]) -> None:
    with load(folders["one"], "reference", context_shift=False) as engine:
        session = engine.session()
        with pytest.raises(ConfigError, match=r"has room for 64; .* or let the context shift"):
            session.prefill(TOKENS[:65])
        session.prefill(TOKENS[:60])
        assert [piece.finish_reason for piece in session.generate()] == [None] * 4 + ["context"]
        assert not engine.plan.has_raw_keys


@pytest.mark.parametrize("at", [50, 64, 100, 150])
@pytest.mark.parametrize("shared", [0, 3, 4, 30, 90, 140])
def test_conversation_continues_from_the_shared_beginning(folders: dict[str, Path], at: int, shared: int) -> None:
    with load(folders["one"], "reference") as engine:
        session = engine.session()
        session.prefill(TOKENS[:at])
        shared, num_dropped = min(shared, at), at - session.position
        turn = [*TOKENS[:shared], *(60 - token for token in TOKENS[shared : at + 20])]
        rest = reuse_prefix(session, turn)
        assert rest
        assert [*session.history, *rest] == turn
        was_dropped = num_dropped and KEEP <= shared <= KEEP + num_dropped
        assert len(session.history) == (KEEP if was_dropped else shared)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context_keep": -1}, "`context_keep` is -1, expected a whole number, 0 or more"),
        ({"context_keep": 1.5}, "`context_keep` is 1.5, expected a whole number, 0 or more"),
        ({"context_shift": "yes"}, "`context_shift` is 'yes', expected true or false"),
        ({"context_keep": 63}, "`context_keep` is 63, but in a context of 64 at least two tokens must move"),
    ],
)
def test_impossible_options_are_rejected(folders: dict[str, Path], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(folders["one"], "reference", **options)


def test_smallest_context_that_shifts(folders: dict[str, Path]) -> None:
    with load(folders["one"], "reference", context_keep=62) as engine:
        session = engine.session()
        session.prefill(TOKENS[:70])
        assert session.tokens == (*TOKENS[:62], *TOKENS[68:70])


def test_run_accepts_a_prompt_and_an_answer_longer_than_the_context(command: Any, tmp_path: Path) -> None:
    arguments = ["run", GGUF, "--npu", "reference", "--raw", "-p", "hello " * 30, "--context", "16", "--chunk", "4"]
    refused = command(*arguments)
    assert refused.status != 0
    assert "the context of 16 has room for 16" in refused.err
    settings = tmp_path / "settings.toml"
    settings.write_text("context_shift = true\ncontext_keep = 2\n", encoding="utf-8")
    outputs = []
    for shift in (["--context-shift", "--keep", "2"], ["--settings", settings]):
        finished = command(*arguments, "-n", "40", *shift)
        assert finished.status == 0, finished.err
        assert "40 tokens" in finished.err
        outputs.append(finished.out)
    assert outputs[0] == outputs[1]
