"""Tests of `--plot` in bench, simulate and tune: the plots and the errors."""

import json
import re
import sys

import pytest
from fixture_checkpoints import checkpoint
from one_line import expect_one_line

from chunkrt.cli import plots
from chunkrt.pictures import Panel, PlotPoint, draw_panels

GGUF = checkpoint("llama_biased_gguf")
SHAPE, DEVICE = "qwen2.5-0.5b", ("--device", "8gen3")


@pytest.fixture
def readable(monkeypatch):
    """Keep texts of SVG files as text instead of outlines."""
    matplotlib = pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        yield


@pytest.fixture
def drawn(monkeypatch):
    """Collect the drawn panels with their lines."""
    panels = []
    monkeypatch.setattr(plots, "draw_panels", lambda found, path, title: panels.extend(found))
    return panels


def words(path):
    return set(re.findall(r">([^<>\n]+)</text>", path.read_text("utf-8")))


def test_bench_plot_has_one_panel_per_kind(command, drawn, tmp_path):
    finished = command(
        "bench", GGUF, "-p", "8,16", "-n", 4, "-pg", "8,4", "-r", 2, "--json", "--plot", tmp_path / "a.svg"
    )
    assert (finished.status, [panel.y_label for panel in drawn]) == (
        0,
        ["prefill, tokens/s", "decode, tokens/s", "prefill and decode, tokens/s"],
    )
    rows = json.loads(finished.out)
    ((points,), (decoded,), (both,)) = (panel.lines.values() for panel in drawn)
    assert points == [PlotPoint(row["n_prompt"], row["avg_ts"], row["stddev_ts"]) for row in rows[:2]]
    assert [point.x for point in decoded + both] == [4, 12]


def test_bench_plot_over_depths_has_one_line_per_length(command, drawn, tmp_path):
    command("bench", GGUF, "-p", "8,16", "-n", 0, "-d", "0,16", "-r", 1, "--plot", tmp_path / "a.svg")
    (panel,) = drawn
    assert panel.x_label == "tokens before"
    assert [[point.x for point in points] for points in panel.lines.values()] == [[0, 16], [0, 16]]
    assert [name.rsplit(", ", 1)[1] for name in panel.lines] == ["8 tokens", "16 tokens"]


def test_bench_plot_of_parallel_is_over_sequences(command, drawn, tmp_path):
    command("bench", GGUF, "-p", 8, "-n", 4, "--parallel", "1,2", "-r", 1, "--plot", tmp_path / "a.svg")
    assert [panel.y_label for panel in drawn] == ["prefill, tokens/s", "decode, tokens/s"]
    assert all([point.x for points in panel.lines.values() for point in points] == [1, 2] for panel in drawn)


def test_simulate_plot(command, readable, tmp_path):
    path = tmp_path / "a.svg"
    finished = command("simulate", SHAPE, *DEVICE, "-p", "64,128", "--chunk", 32, "--chunk", 64, "--plot", path)
    assert (finished.status, finished.err) == (0, "")
    shown = words(path)
    assert {"chunk 32, look_ahead", "chunk 64, look_ahead", "prompt tokens", "tokens/s"} <= shown
    assert "time to first token, ms" in shown
    assert any(word.startswith(SHAPE) and "w8a16" in word for word in shown)


def test_tune_plot_has_the_pareto_front(command, drawn, tmp_path):
    options = ("-o", tmp_path / "t.toml", "-p", 32, "--chunk", 32, "--json")
    found = json.loads(command("tune", GGUF, *DEVICE, *options, "--plot", tmp_path / "a.svg").out)
    (panel,) = drawn
    front, (default,), (chosen,) = panel.lines.values()
    every = {(choice["peak_memory_bytes"] / 1e6, choice["time_ms"]) for choice in found["choices"]}
    beaten = {a for a in every for b in every if a != b and b[0] <= a[0] and b[1] <= a[1]}
    assert {(point.x, point.y) for point in front} == every - beaten
    assert default.y == found["default"]["time_ms"]
    assert chosen.y == found["best"]["time_ms"]


@pytest.mark.parametrize(("ending", "head"), [("png", b"\x89PNG\r\n"), ("SVG", b"<?xml")])
def test_plot_format_follows_the_suffix(readable, tmp_path, ending, head):
    path = tmp_path / f"a.{ending}"
    draw_panels([Panel("x", "y", {"one": [PlotPoint(2, 1, 0.5), PlotPoint(1, 3)]})] * 2, path, "two")
    assert path.read_bytes().startswith(head)


def test_plot_errors_are_reported_before_anything_runs(command, tmp_path, monkeypatch):
    commands = {
        "bench": ("bench", GGUF),
        "simulate": ("simulate", SHAPE, *DEVICE),
        "tune": ("tune", SHAPE, *DEVICE, "-o", tmp_path / "t.toml"),
    }
    monkeypatch.setattr("chunkrt.cli.bench.open_engine", lambda *_: pytest.fail("a model was loaded"))
    monkeypatch.setattr("chunkrt.cli.simulate.simulate_prompt", lambda *_, **__: pytest.fail("it was simulated"))
    monkeypatch.setattr("chunkrt.cli.tune.search", lambda *_, **__: pytest.fail("it was searched"))
    served = (*commands["simulate"], "--arrivals", "poisson:1", "--prompt", "8", "--generate", "8")
    cases = [(arguments, "a.jpg", "its name must end with one of .png, .svg") for arguments in commands.values()]
    cases.append((served, "a.svg", "--plot draws single prompts"))
    for arguments, name, message in cases:
        expect_one_line(command(*arguments, "--plot", tmp_path / name), message, 1)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for arguments in commands.values():
        finished = command(*arguments, "--plot", tmp_path / "a.svg")
        assert (
            finished.err
            == 'chunkrt: --plot needs matplotlib, which is not installed; run pip install "chunkrt[plot]"\n'
        )
