"""Logits equal those of Hugging Face Transformers, with any chunk length, and without chunks."""

import json
import shutil
from functools import cache

import numpy as np
import pytest
from fixture_checkpoints import NAMES, checkpoint, expected_logits, input_ids

import chunkrt
from chunkrt.backends.onnx.onnxrt import OnnxRuntimeExecutable
from chunkrt.compile.compiler import plan_checkpoint
from chunkrt.graph.decoders import FAMILIES
from chunkrt.runtime.state import State

TOLERANCE = 1e-4
"""Tolerance in float32: a few layers of sums over at most 96 products, on logits of up to about 7."""
SPLIT_TOLERANCE = 1e-5
"""Tolerance for the same sums in another order, relative to the largest logit."""
CHUNK_LENGTHS = (1, 8, 32, 64)
LENGTHS = (1, 31, 32, 33, 95)
ONE_CHUNK = 128
FAMILY_NAMES = ("llama_gqa", "mistral_window_5", "qwen2", "qwen3_layer_types", "gemma3_scaled", "phi3_window_5")
FAMILY_NAMES += ("lfm2", "qwen3_next", "qwen3_5")
FAMILY_NAMES += ("smollm3_window", "granite", "granite_hybrid", "minicpm", "ernie4_5_biased", "helium", "glm", "glm4")
FAMILY_NAMES += ("qwen2_moe", "granitemoeshared", "lfm2_moe", "ernie4_5_moe", "qwen3_5_moe", "gpt_oss")
FAMILY_NAMES += ("mamba2", "bamba", "falcon_h1", "nemotron_h", "granite_hybrid_mamba_experts")
FAMILY_NAMES += ("deepseek_v2", "glm4_moe", "minicpm3", "gpt2", "opt")
FAMILY_NAMES += ("olmo2", "olmo3", "exaone4_hybrid", "gemma", "gemma2", "gemma4", "lfm3")
LONGROPE = "phi3_longrope_long"


def load(name, **options):
    return chunkrt.load(checkpoint(name), scheme="float", **({"npu": "reference"} | options))


def logits_of(engine, tokens):
    return engine.session().prefill(tokens, logits="all").logits


@cache
def in_one_chunk(name, num_tokens):
    with load(name, chunk_length=ONE_CHUNK) as engine:
        return logits_of(engine, input_ids(name)[:num_tokens])


def assert_same_but_for_order(found, expected):
    np.testing.assert_allclose(found, expected, rtol=0, atol=SPLIT_TOLERANCE * np.abs(expected).max())


def test_every_family_has_fixtures():
    assert {plan_checkpoint(checkpoint(name), {}).plan.family for name in NAMES} == set(FAMILIES)


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("chunk_length", CHUNK_LENGTHS)
@pytest.mark.parametrize("name", NAMES)
def test_chunked_logits_equal_those_of_transformers(name, chunk_length):
    with load(name, chunk_length=chunk_length) as engine:
        found = logits_of(engine, input_ids(name))
    np.testing.assert_allclose(found, expected_logits(name), rtol=0, atol=TOLERANCE)


@pytest.mark.sampled(every=7)
@pytest.mark.parametrize("name", NAMES)
def test_logits_of_an_independent_backend_equal_those_of_transformers(name):
    """The prompt fills the context."""
    with load(name, npu="onnxrt", chunk_length=8, context_length=len(input_ids(name))) as engine:
        found = logits_of(engine, input_ids(name))
    np.testing.assert_allclose(found, expected_logits(name), rtol=0, atol=TOLERANCE)


