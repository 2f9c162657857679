"""A fixed window computes the same as the decoder: Transformers' logits of the fixtures are the reference."""

import numpy as np
import pytest
from fixture_checkpoints import checkpoint, expected_logits, input_ids
from onnx_models import FAMILIES, Window, planned
from random_folders import write_folder

from chunkrt.compile.compiler import plan_checkpoint
from chunkrt.errors import ConfigError, UnsupportedModelError
from chunkrt.graph.partition import Planned
from chunkrt.graph.plan import resolve
from chunkrt.onnx.exporting import DynamicSettings, dynamic_model

OTHERS = (
    "llama_tied", "llama_biased", "llama_rope_llama3", "gemma3_rope_parameters", "gemma3_window_120", "qwen2_window",
    "mistral_window_95", "phi3_longrope_short", "phi3_longrope_long", "phi3_window_5", "qwen3_layer_types",
    "lfm2_biased", "qwen3_5", "qwen3_next_experts", "qwen3_gguf", "smollm3_window", "granite", "granite_hybrid_nope",
    "minicpm", "ernie4_5_biased", "helium", "glm", "glm4", "olmo2", "olmo3", "exaone4_hybrid", "gemma", "gemma2",
    "lfm3", "mamba2", "bamba", "falcon_h1", "nemotron_h", "granite_hybrid_mamba_experts",
    "apertus", "apertus_gelu",
    "qwen2_moe", "granitemoeshared", "lfm2_moe", "ernie4_5_moe", "olmoe", "gpt_oss", "deepseek_v3_groups", "minicpm3",
)  # fmt: skip


def whole(name, window):
    """Return settings in which the prompt fits, with additional slots."""
    length = -(-len(input_ids(name)) // window) * window
    return {"window": window, "sequence": length, "context": length + 5}


@pytest.mark.sampled(every=13)
@pytest.mark.parametrize("keys", ["pre-rope", "post-rope"])
@pytest.mark.parametrize("window", [1, 8, 32])
@pytest.mark.parametrize("name", FAMILIES)
def test_windows_equal_the_uncached_decoder(name, window, keys):
    logits = Window(planned(name), **whole(name, window), dtype="fp32", keys=keys).run(input_ids(name))
    np.testing.assert_allclose(logits, expected_logits(name), rtol=0, atol=1e-4)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("name", OTHERS)
def test_every_kind_of_decoder_is_exported(name):
    logits = Window(planned(name), **whole(name, 8), dtype="fp32").run(input_ids(name))
    np.testing.assert_allclose(logits, expected_logits(name), rtol=0, atol=1e-4)


@pytest.mark.parametrize("opset", [14, 18, 23])
@pytest.mark.parametrize("name", ["gpt2", "gpt2_by_layer", "opt_norms_behind"])
def test_learned_positions_are_exported_with_keys_after_rope(name, opset):
    decoder, settings = planned(name), {**whole(name, 8), "dtype": "fp32", "opset": opset}
    logits = Window(decoder, **settings, keys="post-rope").run(input_ids(name))
    np.testing.assert_allclose(logits, expected_logits(name), rtol=0, atol=1e-4)
    with pytest.raises(ConfigError, match=r"has learned positions, .*; use --keys post-rope"):
        Window(decoder, **settings)
    with pytest.raises(UnsupportedModelError, match="learned positions, which the dynamic form does not support"):
        dynamic_model(decoder, DynamicSettings(context=64))


@pytest.mark.parametrize("name", ["mamba", "falcon_mamba"])
def test_selective_scan_is_exported_in_the_opset_of_its_expansion(name):
    settings = {**whole(name, 8), "dtype": "fp32"}
    logits = Window(planned(name), **settings, opset=23).run(input_ids(name))
    np.testing.assert_allclose(logits, expected_logits(name), rtol=0, atol=1e-4)
    with pytest.raises(ConfigError, match="is in opset 23; use --opset 23"):
        Window(planned(name), **settings, opset=18)


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("opset", [18, 23])
@pytest.mark.parametrize("name", FAMILIES)
def test_float16_is_close(name, opset):
    logits = Window(planned(name), **whole(name, 8), dtype="fp16", opset=opset).run(input_ids(name))
    assert logits.dtype == np.float16
    expected = expected_logits(name)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=2e-2 * np.abs(expected).max())


