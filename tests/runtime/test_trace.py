"""Traces: the fields that viewers need, exact round trips, and invalid files."""

import json
import os
import tracemalloc
from dataclasses import replace

import pytest
from fake_backend import CONTEXT, LoneExecutor, make_plan, npu_and_cpu, shared_cpu, tokens
from trace_checker import CheckedTrace
from virtual_record import PLAN, virtual_record

from chunkrt.backends.base import Passage
from chunkrt.backends.fallback import NpuState
from chunkrt.errors import ConfigError
from chunkrt.runtime.request import Request
from chunkrt.runtime.state import State
from chunkrt.runtime.tasks import Task, TaskEvent
from chunkrt.runtime.trace.file import check_trace_path, read_trace, read_trace_file, write_trace
from chunkrt.runtime.trace.idle import idle_gaps, where_time_went


def test_tracks_names_and_times(tmp_path):
    record = virtual_record(npu_and_cpu(2))
    write_trace(tmp_path / "out.json", [record], "chunkrt toy")
    trace = CheckedTrace(tmp_path / "out.json")
    assert trace.process == "chunkrt toy"
    assert list(trace.tracks.values()) == ["runs", "NPU", "CPU worker 0", "CPU worker 1"]
    assert [s[2] for s in trace.slices["runs"]] == ["prefill 29 tokens"]
    npu = [e for e in record.events if e.processor == "npu"]
    assert [(s[0], s[1], s[2]) for s in trace.slices["NPU"]] == [
        (
            e.start_ns - record.start_ns,
            e.end_ns - record.start_ns,
            f"{PLAN.subgraphs[e.task.subgraph].name} chunk {e.task.chunk}",
        )
        for e in npu
    ]
    assert sum(len(slices) for track, slices in trace.slices.items() if track != "runs") == len(record.events)


def test_arrows_lead_along_every_chunk(tmp_path):
    first = virtual_record(npu_and_cpu())
    write_trace(tmp_path / "out.json", [first, virtual_record(shared_cpu(2), start=first.end_ns)], "toy")
    flows = CheckedTrace(tmp_path / "out.json").flows
    assert len(flows) == 2 * 4  # their ids differ between runs
    for (name, _), tasks in flows.items():
        chunk = int(name.removeprefix("chunk "))
        stages = [stage.name for stage in (PLAN.subgraphs if chunk == 3 else PLAN.subgraphs[:5])]
        if chunk == 0:
            del stages[0]  # it took no time
        assert tasks == [f"{stage} {name}" for stage in stages]


def test_arrows_lead_along_both_sides_of_a_fork(tmp_path):
    plan = make_plan(layers=1, shadowed=1)
    record = virtual_record(npu_and_cpu(), plan=plan)
    write_trace(tmp_path / "out.json", [record], "toy")
    flows = CheckedTrace(tmp_path / "out.json").flows
    ways = [["static.0", "linear.0", "join.0", "dynamic.0"], ["static.0", "shadow.0", "join.0"]]
    expected = [[f"{stage} chunk {chunk}" for stage in way] for chunk in range(4) for way in ways]
    for chunk in range(4):
        if chunk > 0:  # in chunk 0 it took no time
            expected[2 * chunk].insert(0, f"embedding chunk {chunk}")
    expected[-2] += ["static.1 chunk 3", "head chunk 3"]
    assert list(flows.values()) == expected
    back = read_trace(tmp_path / "out.json")
    assert back[0].pipeline == record.pipeline
    assert [g[2:] for g in idle_gaps(back[0])] == [
        (g.start_ns - record.start_ns, g.end_ns - record.start_ns, g.cause) for g in idle_gaps(record)
    ]


