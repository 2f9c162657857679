"""Tests of `--trace` and `chunkrt trace`: the trace, the table and the timeline."""

import json
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import asdict, replace
from html.parser import HTMLParser

import pytest
from fake_backend import npu_and_cpu
from fixture_checkpoints import checkpoint, input_ids
from one_line import expect_one_line
from shared_runs import shared_records
from trace_checker import CheckedTrace
from virtual_record import virtual_record

from chunkrt.backends.fallback import NpuState
from chunkrt.runtime.record import ChunkRecord, SegmentRecord
from chunkrt.runtime.trace.file import read_trace, read_trace_file, write_trace
from chunkrt.runtime.trace.idle import CAUSES
from chunkrt.runtime.trace.shared import packing

GGUF = checkpoint("llama_biased_gguf")
PROMPT = "hello trace " * 8


@pytest.fixture
def traced(command, tmp_path):
    """Trace a run of several chunks, and decoding."""
    path = tmp_path / "out.json"
    finished = command("run", GGUF, "-p", PROMPT, "-n", 4, "--chunk", 8, "--threads", 2, "--trace", path)
    assert finished.status == 0, finished.err
    return path


def test_run_traces_prefill_and_every_step(traced):
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
    """Return the names of a page's elements, and its links."""

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


@pytest.fixture(scope="module")
def shared():
    """Return records of two concurrent sessions."""
    tokens = input_ids("llama_biased_gguf")[:40]
    return shared_records(GGUF, [tokens, tokens[:21]], npu="native", chunk_length=8, threads=1)


def test_shared_chunks_are_counted_once(command, shared, tmp_path):
    path = tmp_path / "out.json"
    write_trace(path, shared, "toy")
    chunks = {chunk.number: chunk for record in shared for chunk in record.chunks}.values()
    rows = sum(segment.num_tokens for chunk in chunks for segment in chunk.segments)
    groups = json.loads(command("trace", path, "--json").out)["groups"]
    (group,) = [group for group in groups if group["shared_chunks"] is not None]
    assert group["name"] == "shared chunks on CPU"
    assert group["runs"] == sum(bool(record.chunks) for record in shared)
    assert group["tokens"] == rows
    assert group["shared_chunks"] == {
        "sequences": 2,
        "chunks": len(chunks),
        "rows": rows,
        "rows_per_chunk": rows / len(chunks),
        "packed": sum(len(chunk.segments) > 1 for chunk in chunks) / len(chunks),
        "padding": None,
    }
    assert sum(group["processors"][0]["percent"].values()) == pytest.approx(100, abs=1e-6)
    assert sum(group["tokens"] for group in groups) == 40 + 21 + 2 * 4
    finished = command("trace", path)
    assert (finished.status, finished.err) == (0, "")
    assert f"{rows / len(chunks):.1f} of 8 rows a chunk on average" in finished.out
    assert "of the chunks held more than one of 2 sequences" in finished.out


def test_trace_reports_padding_of_the_npu(command, tmp_path):
    record = virtual_record(npu_and_cpu(), num_chunks=2)  # 8 and 5 tokens
    chunks = [
        ChunkRecord(3, (SegmentRecord(0, 0, 8),)),
        ChunkRecord(5, (SegmentRecord(0, 8, 5), SegmentRecord(1, 0, 1))),
    ]
    write_trace(tmp_path / "out.json", [replace(record, chunks=chunks)], "toy")
    finished = command("trace", tmp_path / "out.json")
    assert finished.out.startswith("shared chunks on NPU and CPU: 1 run, ")
    assert (
        "7.0 of 8 rows a chunk on average, 50.0% of the chunks held more than one of 2 sequences, "
        "12.5% of the NPU's rows were padding"
    ) in finished.out


@pytest.mark.parametrize(("lengths", "padding"), [((), 1 - 14 / 16), ((2, 4, 8), 1 - 14 / 16), ((6, 8), 0)])
def test_padding_is_that_of_the_smallest_graph_for_the_rows(tmp_path, lengths, padding):
    record = virtual_record(npu_and_cpu(), num_chunks=2)
    chunks = [
        ChunkRecord(0, (SegmentRecord(0, 0, 8),)),
        ChunkRecord(1, (SegmentRecord(0, 8, 5), SegmentRecord(1, 0, 1))),
    ]
    record = replace(record, chunks=chunks, pipeline=replace(record.pipeline, graph_lengths=lengths))
    write_trace(tmp_path / "out.json", [record], "toy")
    (back,) = read_trace(tmp_path / "out.json")
    assert back.pipeline == record.pipeline
    assert packing([back])["padding"] == padding


