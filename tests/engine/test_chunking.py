"""A prompt's logits do not depend on its chunks, nor on policy or threads."""

from functools import cache

import numpy as np
import pytest
from fixture_checkpoints import NAMES, checkpoint

import chunkrt
from chunkrt.runtime.policy import POLICIES

NAME, CONTEXT, LONGEST_SUM = "llama_gqa", 128, 80
CHUNK_LENGTHS = [1, 8, 32, 64]
LENGTHS = [1, 31, 32, 33, 64, 95]
BACKENDS = [("reference", "float"), ("onnxrt", "float"), *((npu, "w8a8-dynamic") for npu in ("reference", "onnxrt"))]
BACKENDS.append(("native", "w8a8-dynamic"))
TOKENS = np.random.default_rng(0).integers(0, 128, max(LENGTHS)).tolist()


def run(npu, scheme, num_tokens, **options):
    """Return the logits of all tokens, and the number of chunks."""
    # onnxrt rounds keys and values to float16 only after a chunk, so float16 depends on the chunks there.
    options.setdefault("cache_dtype", "float32" if npu == "onnxrt" or scheme == "float" else "float16")
    with chunkrt.load(checkpoint(NAME), npu=npu, scheme=scheme, **options) as engine:
        result = engine.session().prefill(TOKENS[:num_tokens], logits="all")
    return result.logits, result.num_chunks


def assert_same_logits(found, expected, scheme):
    """Compare logits.

    Float: every value is within a float32 step for each product of the longest sum, relative to the largest logit.
    8-bit: if a value is between two int8 steps, the last bit before decides, so that a few rows may differ by about a
    step; the root mean square of all differences stays below one step in 127.
    """
    if scheme == "float":
        np.testing.assert_allclose(found, expected, rtol=0, atol=LONGEST_SUM * 2.0**-23 * np.abs(expected).max())
    else:
        assert np.sqrt(np.mean((found - expected) ** 2)) <= np.sqrt(np.mean(expected**2)) / 127


@cache
def run_whole(npu, scheme, num_tokens):
    """Return the logits of all tokens, computed in one chunk."""
    logits, num_chunks = run(npu, scheme, num_tokens, chunk_length=CONTEXT)
    assert num_chunks == 1
    return logits


@pytest.mark.sampled(every=13)
@pytest.mark.parametrize("num_tokens", LENGTHS)
@pytest.mark.parametrize("chunk_length", CHUNK_LENGTHS)
@pytest.mark.parametrize(("npu", "scheme"), BACKENDS)
def test_chunked_equals_unchunked(npu, scheme, chunk_length, num_tokens):
    unchunked = run_whole(npu, scheme, num_tokens)
    chunked, num_chunks = run(npu, scheme, num_tokens, chunk_length=chunk_length)
    assert num_chunks == -(-num_tokens // chunk_length)
    if npu == "native":
        np.testing.assert_array_equal(chunked, unchunked)
    else:
        assert_same_logits(chunked, unchunked, scheme)


@pytest.mark.sampled(every=7)
@pytest.mark.parametrize("threads", [1, 2, 4, 8])
@pytest.mark.parametrize(("npu", "scheme"), BACKENDS)
def test_policies_and_threads_change_no_bit(npu, scheme, threads):
    expected, _ = run(npu, scheme, max(LENGTHS), chunk_length=8, policy="sequential", threads=1)
    for policy in POLICIES:
        found, _ = run(npu, scheme, max(LENGTHS), chunk_length=8, policy=policy, threads=threads)
        np.testing.assert_array_equal(found, expected, err_msg=policy)


@pytest.mark.parametrize("cache_dtype", ["float32", "float16"])
def test_native_equals_the_reference(cache_dtype):
    reference, _ = run("reference", "w8a8-dynamic", max(LENGTHS), cache_dtype=cache_dtype)
    native, _ = run("native", "w8a8-dynamic", max(LENGTHS), cache_dtype=cache_dtype)
    assert_same_logits(native, reference, "w8a8-dynamic")


def test_int8_caches_change_no_bit_by_chunks_and_little_by_value():
    whole, _ = run("native", "w8a8-dynamic", max(LENGTHS), chunk_length=CONTEXT, cache_dtype="int8")
    for chunk_length in CHUNK_LENGTHS:
        found, _ = run("native", "w8a8-dynamic", max(LENGTHS), chunk_length=chunk_length, cache_dtype="int8")
        np.testing.assert_array_equal(found, whole)
    in_float, _ = run("native", "w8a8-dynamic", max(LENGTHS), cache_dtype="float32")
    # Keys and values are off by up to 1/254 of their row's largest, and the linears round the results once more.
    difference = np.sqrt(np.mean((whole - in_float) ** 2))
    assert 0 < difference <= np.sqrt(np.mean(in_float**2)) / 20


def test_decoder_on_the_cpu_alone_gives_the_same_bits():
    partitioned, _ = run("native", "w8a8-dynamic", max(LENGTHS))
    whole, _ = run("off", "w8a8-dynamic", max(LENGTHS))
    np.testing.assert_array_equal(whole, partitioned)


EXACT = ("lfm2", "gemma3_window_5", "gemma4", "mistral_window_95", "phi3_window_5", "qwen2", "qwen3")
EXACT += ("bamba", "falcon_h1", "granite_hybrid_mamba_experts", "mamba2", "nemotron_h")
EXACT += ("mamba", "mamba_biased", "falcon_mamba")
ROUNDED = ("qwen3_next", "qwen3_next_experts", "qwen3_5")


def chunked_and_split(name, num_prompts):
    """Return the logits of random prompts with chunks of 32, then with other chunks and in two parts."""
    engines = {n: chunkrt.load(checkpoint(name), scheme="w8a8-dynamic", chunk_length=n) for n in (1, 8, 32, 33)}
    rng = np.random.default_rng(1)
    for _ in range(num_prompts):
        tokens = rng.integers(0, engines[32].plan.vocab_size, 90).tolist()
        logits = {n: engine.session().prefill(tokens, logits="all").logits for n, engine in engines.items()}
        session = engines[32].session()
        parts = [session.prefill(part, logits="all").logits for part in (tokens[:13], tokens[13:])]
        yield logits.pop(32), [*logits.values(), np.concatenate(parts)]
    for engine in engines.values():
        engine.close()


FEW_OR_MANY = pytest.mark.parametrize("num_prompts", [3, pytest.param(12, marks=pytest.mark.slow)])


@pytest.mark.sampled(every=2, num_prompts=[3])
@FEW_OR_MANY
@pytest.mark.parametrize("name", [name for name in EXACT if name in NAMES])
def test_chunks_change_no_bit_on_native(name, num_prompts):
    for expected, others in chunked_and_split(name, num_prompts):
        for found in others:
            np.testing.assert_array_equal(found, expected)


@FEW_OR_MANY
@pytest.mark.sampled(name=["qwen3_next_experts"])
@pytest.mark.parametrize("name", ROUNDED)
def test_chunks_change_little_with_a_recurrence(name, num_prompts):
    """The tolerance is 3 % of the largest logit, see docs/architecture.md: int8 grids amplify rounding."""
    for expected, others in chunked_and_split(name, num_prompts):
        for found in others:
            assert np.abs(found - expected).max() <= 0.03 * np.abs(expected).max()