def test_trace_of_the_previous_format_is_read_as_a_chain(tmp_path):
    path, record = tmp_path / "out.json", virtual_record(npu_and_cpu())
    write_trace(path, [record], "toy")
    data = json.loads(path.read_text("utf-8"))
    data["otherData"]["format"] = "chunkrt trace 1"
    (pipeline,) = data["otherData"]["pipelines"]
    pipeline["stages"] = [[stage.name, stage.device, stage.has_state] for stage in record.pipeline.stages]
    path.write_text(json.dumps(data))
    (back,) = read_trace(path)
    assert back.pipeline == record.pipeline
    pipeline["stages"][2] = ["a", "cpu", True, [1]]
    path.write_text(json.dumps(data))
    with pytest.raises(ConfigError, match="is damaged"):
        read_trace(path)


def test_states_of_npus_return_unchanged(tmp_path):
    path, record = tmp_path / "out.json", virtual_record(npu_and_cpu())
    states = [NpuState(status="restoring", failures=3, restored=2, fallbacks=17, error="SSR: no DSP"), NpuState()]
    write_trace(path, [record], "toy", states)
    assert CheckedTrace(path).process == "toy"
    assert read_trace_file(path)[2] == states
    write_trace(path, [record], "toy")
    assert read_trace_file(path)[2] == []


def test_counters(tmp_path):
    record = virtual_record(npu_and_cpu(), slots=2, position=5)
    write_trace(tmp_path / "out.json", [record], "toy")
    counters = CheckedTrace(tmp_path / "out.json").counters
    assert set(counters) == {
        "busy % NPU",
        "busy % CPU",
        "chunk slots in use",
        "memory chunk bytes",
        "memory KV cache bytes",
    }
    in_use = [value for _, value in counters["chunk slots in use"]]
    assert (in_use[0], max(in_use), in_use[-1]) == (0, 2, 0)
    assert [500 * value for value in in_use] == [value for _, value in counters["memory chunk bytes"]]
    cache = [value for _, value in counters["memory KV cache bytes"]]
    assert cache == sorted(cache)
    assert (cache[0], cache[-1]) == (5 * 24, (5 + 29) * 24)


def test_busy_samples_average_to_the_busy_share(tmp_path):
    record = virtual_record(npu_and_cpu(2), num_chunks=40)
    write_trace(tmp_path / "out.json", [record], "toy")
    counters = CheckedTrace(tmp_path / "out.json").counters
    for time in where_time_went([record]):
        *samples, last = [value for _, value in counters[f"busy % {time.name.upper()}"]]
        assert (len(samples) > 10, last) == (True, 0)
        assert all(0 <= sample <= 100 for sample in samples)
        busy = 100 * sum(time.busy_ns.values()) / time.total_ns
        assert sum(samples) / len(samples) == pytest.approx(busy, abs=0.1)


def test_copies_have_a_track_if_there_are_any(tmp_path):
    record = virtual_record(npu_and_cpu(), num_chunks=1)
    first = next(event for event in record.events if event.task.subgraph == 2)
    copy = TaskEvent(first.task, "dma", 0, first.start_ns, first.start_ns)
    write_trace(tmp_path / "out.json", [replace(record, copies=[copy])], "toy")
    trace = CheckedTrace(tmp_path / "out.json")
    assert list(trace.tracks.values()) == ["runs", "NPU", "CPU worker 0", "copies"]
    assert [s[2] for s in trace.slices["copies"]] == ["copy for dynamic.0 chunk 0"]
    (back,) = read_trace(tmp_path / "out.json")
    assert [c.task for c in back.copies] == [copy.task]


