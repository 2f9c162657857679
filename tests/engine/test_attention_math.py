"""bfloat16 and int8 attention: close to float32, and independent of chunks, other sequences and splits of a prompt."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from fixture_checkpoints import ONE_OF_EACH_STATE, checkpoint, input_ids

import chunkrt
from chunkrt.backends.native import cpu
from chunkrt.engine import model_options
from chunkrt.engine.engine import Engine
from chunkrt.errors import ConfigError

CONTEXT = 128
TOKENS = np.random.default_rng(0).integers(0, 128, 95).tolist()


def load(name: str = "llama_gqa", **options: object) -> Engine:
    defaults = {"npu": "native", "scheme": "w8a8-dynamic", "threads": 2, "prefix_cache": "off"}
    return chunkrt.load(checkpoint(name), **{"attention_math": "bfloat16", **defaults, **options})


def logits(tokens: list[int] = TOKENS, name: str = "llama_gqa", **options: object) -> np.ndarray:
    with load(name, **options) as engine:
        found = engine.session().prefill(tokens, logits="all").logits
    assert found is not None
    return found


@pytest.mark.parametrize(
    "options", [{"cache_dtype": dtype} for dtype in ("float32", "float16", "int8")] + [{"attention_math": "int8"}]
)
def test_chunks_and_threads_change_no_bit(options: dict[str, str]) -> None:
    whole = logits(chunk_length=CONTEXT, **options)
    for chunk_length in (1, 8, 32, 64):
        found = logits(chunk_length=chunk_length, threads=chunk_length % 3 + 1, **options)
        np.testing.assert_array_equal(found, whole)


def test_session_with_int8_scores_rewinds_forks_and_is_saved(tmp_path: Path) -> None:
    whole = logits(attention_math="int8")
    with load(attention_math="int8") as engine:
        session = engine.session()
        session.prefill(TOKENS)
        session.rewind(37)
        other = session.fork()
        session.save(tmp_path / "saved")
        loaded = engine.session()
        loaded.load(tmp_path / "saved")
        for each in (session, other, loaded):
            found = each.prefill(TOKENS[37:], logits="all").logits
            np.testing.assert_array_equal(found, whole[37:])


def test_files_with_int8_scores_contain_nothing_of_other_sessions(tmp_path: Path) -> None:
    with load(attention_math="int8") as engine:
        with engine.session() as earlier:
            earlier.prefill(TOKENS[::-1])
        with engine.session() as session:  # perhaps in the memory of the earlier one
            session.prefill(TOKENS)
            session.save(tmp_path / "used")
    with load(attention_math="int8", chunk_length=8) as engine, engine.session() as session:
        session.prefill(TOKENS)
        session.save(tmp_path / "fresh")
    with np.load(tmp_path / "used") as used, np.load(tmp_path / "fresh") as fresh:
        for key in used.files:
            np.testing.assert_array_equal(used[key], fresh[key], err_msg=key)


def test_prefix_cache_holds_keys_in_int8() -> None:
    whole = logits(attention_math="int8")
    with load(attention_math="int8", prefix_cache="memory", chunk_length=8) as engine:
        for _ in range(2):
            session = engine.session()
            found = session.prefill(TOKENS).logits
            np.testing.assert_array_equal(np.ravel(found), whole[-1])
            session.close()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"cache_dtype": "float16"}, "needs bfloat16 caches"),
        ({"context_shift": True}, "cannot shift"),
        ({"npu": "reference"}, "does not support"),
        ({"ops": "-cached_attention"}, "only supported by native attention"),
    ],
)
def test_int8_scores_are_refused_where_they_are_not_supported(options: dict[str, object], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        load(attention_math="int8", **options)


def test_auto_is_not_int8_with_biases_of_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "INT8_ISAS", tuple(cpu.selected_kernels().values()))
    with load("llama_gqa", attention_math="auto") as plain, load("qwen2", attention_math="auto") as biased:
        assert plain.attention_math == "int8"
        assert biased.attention_math != "int8"


@pytest.mark.sampled(name=ONE_OF_EACH_STATE)
@pytest.mark.parametrize(("math", "limit"), [("bfloat16", 1 / 20), ("int8", 1 / 10)])
@pytest.mark.parametrize("name", ["llama_gqa", "gemma3_window_5", "mistral_window_95", "qwen2", "lfm2"])
def test_attention_is_close_to_float32(name: str, math: str, limit: float) -> None:
    if (name, math) == ("qwen2", "int8"):
        pytest.skip("biases of keys take part in the scores")
    tokens = (input_ids(name) * 8)[:95]
    exact, found = logits(tokens, name, attention_math="float32"), logits(tokens, name, attention_math=math)
    # In bfloat16 queries, keys, values and weights are each off by up to 2^-9, and the linears round once more.
    difference = np.sqrt(np.mean((found - exact) ** 2))
    assert 0 < difference <= limit * np.sqrt(np.mean(exact**2))


def test_bfloat16_attention_supports_single_tokens_and_raw_keys() -> None:
    whole = logits()
    with load(context_shift=True) as engine:
        np.testing.assert_array_equal(
            engine.session().prefill(TOKENS, logits="all").logits, logits(context_shift=True, chunk_length=8)
        )
    with load() as engine:
        session = engine.session()
        rows = [session.prefill([token]).logits for token in TOKENS[:20]]
    np.testing.assert_array_equal(np.stack([row.reshape(-1) for row in rows]), whole[:20])


def test_engines_of_either_arithmetic_reject_each_others_sessions() -> None:
    with load() as one, load(attention_math="float32") as other:
        assert one.loaded.identity["attention"] == "bfloat16"
        assert one.loaded.identity != other.loaded.identity


def test_auto_is_float32_without_faster_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHUNKRT_FORCE_ISA", "reference")
    with load(attention_math="auto") as engine:
        assert (engine.attention_math, engine.cache_dtype) == ("float32", "float16")
        found = engine.session().prefill(TOKENS, logits="all").logits
    np.testing.assert_array_equal(found, logits(attention_math="float32"))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ("bfloat16", "bfloat16")),
        ({"npu": "off"}, ("bfloat16", "bfloat16")),
        ({"attention_math": "float32"}, ("float32", "float16")),
        ({"cache_dtype": "float16"}, ("float32", "float16")),
        ({"cache_dtype": "int8"}, ("float32", "int8")),
        ({"context_shift": True}, ("float32", "float16")),
        ({"ops": "-cached_attention"}, ("float32", "float16")),
        ({"ops": "-rope"}, ("float32", "float16")),
        ({"npu": "reference"}, ("float32", "float32")),
        ({"npu": "onnxrt", "scheme": "float"}, ("float32", "float32")),
    ],
)
def test_auto_is_bfloat16_only_with_native_attention_and_its_own_caches(
    options: dict[str, object], expected: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_options, "fastest_attention", lambda **_: "bfloat16")
    with load(**{"attention_math": "auto", **options}) as engine:
        assert (engine.attention_math, engine.cache_dtype) == expected


def test_bfloat16_attention_without_fast_products_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CHUNKRT_FORCE_ISA", "reference")
    with load():
        assert [record.getMessage() for record in caplog.records] == [
            "attention in bfloat16 multiplies in float32 on this processor: it is less precise, and prompts are no "
            "faster; choose `attention_math='auto'`"
        ]
    caplog.clear()
    with load(attention_math="auto"), load(attention_math="float32"):
        assert not caplog.records


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("qwen2", "bfloat16"),
        ("glm4_moe_lite", "bfloat16"),  # latent attention with biases: of the latent, and of the columns with RoPE
        ("olmo2", "bfloat16"),  # biases in front of a norm of heads
        ("deepseek_v2", "int8"),
        ("qwen3", "int8"),
    ],
)
def test_auto_has_no_int8_scores_if_biases_take_part_in_keys(
    name: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fastest(*, has_key_biases: bool) -> str:
        return "bfloat16" if has_key_biases else "int8"

    monkeypatch.setattr(model_options, "fastest_attention", fastest)
    with chunkrt.load(checkpoint(name), npu="native", scheme="w8a8-dynamic", threads=1) as engine:
        assert engine.attention_math == expected
