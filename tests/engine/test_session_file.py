"""A conversation on disk: another engine continues it bit for bit."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np
import pytest
from calibrated import calibrated
from fixture_checkpoints import NAMES, ONE_OF_EACH_STATE, checkpoint

import chunkrt
from chunkrt.checkpoints import checkpoint as checkpoint_module
from chunkrt.engine.engine import Engine
from chunkrt.engine.session import Session
from chunkrt.errors import ClosedError, ConfigError, ModelError
from chunkrt.runtime.request import Request

NAME = "llama_biased_gguf"
PROMPT = [(5 * i) % 40 for i in range(50)]


def load(name: str = NAME, **options: object) -> Engine:
    defaults = {"npu": "native", "scheme": "w8a8-dynamic", "threads": 1, "attention_math": "float32"}
    return chunkrt.load(checkpoint(name), **{**defaults, **options})


@pytest.mark.sampled(name=ONE_OF_EACH_STATE)
@pytest.mark.parametrize("name", NAMES)
def test_another_engine_continues_the_conversation(name: str, tmp_path: Path) -> None:
    with load(name, chunk_length=32) as engine:
        session = engine.session()
        session.prefill(PROMPT)
        list(session.generate(max_new_tokens=5))
        session.save(tmp_path / "said")
        answer = [piece.token_id for piece in session.generate(max_new_tokens=4)]
        tokens, logits = session.tokens, session.prefill(PROMPT[:7]).logits
    for chunk_length in (8, 32, 100):
        with load(name, chunk_length=chunk_length) as engine, engine.load_session(tmp_path / "said") as session:
            assert session.position == len(PROMPT) + 5
            assert [piece.token_id for piece in session.generate(max_new_tokens=4)] == answer
            assert session.tokens == tokens
            if "qwen3_next" not in name and "qwen3_5" not in name:  # the chunks of these models affect rounding
                np.testing.assert_array_equal(session.prefill(PROMPT[:7]).logits, logits)


def after_a_prompt(session: Session) -> None:
    session.prefill(PROMPT)


def after_rows_of_all(session: Session) -> None:
    session.prefill(PROMPT, logits="all")


def after_no_logits(session: Session) -> None:
    session.prefill(PROMPT, logits="none")


def after_an_answer(session: Session) -> None:
    """Leave the last token pending."""
    session.prefill(PROMPT)
    list(session.generate(max_new_tokens=3))


def after_going_back(session: Session) -> None:
    """Go back to the requested position or further: the state is behind the tokens."""
    session.prefill(PROMPT)
    session.prefill(PROMPT[:20])
    session.rewind(37)


def after_shifts(session: Session) -> None:
    session.prefill([*PROMPT, *PROMPT])


@pytest.mark.sampled(every=3, name=ONE_OF_EACH_STATE)  # four names for each act, in turn
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "act", [after_a_prompt, after_rows_of_all, after_no_logits, after_an_answer, after_going_back, after_shifts]
)
def test_saved_session_is_restored_with_any_chunk_length(
    name: str, act: Callable[[Session], None], tmp_path: Path
) -> None:
    """Saved again, the file has the same numbers and arrays; so nothing in it depends on the chunk length."""
    options = {"context_shift": True, "context_length": 80} if act is after_shifts else {}
    if options and name.startswith(("gpt2", "gpt_bigcode", "opt")):
        pytest.skip("the context of a decoder with learned positions does not shift")
    with load(name, chunk_length=32, **options) as engine, engine.session() as session:
        act(session)
        session.save(tmp_path / "said")
    for chunk_length in (8, 33, 70):
        with load(name, chunk_length=chunk_length, prefix_cache="memory", **options) as engine:
            with engine.load_session(tmp_path / "said") as session:
                session.save(tmp_path / "again")
            assert engine.stats().prefix_bytes == 0  # it is unknown how it was computed
        with np.load(tmp_path / "said") as first, np.load(tmp_path / "again") as second:
            assert first.files == second.files
            for key in first.files:
                np.testing.assert_array_equal(first[key], second[key], err_msg=key)


@pytest.mark.parametrize("name", [NAME, "mistral_window_5", "lfm2", "qwen3_next"])
def test_loaded_sessions_are_not_exact_until_they_start_again(name: str, tmp_path: Path) -> None:
    """The prefix cache gets nothing of a file or its continuation; once the session has gone back to the start, it gets
    all."""
    with load(name, chunk_length=8) as engine, engine.session() as session:
        session.prefill(PROMPT)
        session.save(tmp_path / "said")
    with load(name, chunk_length=32, prefix_cache="memory") as engine:
        with engine.load_session(tmp_path / "said") as session:
            session.prefill(PROMPT[:20])
            with session.fork() as fork:
                fork.prefill([1, 2])
            assert engine.stats().prefix_bytes == 0
            session.rewind(0)
            session.prefill(PROMPT)
        with engine.session() as session, load(name, chunk_length=32) as plain:
            found = session.prefill([*PROMPT, 1])
            assert found.num_cached >= 32
            np.testing.assert_array_equal(found.logits, plain.session().prefill([*PROMPT, 1]).logits)


def test_loaded_prefill_is_not_run_again(tmp_path: Path) -> None:
    with load("lfm2") as engine:
        session = engine.session()
        logits = session.prefill(PROMPT).logits
        session.save(tmp_path / "said")
        again = engine.load_session(tmp_path / "said")
        records: list[object] = []
        again.on_run = records.append
        assert next(again.generate()).token_id == int(np.argmax(logits))
        assert records == []


def test_context_that_has_shifted_is_restored(tmp_path: Path) -> None:
    with load(context_shift=True, context_length=40) as engine:
        session = engine.session()
        session.prefill(PROMPT)
        session.save(tmp_path / "said")
        again = engine.load_session(tmp_path / "said")
        assert (again.tokens, again.history) == (session.tokens, session.history)
        np.testing.assert_array_equal(again.prefill([1, 2]).logits, session.prefill([1, 2]).logits)
        assert len(session.history) > len(session.tokens)
    with load(context_shift=True, context_length=40, context_keep=7) as engine:
        with pytest.raises(ModelError, match="was shifted with context_keep 4, not 7; load the model with that value"):
            engine.load_session(tmp_path / "said")
        engine.session().save(tmp_path / "nothing")
    with load(context_shift=True, context_length=40) as engine:
        assert engine.load_session(tmp_path / "nothing").position == 0


def test_load_errors_print_one_line(tmp_path: Path) -> None:
    path = tmp_path / "said"
    with load() as engine:
        session = engine.session()
        session.prefill(PROMPT)
        session.save(path)
        state = tmp_path / "state"
        of_prompt = engine.loaded.make_state()
        engine.loaded.run(Request(np.array(PROMPT), of_prompt))
        of_prompt.save(state)
        del of_prompt
        num_sessions = engine.stats().sessions
        with pytest.raises(ModelError, match="cannot load a state from"):
            engine.load_session(tmp_path / "nothing")
        with pytest.raises(ModelError, match="tensors do not match the"):
            engine.load_session(state)
        assert engine.stats().sessions == num_sessions
        session.close()
        with pytest.raises(ClosedError):
            session.save(path)
    with load(scheme="w8a16", npu="native") as engine, pytest.raises(ModelError):
        engine.load_session(path)
    with load(context_length=40) as engine, pytest.raises(ModelError, match="50 positions"):
        engine.load_session(path)
    with load(cache_dtype="float32") as engine, pytest.raises(ModelError, match="float16"):
        engine.load_session(path)
    with load() as engine:
        session = engine.session()
        session.prefill(PROMPT)
        with pytest.raises(ConfigError, match="cannot save the state"):
            session.save(tmp_path / "no folder" / "said")


def test_session_of_another_model_is_rejected(tmp_path: Path) -> None:
    with load("llama_rope_linear") as engine:
        session = engine.session()
        session.prefill(PROMPT)
        session.save(tmp_path / "said")
    with (
        load("llama_rope_parameters") as engine,
        pytest.raises(ModelError, match="another model, scheme or calibration"),
    ):
        engine.load_session(tmp_path / "said")
    with (
        load("llama_rope_linear", attention_math="bfloat16") as engine,
        pytest.raises(ModelError, match="another arithmetic of attention"),
    ):
        engine.load_session(tmp_path / "said")


def test_session_of_another_calibration_is_rejected(tmp_path: Path) -> None:
    """Equalisation scales columns of v by the calibration, and with them the values in the caches."""
    text = np.random.default_rng(3).integers(3, 40, 256)
    for name, sample in (("one", text[:128]), ("other", text[128:])):
        calibrated(NAME, tmp_path / f"{name}.npz", sample)
    options = {"scheme": "w8a16", "equalisation": 0.75}
    with load(calibration=tmp_path / "one.npz", **options) as engine, engine.session() as session:
        session.prefill(PROMPT)
        session.save(tmp_path / "said")
        engine.load_session(tmp_path / "said").close()
    with (
        load(calibration=tmp_path / "other.npz", **options) as engine,
        pytest.raises(ModelError, match="another model, scheme or calibration"),
    ):
        engine.load_session(tmp_path / "said")


def test_session_with_few_different_weights_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The digest by which ranks compare checkpoints samples large files; here it only covers the header."""
    monkeypatch.setenv("CHUNKRT_HOME", str(tmp_path / "home"))  # otherwise another test may have compiled it before
    monkeypatch.setattr(checkpoint_module, "SAMPLED_PIECES", 1)
    monkeypatch.setattr(checkpoint_module, "SAMPLED_PIECE_BYTES", 64)
    folder = shutil.copytree(checkpoint("llama_gqa"), tmp_path / "model")
    options = {"scheme": "float", "npu": "reference"}
    with load(str(folder), **options) as engine, engine.session() as session:
        session.prefill(PROMPT)
        session.save(tmp_path / "said")
        sampled = engine.loaded.manifest.checkpoint
    path = folder / "model.safetensors"
    weights = bytearray(path.read_bytes())
    weights[-2] ^= 1
    path.write_bytes(weights)
    with load(str(folder), **options) as engine:
        assert engine.loaded.manifest.checkpoint == sampled
        with pytest.raises(ModelError, match="another model"):
            engine.load_session(tmp_path / "said")


def test_damaged_file_leaves_the_session_unchanged(tmp_path: Path) -> None:
    path, random = tmp_path / "said", Random(0)
    with load(chunk_length=8) as engine:
        session = engine.session()
        truth = session.prefill(PROMPT).logits
        session.save(path)
        whole, other = path.read_bytes(), engine.session()
        other.prefill(PROMPT[:20])
        for _ in range(100):
            data = bytearray(whole)
            data[random.randrange(len(data))] ^= 1 << random.randrange(8)
            path.write_bytes(data[: random.choice([len(data), len(data), random.randrange(len(data))])])
            try:
                other.load(path)
            except ModelError:
                assert other.tokens == tuple(PROMPT[:20])
            else:  # a byte without meaning, such as a date
                assert next(other.generate(max_new_tokens=1)).token_id == truth.argmax()
                other.rewind(20)
        np.testing.assert_array_equal(other.prefill(PROMPT[20:]).logits, truth)
