"""Hidden states are those of Hugging Face Transformers, and embeddings depend on them alone."""

from dataclasses import replace

import numpy as np
import pytest
from fixture_checkpoints import checkpoint, expected_logits, input_ids
from led_ranks import led

import chunkrt
from chunkrt.compile.compiler import plan_checkpoint
from chunkrt.engine.embedding import check_hidden
from chunkrt.errors import ConfigError
from chunkrt.quant.scheme import SCHEMES
from chunkrt.runtime.trace.replay import Replay

NAMES = ("llama_mha", "llama_tied", "mistral_window_5", "qwen3", "gemma3_window_5", "phi3_window_5", "lfm2_biased")
NAMES += ("qwen3_next", "qwen3_5")
TEXTS = ["hello", "hello there, good day", "you", "hello there " * 5]
TOLERANCE = 1e-4
"""Tolerance of logits, which are sums of the hidden states."""


def transformers_hidden(name):
    """Return the input of Transformers' LM head: the only solution for its logits, which are more than the columns."""
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
def test_hidden_states_equal_those_of_transformers(name, backend):
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
def test_hidden_states_of_integer_schemes_are_close(name):
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
def test_hidden_states_on_ranks_equal_those_of_one_rank(name):
    """The leader returns them; the others only compute their parts of the sums."""
    tokens = [input_ids(name)[:length] for length in (20, 9, 1)]
    with chunkrt.load(checkpoint(name), npu="reference", scheme="float", chunk_length=8) as engine:
        expected = engine.embed(tokens, pooling="mean")
    with led(name, 2, npu="reference", scheme="float", chunk_length=8) as ranks:
        found = ranks.engine.embed(tokens, pooling="mean")
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)


def test_hidden_states_of_a_rotating_scheme_are_rejected():
    check_hidden(SCHEMES["w8a16"])
    with pytest.raises(ConfigError, match="rotates the residual stream"):
        check_hidden(replace(SCHEMES["w8a16"], is_rotated=True))


@pytest.fixture(scope="module")
def engine():
    with chunkrt.load(checkpoint("llama_biased_gguf"), npu="native", chunk_length=8, threads=2) as engine:
        yield engine


def test_embed_of_one_text_is_one_vector(engine):
    assert np.array_equal(engine.embed(TEXTS[1], pooling="last"), engine.embed(TEXTS[1:2], pooling="last")[0])


def test_session_continues_after_its_hidden_states(engine):
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


def test_trace_of_hidden_states_is_complete(engine):
    records = []
    with engine.session() as session:
        session.on_run = records.append
        session.prefill("hello there " * 5, logits="hidden")
    (record,) = records
    # the LM head does not run
    assert max(event.task.subgraph for event in record.events) < len(record.pipeline.stages) - 1
    Replay(record)


def test_embed_rejects_invalid_input(engine):
    for texts, pooling, message in (
        ([], "last", "texts is empty"),
        ([[]], "mean", "empty"),
        (["hello " * 200], "last", "does not fit"),
        (["hello"], "first", "pooling"),
    ):
        with pytest.raises(ConfigError, match=message):
            engine.embed(texts, pooling=pooling)
    assert engine.stats().sessions == 0
