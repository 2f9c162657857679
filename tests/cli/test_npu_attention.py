"""Tests of the command line with attention on the NPU: plan, predictions, compilation and errors."""

import json

import pytest
from fixture_checkpoints import checkpoint
from one_line import expect_one_line

SHAPE = "qwen2.5-0.5b"


@pytest.fixture
def figures(command):
    """Return the JSON output of a command."""

    def figures(*arguments):
        result = command(*arguments, "--json")
        assert result.status in (0, 3), result.err
        return json.loads(result.out)

    return figures


def test_fit_of_a_shape_counts_cpu_weights(figures):
    both = figures("fit", SHAPE, "--soc", "SM8650", "--scheme", "w4a16")
    alone = figures("fit", SHAPE, "--soc", "SM8650", "--scheme", "w4a16", "--weights", "npu-only")
    assert 0 < alone["cpu_weight_bytes"] < both["cpu_weight_bytes"]
    assert alone["npu_bytes"] == both["npu_bytes"]


def test_llama_8b_fits_16_gb_with_npu_only_weights(figures):
    asked = ("fit", "llama-3.1-8b", "--soc", "SM8650", "--scheme", "w4a16", "--ram", "16", "--context", "4096")
    assert figures(*asked, "--weights", "npu-only")["fits"]


def test_fit_counts_the_graphs_of_both_plans(figures):
    asked = ("fit", SHAPE, "--soc", "SM8650", "--attention", "npu", "--npu-graph", "layers=8")
    near = figures(*asked, "--context", "512")
    assert len(near["contexts"]) == 3
    longer = figures(*asked, "--context", "1024")
    assert len(longer["contexts"]) == 3 + 25
    assert longer["npu_bytes"] > near["npu_bytes"]


def test_simulate_attends_on_either_processor(figures):
    asked = ("simulate", SHAPE, "--device", "sd8gen3", "-p", "256", "--chunk", "32")
    (on_cpu,), (on_npu,) = figures(*asked), figures(*asked, "--attention", "npu")
    assert on_npu["cpu_busy"] < on_cpu["cpu_busy"] / 4
    assert on_npu["tokens_per_s"] != on_cpu["tokens_per_s"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("simulate", SHAPE, "--device", "sd8gen3", "--npu-window", "64"), "has no effect without --attention npu"),
        (("fit", SHAPE, "--soc", "SM8650", "--npu-graph", "layers=2"), "has no effect without --attention npu"),
        (("compile", checkpoint("llama_gqa"), "-o", "out", "--attention", "npu"), "has no effect without --soc"),
        (("run", checkpoint("llama_gqa"), "-p", "x", "--npu", "native", "--attention", "npu"), "--npu is native"),
        (("run", checkpoint("llama_gqa"), "-p", "x", "--npu", "qnn", "--npu-window", "9"), "without --attention npu"),
        (
            ("run", checkpoint("llama_gqa"), "-p", "x", "--npu", "qnn", "--weights", "npu-only", "--decode-on", "cpu"),
            "--decode-on has no effect without --weights both",
        ),
        (("fit", SHAPE, "--soc", "SM8650", "--attention", "npu", "--npu-window", "0"), "--npu-window is '0'"),
    ],
)
def test_npu_attention_options_without_effect_are_refused(command, arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    expect_one_line(command(*arguments), message)


def test_plan_shows_the_attention_graph_and_crossing_bytes(figures):
    pytest.importorskip("onnxruntime_qnn", reason="onnxruntime-qnn is not installed")
    asked = ("plan", checkpoint("llama_gqa"), "--npu", "qnn", "--scheme", "w8a16")
    found = figures(*asked, "--attention", "npu", "--npu-window", "64")
    (graph,) = [each for each in found["subgraphs"] if each["device"] == "npu"]
    assert graph["window_bytes"] > 0
    assert graph["history_bytes"] > 0
    assert all(each["window_bytes"] == each["history_bytes"] == 0 for each in figures(*asked)["subgraphs"])