def test_trace_shows_the_state_of_the_npu(command, tmp_path):
    states = [NpuState(), NpuState(status="lost", failures=2, restored=1, fallbacks=9, error="SSR: no DSP")]
    write_trace(tmp_path / "out.json", [virtual_record(npu_and_cpu())], "toy", states)
    lines = command("trace", tmp_path / "out.json").out.splitlines()
    assert lines[-3:] == [
        "NPU: ok, 0 failures, restored 0 times, 0 tasks computed by the CPU",
        "",
        "NPU: lost, 2 failures, restored 1 times, 9 tasks computed by the CPU; last error: SSR: no DSP",
    ]
    found = json.loads(command("trace", tmp_path / "out.json", "--json").out)["npu"]
    assert found == [asdict(state) for state in states]


def test_trace_of_a_run_on_an_npu_has_its_state(command, monkeypatch, tmp_path):
    pytest.importorskip("onnxruntime_qnn", reason="onnxruntime-qnn, which emulates the NPU, is not installed")
    monkeypatch.setenv("CHUNKRT_HOME", str(tmp_path / "home"))
    path = tmp_path / "out.json"
    finished = command("run", GGUF, "-p", "hello trace", "-n", 2, "--npu", "qnn", "--chunk", "2,8", "--trace", path)
    assert finished.status == 0, finished.err
    assert read_trace_file(path)[2] == [NpuState()]
    assert read_trace(path)[0].pipeline.graph_lengths == (2, 8)
    assert "NPU: ok, 0 failures" in command("trace", path).out


def test_traces_without_an_npu_have_no_state_of_one(traced):
    assert read_trace_file(traced)[2] == []


def test_timeline_has_a_row_per_sequence(command, shared, tmp_path):
    shared = [record for record in shared if record.chunks]
    write_trace(tmp_path / "out.json", shared, "toy")
    assert command("trace", tmp_path / "out.json", "--plot", tmp_path / "out.svg").status == 0
    text = (tmp_path / "out.svg").read_text("utf-8")
    assert ElementTree.fromstring(text).tag.endswith("svg")
    longest = max(shared, key=lambda record: record.num_tokens)
    assert f">sequence {longest.sequence}<" in text


def test_trace_plot_refuses_wrong_files(command, traced, tmp_path):
    expect_one_line(command("trace", traced, "--plot", tmp_path / "a.png"), "must end with one of .svg, .html")
    expect_one_line(command("trace", traced, "--plot", tmp_path / "missing" / "a.svg"), "No such file or directory")
    (tmp_path / "folder.svg").mkdir()
    expect_one_line(command("trace", traced, "--plot", tmp_path / "folder.svg"), "it is not a file; name a file")


def test_paths_of_traces_are_checked_before_anything_runs(command, tmp_path):
    for arguments in (("run", "no such model", "-p", "x"), ("bench", "no such model")):
        expect_one_line(command(*arguments, "--trace", tmp_path), "it is a folder; name a file")
        expect_one_line(command(*arguments, "--trace", tmp_path / "a" / "b.json"), "there is no folder")


def test_failed_run_leaves_no_trace(command, tmp_path):
    expect_one_line(command("run", GGUF, "-p", "x", "-n", 0, "--trace", tmp_path / "out.json"), "--max-new-tokens is 0")
    assert list(tmp_path.iterdir()) == []


def test_trace_refuses_files_of_other_formats(command, tmp_path):
    expect_one_line(command("trace", tmp_path / "out.json"), "No such file or directory")
    expect_one_line(command("trace", tmp_path), "cannot read a trace from")
    expect_one_line(command("trace", GGUF), "it is not JSON")
    path = tmp_path / "foreign.json"
    path.write_text('{"traceEvents": []}')
    expect_one_line(command("trace", path), "is JSON, but not in the format")
