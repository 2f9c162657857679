"""Dual chunk attention, against a decoder in float64 that is written from the definition."""

import json
import shutil

import numpy as np
import pytest
from fixture_checkpoints import checkpoint
from float64_dual_chunks import logits as true_logits
from led_ranks import led
from onnx_models import Window

import chunkrt
from chunkrt.compile.compiler import plan_checkpoint
from chunkrt.engine import scoring
from chunkrt.engine.npu_attention import near_plans
from chunkrt.engine.options import EngineOptions
from chunkrt.errors import ClosedError, ConfigError, ModelError, UnsupportedModelError
from chunkrt.onnx.exporting import DynamicSettings, WindowSettings, dynamic_model, window_model

SIZES = {"chunk_size": 24, "local_size": 8, "original_max_position_embeddings": 40}
"""Chunks of 16 positions; the factor of queries and keys exceeds 1 in contexts of more than 40 tokens."""
CONTEXT = 100
TOKENS = np.random.default_rng(7).integers(3, 48, CONTEXT).tolist()
LENGTHS = (16, 17, 24, 33, 40, 41, 64, 95)
TOLERANCE = 1e-4


def write(folder, **changes):
    """Write the toy Qwen2 with the config of dual chunk attention, and other fields of the config."""
    shutil.copytree(checkpoint("qwen2"), folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"max_position_embeddings": CONTEXT, "dual_chunk_attention_config": SIZES, **changes}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write(tmp_path_factory.mktemp("dual") / "m")


@pytest.fixture(scope="module")
def truth(folder):
    """Return a function that returns the logits of a prompt of the first tokens, and of the tokens behind it."""
    found = {}

    def logits(num_prompt, tokens=None):
        key = (num_prompt, tuple(TOKENS[:num_prompt] if tokens is None else tokens))
        if key not in found:
            found[key] = true_logits(folder, key[1], num_prompt)
        return found[key]

    return logits


def load(folder, **options):
    return chunkrt.load(folder, **{"npu": "reference", "scheme": "float", "cache_dtype": "float32"} | options)


def all_logits(session, tokens):
    return session.prefill(tokens, logits="all").logits


@pytest.mark.parametrize("npu", ["reference", "onnxrt"])
@pytest.mark.parametrize("chunk_length", [1, 7, 32])
def test_prompts_across_all_ranges_equal_the_definition(folder, truth, chunk_length, npu):
    with load(folder, npu=npu, chunk_length=chunk_length) as engine:
        assert engine.context_length == CONTEXT
        for length in LENGTHS:
            found = all_logits(engine.session(), TOKENS[:length])
            np.testing.assert_allclose(found, truth(length), rtol=0, atol=TOLERANCE)
    plain = true_logits(folder, TOKENS[:95], 1)
    assert np.abs(truth(95) - plain).max() > 0.01  # the factor matters


def generated_logs(session, num_tokens):
    """Return the tokens of a greedy generation and their log-probabilities."""
    pieces = session.generate(max_new_tokens=num_tokens, log_probabilities=1, ignore_eos=True)
    found = [(p.token_id, p.log_probabilities.own) for p in pieces if p.token_id is not None]
    return [token for token, _ in found], np.array([log for _, log in found])


