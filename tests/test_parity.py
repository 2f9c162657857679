"""Logits are those of Hugging Face Transformers, whatever the chunk length, and without chunks at all."""

import numpy as np
import pytest
from fixture_checkpoints import NAMES, checkpoint, expected_logits, input_ids

import chunkrt
from chunkrt.backends.onnxrt import OnnxRuntimeExecutable
from chunkrt.runtime.state import State

TOLERANCE = 1e-4
"""Float32 throughout: a few layers of sums over at most 96 products, on logits of up to about 7."""


@pytest.mark.parametrize("npu", ["reference", "onnxrt"])
@pytest.mark.parametrize("chunk_length", [1, 8, 32])
@pytest.mark.parametrize("name", NAMES)
def test_chunked_logits_are_those_of_transformers(name, chunk_length, npu):
    with chunkrt.load(checkpoint(name), npu=npu, scheme="float", chunk_length=chunk_length) as engine:
        result = engine.session().prefill(input_ids(name), logits="all")
    np.testing.assert_allclose(result.logits, expected_logits(name), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", NAMES)
def test_the_whole_decoder_as_one_onnx_model_gives_the_logits_of_transformers(name):
    """In one call, with empty caches: no chunk, no executor, no kernel of ours."""
    tokens = np.array(input_ids(name), np.int64)
    with chunkrt.load(checkpoint(name), npu="onnxrt", scheme="float") as engine:
        decoder = OnnxRuntimeExecutable(engine.plan.subgraphs, engine.plan, engine.scheme, engine.weights)
        state = State(engine.plan, tokens.size)
        logits = np.empty((tokens.size, engine.plan.vocab_size), np.float32)
        inputs = {"input_ids": tokens, "position": np.zeros(1, np.int64), "logit_rows": np.arange(tokens.size)}
        decoder.run({**inputs, **state.tensors}, {engine.plan.output: logits})
    np.testing.assert_allclose(logits, expected_logits(name), rtol=0, atol=TOLERANCE)


def test_decoding_token_by_token_gives_the_logits_of_transformers():
    name = "llama_gqa"
    with chunkrt.load(checkpoint(name), npu="onnxrt", scheme="float") as engine:
        session = engine.session()
        logits = [session.prefill([token]).logits for token in input_ids(name)]
    np.testing.assert_allclose(logits, expected_logits(name), rtol=0, atol=TOLERANCE)


def test_the_last_logits_are_those_of_the_last_token():
    name = "llama_tied"
    with chunkrt.load(checkpoint(name), npu="reference", scheme="float") as engine:
        result = engine.session().prefill(input_ids(name))
    np.testing.assert_allclose(result.logits, expected_logits(name)[-1], rtol=0, atol=TOLERANCE)
