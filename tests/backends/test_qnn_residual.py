"""A residual stream that exceeds float16, on the emulated NPU: scaled at compilation, it runs there."""

from dataclasses import replace

import numpy as np
import pytest
from wide_gemma import wide_gemma, wide_logits

import chunkrt
from chunkrt.backends import qnn
from chunkrt.compile import compiler
from chunkrt.errors import BackendError
from chunkrt.quant.residual_scaling import residual_scaling

pytest.importorskip("onnxruntime_qnn", reason="onnxruntime-qnn, which emulates the NPU, is not installed")
if not qnn.open_htp().is_emulated:
    pytest.skip("this machine has an NPU, and a compiler for that NPU alone", allow_module_level=True)

MOST_ERROR = 0.04
"""Tolerance of w8a16's logits against Transformers' (root mean square)."""


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    return wide_gemma(tmp_path_factory.mktemp("wide"))


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("CHUNKRT_HOME", str(tmp_path))


def logits_on_the_npu(wide):
    """Return logits of three chunks, with all static subgraphs on the NPU; and Transformers' logits."""
    model, calibration = wide
    expected, tokens = wide_logits()
    options = {"npu": "qnn", "scheme": "w8a16", "calibration": calibration, "chunk_length": 32, "threads": 2}
    with chunkrt.load(model, **options) as engine:
        devices = {s.device for s in engine.plan.static_subgraphs if s.rows == "T"}
        assert devices == {"npu"}
        return engine.session().prefill(tokens, logits="all").logits, expected


def test_stream_that_exceeds_float16_runs_on_the_npu(wide):
    """Before streams were scaled this ended as in the test below: "left the range of float16 on the NPU"."""
    found, expected = logits_on_the_npu(wide)
    error = np.sqrt(np.mean((found - expected) ** 2) / np.mean(expected**2))
    assert error < MOST_ERROR


def test_unscaled_stream_exceeds_float16(wide, monkeypatch):
    monkeypatch.setattr(
        compiler, "residual_scaling", lambda plan, found: replace(residual_scaling(plan, found), exponent=0)
    )
    with pytest.raises(BackendError, match=r"left the range of float16 on the NPU; .* `npu='native'`"):
        logits_on_the_npu(wide)
