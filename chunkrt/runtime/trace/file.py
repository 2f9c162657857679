"""Trace files: Chrome's JSON format, which also contains the records of the runs, so a trace can be analysed later.

Pipelines, runs and the NPU's health are stored under "otherData", which viewers ignore. Tasks and copies are read from
the events. A chunk that several runs shared is written once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, Any, get_args

from chunkrt.backends.base import Passage
from chunkrt.backends.fallback import STATUSES, NpuState
from chunkrt.errors import ConfigError, cause_of
from chunkrt.files import read_json, written_aside
from chunkrt.graph.plan import Device
from chunkrt.runtime.chunk_slots import check_chunks_in_flight
from chunkrt.runtime.record import (
    ORIGINS,
    WORKS,
    ChunkRecord,
    Origin,
    Pipeline,
    RunRecord,
    SegmentRecord,
    Stage,
    Work,
)
from chunkrt.runtime.tasks import Processor, Task, TaskEvent
from chunkrt.runtime.trace.events import COPIES, FIRST_WORKER_TRACK, SPAN, trace_events, tracks_of
from chunkrt.runtime.trace.shared import pipeline_numbers

FORMAT, CHAINS = "chunkrt trace 2", "chunkrt trace 1"
"""Names of the format and of its predecessor. In the predecessor stages have no `waits_for`, and wait for the preceding
stage.
"""
MOST_WORKERS = 4096
LARGEST = 1 << 62


Trace = tuple[str, list[RunRecord], list[NpuState]]
"""Content of a trace file: the title, the records, and the states of the NPU at the end of the traced runs, one for
each engine that used an NPU. There are no states if an older version of chunkrt wrote the file.
"""


def check_trace_path(path: Path) -> None:
    """Check that a trace can be written to a path, before the traced run.

    Raises:
        ConfigError: the path is not a file, or the folder is missing or not writable.
    """
    if path.exists() and not path.is_file():
        raise ConfigError(
            f"cannot write a trace to {path}: it is {'a folder' if path.is_dir() else 'no file'}; name a file"
        )
    if not path.parent.is_dir():
        raise ConfigError(f"cannot write a trace to {path}: there is no folder {path.parent}")
    if not os.access(path.parent, os.W_OK):
        raise ConfigError(f"cannot write a trace to {path}: {path.parent} is not writable")


def write_trace(path: Path, records: Sequence[RunRecord], title: str, npu: Sequence[NpuState] = ()) -> None:
    """Write the records of some runs to a temporary file next to `path`, and rename it.

    Args:
        path: path of the file; an existing file is replaced.
        records: records of runs on one clock, at least one.
        title: title such as the model's name.
        npu: see `Trace`.

    Raises:
        ConfigError: the file cannot be written.
    """
    check_trace_path(path)
    try:
        with written_aside(path) as aside, aside.open("w", encoding="utf-8", errors="backslashreplace") as file:
            _write(file, records, title, npu)
    except OSError as error:
        raise ConfigError(f"cannot write a trace to {path}: {cause_of(error)}") from error


def read_trace(path: Path) -> list[RunRecord]:
    """Read the records that `write_trace` wrote, in the same order. The errors are those of `read_trace_file`."""
    return read_trace_file(path)[1]


def read_trace_file(path: Path) -> Trace:
    """Read a file that `write_trace` wrote.

    Raises:
        ConfigError: the file is missing or damaged, or another program wrote it.
    """
    try:
        data = read_json(path)
    except OSError as error:
        raise ConfigError(f"cannot read a trace from {path}: {cause_of(error)}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not a trace, because it is not JSON: {error}; {_HINT}") from error
    return parse_trace(data, path)


def parse_trace(data: Any, path: Path) -> Trace:
    """Return the content of a trace, from the JSON value in the file at `path`.

    Raises:
        ConfigError: the trace is damaged, or another program wrote it.
    """
    about = data.get("otherData") if isinstance(data, dict) else None
    if not isinstance(about, dict) or about.get("format") not in (FORMAT, CHAINS):
        raise ConfigError(f"{path} is JSON, but not in the format {FORMAT!r}; {_HINT}")
    try:
        npu = [_npu_state(state) for state in about.get("npu", ())]
        return _text(about.get("title", "")), _records(data["traceEvents"], about), npu
    except (ValueError, KeyError, TypeError, IndexError, OverflowError, AttributeError, ConfigError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise ConfigError(f"the trace in {path} is damaged ({problem}); {_HINT}") from error


_HINT = "record one with `chunkrt run MODEL --trace FILE`"


def _write(file: IO[str], records: Sequence[RunRecord], title: str, npu: Sequence[NpuState]) -> None:
    zero_ns = min(record.start_ns for record in records)
    numbers = pipeline_numbers(records)
    pipelines: list[dict[str, Any]] = []
    runs: list[dict[str, int]] = []
    for record in records:
        if numbers[id(record.pipeline)] == len(pipelines):
            processors = [asdict(p) | {"devices": sorted(p.devices)} for p in record.pipeline.processors]
            pipelines.append(vars(record.pipeline) | {"processors": processors})
        kept = {name: getattr(record, name) for name in ("num_tokens", "position", "position_bytes", "sequence")}
        times = {"start_ns": record.start_ns - zero_ns, "end_ns": record.end_ns - zero_ns}
        chunks: dict[str, Any] = {"chunks": record.chunks} if record.chunks else {}
        cached = {"num_cached": record.num_cached} if record.num_cached else {}
        runs.append({"pipeline": numbers[id(record.pipeline)], **kept, **times, **chunks, **cached})
    tracks = [key[:2] for key in tracks_of(records)]
    about: dict[str, Any] = {"format": FORMAT, "title": title, "pipelines": pipelines, "runs": runs, "tracks": tracks}
    if npu:
        about["npu"] = [asdict(state) for state in npu]
    separator = '{"traceEvents":[\n'
    for event in trace_events(records, title):
        file.write(separator + json.dumps(event, ensure_ascii=False, separators=(",", ":")))
        separator = ",\n"
    file.write('\n],\n"otherData":' + json.dumps(about, ensure_ascii=False) + "}\n")


def _npu_state(data: dict[str, Any]) -> NpuState:
    if data["status"] not in STATUSES:
        raise ValueError(f"{data['status']!r} is not a status of an NPU")
    failures, restored, fallbacks = (_whole(data[name]) for name in ("failures", "restored", "fallbacks"))
    return NpuState(
        status=data["status"], failures=failures, restored=restored, fallbacks=fallbacks, error=_text(data["error"])
    )


def _records(events: list[Any], about: dict[str, Any]) -> list[RunRecord]:
    read_stage = _stage if about["format"] == FORMAT else _stage_of_chain
    pipelines = [_pipeline(data, read_stage) for data in about["pipelines"]]
    workers = {track: (_text(name), _whole(n)) for track, (name, n) in enumerate(about["tracks"], FIRST_WORKER_TRACK)}
    runs = [_run(index, data, pipelines) for index, data in enumerate(about["runs"])]
    if not runs:
        raise ValueError("it has no runs")
    places = _places(runs, [_whole(data["pipeline"]) for data in about["runs"]])
    tasks: list[list[TaskEvent]] = [[] for _ in runs]
    copies: list[list[TaskEvent]] = [[] for _ in runs]
    for event in events:
        if event["ph"] != "X" or event["cat"] in ("run", SPAN):
            continue
        args = event["args"]
        processor, worker = workers[event["tid"]]
        start_ns = _nanoseconds(event["ts"])
        end_ns = start_ns + _nanoseconds(event["dur"])
        for index, chunk in _places_of(args, runs, places):
            task, passage = Task(_whole(args["subgraph"]), chunk), _passage(args, start_ns, end_ns)
            found = TaskEvent(task, processor, worker, start_ns, end_ns, passage)
            (copies if processor == COPIES else tasks)[index].append(found)
    for index, (run, its_tasks) in enumerate(zip(runs, tasks, strict=True)):
        if not its_tasks:
            raise ValueError(f"run {index} has no tasks")
        if run.chunks and {event.task.chunk for event in its_tasks} != set(range(run.num_chunks)):
            raise ValueError(f"run {index} has chunks without tasks")
    return [replace(run, events=e, copies=c) for run, e, c in zip(runs, tasks, copies, strict=True)]


def _passage(args: Mapping[str, Any], start_ns: int, end_ns: int) -> Passage | None:
    if "passage_ns" not in args:
        return None
    passage = Passage(*(start_ns + _whole(time) for time in args["passage_ns"]))
    if list(passage) != sorted(passage) or passage.ended_ns > end_ns:
        raise ValueError(f"a task has NPU times {args['passage_ns']}, which are not within it")
    return passage


def _run(index: int, data: dict[str, Any], pipelines: Sequence[Pipeline]) -> RunRecord:
    """Return the record of a run without its events."""
    pipeline = pipelines[_whole(data["pipeline"])]
    chunks = tuple(_chunk(chunk, pipeline) for chunk in data.get("chunks", ()))
    run = RunRecord(
        pipeline=pipeline,
        num_tokens=_whole(data["num_tokens"]),
        position=_whole(data["position"]),
        position_bytes=_whole(data["position_bytes"]),
        start_ns=_whole(data["start_ns"]),
        end_ns=_whole(data["end_ns"]),
        events=(),
        chunks=chunks,
        sequence=_whole(data.get("sequence", 0)),
        num_cached=_whole(data.get("num_cached", 0)),
    )
    if not run.num_tokens:
        raise ValueError(f"run {index} has no tokens")
    position = run.position
    for chunk in chunks:
        own = [segment for segment in chunk.segments if segment.sequence == run.sequence]
        if [segment.position for segment in own] != [position]:
            raise ValueError(f"chunk {chunk.number} contains no rows of run {index} from position {position} on")
        position += own[0].num_tokens
    if chunks and position != run.position + run.num_tokens:
        raise ValueError(f"run {index} has {run.num_tokens} tokens, its chunks {position - run.position}")
    return run


def _chunk(data: Any, pipeline: Pipeline) -> ChunkRecord:
    number, segments = data
    chunk = ChunkRecord(_whole(number), tuple(SegmentRecord(*map(_whole, segment)) for segment in segments))
    if min((segment.num_tokens for segment in chunk.segments), default=0) < 1:
        raise ValueError(f"chunk {number} has a segment without rows")
    if chunk.num_tokens > pipeline.chunk_length:
        raise ValueError(f"chunk {number} has {chunk.num_tokens} rows, expected at most {pipeline.chunk_length}")
    if len({segment.sequence for segment in chunk.segments}) < len(chunk.segments):
        raise ValueError(f"chunk {number} has two segments of one sequence")
    return chunk


Places = Mapping[tuple[int, int], Sequence[tuple[int, int]]]
"""Maps pipeline and chunk number to the runs with rows in the shared chunk, and the index of the chunk in each run."""


def _places(runs: Sequence[RunRecord], pipelines: Sequence[int]) -> Places:
    places: dict[tuple[int, int], list[tuple[int, int]]] = {}
    chunks: dict[tuple[int, int], ChunkRecord] = {}
    for index, (run, pipeline) in enumerate(zip(runs, pipelines, strict=True)):
        for place, chunk in enumerate(run.chunks):
            if chunks.setdefault((pipeline, chunk.number), chunk) != chunk:
                raise ValueError(f"two runs have different descriptions of chunk {chunk.number}")
            places.setdefault((pipeline, chunk.number), []).append((index, place))
    return places


def _places_of(args: dict[str, Any], runs: Sequence[RunRecord], places: Places) -> Sequence[tuple[int, int]]:
    """Return the runs to which an event belongs, with the index of the event's chunk in each run."""
    chunk = _whole(args["chunk"])
    if "run" in args:
        run = _whole(args["run"])
        if runs[run].chunks:
            raise ValueError(f"a task belongs to run {run} alone, but that run shared its chunks")
        return [(run, chunk)]
    key = _whole(args["pipeline"]), chunk
    if key not in places:
        raise ValueError(f"no run has a chunk {chunk} of pipeline {key[0]}")
    return places[key]


