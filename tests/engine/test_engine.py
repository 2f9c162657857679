"""Loading a model: accepted and rejected arguments, and the use of an engine by several sessions."""

import re
from pathlib import Path

import numpy as np
import pytest
from fixture_checkpoints import checkpoint, input_ids

import chunkrt
from chunkrt.backends import qnn
from chunkrt.backends.qnn import library
from chunkrt.compile import compiler
from chunkrt.engine.engine import EngineOptions
from chunkrt.errors import BackendUnavailableError, ConfigError, ModelError, PartitionError

NAME = "llama_biased_gguf"
CHECKPOINT = checkpoint(NAME)
TOKENS = input_ids(NAME)


@pytest.fixture
def engine():
    with chunkrt.load(CHECKPOINT, chunk_length=8, threads=2) as engine:
        yield engine


def test_load_defaults(engine):
    with chunkrt.load(CHECKPOINT) as engine:
        assert engine.options == EngineOptions()
        assert engine.chunk_length == 128
        assert engine.scheme.name == "w8a8-dynamic"
        assert engine.loaded.npu_backend.name == "native"
        assert engine.context_length == 128
        assert engine.options.num_threads >= 1


@pytest.mark.parametrize("path", [str(CHECKPOINT), CHECKPOINT, checkpoint("llama_mha"), str(checkpoint("llama_mha"))])
def test_load_accepts_a_file_or_a_folder(path):
    with chunkrt.load(path) as engine:
        assert engine.plan.family == "llama"
        assert (engine.loaded.tokenizer is None) == Path(path).is_dir()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chunk_lenght": 8}, "unknown option 'chunk_lenght'; did you mean 'chunk_length'?"),
        ({"npu": "onnxruntime"}, "unknown NPU choice 'onnxruntime'; did you mean 'onnxrt'?"),
        ({"policy": "inorder"}, "unknown policy 'inorder'; did you mean 'in_order'?"),
        ({"scheme": "w8a8dynamic"}, "unknown scheme 'w8a8dynamic'; did you mean 'w8a8-dynamic'?"),
        ({"soc": "SM8651"}, "unknown SoC 'SM8651'; did you mean 'SM8650'?"),
        ({"on_npu_failure": "fallbak"}, "unknown answer to an NPU's failure 'fallbak'; did you mean 'fallback'?"),
        ({"chunk_length": 0}, "`chunk_length` is 0, expected numbers of tokens, at least 1"),
        ({"chunk_length": -1}, "`chunk_length` is -1, expected numbers of tokens, at least 1"),
        ({"threads": 0}, "`threads` is 0, expected at least 1"),
        ({"context_length": 0}, "`context_length` is 0, expected at least 1"),
        ({"chunk_length": 129}, "`chunk_length` is 129, longer than the context of 128"),
        ({"chunk_length": 33, "context_length": 32}, "`chunk_length` is 33, longer than the context of 32"),
        ({"context_length": 129}, "`context_length` is 129, but the model takes at most 128"),
        ({"placement": Path("nowhere.toml")}, "cannot read the placement file nowhere.toml"),
        ({"placement": Path("nowhere.toml"), "npu": "off"}, "`placement` and `npu='off'` contradict each other"),
    ],
)
def test_wrong_options_are_rejected(options, message):
    with pytest.raises(ConfigError) as raised:
        chunkrt.load(CHECKPOINT, **options)
    assert message in str(raised.value)


def test_missing_npu_is_reported(monkeypatch):
    monkeypatch.setattr(library, "PACKAGE", "a-package-that-nobody-has")
    monkeypatch.setattr(qnn, "open_htp", library.open_htp.__wrapped__)
    monkeypatch.setattr(compiler, "prepare_checkpoint", lambda *_, **__: pytest.fail("compiled before it was said"))
    with pytest.raises(BackendUnavailableError, match=r'is not installed; pip install "chunkrt\[qnn\]", or use `npu='):
        chunkrt.load(CHECKPOINT, npu="qnn")


def test_native_rejects_float_linears_with_advice():
    with pytest.raises(
        PartitionError, match=r"native cannot run subgraph static.0 under scheme float \(node model"
    ) as e:
        chunkrt.load(CHECKPOINT, scheme="float", npu="native")
    assert "`npu='onnxrt'` or `npu='reference'`" in str(e.value)


def test_unknown_model_name_offers_the_nearest():
    with pytest.raises(ConfigError, match="no model is called 'smollm2'; did you mean smollm2-135m-instruct"):
        chunkrt.load("smollm2")


@pytest.mark.parametrize("path", ["nowhere/model", "model.gguf"])
def test_missing_path_is_not_treated_as_a_name(path):
    with pytest.raises(ModelError, match=f"there is no file or folder {re.escape(str(path))}"):
        chunkrt.load(path)


def test_shorter_context_has_a_smaller_state():
    with chunkrt.load(CHECKPOINT, context_length=40) as short, chunkrt.load(CHECKPOINT) as long:
        assert short.session().context_length == 40
        np.testing.assert_array_equal(
            short.session().prefill(TOKENS[:40]).logits, long.session().prefill(TOKENS[:40]).logits
        )


def test_model_without_a_tokenizer_accepts_only_token_ids():
    with chunkrt.load(checkpoint("llama_mha")) as engine:
        with pytest.raises(ModelError, match=r"has no tokenizer; put its tokenizer\.json next to its weights"):
            engine.session().prefill("hello")
        session = engine.session()
        session.prefill([1, 2])
        assert [piece.text for piece in session.generate(max_new_tokens=2)] == ["", ""]


def test_placement_file_moves_modules(tmp_path):
    path = tmp_path / "placement.toml"
    path.write_text('"model.layers.*.mlp.down_proj" = "cpu"\n')
    with chunkrt.load(CHECKPOINT, placement=path) as placed, chunkrt.load(CHECKPOINT) as usual:
        assert len(placed.plan.subgraphs) == len(usual.plan.subgraphs) + 4
        found, expected = (engine.session().prefill(TOKENS).logits for engine in (placed, usual))
    # Sums of three terms in another order: a few float32 steps.
    np.testing.assert_allclose(found, expected, rtol=0, atol=16 * 2.0**-23 * np.abs(expected).max())


def test_npu_off_is_one_subgraph_and_the_lm_head():
    with chunkrt.load(CHECKPOINT, npu="off") as engine:
        assert [(s.name, s.device) for s in engine.plan.subgraphs] == [("dynamic.0", "cpu"), ("head", "cpu")]


def test_load_reports_progress(tmp_path, monkeypatch):
    monkeypatch.setenv("CHUNKRT_HOME", str(tmp_path))
    told = []
    chunkrt.load(CHECKPOINT, progress=lambda *step: told.append(step)).close()
    assert {what for what, _, _ in told} == {"compiling"}
    assert told[-1][1] == told[-1][2] > 0
    told.clear()
    chunkrt.load(CHECKPOINT, progress=lambda *step: told.append(step)).close()
    assert told == []
