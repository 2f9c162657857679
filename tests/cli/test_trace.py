"""`--trace` and `chunkrt trace`, from a run to a table and a picture."""

import json
import sys
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import pytest
from fixture_checkpoints import checkpoint
from one_line import expect_one_line
from trace_checker import CheckedTrace

from chunkrt.runtime.trace.file import read_trace
from chunkrt.runtime.trace.idle import CAUSES

GGUF = checkpoint("llama_biased_gguf")
PROMPT = "hello trace " * 8


@pytest.fixture
def traced(command, tmp_path):
    """The trace of a run of several chunks, and of decoding."""
    path = tmp_path / "out.json"
    finished = command("run", GGUF, "-p", PROMPT, "-n", 4, "--chunk", 8, "--threads", 2, "--trace", path)
    assert finished.status == 0, finished.err
    return path


def test_run_traces_the_prompt_and_every_step(traced):
    trace = CheckedTrace(traced)
    assert trace.process == f"chunkrt {GGUF}"
    prefill, *decode = [name for _, _, name, _ in trace.slices["runs"]]
    assert prefill.startswith("prefill ")
    num_tokens = int(prefill.split()[1])
    assert decode == [f"decode at {num_tokens + step}" for step in range(3)]
    assert list(trace.tracks.values()) == ["runs", "CPU worker 0", "CPU worker 1"]
    assert len(trace.flows) == -(-num_tokens // 8)
    names = {name for _, _, name, _ in trace.slices["CPU worker 0"]}
    assert names & {"dynamic.0 chunk 0", "embedding chunk 0", "static.0 chunk 0"}


def test_bench_traces_the_last_repetition_of_every_test(command, tmp_path):
    path = tmp_path / "out.json"
    finished = command("bench", GGUF, "-p", "24,40", "-n", 3, "-r", 2, "--chunk", 8, "--trace", path)
    assert finished.status == 0, finished.err
    assert [record.num_tokens for record in read_trace(path)] == [24, 40, 1, 1, 1]
    CheckedTrace(path)


def test_the_table_and_the_json_sum_to_100(command, traced):
    groups = json.loads(command("trace", traced, "--json").out)["groups"]
    assert [group["name"].split()[0] for group in groups] == ["prefill", "decode"]
    assert [group["runs"] for group in groups] == [1, 3]
    for group in groups:
        for processor in group["processors"]:
            assert set(processor["percent"]) == {"busy", *CAUSES}
            assert sum(processor["percent"].values()) == pytest.approx(100, abs=1e-6)
            assert processor["total_ns"] == processor["workers"] * group["wall_ns"]
    finished = command("trace", traced)
    assert (finished.status, finished.err) == (0, "")
    for table in finished.out.split("\n\n"):
        lines = [line for line in table.splitlines() if line.startswith(("busy", "idle: "))]
        percents = [float(line.split()[-2]) for line in lines]
        assert sum(percents) == pytest.approx(100, abs=0.5)


class Page(HTMLParser):
    """The names of a page's elements, and its links."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.links = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append(tag)
        self.links += [value for name, value in attrs if name in ("href", "src")]


@pytest.mark.parametrize("ending", ["svg", "html"])
def test_timelines_without_matplotlib(command, traced, tmp_path, monkeypatch, ending):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    path = tmp_path / f"timeline.{ending}"
    path.write_text("old")
    assert command("trace", traced, "--plot", path).status == 0
    text = path.read_text("utf-8")
    assert "CPU worker 1" in text
    assert "static.0 chunk 3" in text
    if ending == "svg":
        assert ElementTree.fromstring(text).tag.endswith("svg")
    else:
        page = Page(text)
        assert "svg" in page.elements
        assert "script" not in page.elements
        assert page.links == []
    assert len(text) < 200_000
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.json", path.name]


def test_what_cannot_be_drawn(command, traced, tmp_path):
    expect_one_line(command("trace", traced, "--plot", tmp_path / "a.png"), "ends in none of .svg, .html")
    expect_one_line(command("trace", traced, "--plot", tmp_path / "missing" / "a.svg"), "No such file or directory")
    (tmp_path / "folder.svg").mkdir()
    expect_one_line(command("trace", traced, "--plot", tmp_path / "folder.svg"), "it is no file; name one")


def test_paths_of_traces_are_checked_before_anything_runs(command, tmp_path):
    for arguments in (("run", "no such model", "-p", "x"), ("bench", "no such model")):
        expect_one_line(command(*arguments, "--trace", tmp_path), "it is a folder; name a file")
        expect_one_line(command(*arguments, "--trace", tmp_path / "a" / "b.json"), "there is no folder")


def test_no_trace_is_left_of_a_run_that_failed(command, tmp_path):
    expect_one_line(command("run", GGUF, "-p", "x", "-n", 0, "--trace", tmp_path / "out.json"), "max_new_tokens is 0")
    assert list(tmp_path.iterdir()) == []


def test_files_that_are_no_traces(command, tmp_path):
    expect_one_line(command("trace", tmp_path / "out.json"), "No such file or directory")
    expect_one_line(command("trace", tmp_path), "cannot read a trace from")
    expect_one_line(command("trace", GGUF), "it is not JSON")
    path = tmp_path / "foreign.json"
    path.write_text('{"traceEvents": []}')
    expect_one_line(command("trace", path), "is JSON, but not of the format")