def _pipeline(data: dict[str, Any], read_stage: Callable[..., Stage]) -> Pipeline:
    stages = tuple(read_stage(index, *stage) for index, stage in enumerate(data["stages"]))
    processors = tuple(_processor(processor) for processor in data["processors"])
    names = ("chunk_length", "num_slots", "slot_bytes")
    chunk_length, num_slots, slot_bytes = (_whole(data[name]) for name in names)
    check_chunks_in_flight(num_slots)
    if chunk_length < 1 or len({processor.name for processor in processors}) < len(processors):
        raise ValueError(f"a pipeline of {num_slots} slots for chunks of {chunk_length}, {len(processors)} processors")
    return Pipeline(
        stages=stages,
        processors=processors,
        policy=_text(data["policy"]),
        chunk_length=chunk_length,
        num_slots=num_slots,
        slot_bytes=slot_bytes,
        graph_lengths=tuple(sorted(map(_whole, data.get("graph_lengths", ())))),
        origin=_origin(data.get("origin", "unknown")),
    )


def _stage(index: int, name: Any, device: Any, work: Any, waits_for: Any) -> Stage:
    if work not in WORKS:
        raise ValueError(f"{work!r} is not a kind of work")
    if any(_whole(source) >= index for source in waits_for):
        raise ValueError(f"stage {index} waits for {waits_for}, which do not all come before it")
    return Stage(_text(name), _device(device), work, tuple(waits_for))


