"""chunkrt's logits are those of Hugging Face Transformers, for every kind of decoder among the fixtures."""

from pathlib import Path

import numpy as np
import pytest

import chunkrt

FIXTURES = Path(__file__).parent / "fixtures"
NAMES = sorted(path.name for path in FIXTURES.iterdir())
TOLERANCE = 1e-4
"""Float32 throughout: a few layers of sums over at most 96 products, on logits of up to about 5."""


@pytest.fixture
def checkpoint(request, tmp_path, monkeypatch):
    """The folder or GGUF file of a fixture, and a cache of its own to compile it into."""
    monkeypatch.setenv("CHUNKRT_HOME", str(tmp_path))
    folder = FIXTURES / request.param
    return folder / "model.gguf" if (folder / "model.gguf").exists() else folder


@pytest.mark.parametrize("npu", ["reference", "onnxrt"])
@pytest.mark.parametrize("checkpoint", NAMES, indirect=True)
def test_logits_are_those_of_transformers(checkpoint, npu):
    expected = np.load((checkpoint if checkpoint.is_dir() else checkpoint.parent) / "expected.npz")
    with chunkrt.load(checkpoint, npu=npu, scheme="float") as engine:
        result = engine.session().prefill(expected["input_ids"].tolist(), logits="all")
    np.testing.assert_allclose(result.logits, expected["logits"], rtol=0, atol=TOLERANCE)