@pytest.mark.parametrize("opset", [18, 23])
def test_norms_support_squares_that_exceed_float16(opset):
    """Rows of about 300 have squares above 65504, so a mean of them in float16 would be infinite."""
    decoder = planned("llama_gqa")

    class Loud(Planned):
        def load(self, name):
            weight = super().load(name)
            return weight * np.float32(300 / np.abs(weight).mean()) if name == "model.embed_tokens.weight" else weight

    loud = Loud(source=decoder.source, decoder=decoder.decoder, plan=decoder.plan)
    tokens = input_ids("llama_gqa")[:20]
    sizes = {"window": 4, "sequence": 24, "context": 24, "opset": opset}
    wide = Window(loud, **sizes, dtype="fp32").run(tokens)
    narrow = Window(loud, **sizes, dtype="fp16").run(tokens)
    assert np.isfinite(narrow).all()
    np.testing.assert_allclose(narrow, wide, rtol=0, atol=2e-2 * np.abs(wide).max())


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_left_padding_has_no_effect(name, dtype):
    """Cases are a part of a window, and two windows of padding alone."""
    tokens = input_ids(name)[:17]
    window = Window(planned(name), window=4, sequence=32, context=40, dtype=dtype)
    padded = window.run(tokens, extra_padding=2)
    states = window.states
    unpadded = Window(planned(name), window=1, sequence=32, context=40, dtype=dtype)
    logits = unpadded.run(tokens)
    atol = 1e-5 if dtype == "fp32" else 2e-2
    np.testing.assert_allclose(padded, logits, rtol=0, atol=atol * max(1, np.abs(logits).max()))
    for state, content in states.items():
        seen = np.s_[:, :, -len(tokens) :] if state.endswith(("key", "value")) else np.s_[...]
        expected = unpadded.states[state][seen]
        np.testing.assert_allclose(content[seen], expected, rtol=0, atol=atol * max(1, np.abs(expected).max()))


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("name", FAMILIES)
def test_padding_leaves_recurrent_state_unchanged(name):
    """A window of padding alone keeps it bit for bit."""
    window = Window(planned(name), window=8, sequence=16, context=16, dtype="fp32")
    window.step(np.full(8, 3), 0, np.zeros(8, np.int64))
    for state, content in window.states.items():
        if not state.endswith(("key", "value")):
            assert not content.any(), state


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("window", [8, 32, 60])
def test_closed_form_of_the_delta_rule_is_stable(window):
    """With one token repeated, keys are alike, and the inverted matrix is far from the identity."""
    tokens = [7] * 60
    sizes = {"sequence": 64, "context": 64, "dtype": "fp32"}
    row_by_row = Window(planned("qwen3_next"), window=1, **sizes).run(tokens)
    at_once = Window(planned("qwen3_next"), window=window, **sizes).run(tokens)
    np.testing.assert_allclose(at_once, row_by_row, rtol=0, atol=1e-5)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("name", ["llama_gqa", "gemma3_window_5", "lfm2"])
def test_growing_the_sequence_moves_no_cached_data(name):
    """A window with a short sequence is followed by one that sees more of the same caches."""
    tokens = np.array(input_ids(name)[:32])
    short = Window(planned(name), window=8, sequence=16, context=40, dtype="fp32")
    long = Window(planned(name), window=8, sequence=40, context=40, dtype="fp32")
    for start in (0, 8):
        logits = short.step(tokens[start:][:8], start + 8)
        np.testing.assert_allclose(logits, long.step(tokens[start:][:8], start + 8), rtol=0, atol=1e-5)
    long.states = short.states
    grown = np.concatenate([long.step(tokens[start:][:8], start + 8) for start in (16, 24)])
    np.testing.assert_allclose(grown, expected_logits(name)[16:32], rtol=0, atol=1e-4)


@pytest.mark.parametrize("opset", [14, 23])
def test_shift_invariance_after_sliding(tmp_path, opset):
    """After more tokens than the sequence, the first layer's result is that of the remaining tokens, regardless of
    their position."""
    decoder = plan_checkpoint(write_folder(tmp_path / "one", num_hidden_layers=1), {})
    sizes = {"window": 4, "sequence": 16, "context": 16, "dtype": "fp32", "opset": opset}
    tokens = np.random.default_rng(0).integers(0, decoder.plan.vocab_size, 48).tolist()
    slid = Window(decoder, **sizes).run(tokens)[-4:]
    alone = Window(decoder, **sizes).run(tokens[-16:])[-4:]
    np.testing.assert_allclose(slid, alone, rtol=0, atol=1e-5)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("name", ["llama_gqa", "qwen3", "gemma3_window_5"])
def test_sliding_equals_attention_to_the_same_tokens_at_absolute_positions(name):
    """In deep decoders, keys before RoPE, always at the window's positions, are compared with keys rotated at their
    original positions."""
    tokens = np.array(input_ids(name))[:64]
    sizes = {"window": 8, "sequence": 24, "context": 24, "dtype": "fp32"}
    at_places = Window(planned(name), **sizes, keys="pre-rope").run(tokens)
    absolute = Window(planned(name), **sizes, keys="post-rope").run(tokens)
    np.testing.assert_allclose(at_places, absolute, rtol=0, atol=1e-5 * max(1, np.abs(absolute).max()))
    if name != "gemma3_window_5":
        assert np.abs(at_places - expected_logits(name)[:64])[32:].max() > 1e-2  # the oldest have left the window


def test_states_have_the_shapes_of_the_contract():
    window = Window(planned("qwen3_next"), window=8, sequence=24, context=40)
    types = {value.name: (value.type, tuple(value.shape)) for value in window.session.get_inputs()}
    plan = planned("qwen3_next").plan
    assert types["input_ids"] == ("tensor(int64)", (1, 8))
    assert types["attention_mask"] == ("tensor(int64)", (1, 24))
    for tensor in plan.state_tensors:
        layer, kind = tensor.name.split(".")[2], tensor.name.rpartition(".")[2]
        name = f"past_key_values.{layer}.{kind.removesuffix('_cache')}"
        wanted = "tensor(float16)" if kind.endswith("_cache") else "tensor(float)"
        assert types[name] == (wanted, (1, *resolve(tensor.shape, {"P": 40, "W": 40})))
    assert len(types) == 2 + len(plan.state_tensors)
    outputs = {value.name: (value.type, value.shape) for value in window.session.get_outputs()}
    assert outputs["logits"] == ("tensor(float16)", [1, 8, plan.vocab_size])
    assert {n.replace("present.", "past_key_values.") for n in outputs if n != "logits"} <= types.keys()


def test_fixture_has_expected_logits():
    """Missing expected logits would let every test pass."""
    assert all(expected_logits(name).std() > 0.1 for name in (*FAMILIES, *OTHERS))
    assert checkpoint("llama_gqa").is_dir()
