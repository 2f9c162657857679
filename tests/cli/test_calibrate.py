"""Tests of `chunkrt calibrate`: output, written files and errors."""

import json

import numpy as np
import pytest
from fixture_checkpoints import checkpoint
from one_line import expect_one_line

from chunkrt.compile import calibrate as calibration_module
from chunkrt.compile.compiler import compile_checkpoint, plan_checkpoint
from chunkrt.graph.plan import linear_nodes
from chunkrt.quant import residual_scaling
from chunkrt.quant.calibration import Calibration
from chunkrt.quant.scheme import SCHEMES, Recipe

GGUF, FOLDER = checkpoint("llama_biased_gguf"), checkpoint("llama_gqa")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("CHUNKRT_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "calibrations"


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("Eine kleine Geschichte.\n\nUnd noch eine.", "utf-8")
    return path


def test_calibrate_prints_a_summary_and_writes_a_file(command, cache, text):
    finished = command("calibrate", GGUF, "--text", text)
    assert (finished.status, finished.err) == (0, "")
    (path,) = cache.iterdir()
    made = Calibration.load(path)
    assert finished.out.splitlines()[-1] == f"saved to {path}"
    assert f"{made.token_ids.size} tokens, {len(made.peaks)} values, limits by mse" in finished.out
    assert f"widest: {max(made.peaks, key=made.peaks.get)}, " in finished.out


def test_calibrate_json_equals_the_file(command, cache, text):
    finished = command("calibrate", GGUF, "--text", text, "--method", "mse", "--tokens", 12, "--json")
    assert (finished.status, finished.err) == (0, "")
    (path,) = cache.iterdir()
    made, summary = Calibration.load(path), json.loads(finished.out)
    widest = max(made.peaks, key=made.peaks.get)
    rows = summary.pop("most_uneven")
    assert summary == {
        "model": str(GGUF),
        "method": "mse",
        "tokens": 12,
        "values": len(made.peaks),
        "widest": {"name": widest, "peak": made.peaks[widest]},
        "residual_stream": {"peak": stream_peak(made), "exponent": 0, "obstacle": None},
        "path": str(path),
    }
    ratios = {name: limits.max() / np.median(limits) for name, limits in made.column_peaks.items()}
    assert [row["ratio"] for row in rows] == pytest.approx(sorted(ratios.values(), reverse=True)[:5])
    linears = linear_nodes(plan_checkpoint(GGUF, {}).plan)
    for row in rows:
        node = linears[f"{row['linear']}.weight"]
        limits = made.column_peaks[node.outputs[0]]
        assert (row["input"], row["input_limit"]) == (made.peaks[node.inputs[0]], made.limits[node.inputs[0]])
        assert row["largest_column"] == limits.max()
        assert row["median_column"] == np.median(limits)


def stream_peak(calibration):
    """Peaks of the embeddings, of the values added to them, and of the sums."""
    added = (f"{linear}.{value}" for linear in ("o_proj", "down_proj") for value in ("product", "output"))
    stream = ("embed_tokens.output", *added, "attention_residual", "layers.0.output", "layers.1.output")
    return max(peak for name, peak in calibration.peaks.items() if name.endswith(stream))


def test_calibrate_reports_the_scale_of_the_residual_stream(command, text, monkeypatch):
    finished = command("calibrate", GGUF, "--text", text)
    (line,) = (line for line in finished.out.splitlines() if line.startswith("the residual stream reaches "))
    assert line.endswith(" and keeps its scale (float16's largest value is 65504)")
    peak = float(line.split()[4])
    monkeypatch.setattr(residual_scaling, "HEADROOM", 65_504 / peak * 3)
    finished = command("calibrate", GGUF, "--text", text)
    assert f"the residual stream reaches {peak:.6g} and is scaled by 2^-2, to {peak / 4:.6g}\n" in finished.out
    summary = json.loads(command("calibrate", GGUF, "--text", text, "--json").out)
    assert summary["residual_stream"]["exponent"] == 2


def test_calibrate_writes_a_copy_with_output(command, cache, text, tmp_path):
    finished = command("calibrate", GGUF, "--text", text, "-o", tmp_path / "mine.npz")
    assert finished.out.splitlines()[-1] == f"saved to {tmp_path / 'mine.npz'}"
    (path,) = cache.iterdir()
    assert Calibration.load(tmp_path / "mine.npz").limits == Calibration.load(path).limits


def test_calibrate_uses_the_built_in_text_by_default(command, cache):
    assert json.loads(command("calibrate", GGUF, "--json").out)["tokens"] == calibration_module.DEFAULT_NUM_TOKENS


LINES = [
    (("smollm2",), "no model is called 'smollm2'; did you mean smollm2-135m-instruct?"),
    (("nowhere/model.gguf",), "there is no file or folder nowhere/model.gguf"),
    ((GGUF, "--text", "nowhere.txt"), "cannot read the text from nowhere.txt: No such file"),
    ((GGUF, "--text", "."), "cannot read the text from .: Is a directory"),
    ((GGUF, "--text", GGUF), "is not UTF-8"),
    ((GGUF, "--tokens", 0), "--tokens is 0, expected at least 1"),
    ((GGUF, "--tokens", -5), "--tokens is -5, expected at least 1"),
    ((GGUF, "--tokens", 100_000), "fewer than the requested 100000"),
    ((GGUF, "-o", "."), "cannot write the calibration"),
    ((FOLDER,), "has no tokenizer"),
]
USAGE = [
    (("--method", "median"), "'median' is not one of"),
    (("--tokens", "many"), "'many' is not a valid integer"),
    (("--texts", "x"), "No such option"),
]


@pytest.mark.parametrize(("arguments", "message"), LINES)
def test_calibrate_refuses_impossible_requests(command, arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    expect_one_line(command("calibrate", *arguments), message, status=1)


@pytest.mark.parametrize(("arguments", "message"), USAGE)
def test_calibrate_refuses_a_wrong_command_line(command, arguments, message):
    expect_one_line(command("calibrate", GGUF, *arguments), message, status=2)


def test_calibrate_refuses_an_empty_text(command, text):
    text.write_text("\n \n")
    expect_one_line(command("calibrate", GGUF, "--text", text), "the calibration text is empty", status=1)


def test_calibrate_refuses_an_engine_directory(command, tmp_path):
    compile_checkpoint(GGUF, Recipe(scheme=SCHEMES["w8a8-dynamic"]), {}, tmp_path / "engine", model="toy")
    expect_one_line(command("calibrate", tmp_path / "engine"), "is compiled and has fixed grids", status=1)


def test_ctrl_c_stops_a_calibration(command, cache, text, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(calibration_module, "calibrate", interrupt)
    finished = command("calibrate", GGUF, "--text", text)
    assert (finished.status, finished.out, finished.err.strip()) == (130, "", "interrupted")
    assert not cache.exists()