@pytest.mark.sampled(every=7)
@pytest.mark.parametrize("name", NAMES)
def test_decoder_as_one_onnx_model_equals_transformers(name):
    """It runs in one call, with empty caches, without chunks, executor or chunkrt's kernels."""
    tokens = np.array(input_ids(name), np.int64)
    with load(name, npu="onnxrt") as engine:
        decoder = OnnxRuntimeExecutable(engine.plan.subgraphs, engine.plan, engine.scheme, engine.loaded.weights)
        state = State(engine.plan, tokens.size)
        logits = np.empty((tokens.size, engine.plan.vocab_size), np.float32)
        given = {
            "input_ids": tokens,
            "position": np.zeros(1, np.int64),
            "rope_position": np.array([engine.plan.rope_offset(tokens.size)]),
            "logit_rows": np.arange(tokens.size),
        }
        inputs = {input_name: given[input_name] for input_name in engine.plan.inputs}
        decoder.run({**inputs, **state.tensors}, {engine.plan.output: logits})
    np.testing.assert_allclose(logits, expected_logits(name), rtol=0, atol=TOLERANCE)


@pytest.mark.sampled(every=31)
@pytest.mark.parametrize("npu", ["reference", "onnxrt"])
@pytest.mark.parametrize("chunk_length", CHUNK_LENGTHS)
@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_prompt_of_any_length_equals_one_chunk(name, chunk_length, npu):
    with load(name, npu=npu, chunk_length=chunk_length) as engine:
        for num_tokens in LENGTHS:
            tokens = input_ids(name)[:num_tokens]
            assert_same_but_for_order(logits_of(engine, tokens), in_one_chunk(name, num_tokens))


@pytest.mark.sampled(every=7)
@pytest.mark.parametrize("npu", ["reference", "onnxrt"])
@pytest.mark.parametrize(("num_prefilled", "num_decoded"), [(1, 12), (31, 2), (33, 9)])
@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_decoding_continues_at_the_end_of_a_prompt(name, num_prefilled, num_decoded, npu):
    tokens = input_ids(name)[: num_prefilled + num_decoded]
    with load(name, npu=npu, chunk_length=8) as engine:
        session = engine.session()
        session.prefill(tokens[:num_prefilled])
        found = [session.prefill([token]).logits for token in tokens[num_prefilled:]]
    assert_same_but_for_order(np.array(found), in_one_chunk(name, len(tokens))[num_prefilled:])


def test_prompt_uses_the_rotary_tables_of_its_complete_length():
    """Phi-3 has two tables, and the first chunk alone does not determine which."""
    tokens = input_ids(LONGROPE)
    with load(LONGROPE, chunk_length=32) as engine:
        assert engine.plan.long_context_from == 64
        short, long = logits_of(engine, tokens[:64]), logits_of(engine, tokens)
    np.testing.assert_allclose(short, expected_logits("phi3_longrope_short"), rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(long, expected_logits(LONGROPE), rtol=0, atol=TOLERANCE)
    assert np.abs(long[:64] - short).max() > 0.01


def test_context_that_outgrows_the_first_tables_uses_the_second():
    tokens = input_ids(LONGROPE)
    with load(LONGROPE, chunk_length=8) as engine:
        session = engine.session()
        session.prefill(tokens[:62])
        found = [session.prefill([token]).logits for token in tokens[62:70]]
    assert_same_but_for_order(found[:2], in_one_chunk(LONGROPE, 64)[62:])
    assert_same_but_for_order(found[2:], in_one_chunk(LONGROPE, 70)[64:])


def test_last_logits_are_those_of_the_last_token():
    name = "llama_tied"
    with load(name) as engine:
        result = engine.session().prefill(input_ids(name))
    np.testing.assert_allclose(result.logits, expected_logits(name)[-1], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", ["gelu_new", "gelu_fast"])
def test_names_of_the_tanh_approximation_are_synonyms(name, tmp_path):
    """Transformers' NewGELUActivation and FastGELUActivation compute the same as gelu_pytorch_tanh."""
    folder = shutil.copytree(checkpoint("gemma3_window_5"), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config.pop("hidden_act", None)
    (folder / "config.json").write_text(json.dumps(config | {"hidden_activation": name}))
    tokens = input_ids("gemma3_window_5")[:12]
    found, expected = (
        chunkrt.load(model, npu="reference", scheme="float").session().prefill(tokens).logits
        for model in (folder, checkpoint("gemma3_window_5"))
    )
    np.testing.assert_array_equal(found, expected)