def test_spans_of_a_converting_npu_are_within_its_tasks_and_round_trip(tmp_path):
    record = virtual_record(npu_and_cpu())
    npu, cpu = record.pipeline.processors
    processors = (replace(npu, num_computing=1), cpu)
    events = [
        e._replace(passage=Passage(e.start_ns + 1, e.start_ns + 3, e.end_ns - 5))
        if e.processor == "npu" and e.end_ns - e.start_ns > 8
        else e
        for e in record.events
    ]
    record = replace(record, events=events, pipeline=replace(record.pipeline, processors=processors))
    write_trace(tmp_path / "trace", [record], "spans")
    (back,) = read_trace(tmp_path / "trace")
    assert back.pipeline == record.pipeline
    assert back.events == [moved_to_zero(event, record.start_ns) for event in events]
    slices = [e for e in json.loads((tmp_path / "trace").read_text())["traceEvents"] if e.get("cat") == "span"]
    num_passed = sum(event.passage is not None for event in events)
    assert [e["name"] for e in slices] == ["entering", "waiting", "computing", "leaving"] * num_passed
    npu_time, cpu_time = where_time_went([record])
    assert {s: npu_time.span_ns[s] for s in ("entering", "waiting", "leaving")} == {
        "entering": num_passed,
        "waiting": 2 * num_passed,
        "leaving": 5 * num_passed,
    }
    assert sum(npu_time.span_ns.values()) == sum(e.end_ns - e.start_ns for e in events if e.passage is not None)
    assert not cpu_time.span_ns


def moved_to_zero(event, start_ns):
    passage = event.passage and Passage(*(time - start_ns for time in event.passage))
    return event._replace(start_ns=event.start_ns - start_ns, end_ns=event.end_ns - start_ns, passage=passage)


def test_real_runs_round_trip(tmp_path):
    executor = LoneExecutor(PLAN, processors=npu_and_cpu(2), policy="look_ahead")
    state = State(PLAN, CONTEXT)
    records = [executor.run(Request(tokens(count), state)).record for count in (29, 1, 1)]
    write_trace(tmp_path / "out.json", records, "toy")
    trace = CheckedTrace(tmp_path / "out.json")
    assert [s[2] for s in trace.slices["runs"]] == ["prefill 29 tokens", "decode at 29", "decode at 30"]
    zero = records[0].start_ns
    for record, back in zip(records, read_trace(tmp_path / "out.json"), strict=True):
        moved = [e._replace(start_ns=e.start_ns - zero, end_ns=e.end_ns - zero) for e in record.events]
        times = {"start_ns": record.start_ns - zero, "end_ns": record.end_ns - zero}
        assert back == replace(record, events=moved, copies=[], **times)
        assert [(g.cause, g.end_ns - g.start_ns) for g in idle_gaps(back)] == [
            (g.cause, g.end_ns - g.start_ns) for g in idle_gaps(record)
        ]


def test_any_name_survives(tmp_path):
    title = 'Modell "Ünï\\cödé" 模型 \U0001f642 </script> \x07 \udc80'
    write_trace(tmp_path / "spür 模.json", [virtual_record(npu_and_cpu())], title)
    assert CheckedTrace(tmp_path / "spür 模.json").process.startswith('Modell "Ünï\\cödé" 模型 \U0001f642 </script>')
    assert len(read_trace(tmp_path / "spür 模.json")) == 1