def _stage_of_chain(index: int, name: Any, device: Any, has_state: Any) -> Stage:
    work: Work = "attention" if has_state else "linears" if device == "npu" else "embedding"
    return Stage(_text(name), _device(device), work, tuple(range(max(0, index - 1), index)))


def _processor(data: dict[str, Any]) -> Processor:
    workers = _whole(data["workers"])
    if not 1 <= workers <= MOST_WORKERS:
        raise ValueError(f"a processor has {workers} workers")
    num_computing = data.get("num_computing")
    if num_computing is not None and not 1 <= _whole(num_computing) <= workers:
        raise ValueError(f"a processor of {workers} workers computes {num_computing} tasks at once")
    return Processor(
        name=_text(data["name"]),
        devices=frozenset(_device(device) for device in data["devices"]),
        workers=workers,
        num_computing=num_computing,
    )


def _device(value: Any) -> Device:
    if value not in get_args(Device):
        raise ValueError(f"{value!r} is not a device")
    device: Device = value
    return device


def _origin(value: Any) -> Origin:
    if value not in ORIGINS:
        raise ValueError(f"{value!r} is not an origin of times")
    origin: Origin = value
    return origin


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not a name")
    return value


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < LARGEST:
        raise ValueError(f"{value!r} is not a non-negative integer")
    return int(value)


def _nanoseconds(value: Any) -> int:
    """Convert microseconds to nanoseconds."""
    if type(value) not in (int, float) or not 0 <= value < LARGEST:
        raise ValueError(f"{value!r} is not a time")
    nanoseconds: int = round(value * 1000)
    return nanoseconds
