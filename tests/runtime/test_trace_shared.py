"""Traces of runs that shared chunks: every chunk once, the sequences of its rows, and files that contradict
themselves."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from fake_backend import make_plan, npu_and_cpu
from fixture_checkpoints import checkpoint, input_ids
from shared_runs import shared_records
from trace_checker import CheckedTrace
from virtual_record import make_record

from chunkrt.errors import ConfigError
from chunkrt.runtime.record import ChunkRecord, RunRecord, SegmentRecord
from chunkrt.runtime.tasks import Task, TaskEvent
from chunkrt.runtime.trace.file import read_trace, write_trace
from chunkrt.runtime.trace.idle import idle_gaps, where_time_went
from chunkrt.runtime.trace.shared import joined, packing, rows_of, with_others
from chunkrt.runtime.trace.timeline.picture import make_picture
from chunkrt.runtime.trace.timeline.vector import to_svg

TOKENS = input_ids("llama_biased_gguf")[:40]
PROMPTS = [TOKENS, TOKENS[:23], TOKENS[:9]]


@pytest.fixture(scope="module")
def records() -> list[RunRecord]:
    """Records of three sessions of one engine, each in a thread of its own."""
    return shared_records(checkpoint("llama_biased_gguf"), PROMPTS, npu="native", chunk_length=8, threads=2)


def chunks_of(records: list[RunRecord]) -> dict[int, ChunkRecord]:
    return {chunk.number: chunk for record in records for chunk in record.chunks}


def test_records_of_an_engine_round_trip(records: list[RunRecord], tmp_path: Path) -> None:
    write_trace(tmp_path / "out.json", records, "toy")
    back = read_trace(tmp_path / "out.json")
    zero = min(record.start_ns for record in records)
    for record, other in zip(records, back, strict=True):
        moved = [e._replace(start_ns=e.start_ns - zero, end_ns=e.end_ns - zero) for e in record.events]
        times = {"start_ns": record.start_ns - zero, "end_ns": record.end_ns - zero}
        assert other == replace(record, events=moved, copies=[], **times)
    assert packing(back) == packing(records)
    by_pipeline = [[r for r in found if r.chunks] for found in (records, back)]
    assert where_time_went(by_pipeline[0]) == where_time_went(by_pipeline[1])


def test_records_of_one_session_contain_its_tokens_in_order(records: list[RunRecord]) -> None:
    by_sequence: dict[int, list[RunRecord]] = {}
    for record in records:
        by_sequence.setdefault(record.sequence, []).append(record)
    assert len(by_sequence) == len(PROMPTS)
    for runs in by_sequence.values():
        position = 0
        for run in runs:
            assert run.position == position
            position += run.num_tokens
            own = [s for chunk in run.chunks for s in chunk.segments if s.sequence == run.sequence]
            assert len(own) == len(run.chunks)
            assert not own or sum(segment.num_tokens for segment in own) == run.num_tokens


def test_shared_chunk_is_drawn_once(records: list[RunRecord], tmp_path: Path) -> None:
    write_trace(tmp_path / "out.json", records, "toy")
    trace = CheckedTrace(tmp_path / "out.json")
    sequences = {f"sequence {record.sequence}" for record in records}
    assert {track for track in trace.tracks.values() if track.startswith("sequence")} == sequences
    assert not trace.slices["runs"]
    for record in records:  # the checker has seen that those of a lane do not overlap
        assert record.name in [name for _, _, name, _ in trace.slices[f"sequence {record.sequence}"]]
    chunks, found = chunks_of(records), set()
    for track, slices in trace.slices.items():
        for _, _, name, args in slices:
            if track.startswith("CPU") and "rows" in args:
                task = args["subgraph"], args["chunk"]
                assert task not in found
                found.add(task)
                segments = chunks[args["chunk"]].segments
                assert list(args["rows"]) == [f"sequence {segment.sequence}" for segment in segments]
                assert all(f"{segment.sequence}" in name.partition(" of ")[2] for segment in segments)
    assert {chunk for _, chunk in found} == set(chunks)
    assert len(found) == sum(len(joint.events) for joint in joined(records) if joint.chunks)


def test_rows_of_names_rows_and_positions() -> None:
    record = made([[(3, 40, 5), (7, 0, 1), (9, 2, 2)]])
    (picture,) = [make_picture(joint) for joint in joined([record])]
    assert [name for name, _ in picture.sequences] == ["sequence 3", "sequence 7", "sequence 9"]
    assert [bar.text for _, bars in picture.sequences for bar in bars] == [
        "chunk 0, rows 0 to 4, from position 40",
        "chunk 0, row 5, from position 0",
        "chunk 0, rows 6 to 7, from position 2",
    ]
    assert [bar.kind for _, bars in picture.sequences for bar in bars] == ["rows", "row", "rows"]
    assert picture.title.startswith("chunks of sequences 3, 7, 9: ")
    titles = [e.text for e in ElementTree.fromstring(to_svg(picture)).iter() if e.tag.endswith("title")]
    assert "chunk 0, rows 0 to 4, from position 40" in titles


def test_joined_records_hold_every_task_once_and_every_chunk(records: list[RunRecord]) -> None:
    together = joined(records)
    assert [record for record in together if not record.chunks] == [record for record in records if not record.chunks]
    spans = [(joint.start_ns, joint.end_ns) for joint in together if joint.chunks]
    assert all(end < start for (_, end), (start, _) in pairwise(sorted(spans)))
    numbers = [chunk.number for joint in together for chunk in joint.chunks]
    assert sorted(numbers) == sorted(chunks_of(records))
    assert sum(joint.num_tokens for joint in together) == sum(record.num_tokens for record in records)
    told = {(r.chunks[e.task.chunk].number, e.task.subgraph, e.start_ns) for r in records if r.chunks for e in r.events}
    assert len(told) == sum(len(joint.events) for joint in together if joint.chunks)
    assert joined(together) == together


def test_timeline_of_a_run_shows_concurrent_sequences(records: list[RunRecord]) -> None:
    longest = max((record for record in records if record.chunks), key=lambda record: record.num_tokens)
    picture = make_picture(with_others(longest, records))
    name = f"sequence {longest.sequence}"
    told = {f"chunk {chunk.number}, {rows_of(chunk)[name]}" for chunk in longest.chunks}
    assert told <= {bar.text for bar in dict(picture.sequences)[name]}
    for _, bars in picture.workers:
        at = 0.0
        for bar in bars:
            assert bar.start == pytest.approx(at)
            at = bar.end
        assert at == pytest.approx(picture.milliseconds)


PLAN = make_plan(layers=1)
EMBEDDING, STATIC_0, DYNAMIC, STATIC_1, HEAD = range(5)
Spans = list[tuple[int, int, str, int, int]]
"""Subgraph, chunk, processor, the worker if it is not the first; start, end."""


def made(segments: list[list[tuple[int, int, int]]], spans: Spans | None = None, slots: int = 2) -> RunRecord:
    """Return shared chunks in the form of `joined`; without spans each task takes 10, one after the other."""
    devices = ["cpu", "npu", "cpu", "npu", "cpu"]
    tasks = [(subgraph, chunk) for chunk in range(len(segments)) for subgraph in range(5)]
    spans = spans or [(s, c, devices[s], 10 * place, 10 * place + 10) for place, (s, c) in enumerate(tasks)]
    events = [
        TaskEvent(Task(s, c), who.split()[0], int(who.partition(" ")[2] or 0), start, end)
        for s, c, who, start, end in spans
    ]
    chunks = [ChunkRecord(number, tuple(SegmentRecord(*s) for s in of)) for number, of in enumerate(segments)]
    processors = npu_and_cpu(1 + any(event.worker for event in events))
    return make_record(
        events, processors, PLAN, num_tokens=sum(chunk.num_tokens for chunk in chunks), slots=slots, chunks=chunks
    )


def test_packing_of_hand_made_chunks() -> None:
    one = made([[(1, 0, 8)], [(1, 8, 3), (2, 0, 2)], [(2, 2, 1), (3, 0, 1)]])
    assert packing([one]) == {
        "sequences": 3,
        "chunks": 3,
        "rows": 15,
        "rows_per_chunk": 5.0,
        "packed": 2 / 3,
        "padding": (0 + 3 + 6) / 24,
    }
    on_cpu = replace(one, pipeline=replace(one.pipeline, processors=npu_and_cpu()[1:]))
    found = packing([one, one, on_cpu])  # a chunk counts once; those of another pipeline are separate
    assert found is not None
    assert (found["chunks"], found["rows"], found["padding"]) == (6, 30, 9 / 24)
    assert packing([replace(one, chunks=())]) is None


def test_joined_records_split_at_a_time_without_chunks() -> None:
    spans: Spans = [(s, c, "cpu", at + s, at + s + 1) for c, at in ((0, 0), (1, 4), (2, 12)) for s in range(5)]
    parts = joined([made([[(1, 0, 8)], [(2, 0, 8)], [(1, 8, 3)]], spans)])
    assert [(part.start_ns, part.end_ns) for part in parts] == [(0, 9), (12, 17)]
    assert [[chunk.number for chunk in part.chunks] for part in parts] == [[0, 1], [2]]


def lines(record: RunRecord) -> list[str]:
    gaps = sorted(idle_gaps(record), key=lambda gap: (gap.processor, gap.start_ns))
    return [f"{gap.start_ns}-{gap.end_ns} {gap.processor}: {gap.cause}" for gap in gaps]


def test_chunks_without_a_common_sequence_do_not_wait_for_each_other() -> None:
    """Their attention runs at once, which never happens for chunks of one prompt."""
    spans: Spans = [
        (EMBEDDING, 0, "cpu", 0, 1),
        (EMBEDDING, 1, "cpu 1", 0, 1),
        (STATIC_0, 0, "npu", 1, 2),
        (STATIC_0, 1, "npu", 2, 3),
        (DYNAMIC, 0, "cpu", 2, 9),
        (DYNAMIC, 1, "cpu 1", 3, 5),
        (STATIC_1, 1, "npu", 5, 6),
        (HEAD, 1, "cpu 1", 6, 7),
        (STATIC_1, 0, "npu", 9, 10),
        (HEAD, 0, "cpu", 10, 11),
    ]
    assert lines(made([[(1, 0, 8)], [(2, 0, 8)]], spans)) == [
        "1-2 cpu: linears",
        "1-3 cpu: linears",
        "5-6 cpu: linears",
        "7-11 cpu: drain",
        "9-10 cpu: linears",
        "0-1 npu: start",
        "3-5 npu: attention",
        "6-9 npu: attention",
        "10-11 npu: drain",
    ]
    with pytest.raises(ConfigError, match=r"dynamic\.0 of chunk 1 started 6 ns before it was ready"):
        idle_gaps(made([[(1, 0, 8)], [(1, 8, 8)]], spans))
    with pytest.raises(ConfigError, match="before it was ready"):
        idle_gaps(made([[(1, 0, 8)], [(2, 0, 8)]], spans, slots=1))


def test_worker_waits_for_a_chunk_that_is_not_formed() -> None:
    spans: Spans = [
        (EMBEDDING, 0, "cpu", 0, 1),
        (STATIC_0, 0, "npu", 1, 3),
        (DYNAMIC, 0, "cpu", 3, 9),
        (EMBEDDING, 1, "cpu", 9, 10),
        (STATIC_0, 1, "npu", 10, 13),
        (DYNAMIC, 1, "cpu", 13, 14),
    ]
    assert "3-9 npu: chunk" in lines(made([[(1, 0, 8)], [(2, 0, 8)]], spans))
    assert "3-9 npu: buffer" in lines(made([[(1, 0, 8)], [(2, 0, 8)]], spans, slots=1))


def test_run_that_waited_between_its_chunks_is_explained_alone() -> None:
    whole = made([[(1, 0, 8)], [(2, 0, 8)], [(1, 8, 3)]])
    events = [event._replace(task=Task(event.task.subgraph, event.task.chunk // 2)) for event in whole.events]
    own = replace(
        whole,
        num_tokens=11,
        events=[event for event in events if not 50 <= event.start_ns < 100],
        chunks=[whole.chunks[0], whole.chunks[2]],
        sequence=1,
    )
    assert "50-100 cpu: chunk" in lines(own)
    (cpu,) = [time for time in where_time_went([own]) if time.name == "cpu"]
    assert (cpu.total_ns, sum(cpu.busy_ns.values())) == (100, 60)  # between its chunks nothing was in progress


def damaged(path: Path, records: list[RunRecord], change: Callable[[dict[str, Any]], object]) -> None:
    write_trace(path, records, "toy")
    data = json.loads(path.read_text("utf-8"))
    change(data)
    path.write_text(json.dumps(data))


def two_runs() -> list[RunRecord]:
    whole = made([[(1, 0, 4), (2, 0, 4)]])
    return [replace(whole, num_tokens=4, sequence=sequence) for sequence in (1, 2)]


def set_segments(*segments: list[Any]) -> Callable[[dict[str, Any]], object]:
    def change(data: dict[str, Any]) -> None:
        for run in data["otherData"]["runs"]:
            run["chunks"] = [[0, list(segments)]]

    return change


def task_of(data: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = next(e for e in data["traceEvents"] if e["ph"] == "X" and e["cat"] != "run")
    return found


NO_CHUNKS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "too many rows": (set_segments([1, 0, 4], [2, 0, 5]), "chunk 0 has 9 rows, expected at most 8"),
    "no rows": (set_segments([1, 0, 4], [2, 0, 0]), "chunk 0 has a segment without rows"),
    "no segments": (set_segments(), "chunk 0 has a segment without rows"),
    "a sequence twice": (set_segments([1, 0, 4], [2, 0, 2], [2, 2, 2]), "chunk 0 has two segments of one sequence"),
    "a segment of two": (set_segments([1, 0], [2, 0, 4]), "is damaged"),
    "a position in words": (set_segments([1, "0", 4], [2, 0, 4]), "'0' is not a non-negative integer"),
    "another's rows": (set_segments([1, 0, 4], [3, 0, 4]), "chunk 0 contains no rows of run 1 from position 0 on"),
    "another position": (set_segments([1, 0, 4], [2, 1, 4]), "chunk 0 contains no rows of run 1 from position 0 on"),
    "too few tokens": (set_segments([1, 0, 3], [2, 0, 4]), "run 0 has 4 tokens, its chunks 3"),
    "a negative number": (
        lambda data: data["otherData"]["runs"][0]["chunks"][0].__setitem__(0, -1),
        "-1 is not a non-negative integer",
    ),
    "two stories": (
        lambda data: data["otherData"]["runs"][1]["chunks"][0][1].reverse(),
        "two runs have different descriptions of chunk 0",
    ),
    "one of two numbers": (
        lambda data: data["otherData"]["runs"][1]["chunks"][0].__setitem__(0, 1),
        "run 1 has no tasks",
    ),
    "a chunk without tasks": (
        lambda data: data["otherData"]["runs"][0].update(
            num_tokens=8, chunks=[[0, [[1, 0, 4], [2, 0, 4]]], [1, [[1, 4, 4]]]]
        ),
        "run 0 has chunks without tasks",
    ),
    "a task of no chunk": (lambda data: task_of(data)["args"].update(chunk=7), "no run has a chunk 7 of pipeline 0"),
    "a task of no pipeline": (
        lambda data: task_of(data)["args"].update(pipeline=1),
        "no run has a chunk 0 of pipeline 1",
    ),
    "a task of one's own": (
        lambda data: task_of(data)["args"].update(run=0),
        "a task belongs to run 0 alone, but that run shared its chunks",
    ),
    "chunks of no use": (lambda data: data["otherData"]["runs"][0].update(chunks=7), "is damaged"),
    "a sequence in words": (
        lambda data: data["otherData"]["runs"][0].update(sequence="a"),
        "'a' is not a non-negative integer",
    ),
}


@pytest.mark.parametrize("name", NO_CHUNKS)
def test_file_that_contradicts_itself_is_one_clear_line(tmp_path: Path, name: str) -> None:
    change, message = NO_CHUNKS[name]
    damaged(tmp_path / "out.json", two_runs(), change)
    with pytest.raises(ConfigError, match="is damaged") as raised:
        read_trace(tmp_path / "out.json")
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_chunks_of_two_engines_with_one_number_are_separate(tmp_path: Path) -> None:
    one, other = made([[(1, 0, 4)]]), made([[(2, 0, 8)]])
    other = replace(other, events=[e._replace(start_ns=e.start_ns + 99, end_ns=e.end_ns + 99) for e in other.events])
    records = [replace(one, sequence=1), replace(other, sequence=2, start_ns=99, end_ns=other.end_ns + 99)]
    assert records[0].pipeline == records[1].pipeline
    write_trace(tmp_path / "out.json", records, "toy")
    back = read_trace(tmp_path / "out.json")
    assert [len(record.events) for record in back] == [5, 5]
    assert [chunk.num_tokens for joint in joined(back) for chunk in joint.chunks] == [4, 8]
