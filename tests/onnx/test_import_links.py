"""Hubs keep a download as a folder of links to blobs; ONNX Runtime and onnx_ir refuse data behind links."""

import os
import shutil
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from fixture_checkpoints import checkpoint

import chunkrt
from chunkrt.compile.compiler import plan_checkpoint
from chunkrt.onnx.importing import verify

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
