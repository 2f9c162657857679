"""Output of `chunkrt export` is imported with the same plan, the same weights, and the same greedy tokens."""

import json
import os
import shutil
import sys
from pathlib import Path

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


FIXTURES = Path(__file__).parents[1] / "data" / "onnx"
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="links need privileges on Windows")


def symbolic(blob, path):
    path.symlink_to(Path(os.path.relpath(blob, path.parent)))


def cached(source, tmp_path, link, below=""):
    """Make a folder of links as huggingface_hub does: the snapshot, whose files are in blobs/ under other names."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "0123abcd" / below
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(source.iterdir())):
        shutil.copy(file, blobs / f"{number:040x}")
        link(blobs / f"{number:040x}", snapshot / file.name)
    return snapshot


@pytest.mark.parametrize("link", [symbolic, os.link], ids=["symbolic", "hard"])
@pytest.mark.parametrize("name", ["genai_llama_fp32", "genai_llama_int4", "genai_llama_int4_qdq", "genai_lfm2_fp32"])
def test_snapshot_is_imported_and_agrees_with_its_original(tmp_path, name, link):
    snapshot = cached(FIXTURES / name, tmp_path, link)
    found, expected = plan_checkpoint(snapshot, {}), plan_checkpoint(FIXTURES / name, {})
    for weight in expected.parameters:
        np.testing.assert_array_equal(found.load(weight), expected.load(weight), err_msg=weight)
    assert verify(found.source, found.plan, found.load) < 1e-4


@pytest.mark.parametrize("link", [symbolic, os.link], ids=["symbolic", "hard"])
def test_decomposed_decoder_in_a_cache(tmp_path, link):
    """Its parts are run one by one, with their own data."""
    source = tmp_path / "source"
    shutil.copytree(FIXTURES / "optimum_llama_fp32", source)
    model = onnx.load(source / "model.onnx")
    (source / "model.onnx").unlink()
    onnx.save(model, source / "model.onnx", save_as_external_data=True, location="model.onnx_data", size_threshold=0)
    snapshot = cached(source, tmp_path, link, below="onnx")
    found = plan_checkpoint(snapshot / "model.onnx", {})
    assert verify(found.source, found.plan, found.load) < 1e-4


@pytest.mark.parametrize("link", [symbolic, os.link], ids=["symbolic", "hard"])
def test_exported_window_in_a_cache(tmp_path, command, link):
    """It is compared with itself, run as intended."""
    path = tmp_path / "source" / "decoder.onnx"
    done = command("export", checkpoint("qwen2"), "-o", path, "--dtype", "fp32", "--external-data")
    assert done.status == 0, done.err
    found = plan_checkpoint(cached(path.parent, tmp_path, link), {})
    assert verify(found.source, found.plan, found.load) < 1e-4


def test_snapshot_runs_under_a_relative_name(tmp_path, monkeypatch):
    snapshot = cached(FIXTURES / "genai_llama_fp32", tmp_path, symbolic)
    monkeypatch.chdir(snapshot.parent)
    with chunkrt.load(snapshot.name, npu="off") as engine:
        assert np.isfinite(engine.session().prefill([1, 2, 3]).logits).all()
