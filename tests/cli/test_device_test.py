"""`chunkrt device-test`, with the emulator as the device."""

import errno
import json
import os
from contextlib import contextmanager

import pytest
from fixture_checkpoints import checkpoint
from one_line import expect_one_line

from chunkrt.engine.deploy import compile_engine
from chunkrt.engine.options import EngineOptions
from chunkrt.files import written_aside

pytest.importorskip("onnxruntime_qnn", reason="contexts are compiled by onnxruntime-qnn")

GGUF = checkpoint("llama_biased_gguf")


@pytest.fixture(scope="module", params=["cpu", "npu"])
def folder(request, tmp_path_factory):
    """An engine directory for SM8650, with attention on either processor."""
    output = tmp_path_factory.mktemp("device") / "engine"
    attention = {"attention": "npu", "npu_window": "32"} if request.param == "npu" else {}
    options = EngineOptions(npu="qnn", context_length=32, **attention)
    compile_engine(str(GGUF), output, options, socs=["SM8650"], chunk_lengths=[8])
    return output


def test_device_test_reports_can_be_compared(command, folder, tmp_path):
    arguments = ("device-test", folder, "--minutes", 0)
    finished = command(*arguments, "-o", tmp_path / "first.json")
    assert (finished.status, finished.err) == (0, "")
    report = json.loads((tmp_path / "first.json").read_text())
    checks = {check["name"]: check for check in report["checks"]}
    assert list(checks) == [
        *("directory", "contexts", "library", "SoC", "contexts load", "shared memory"),
        *("restored contexts", "logits of the CPU"),
    ]
    assert all(check["ok"] for check in checks.values())
    assert report["soc"] == "SM8650"
    assert report["is_emulated"]
    assert len(report["generated"]) == 8
    assert report["graph_us"]
    assert all(times["first"] > 0 for times in report["graph_us"].values())
    assert finished.out.count("ok  ") == len(checks)

    finished = command(*arguments, "-o", tmp_path / "second.json", "--against", tmp_path / "first.json")
    assert "ok   logits of the other report: bit-identical logits and tokens" in finished.out
    report["logits"] = [2 * value for value in report["logits"]]
    (tmp_path / "wrong.json").write_text(json.dumps(report))
    finished = command(*arguments, "-o", tmp_path / "third.json", "--against", tmp_path / "wrong.json")
    assert (finished.status, "FAIL logits of the other report" in finished.out) == (3, True)


def test_files_have_the_same_line_ends_on_all_systems(folder):
    """Linux and Windows compile equal engine directories."""
    texts = list(folder.rglob("*.json"))
    assert {"engine.json", "plan.json", "text.json", "context.json"} <= {path.name for path in texts}
    assert not [path.name for path in texts if b"\r" in path.read_bytes()]


def test_device_test_needs_an_engine_directory(command, tmp_path):
    expect_one_line(command("device-test", GGUF, "-o", tmp_path / "report.json"), "is not an engine directory")


def test_full_disk_is_reported_with_the_name_of_the_file(command, folder, tmp_path, monkeypatch):
    @contextmanager
    def full(path):
        if path.name == "report.json":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with written_aside(path) as aside:
            yield aside

    monkeypatch.setattr("chunkrt.files.written_aside", full)
    finished = command("device-test", folder, "--minutes", 0, "-o", tmp_path / "report.json")
    expect_one_line(finished, f"cannot write {tmp_path / 'report.json'}: No space left on device")


@pytest.mark.parametrize("text", ["[]", "{}", '{"format": 1, "logits": 3}', '{"format": 1, "logits": ["x"]}'])
def test_other_report_is_checked_before_the_measurement(command, folder, tmp_path, text):
    (tmp_path / "other.json").write_text(text)
    finished = command("device-test", folder, "-o", tmp_path / "report.json", "--against", tmp_path / "other.json")
    expect_one_line(finished, "other.json is not a report of this version of device-test")
