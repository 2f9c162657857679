"""Hidden states are those of Hugging Face Transformers, and embeddings are made of them alone."""

import threading
from dataclasses import replace

import numpy as np
import pytest
from calibrated import calibrated
from fixture_checkpoints import checkpoint, expected_logits, input_ids
from led_ranks import led

import chunkrt
from chunkrt.backends import qnn
from chunkrt.compile.compiler import plan_checkpoint
from chunkrt.engine.embedding import check_hidden
from chunkrt.errors import ConfigError
from chunkrt.quant.scheme import SCHEMES
from chunkrt.runtime.trace.replay import Replay

NAMES = ("llama_mha", "llama_tied", "mistral_window_5", "qwen3", "gemma3_window_5", "phi3_window_5", "lfm2_biased")
NAMES += ("qwen3_next", "qwen3_5")
TEXTS = ["hello", "hello there, good day", "you", "hello there " * 5]
TOLERANCE = 1e-4
"""As of logits, which the head made of them by a sum."""


def transformers_hidden(name):
    """What its head read: the only rows that make all of Transformers' logits, of which there are more than columns."""
    planned = plan_checkpoint(checkpoint(name), {})
    head = planned.plan.subgraphs[-1]
    (weight,) = (node.inputs[1] for node in head.nodes if node.op == "MatMul")
    found, rest, rank, _ = np.linalg.lstsq(planned.load(weight).T.astype(np.float64), expected_logits(name).T)
    assert rank == found.shape[0]
    assert rest.max() < 1e-6
    return found.T


def unit(row):
    return row / np.linalg.norm(row)


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("backend", ["reference", "onnxrt"])
@pytest.mark.parametrize("name", NAMES)
def test_hidden_states_are_those_of_transformers(name, backend):
    expected, tokens = transformers_hidden(name), input_ids(name)
    with chunkrt.load(checkpoint(name), scheme="float", npu=backend, chunk_length=8) as engine:
        result = engine.session().prefill(tokens, logits="hidden")
        assert result.logits is None
        np.testing.assert_allclose(result.hidden, expected, rtol=0, atol=TOLERANCE * np.abs(expected).max())
        for pooling, row in (("last", expected[-1]), ("mean", expected.mean(axis=0))):
            found = engine.embed([tokens], pooling=pooling)
            assert found.dtype == np.float32
            np.testing.assert_allclose(found, unit(row)[None], rtol=0, atol=TOLERANCE)


@pytest.mark.sampled(name=["llama_tied", "gemma3_window_5", "lfm2_biased"])
@pytest.mark.parametrize("name", NAMES)
def test_those_of_integers_mean_the_same(name):
    expected = transformers_hidden(name)
    with chunkrt.load(checkpoint(name), npu="native", chunk_length=8, threads=2) as engine:
        hidden = engine.session().prefill(input_ids(name), logits="hidden").hidden
        with engine.session() as session:
            split = [
                session.prefill(part, logits="hidden").hidden for part in (input_ids(name)[:32], input_ids(name)[32:])
            ]
    cosines = (hidden * expected).sum(axis=1) / np.linalg.norm(hidden, axis=1) / np.linalg.norm(expected, axis=1)
    assert cosines.min() > 0.98
    assert np.array_equal(np.concatenate(split), hidden)


@pytest.mark.parametrize("name", ["llama_biased_gguf", "gemma3_window_5"])
def test_ranks_give_what_one_gives(name):
    """The leader has them; the others compute what its sums need."""
    tokens = [input_ids(name)[:length] for length in (20, 9, 1)]
    with chunkrt.load(checkpoint(name), npu="reference", scheme="float", chunk_length=8) as engine:
        expected = engine.embed(tokens, pooling="mean")
    with led(name, 2, npu="reference", scheme="float", chunk_length=8) as ranks:
        found = ranks.engine.embed(tokens, pooling="mean")
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)


