"""Exports with integer weights compute the decoder whose weights the integers stand for. The reference is a decoder in
float64, with weights that NumPy dequantises from the file by the operators' definitions."""

import json

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from fixture_checkpoints import checkpoint, expected_logits, input_ids
from float64_llama import float64_logits
from one_line import expect_one_line
from onnx import numpy_helper
from onnx_models import planned
from random_folders import write_folder

from chunkrt.compile.compiler import plan_checkpoint
from chunkrt.onnx.exporting import DynamicSettings, WindowSettings, check_float16, dynamic_model, save_model
from chunkrt.onnx.exporting.emitter import Emitter
from chunkrt.onnx.window_session import OnnxSession

TOLERANCES = {"fp32": 1e-4, "fp16": 2e-2}
"""Tolerances relative to the largest logit."""


def weights_of(decoder):
    """Return the weights of a decoder in float64, by plan name."""
    tensors = decoder.plan.tensors.values()
    return {t.name: decoder.load(t.name).astype(np.float64) for t in tensors if t.kind == "weight"}


def rounded_weights(decoder, path):
    """Return the same with the values that the file's integers stand for, and the largest rounding error of any weight
    relative to its scale.
    """
    weights, largest = weights_of(decoder), 0.0
    stored = {t.name: numpy_helper.to_array(t) for t in onnx.load(path).graph.initializer}
    for key, weight in list(weights.items()):
        parts = next(((stored[f"{key}.{kind}"], kind) for kind in ("int8", "int4") if f"{key}.{kind}" in stored), None)
        if parts is None:
            continue
        integers, kind = parts
        scales = stored[f"{key}.scale"].astype(np.float64)
        is_table = key == "model.embed_tokens.weight"
        if kind == "int4":
            bytes_ = integers.reshape(len(integers), -1)
            nibbles = np.stack([bytes_ & 0x0F, bytes_ >> 4], axis=-1).reshape(len(bytes_), -1)
            scales = np.repeat(scales, 32, axis=1)
            values = ((nibbles.astype(np.float64) - 8) * scales)[:, : weight.shape[1 if is_table else 0]]
            scales = scales[:, : values.shape[1]]
            values, scales = (values, scales) if is_table else (values.T, scales.T)
        else:
            scales = np.broadcast_to(scales[:, None] if is_table else scales, weight.shape)
            values = integers * scales
        largest = max(largest, float((np.abs(values - weight) / np.abs(scales)).max()))
        weights[key] = values
    if "lm_head.weight" not in {name.rpartition(".")[0] for name in stored}:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].T
    return weights, largest


def config_of(name):
    return json.loads((checkpoint(name) / "config.json").read_text())


@pytest.mark.parametrize("name", ["llama_gqa", "llama_tied"])
def test_reference_computes_transformers_logits(name):
    logits = float64_logits(config_of(name), weights_of(planned(name)), input_ids(name))
    np.testing.assert_allclose(logits, expected_logits(name), rtol=0, atol=1e-4)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("opset", ["14", "18", "21", "23"])
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("name", ["llama_gqa", "llama_tied"])
def test_rounded_weights_are_multiplied_by_float_activations(tmp_path, command, name, weights, dtype, opset):
    path = tmp_path / "d.onnx"
    options = ["--weights", weights, "--dtype", dtype, "--opset", opset, "--window", "8", "--context", "96"]
    assert command("export", checkpoint(name), "-o", path, *options).status == 0
    onnx.checker.check_model(str(path), full_check=True)
    rounded, error = rounded_weights(planned(name), path)
    bound = 0.5 + 127 * 2**-11 if weights == "int8" else 1 + 8 * 2**-11  # scales in float16; 4 bits clip 8 to 7
    assert 0.4 < error <= bound
    tokens = input_ids(name)
    expected = float64_logits(config_of(name), rounded, tokens)
    assert np.abs(expected - expected_logits(name)).max() > 1e-2
    logits = OnnxSession(path, threads=1).run(tokens)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=TOLERANCES[dtype] * np.abs(expected).max())


