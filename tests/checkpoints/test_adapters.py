"""Tests of LoRA adapters, which are added to a checkpoint's weights before it is compiled."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from fixture_checkpoints import checkpoint, expected_logits, input_ids
from safetensors.numpy import load_file, save_file

import chunkrt
from chunkrt.engine.settings import read_settings
from chunkrt.errors import ChunkrtError, ConfigError, ModelError

FOLDER = Path(__file__).parents[1] / "data" / "adapters"
BIASED, PHI3, GQA = (FOLDER / name for name in ("llama_biased", "phi3_window_120", "llama_gqa"))
WEIGHTS = "adapter_model.safetensors"
FIRST = "base_model.model.model.layers.0.self_attn.q_proj"


def logits_of(model, ids, **options):
    options = {"npu": "reference", "scheme": "float", "cache_dtype": "float32", **options}
    with chunkrt.load(model, **options) as engine, engine.session() as session:
        return session.prefill(ids, logits="all").logits


def changed(tmp_path, original=BIASED, *, tensors=None, **config):
    """Return a copy of an adapter with another config, or other tensors; None removes one."""
    folder = tmp_path / "adapter"
    shutil.copytree(original, folder)
    found = json.loads((folder / "adapter_config.json").read_text()) | config
    (folder / "adapter_config.json").write_text(json.dumps(found))
    found = load_file(folder / WEIGHTS) | (tensors or {})
    save_file({name: values for name, values in found.items() if values is not None}, folder / WEIGHTS)
    return folder


def merged(tmp_path):
    """Return the folder llama_biased with the adapter's products added to the weights, by PEFT's formula."""
    folder = tmp_path / "merged"
    shutil.copytree(checkpoint("llama_biased"), folder)
    weights, parts = load_file(folder / "model.safetensors"), load_file(BIASED / WEIGHTS)
    for name in [name for name in parts if "lora_A" in name]:
        target = name.removeprefix("base_model.model.").replace("lora_A.", "")
        a, b = parts[name].astype(np.float64), parts[name.replace("lora_A", "lora_B")].astype(np.float64)
        weights[target] = (weights[target] + 8 / 4 * (b @ a)).astype(np.float32)
    save_file(weights, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("model", "adapter", "expected"),
    [
        ("llama_gqa", GQA, GQA),
        ("phi3_window_120", PHI3, PHI3),
        ("llama_biased", BIASED, BIASED),
        ("llama_biased_gguf", BIASED, BIASED),
        ("llama_biased", FOLDER / "llama_biased.gguf", BIASED),
        ("llama_biased_gguf", FOLDER / "llama_biased.gguf", BIASED),
    ],
)
def test_adapted_logits_are_those_of_peft(model, adapter, expected):
    expected = np.load(expected / "expected.npz")["logits"]
    assert np.abs(expected - expected_logits(model)).max() > 0.1 * np.abs(expected).max()
    found = logits_of(checkpoint(model), input_ids(model), adapter=adapter)
    np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("scheme", ["w8a8-dynamic", "w4a8-dynamic"])
def test_adapted_model_is_quantised_like_a_merged_checkpoint(tmp_path, scheme):
    ids, options = input_ids("llama_biased"), {"npu": "native", "scheme": scheme}
    found = logits_of(checkpoint("llama_biased"), ids, adapter=BIASED, **options)
    expected = logits_of(merged(tmp_path), ids, **options)
    np.testing.assert_allclose(found, expected, atol=1e-2 * np.abs(expected).max())


def test_adapter_has_its_own_calibration_under_a_static_scheme(tmp_path, monkeypatch):
    monkeypatch.setenv("CHUNKRT_HOME", str(tmp_path))
    model, ids = checkpoint("llama_biased_gguf"), input_ids("llama_biased_gguf")
    expected = np.load(BIASED / "expected.npz")["logits"]
    options, num_files = {"npu": "native", "scheme": "w8a16"}, []
    for adapter in (None, BIASED, None, BIASED):
        found = logits_of(model, ids, adapter=adapter, **options)
        num_files.append(len(list((tmp_path / "calibrations").glob("*.npz"))))
    assert num_files == [1, 2, 2, 2]
    assert np.square(found - expected).mean() < 0.05**2 * np.square(expected).mean()


def test_changed_adapter_is_compiled_again(tmp_path):
    model, ids = checkpoint("llama_biased"), input_ids("llama_biased")
    folder = changed(tmp_path)
    first = logits_of(model, ids, adapter=folder)
    shutil.rmtree(folder)
    doubled = changed(tmp_path, lora_alpha=16)
    assert np.abs(logits_of(model, ids, adapter=doubled) - first).max() > 0.1 * np.abs(first).max()


def test_adapter_without_effect_keeps_the_bits(tmp_path):
    model, ids = checkpoint("llama_biased"), input_ids("llama_biased")
    zeros = {name: 0 * b for name, b in load_file(BIASED / WEIGHTS).items() if "lora_B" in name}
    found = logits_of(model, ids, adapter=changed(tmp_path, tensors=zeros))
    np.testing.assert_array_equal(found, logits_of(model, ids))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type 'IA3', and only 'LORA'"),
        ({"use_dora": True}, "uses DoRA"),
        ({"bias": "all"}, "trains biases"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters"),
        ({"init_lora_weights": "pissa_niter_16"}, "changed base weights"),
        ({"lora_alpha": None}, "lora_alpha of model.layers.0.mlp.down_proj is None"),
        ({"r": 0}, "r of model.layers.0.mlp.down_proj is 0"),
        ({"r": 5}, r"tensors \[4, 64\] and \[32, 4\]"),
        ({"rank_pattern": {"(": 4}}, "rank_pattern has an invalid pattern"),
        ({"alpha_pattern": [1]}, "alpha_pattern has an invalid pattern"),
    ],
)
def test_unsupported_config_is_refused(tmp_path, config, message):
    with pytest.raises(ChunkrtError, match=message):
        chunkrt.load(checkpoint("llama_biased"), adapter=changed(tmp_path, **config))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({f"{FIRST}.lora_A.weight": None}, "lacks the tensor lora_A of model.layers.0.self_attn.q_proj"),
        ({f"{FIRST}.lora_magnitude_vector": np.ones(4, np.float32)}, "no part of a LoRA product"),
        ({"base_model.model.model.embed_tokens.lora_embedding_A": np.ones((4, 4), np.float32)}, "changes an embedding"),
        ({f"{FIRST}.lora_B.weight": np.ones((33, 4), np.float32)}, r"as \[33, 32\], and llama_biased has \[32, 32\]"),
        ({f"{FIRST}.lora_B.weight": np.full((32, 4), np.nan, np.float32)}, "not finite"),
        ({f"{FIRST}.lora_B.weight": np.ones((32, 4), np.int8)}, "stored as I8"),
        ({f"{FIRST}s.lora_{part}.weight": np.ones((4, 4), np.float32) for part in "AB"}, "q_projs.weight, which"),
    ],
)
def test_unsupported_tensor_is_refused(tmp_path, tensors, message):
    with pytest.raises(ChunkrtError, match=message):
        chunkrt.load(checkpoint("llama_biased"), adapter=changed(tmp_path, tensors=tensors))


def test_path_that_is_no_adapter_is_refused(tmp_path):
    model = checkpoint("llama_biased")
    (tmp_path / "text").write_text("text")
    for path, message in (
        (tmp_path / "absent", "absent: No such file"),
        (tmp_path, "has no adapter_config.json"),
        (tmp_path / "text", "is not a GGUF file"),
        (checkpoint("llama_biased_gguf"), "is no adapter: its general.type is"),
    ):
        with pytest.raises(ModelError, match=message):
            chunkrt.load(model, adapter=path)
    for value in (5, ""):
        with pytest.raises(ConfigError, match="adapter"):
            chunkrt.load(model, adapter=value)


@pytest.mark.parametrize("adapter", [BIASED, FOLDER / "llama_biased.gguf"])
def test_adapter_that_is_opened_as_a_model_is_refused(adapter):
    with pytest.raises(ModelError, match="it holds only an adapter; give its base model"):
        chunkrt.load(adapter)


def test_adapter_of_another_architecture_is_refused():
    with pytest.raises(ModelError, match=r"is for the architecture 'llama', and .* is 'qwen3'"):
        chunkrt.load(checkpoint("qwen3_gguf"), adapter=FOLDER / "llama_biased.gguf")


def test_tied_lm_head_with_an_adapter_is_refused(tmp_path):
    tensors = {f"base_model.model.lm_head.lora_{part}.weight": np.ones((4, 4), np.float32) for part in "AB"}
    with pytest.raises(ModelError, match=r"changes lm_head.weight, which llama_tied lacks; .* shares? this tensor"):
        chunkrt.load(
            checkpoint("llama_tied"),
            adapter=changed(tmp_path, tensors=dict.fromkeys(load_file(BIASED / WEIGHTS)) | tensors),
        )


def test_compile_writes_an_engine_directory_with_the_adapter(command, tmp_path):
    model, ids = checkpoint("llama_biased_gguf"), input_ids("llama_biased_gguf")
    finished = command("compile", model, "-o", tmp_path / "engine", "--adapter", BIASED)
    assert (finished.status, finished.out[:30]) == (0, f"{tmp_path / 'engine'}: "[:30])
    with chunkrt.load(tmp_path / "engine") as engine, engine.session() as session:
        found = session.prefill(ids, logits="all").logits
    np.testing.assert_array_equal(
        found, logits_of(model, ids, adapter=BIASED, npu="native", scheme=None, cache_dtype=None)
    )
    finished = command("run", tmp_path / "engine", "-p", "a", "--adapter", BIASED)
    assert finished.status == 1
    assert finished.err.endswith("its weights are fixed; pass the checkpoint to add an adapter\n")


def test_run_accepts_the_flag_of_llama_cpp(command):
    arguments = ("run", checkpoint("llama_biased_gguf"), "-p", "a b", "-n", 4, "--temperature", 0)
    found = [command(*arguments, flag, BIASED) for flag in ("--adapter", "--lora")]
    assert found[0].status == 0
    assert found[0].out == found[1].out


def test_read_settings_resolves_the_path_of_an_adapter(tmp_path):
    shutil.copytree(BIASED, tmp_path / "adapter")
    (tmp_path / "settings.toml").write_text('adapter = "adapter"\n')
    assert read_settings(tmp_path / "settings.toml") == {"adapter": tmp_path / "adapter"}