def expect_generation(truth, num_prompt, before, tokens, logs):
    """Check generated tokens, and their log-probabilities, against the definition.

    Args:
        num_prompt: number of tokens of the last prompt.
        before: all tokens before the generated ones.
    """
    rows = truth(num_prompt, [*before, *tokens[:-1]])[len(before) - 1 :]
    shares = np.exp(rows - rows.max(axis=1, keepdims=True))
    expected = np.log(shares / shares.sum(axis=1, keepdims=True))
    assert tokens == rows.argmax(axis=1).tolist()
    np.testing.assert_allclose(logs, expected[np.arange(len(tokens)), tokens], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("num_prompt", [14, 36, 41, 60])
def test_generated_tokens_have_the_factor_of_their_own_context(folder, truth, num_prompt):
    """The second generation crosses the limit of 40 tokens, and its prompt is not computed again."""
    with load(folder, chunk_length=7) as engine:
        session = engine.session()
        session.prefill(TOKENS[:num_prompt])
        runs = []
        session.on_run = runs.append
        tokens, logs = generated_logs(session, 12)
        assert min(run.position for run in runs) == num_prompt
        expect_generation(truth, num_prompt, TOKENS[:num_prompt], tokens, logs)
        more, logs = generated_logs(session, 5)
        expect_generation(truth, num_prompt, [*TOKENS[:num_prompt], *tokens], more, logs)


def test_prompt_that_grows_has_the_factor_of_all_its_tokens(folder, truth):
    with load(folder, chunk_length=7) as engine:
        session = engine.session()
        for start, stop in ((0, 30), (30, 40), (40, 45), (45, 46), (46, 80)):
            found = session.prefill(TOKENS[start:stop], logits="all").logits
            np.testing.assert_allclose(found, truth(stop)[start:], rtol=0, atol=TOLERANCE)


def test_failed_prompt_leaves_the_factor_of_the_earlier_one(folder, truth):
    with load(folder, chunk_length=7) as engine:
        session = engine.session()
        session.prefill(TOKENS[:50])
        with pytest.raises(ClosedError):
            session.prefill(TOKENS[50:80], progress=lambda *_: session.cancel())
        expect_generation(truth, 50, TOKENS[:50], *generated_logs(session, 6))


def test_rewind_fork_and_file_continue_as_the_definition(folder, truth, tmp_path):
    with load(folder, chunk_length=7) as engine:
        session = engine.session()
        session.prefill(TOKENS[:60])
        tokens, _ = generated_logs(session, 10)
        fork = session.fork()
        session.save(tmp_path / "session")
        loaded = engine.load_session(tmp_path / "session")
        for each in (fork, loaded):
            each.rewind(65)  # 5 generated tokens remain
            expect_generation(truth, 60, [*TOKENS[:60], *tokens[:5]], *generated_logs(each, 6))
        session.rewind(50)
        expect_generation(truth, 50, TOKENS[:50], *generated_logs(session, 6))
        session.rewind(20)
        expect_generation(truth, 20, TOKENS[:20], *generated_logs(session, 6))
        session.rewind(17)
        np.testing.assert_allclose(all_logits(session, TOKENS[17:70]), truth(70)[17:], rtol=0, atol=TOLERANCE)


def test_file_moves_to_a_context_without_dual_chunks_and_back(folder, truth, tmp_path):
    with load(folder) as engine, load(folder, context_length=16) as short:
        session = engine.session()
        session.prefill(TOKENS[:10])
        session.save(tmp_path / "session")
        moved = short.load_session(tmp_path / "session")
        np.testing.assert_allclose(all_logits(moved, TOKENS[10:16]), truth(16)[10:], rtol=0, atol=TOLERANCE)
        moved.save(tmp_path / "session")
        again = engine.load_session(tmp_path / "session")
        np.testing.assert_allclose(all_logits(again, TOKENS[16:40]), truth(40)[16:], rtol=0, atol=TOLERANCE)


def test_prefix_cache_takes_only_tokens_with_the_same_factor(folder, truth):
    with load(folder, chunk_length=7, prefix_cache="memory") as engine:
        engine.session().prefill(TOKENS[:36])
        engine.session().prefill(TOKENS[:60])
        other = [*TOKENS[:50], *TOKENS[:10]]
        for tokens, is_cached in ((TOKENS[:40], True), (TOKENS[:61], False), (TOKENS[:60], True), (other, True)):
            result = engine.session().prefill(tokens)
            assert (result.num_cached > 0) == is_cached
            np.testing.assert_allclose(result.logits, truth(len(tokens), tokens)[-1], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("npu", ["reference", "native"])
def test_sequences_in_shared_chunks_are_computed_as_alone(folder, npu):
    prompts = [TOKENS[i : i + 2 + 9 * i] for i in range(8)]
    with load(folder, npu=npu, chunk_length=7, scheme="w8a8-dynamic" if npu == "native" else "float") as engine:
        alone = [engine.generate([prompt], max_new_tokens=9)[0] for prompt in prompts]
        assert engine.generate(prompts, max_new_tokens=9, max_sessions=8) == alone


QUANTISED = {"scheme": "w8a8-dynamic", "chunk_length": 7}
NATIVE = (
    ({"cache_dtype": "float32"}, 1e-4),
    ({"cache_dtype": "float16"}, 0.3),
    ({"cache_dtype": "int8"}, 0.3),
    ({"cache_dtype": None, "attention_math": "bfloat16"}, 0.3),
    ({"cache_dtype": None}, 0.3),
)


@pytest.mark.parametrize(("options", "tolerance"), NATIVE)
def test_native_decoder_is_close_to_the_reference(folder, options, tolerance):
    """Rounded caches move some inputs of the linears to other integers, so the mean error is bounded."""
    with load(folder, **QUANTISED) as reference, load(folder, npu="native", **QUANTISED, **options) as native:
        for length in (24, 40, 95):
            expected = all_logits(reference.session(), TOKENS[:length])
            found = all_logits(native.session(), TOKENS[:length])
            assert np.abs(found - expected).mean() < tolerance / 4
            assert np.abs(found - expected).max() < tolerance * 4
        session = native.session()
        session.prefill(TOKENS[:60])
        rows = [session.prefill([token]).logits for token in TOKENS[60:63]]
        for length, row in zip((61, 62, 63), rows, strict=True):
            np.testing.assert_array_equal(row, native.session().prefill(TOKENS[:length]).logits)


def test_ranks_compute_the_logits_of_one(folder, truth):
    with led(folder, 2, npu="reference", scheme="float", cache_dtype="float32", context_length=None) as ranks:
        session = ranks.engine.session()
        np.testing.assert_allclose(all_logits(session, TOKENS[:30]), truth(30), rtol=0, atol=TOLERANCE)
        np.testing.assert_allclose(all_logits(session, TOKENS[30:70]), truth(70)[30:], rtol=0, atol=TOLERANCE)
        expect_generation(truth, 70, TOKENS[:70], *generated_logs(session, 6))


def test_unsupported_uses_are_refused_in_one_line(folder):
    with pytest.raises(ConfigError, match=r"^`context_shift` moves cached keys, .* a `context_length` of at most 16$"):
        load(folder, context_shift=True)
    load(folder, context_shift=True, context_length=16).close()
    planned = plan_checkpoint(folder, {})
    for model, settings in (
        (window_model, WindowSettings(window=2, sequence=17, context=17)),
        (dynamic_model, DynamicSettings(context=17)),
    ):
        with pytest.raises(UnsupportedModelError, match="is 17, but in contexts of more than 16 tokens qwen2 has dual"):
            model(planned, settings)
    with pytest.raises(ConfigError, match=r"the NPU cannot compute any .*, or choose a `context_length` of at most 16"):
        near_plans(planned.plan, {}, EngineOptions(attention="npu"), CONTEXT)
    assert near_plans(planned.plan.within(16), {}, EngineOptions(attention="npu"), 16)


def test_exported_window_of_the_plain_context_computes_the_definition(folder, truth):
    settings = {"window": 8, "sequence": 16, "context": 16, "dtype": "fp32"}
    for keys in ("pre-rope", "post-rope"):
        logits = Window(plan_checkpoint(folder, {}), **settings, keys=keys).run(TOKENS[:16])
        np.testing.assert_allclose(logits, truth(16), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"chunk_size": "many"}, "dual_chunk_attention_config: chunk_size is 'many', expected a positive whole number"),
        ({"local_size": 24}, "dual_chunk_attention_config: local_size is 24, expected less than the chunk_size of 24"),
        ({"original_max_position_embeddings": -1}, "original_max_position_embeddings is -1, expected a whole number"),
    ],
)
def test_invalid_sizes_are_refused(tmp_path, sizes, message):
    with pytest.raises(ModelError, match=message):
        load(write(tmp_path / "m", dual_chunk_attention_config=SIZES | sizes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"use_sliding_window": True, "sliding_window": 8},
            "dual_chunk_attention_config = .* is not supported in this",
        ),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope scaling 'linear' with dual chunk attention is not"),
    ],
)
def test_combinations_without_a_definition_are_refused(tmp_path, changes, message):
    with pytest.raises(UnsupportedModelError, match=message):
        load(write(tmp_path / "m", **changes))