@pytest.mark.parametrize(("weights", "kind"), [("int8", np.int8), ("int4", np.uint8)])
def test_tied_weights_are_stored_once_as_integers(tmp_path, command, weights, kind):
    path = tmp_path / "d.onnx"
    options = ["--weights", weights, "--window", "8,1", "--context", "96", "--dtype", "fp32"]
    assert command("export", checkpoint("llama_tied"), "-o", path, *options).status == 0
    paths = [tmp_path / f"d.window{window}.onnx" for window in (8, 1)]
    for each in paths:
        stored = {t.name: numpy_helper.to_array(t) for t in onnx.load(each).graph.initializer}
        large = [name for name, array in stored.items() if "embed_tokens" in name or "lm_head" in name]
        assert sorted(large) == [f"model.embed_tokens.weight.{weights}", "model.embed_tokens.weight.scale"]
        assert stored[f"model.embed_tokens.weight.{weights}"].dtype == kind
    rounded, _ = rounded_weights(planned("llama_tied"), paths[0])
    tokens = input_ids("llama_tied")[:12]
    expected = float64_logits(config_of("llama_tied"), rounded, tokens)
    logits = OnnxSession(*paths, threads=1)
    found = np.concatenate([logits.run(tokens[:9]), logits.run(tokens[9:])])
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4 * np.abs(expected).max())


def test_dynamic_form_has_integer_weights(tmp_path):
    folder, path = write_folder(tmp_path / "tiny", head_dim=16, attention_bias=False), tmp_path / "d.onnx"
    decoder = plan_checkpoint(folder, {})
    save_model(dynamic_model(decoder, DynamicSettings(context=64, dtype="fp32", weights="int4")), path)
    session = ort.InferenceSession(str(path))
    tokens = list(range(20))
    feeds = {"input_ids": np.array([tokens]), "attention_mask": np.ones((1, 20), np.int64)}
    for value in session.get_inputs():
        if value.name.startswith("past"):
            feeds[value.name] = np.zeros((1, value.shape[1], 0, value.shape[3]), np.float32)
    rounded, _ = rounded_weights(decoder, path)
    expected = float64_logits(json.loads((folder / "config.json").read_text()), rounded, tokens)
    (logits,) = session.run(["logits"], feeds)
    np.testing.assert_allclose(logits[0], expected, rtol=0, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_experts_and_reimports_are_refused(tmp_path, command, weights):
    done = command("export", checkpoint("qwen3_moe"), "-o", tmp_path / "d.onnx", "--weights", weights)
    expect_one_line(done, f"has experts, which --weights {weights} does not cover")
    assert command("export", checkpoint("llama_gqa"), "-o", tmp_path / "d.onnx", "--weights", weights).status == 0
    done = command("compile", tmp_path / "d.onnx", "-o", tmp_path / "engine")
    expect_one_line(done, f"was exported with --weights {weights}; use the checkpoint")


def test_check_covers_the_rounded_weights():
    check_float16(planned("llama_gqa"), WindowSettings(window=8, sequence=8, context=8, weights="int4"))


def test_rounded_activations_are_refused_and_no_file_stays(tmp_path, command, monkeypatch):
    """The dynamic quantisation of activations in MatMulNBits, `accuracy_level=4`, is not the claimed arithmetic."""
    emit = Emitter.ops

    def careless(self, op, *inputs, **attributes):
        return emit(self, op, *inputs, **attributes | ({"accuracy_level": 4} if op == "MatMulNBits" else {}))

    monkeypatch.setattr(Emitter, "ops", careless)
    options = ["--weights", "int4", "--dtype", "fp32", "--window", "8,1", "--context", "64"]
    done = command("export", checkpoint("llama_gqa"), "-o", tmp_path / "d.onnx", *options)
    expect_one_line(done, "differs on ONNX Runtime from its int4 weights with float activations")
    assert not list(tmp_path.iterdir())