@pytest.mark.parametrize("num_chunks", [1_000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_huge_trace_is_written_piece_by_piece(tmp_path, num_chunks):
    """The writer holds only a small part of the file, and the analysis succeeds."""
    record = virtual_record(npu_and_cpu(2), num_chunks=num_chunks, slots=32)
    path = tmp_path / "out.json"
    tracemalloc.start()
    write_trace(path, [replace(record, events=record.events)], "toy")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert path.stat().st_size > 1000 * num_chunks
    assert peak < path.stat().st_size
    (back,) = read_trace(path)
    assert len(back.events) == len(record.events) > 5 * num_chunks
    for time in where_time_went([back]):
        assert sum(time.busy_ns.values()) + sum(time.idle_ns.values()) == time.total_ns


def test_write_trace_replaces_the_file_completely_or_not_at_all(tmp_path):
    path = tmp_path / "out.json"
    path.write_text("old")
    broken = replace(virtual_record(npu_and_cpu()), events=[TaskEvent(Task(0, 0), "nobody", 0, 0, 0)])
    with pytest.raises(KeyError):
        write_trace(path, [broken], "toy")
    assert path.read_text() == "old"
    write_trace(path, [virtual_record(npu_and_cpu())], "toy")
    assert len(read_trace(path)) == 1
    assert list(tmp_path.iterdir()) == [path]


def test_unwritable_paths_are_rejected(tmp_path):
    with pytest.raises(ConfigError, match="it is a folder; name a file"):
        check_trace_path(tmp_path)
    with pytest.raises(ConfigError, match="there is no folder"):
        check_trace_path(tmp_path / "missing" / "out.json")
    with pytest.raises(ConfigError, match="there is no folder"):
        write_trace(tmp_path / "missing" / "out.json", [virtual_record(npu_and_cpu())], "toy")
    check_trace_path(tmp_path / "out.json")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_write_trace_does_not_replace_a_device(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="it is no file; name a file"):
        check_trace_path(tmp_path / "pipe")


def damaged(change):
    def write(path):
        write_trace(path, [virtual_record(npu_and_cpu())], "toy")
        data = json.loads(path.read_text("utf-8"))
        change(data)
        path.write_text(json.dumps(data))

    return write


def set_event(**fields):
    def change(data):
        event = next(e for e in data["traceEvents"] if e["ph"] == "X" and e["cat"] != "run")
        event.update(fields)

    return damaged(change)


def set_pipeline(**fields):
    return damaged(lambda data: data["otherData"]["pipelines"][0].update(fields))


def set_run(**fields):
    return damaged(lambda data: data["otherData"]["runs"][0].update(fields))


def set_npu(**fields):
    state = {"status": "ok", "failures": 0, "restored": 0, "fallbacks": 0, "error": ""}
    return damaged(lambda data: data["otherData"].update(npu=[state | fields]))


PROCESSOR = {"name": "cpu", "devices": ["cpu"], "workers": 1}

NO_TRACES = {
    "empty": (lambda path: path.write_text(""), "it is not JSON"),
    "text": (lambda path: path.write_text("hello"), "it is not JSON"),
    "binary": (lambda path: path.write_bytes(bytes(range(128, 256))), "it is not JSON"),
    "cut": (lambda path: (set_run()(path), path.write_bytes(path.read_bytes()[:-300])), "it is not JSON"),
    "deep": (lambda path: path.write_text("[" * 100_000), "it is not JSON"),
    "list": (lambda path: path.write_text("[1, 2]"), "not in the format"),
    "another program's": (lambda path: path.write_text('{"traceEvents": [{"ph": "X", "ts": 0}]}'), "not in the format"),
    "another version's": (
        damaged(lambda data: data["otherData"].update(format="chunkrt trace 9")),
        "not in the format",
    ),
    "no events": (damaged(lambda data: data.pop("traceEvents")), "KeyError: 'traceEvents'"),
    "events of no use": (damaged(lambda data: data.update(traceEvents=7)), "is damaged"),
    "event of no use": (damaged(lambda data: data["traceEvents"].append(None)), "is damaged"),
    "no runs": (damaged(lambda data: data["otherData"].update(runs=[])), "is damaged"),
    "no tasks": (damaged(lambda data: data.update(traceEvents=[])), "run 0 has no tasks"),
    "unknown track": (set_event(tid=77), "is damaged"),
    "time not finite": (set_event(ts=float("nan")), "NaN is not JSON"),
    "time too large": (set_event(ts=1e300), "is not a time"),
    "negative time": (set_event(dur=-5), "-5 is not a time"),
    "passage beyond its task": (
        set_event(args={"run": 0, "subgraph": 0, "chunk": 0, "passage_ns": [0, 0, 1 << 60]}),
        "which are not within it",
    ),
    "passage backwards": (
        set_event(args={"run": 0, "subgraph": 0, "chunk": 0, "passage_ns": [1, 0, 1]}),
        "which are not within it",
    ),
    "passage in part": (
        set_event(args={"run": 0, "subgraph": 0, "chunk": 0, "passage_ns": [0, 0]}),
        "is damaged",
    ),
    "time is a word": (set_event(ts="now"), "'now' is not a time"),
    "run of no use": (set_event(args={"run": 5, "subgraph": 0, "chunk": 0}), "is damaged"),
    "negative run": (set_event(args={"run": -1, "subgraph": 0, "chunk": 0}), "-1 is not a non-negative integer"),
    "chunk is a share": (set_event(args={"run": 0, "subgraph": 0, "chunk": 0.5}), "0.5 is not a non-negative integer"),
    "tokens": (set_run(num_tokens=0), "run 0 has no tokens"),
    "many tokens": (set_run(num_tokens=1 << 80), "is not a non-negative integer"),
    "pipeline": (set_run(pipeline=3), "is damaged"),
    "slots": (set_pipeline(num_slots=0), "0 chunks in flight, expected 1 to 256"),
    "device": (set_pipeline(stages=[["a", "gpu", "linears", []]]), "'gpu' is not a device"),
    "work": (set_pipeline(stages=[["a", "cpu", True, []]]), "True is not a kind of work"),
    "stage": (set_pipeline(stages=[7]), "is damaged"),
    "stage of another format": (set_pipeline(stages=[["a", "cpu", True]]), "is damaged"),
    "waits for itself": (set_pipeline(stages=[["a", "cpu", "linears", [0]]]), "stage 0 waits for [0], which do not"),
    "waits for a word": (set_pipeline(stages=[["a", "cpu", "linears", "b"]]), "'b' is not a non-negative integer"),
    "waits for a missing stage": (
        set_pipeline(stages=[["a", "cpu", "linears", [-1]]]),
        "-1 is not a non-negative integer",
    ),
    "workers": (set_pipeline(processors=[PROCESSOR | {"workers": 10**12}]), "has 1000000000000 workers"),
    "twins": (set_pipeline(processors=[PROCESSOR, PROCESSOR]), "is damaged"),
    "policy": (set_pipeline(policy=[]), "[] is not a name"),
    "graph lengths": (set_pipeline(graph_lengths=[8, -1]), "-1 is not a non-negative integer"),
    "status of the NPU": (set_npu(status="fine"), "'fine' is not a status of an NPU"),
    "failures of the NPU": (set_npu(failures=-1), "-1 is not a non-negative integer"),
    "error of the NPU": (set_npu(error=None), "None is not a name"),
    "no NPU": (damaged(lambda data: data["otherData"].update(npu=[7])), "is damaged"),
}


@pytest.mark.parametrize("name", NO_TRACES)
def test_file_that_is_not_a_trace_is_one_clear_line(tmp_path, name):
    write, message = NO_TRACES[name]
    path = tmp_path / "out.json"
    write(path)
    with pytest.raises(ConfigError) as raised:
        read_trace(path)
    assert message in str(raised.value)
    assert str(path) in str(raised.value)
    assert "chunkrt run MODEL --trace FILE" in str(raised.value)


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (set_run(num_tokens=10**15), "tasks for"),
        (set_run(end_ns=3), "is not between"),
        (set_pipeline(stages=[["only", "cpu", "attention", []]]), "does not exist"),
        (set_pipeline(processors=[PROCESSOR]), "no worker 0 of processor 'npu' runs"),
        (set_event(dur=1e9), "is not between"),
    ],
)
def test_trace_that_contradicts_itself_is_one_clear_line(tmp_path, write, message):
    write(tmp_path / "out.json")
    with pytest.raises(ConfigError, match="record the run again") as raised:
        where_time_went(read_trace(tmp_path / "out.json"))
    assert message in str(raised.value)


def test_missing_trace_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        read_trace(tmp_path / "out.json")