def test_a_scheme_that_rotates_them_is_refused():
    check_hidden(SCHEMES["w8a16"])
    with pytest.raises(ConfigError, match="rotates the residual stream"):
        check_hidden(replace(SCHEMES["w8a16"], is_rotated=True))


@pytest.fixture(scope="module")
def engine():
    with chunkrt.load(checkpoint("llama_biased_gguf"), npu="native", chunk_length=8, threads=2) as engine:
        yield engine


def alone(engine, text, pooling):
    with engine.session() as session:
        hidden = session.prefill(text, logits="hidden").hidden
    return unit(hidden[-1].astype(np.float64) if pooling == "last" else hidden.mean(axis=0, dtype=np.float64))


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_texts_that_share_chunks_get_the_bits_that_each_gets_alone(engine, pooling):
    """Beside sequences that want logits of their rows in the same chunks."""
    expected = np.stack([alone(engine, text, pooling) for text in TEXTS]).astype(np.float32)
    text = engine.generate("good day", max_new_tokens=40)
    together, said = [], []

    def write():
        said.append(engine.generate(["good day"] * 3, max_new_tokens=40))

    thread = threading.Thread(target=write)
    before = engine.stats().shared_rows
    thread.start()
    for _ in range(5):
        together.append(engine.embed(TEXTS, pooling=pooling))
    thread.join()
    assert engine.stats().shared_rows > before
    assert all(np.array_equal(found, expected) for found in together)
    assert said == [[text] * 3]


def test_one_text_is_one_vector(engine):
    assert np.array_equal(engine.embed(TEXTS[1], pooling="last"), engine.embed(TEXTS[1:2], pooling="last")[0])


def test_a_session_goes_on_after_its_hidden_states(engine):
    with engine.session() as session, engine.session() as other:
        first = session.prefill("hello", logits="hidden").hidden
        second = session.prefill(" there", logits="hidden").hidden
        pieces = [piece.token_id for piece in session.generate(max_new_tokens=6)]
        tokens = session.tokens[: -len(pieces)]
        whole = other.prefill(tokens, logits="hidden").hidden
        assert np.array_equal(np.concatenate([first, second]), whole)
        other.rewind(0)
        other.prefill(tokens)
        assert [piece.token_id for piece in other.generate(max_new_tokens=6)] == pieces


def test_a_trace_of_them_is_whole(engine):
    records = []
    with engine.session() as session:
        session.on_run = records.append
        session.prefill("hello there " * 5, logits="hidden")
    (record,) = records
    assert max(event.task.subgraph for event in record.events) < len(record.pipeline.stages) - 1  # the head is spared
    Replay(record)


def test_what_makes_no_embedding_is_refused(engine):
    for texts, pooling, message in (
        ([], "last", "texts is empty"),
        ([[]], "mean", "empty"),
        (["hello " * 200], "last", "does not fit"),
        (["hello"], "first", "pooling"),
    ):
        with pytest.raises(ConfigError, match=message):
            engine.embed(texts, pooling=pooling)
    assert engine.stats().sessions == 0


def test_an_emulated_npu_gives_what_it_gives_alone_and_means_the_same(tmp_path):
    pytest.importorskip("onnxruntime_qnn", reason="onnxruntime-qnn, which emulates the NPU, is not installed")
    if not qnn.open_htp().is_emulated:
        pytest.skip("this machine has an NPU, and a compiler for that NPU alone")
    path = tmp_path / "toy.npz"
    model = calibrated("llama_biased_gguf", path)
    with chunkrt.load(model, npu="reference", scheme="float") as engine:
        exact = engine.embed(TEXTS, pooling="mean")
    with chunkrt.load(model, npu="qnn", soc="SM8650", chunk_length=8, calibration=path) as engine:
        together = engine.embed(TEXTS, pooling="mean")
        for row, one in zip(together, TEXTS, strict=True):
            assert np.array_equal(row, engine.embed(one, pooling="mean"))
    assert (together * exact).sum(axis=1).min() > 0.99