def test_sizes_without_a_limit_have_no_factor(tmp_path):
    sizes = {"chunk_size": 24, "local_size": 8}
    folder = write(tmp_path / "m", dual_chunk_attention_config=sizes)
    with load(folder, chunk_length=7) as engine:
        assert engine.plan.long_context_from is None
        found = all_logits(engine.session(), TOKENS[:95])
    np.testing.assert_allclose(found, true_logits(folder, TOKENS[:95]), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("piece", [1, 2**20])
def test_scores_have_the_factor_of_context_and_continuation(folder, truth, piece, monkeypatch):
    """The last token of a continuation is not run. Pieces of 1 byte are single chunks."""
    monkeypatch.setattr(scoring, "PIECE_BYTES", piece)
    with load(folder, chunk_length=7) as engine:
        session = engine.session()
        for start, stop in ((30, 36), (30, 61), (50, 62), (30, 41), (30, 42)):
            found = session.score(TOKENS[:start], TOKENS[start:stop])
            rows = truth(stop - 1)[start - 1 :]
            logs = rows - np.log(np.exp(rows).sum(axis=1, keepdims=True))
            expected = logs[np.arange(stop - start), TOKENS[start:stop]].sum()
            assert found.log_probability == pytest.approx(expected, abs=TOLERANCE * (stop - start))
