"""A model that the NPU cannot compile completely, on the emulated NPU: unsupported operators run on the CPU."""

import json
import logging

import numpy as np
import pytest
from fixture_checkpoints import checkpoint, input_ids
from one_line import expect_one_line

import chunkrt
from chunkrt.backends import qnn
from chunkrt.checkpoints.source import weights_digest
from chunkrt.compile.calibrate import calibrate
from chunkrt.compile.compiler import plan_checkpoint
from chunkrt.engine.deploy import compile_engine
from chunkrt.engine.options import EngineOptions
from chunkrt.errors import PartitionError

pytest.importorskip("onnxruntime_qnn", reason="onnxruntime-qnn, which emulates the NPU, is not installed")
if not qnn.open_htp().is_emulated:
    pytest.skip("this machine has an NPU, and a compiler for that NPU alone", allow_module_level=True)

NAME, SCHEME = "lfm2", "w4a16"
"""Checkpoint whose feed-forwards have 48 values, which blocks of 32 do not divide: the NPU does not support
down_proj."""
MOST_DIFFERENCE = 2.0**-6
"""Tolerance of logits from those of the CPU under the same scheme (root mean square); values between linears are
float16."""


@pytest.fixture(scope="module")
def calibration(tmp_path_factory):
    planned = plan_checkpoint(checkpoint(NAME), {})
    found = calibrate(
        planned.plan, planned.load, np.array(input_ids(NAME)), model=NAME, weights=weights_digest(planned.source)
    )
    path = tmp_path_factory.mktemp("calibration") / "found.npz"
    found.save(path)
    return path


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("CHUNKRT_HOME", str(tmp_path / "home"))


def load(calibration, **options):
    wanted = {"npu": "qnn", "scheme": SCHEME, "chunk_length": 32, "threads": 2, "calibration": calibration}
    return chunkrt.load(checkpoint(NAME), **(wanted | options))


def logits_of(engine):
    return engine.session().prefill(np.array(input_ids(NAME)), logits="all").logits


def test_unsupported_operators_run_on_the_cpu_with_one_line(calibration, caplog):
    with load(calibration, npu="native") as engine:
        expected = logits_of(engine)
    caplog.clear()
    with load(calibration) as engine:
        found = logits_of(engine)
        moved = [s.name for s in engine.plan.subgraphs if s.device == "cpu" and "part" in s.name]
        assert len(moved) == len([s for s in engine.plan.subgraphs if any("down_proj" in n.name for n in s.nodes)])
        assert engine.loaded.npu_backend.num_compiled == sum(s.device == "npu" for s in engine.plan.subgraphs)
    lines = [r.getMessage() for r in caplog.records if r.name == "chunkrt.engine.capability"]
    assert len(lines) == 1
    assert caplog.records[0].levelno == logging.WARNING
    assert "linear (first model.layers.0.feed_forward.down_proj.output: MatMul of u16 by s4 of depth 48" in lines[0]
    difference = np.sqrt(np.mean((found - expected) ** 2) / np.mean(expected**2))
    assert 0 < difference < MOST_DIFFERENCE


def test_strict_mode_refuses_the_model(calibration):
    with pytest.raises(PartitionError, match=r"qnn cannot run subgraph .*down_proj.* of depth 48"):
        load(calibration, npu_strict=True)


def test_engine_directory_has_contexts_of_supported_subgraphs(calibration, tmp_path):
    options = EngineOptions(npu="qnn", scheme=SCHEME, calibration=calibration)
    written = compile_engine(str(checkpoint(NAME)), tmp_path / "device", options, socs=["SM8650"], chunk_lengths=[32])
    with chunkrt.load(tmp_path / "device", npu="qnn") as engine:
        assert engine.loaded.npu_backend.num_compiled == 0
        assert written["npu"][0]["contexts"] == sum(s.device == "npu" for s in engine.plan.subgraphs)


def test_plan_marks_moved_subgraphs(command):
    arguments = ("plan", checkpoint(NAME), "--npu", "qnn", "--scheme", SCHEME)
    finished = command(*arguments)
    assert finished.status == 0
    rows = [line.split() for line in finished.out.splitlines()]
    marked = [name for name, device, *_ in (row for row in rows if len(row) > 2) if device == "cpu*"]
    summary = json.loads(command(*arguments, "--json").out)
    assert len(marked) == len(summary["moved"]) > 0
    assert all(name.startswith("static.") for name in marked)
    assert summary["moved"][0]["node"] == "model.layers.0.feed_forward.down_proj.output"
    assert "of depth 48" in summary["moved"][0]["reason"]
    assert any(
        line.startswith("* the CPU runs operators that the NPU does not support: ")
        for line in finished.out.splitlines()
    )
    expect_one_line(command(*arguments, "--npu-strict"), "qnn cannot run subgraph static.", 1)
    assert command("ops", *arguments[1:]).status == 0
