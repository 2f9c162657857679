"""Output of `chunkrt export` is imported with the same plan, the same weights, and the same greedy tokens."""

import json

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from fixture_checkpoints import checkpoint, input_ids

import chunkrt
from chunkrt.cli import cli
from chunkrt.compile.compiler import plan_checkpoint
from chunkrt.errors import ModelError, UnsupportedModelError
from chunkrt.onnx.importing import import_decoder, verify
from chunkrt.onnx.window_session import OnnxSession

WINDOWS = ["llama_tied", "gemma3_window_5", "phi3_longrope_long", "lfm2", "qwen3_next", "qwen3_next_experts"]
WINDOWS += ["gemma2", "gpt_oss", "granite", "lfm2_moe", "smollm3_window"]


def exported(name, folder, *options):
    path = folder / "decoder.onnx"
    result = CliRunner().invoke(cli, ["export", str(checkpoint(name)), "-o", str(path), "--dtype", "fp32", *options])
    assert result.exit_code == 0, result.output
    return path


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("name", WINDOWS)
def test_fixed_window_is_imported_with_its_plan(tmp_path, name):
    path = exported(name, tmp_path)
    found, expected = plan_checkpoint(path, {}), plan_checkpoint(checkpoint(name), {})
    assert json.loads(found.plan.to_json()) == json.loads(expected.plan.to_json())
    for tensor in expected.plan.tensors.values():
        if tensor.kind == "weight":
            np.testing.assert_array_equal(found.load(tensor.name), expected.load(tensor.name), err_msg=tensor.name)
    assert verify(found.source, found.plan, found.load) < 1e-4


@pytest.mark.parametrize("placement", [{"": "cpu"}, {"model.layers.*.mlp.down_proj": "cpu", "lm_head": "npu"}])
def test_import_is_placed_like_the_checkpoint(tmp_path, placement):
    path = exported("llama_tied", tmp_path)
    plans = [plan_checkpoint(source, placement).plan for source in (path, checkpoint("llama_tied"))]
    assert plans[0].to_json() == plans[1].to_json()


def test_import_generates_the_same_tokens(tmp_path, monkeypatch):
    monkeypatch.setenv("CHUNKRT_HOME", str(tmp_path / "home"))
    path = exported("llama_tied", tmp_path)
    prompt, found = input_ids("llama_tied"), []
    for model in (path, checkpoint("llama_tied")):
        with chunkrt.load(model, npu="reference") as engine:
            session = engine.session()
            session.prefill(prompt)
            found.append([piece.token_id for piece in session.generate(max_new_tokens=8)])
    assert found[0] == found[1]


def test_export_of_an_import_cannot_be_imported(tmp_path):
    """It runs; but its rotary tables end with the window, and no frequencies extend them."""
    first = exported("llama_tied", tmp_path)
    second = tmp_path / "second.onnx"
    result = CliRunner().invoke(cli, ["export", str(first), "-o", str(second), "--dtype", "fp32"])
    assert result.exit_code == 0, result.output
    tokens = input_ids("llama_tied")[:8]
    of_both = [OnnxSession(path).run(tokens) for path in (first, second)]
    np.testing.assert_array_equal(*of_both)
    with pytest.raises(UnsupportedModelError, match=r"second\.onnx has rows of model\.rope without .* import that one"):
        import_decoder(second)


@pytest.mark.parametrize(
    ("key", "change"),
    [
        ("chunkrt.plan", lambda plan: plan.replace('"num_heads": 4', '"num_heads": 3', 1).replace('"num_heads":4', "")),
        ("chunkrt.plan", lambda plan: plan[: len(plan) // 2]),
        ("chunkrt.plan", lambda plan: "{}"),
        ("chunkrt.rope", lambda rope: '{"model.rope": {"frequencies": [["x"]], "magnitude": 1}}'),
        ("chunkrt.rope", lambda rope: "[]"),
    ],
)
def test_modified_plan_is_one_error(tmp_path, key, change):
    path = exported("llama_tied", tmp_path)
    model = onnx.load(path)
    (prop,) = (each for each in model.metadata_props if each.key == key)
    prop.value = change(prop.value)
    onnx.save(model, path)
    with pytest.raises(ModelError, match=r"decoder\.onnx: the plan that it was exported from"):
        import_decoder(path)
