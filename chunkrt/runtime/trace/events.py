"""Traces: the records of runs as Chrome trace events, which Perfetto's viewer opens.

A trace contains one track for each worker, one for copies if any exist, and one for the runs (or, if runs share chunks,
one for the runs of each sequence). A task is a complete event ("X") named by its subgraph and chunk, and for a shared
chunk by the sequences of its rows. Flow events ("s", "t", "f") lead along every chunk; if tasks fork, a second flow
leads along the other branch until it joins. Counters ("C") hold the busy share of each processor and the memory of
chunks and caches. The slice of a task whose values an NPU has converted contains the slices of its spans. Times are
microseconds since the first run's start, with three decimals.

Source: Trace Event Format, Google, the Chromium project.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any

from chunkrt.runtime.record import RunRecord, track_name
from chunkrt.runtime.tasks import TaskEvent
from chunkrt.runtime.trace.shared import chunk_numbers, joined, pipeline_numbers, rows_of, sequence_names

Event = dict[str, Any]
Tracks = Mapping[tuple[str, int, int], tuple[int, str]]
"""Track id and name by (processor, worker, set of tracks)."""

Lanes = Mapping[int, tuple[int, str]]
"""Track id and name by sequence."""

PROCESS = 1
"""Process to which all tracks belong."""

RUNS_TRACK, FIRST_WORKER_TRACK = 1, 2
COPIES = "copies"
SPAN = "span"
"""Category of the slices within the slice of a task, which are the parts of the task's time."""
TRUNCATION_GUARD_US = 1e-4
"""Offset added to all times in microseconds. Viewers truncate times to nanoseconds, and not every nanosecond is exact
in floating point. If 8.413 times 1000 became 8412.999, adjacent tasks would overlap.
"""

TASKS_PER_BUSY_SAMPLE, MOST_BUSY_SAMPLES = 16, 128


def trace_events(records: Sequence[RunRecord], title: str) -> Iterator[Event]:
    """Yield the events of a trace.

    Args:
        records: records of runs on one clock, at least one.
        title: title of the process, such as the model's name.
    """
    tracks, sets = tracks_of(records), _sets(records)
    lanes = _lanes(records, FIRST_WORKER_TRACK + len(tracks))
    yield from _metadata([*tracks.values(), *lanes.values()], title)
    start_ns, flow_ids, pipelines = min(record.start_ns for record in records), count(1), pipeline_numbers(records)
    for index, record in enumerate(records):
        track, _ = lanes.get(record.sequence, (RUNS_TRACK, ""))
        drawn = _Drawn(record, {"run": index}, start_ns, tracks, 0, flow_ids)
        yield drawn.run(track)
        if not record.chunks:
            yield from drawn.events()
    for joint in joined([record for record in records if record.chunks]):
        source, set_number = {"pipeline": pipelines[id(joint.pipeline)]}, sets[id(joint.pipeline)]
        yield from _Drawn(joint, source, start_ns, tracks, set_number, flow_ids).events()


def tracks_of(records: Sequence[RunRecord]) -> Tracks:
    """Return the tracks of a trace, NPUs first. The track of copies is worker 0 of a processor with the name COPIES."""
    names: dict[tuple[str, int, int], str] = {}
    sets = _sets(records)
    for record in sorted(records, key=lambda record: -sum(p.workers for p in record.pipeline.processors)):
        for processor in sorted(record.pipeline.processors, key=lambda processor: "cpu" in processor.devices):
            for worker in range(processor.workers):
                number = sets.get(id(record.pipeline), 0)
                names.setdefault((processor.name, worker, number), track_name(processor, worker) + _suffix(number))
    if any(record.copies for record in records):
        names[COPIES, 0, 0] = COPIES
    return {key: (track, name) for track, (key, name) in enumerate(names.items(), FIRST_WORKER_TRACK)}


def _sets(records: Sequence[RunRecord]) -> dict[int, int]:
    """Map the identity of every pipeline for shared chunks to its set of tracks. Pipelines need separate tracks because
    their workers may have the same names: some use an NPU, and others only the CPU.
    """
    shared = {id(record.pipeline): record.pipeline for record in records if record.chunks}
    in_order = sorted(shared, key=lambda pipeline: -sum(p.workers for p in shared[pipeline].processors))
    return {pipeline: number for number, pipeline in enumerate(in_order)}


def _suffix(set_number: int) -> str:
    return f" ({set_number + 1})" if set_number else ""


def _lanes(records: Sequence[RunRecord], first: int) -> Lanes:
    """Return a track for the runs of each sequence if runs share chunks, because such runs overlap."""
    if not any(record.chunks for record in records):
        return {}
    sequences = sorted({record.sequence for record in records})
    return {sequence: (track, f"sequence {sequence}") for track, sequence in enumerate(sequences, first)}


def _metadata(tracks: Iterable[tuple[int, str]], title: str) -> Iterator[Event]:
    yield {"ph": "M", "pid": PROCESS, "name": "process_name", "args": {"name": title}}
    for track, name in ((RUNS_TRACK, "runs"), *tracks):
        where = {"ph": "M", "pid": PROCESS, "tid": track}
        yield {**where, "name": "thread_name", "args": {"name": name}}
        yield {**where, "name": "thread_sort_index", "args": {"sort_index": track}}


class _Drawn:
    """The part of a trace that belongs to one run, or to shared chunks.

    Args:
        record: record of the run, or joint record of shared chunks.
        source: argument of the tasks: the run's index, or for shared chunks the pipeline's number.
        set_number: number of the set of tracks of its workers.
    """

    def __init__(
        self,
        record: RunRecord,
        source: Event,
        start_ns: int,
        tracks: Tracks,
        set_number: int,
        flow_ids: Iterator[int],
    ) -> None:
        self._record = record
        self._source = source
        self._zero_ns = start_ns
        self._tracks = {key[:2]: track for key, (track, _) in tracks.items() if key[2] == set_number}
        self._copies_track, _ = tracks.get((COPIES, 0, 0), (0, ""))
        self._suffix = _suffix(set_number)
        self._flow_ids = flow_ids
        self._numbers = chunk_numbers(record)

    def run(self, track: int) -> Event:
        """Return the event of the complete run."""
        record = self._record
        args = self._source | {"tokens": record.num_tokens, "position": record.position}
        if record.num_cached:
            args |= {"cached": record.num_cached}
        if record.chunks:
            args |= {"sequence": record.sequence, "chunks": self._numbers}
        return self._slice(track, record.name, "run", record.start_ns, record.end_ns, args)

    def events(self) -> Iterator[Event]:
        """Yield tasks, copies, arrows and counters."""
        record = self._record
        for event in record.events:
            track = self._tracks[event.processor, event.worker]
            yield self._task(event, track, "")
            for span, start_ns, end_ns in event.spans:
                if end_ns > start_ns:
                    yield self._slice(track, span, SPAN, start_ns, end_ns, {})
        for copy in record.copies:
            yield self._task(copy, self._copies_track, "copy for ")
        if record.num_chunks > 1 or record.chunks:
            yield from self._flows()
        yield from self._busy_shares()
        yield from self._memory()

    def _task(self, event: TaskEvent, track: int, prefix: str) -> Event:
        stage = self._record.pipeline.stages[event.task.subgraph]
        args = self._source | {"subgraph": event.task.subgraph, "chunk": self._numbers[event.task.chunk]}
        if event.passage is not None:
            args |= {"passage_ns": [time - event.start_ns for time in event.passage]}
        name = f"{prefix}{stage.name} chunk {self._numbers[event.task.chunk]}"
        if self._record.chunks:
            shared = self._record.chunks[event.task.chunk]
            args |= {"rows": rows_of(shared)}
            name += f" of {sequence_names([shared])}"
        return self._slice(track, name, "copy" if prefix else stage.work, event.start_ns, event.end_ns, args)

    def _slice(self, track: int, name: str, category: str, start_ns: int, end_ns: int, args: Event) -> Event:
        return {
            "ph": "X",
            "pid": PROCESS,
            "tid": track,
            "ts": _microseconds(start_ns - self._zero_ns),
            "dur": _microseconds(end_ns - start_ns),
            "name": name,
            "cat": category,
            "args": args,
        }

    def _flows(self) -> Iterator[Event]:
        """Yield arrows from every task of a chunk to the tasks that wait for it. Arrows begin and end in the middle of
        tasks.
        """
        chunks: dict[int, dict[int, TaskEvent]] = defaultdict(dict)
        for event in self._record.events:
            chunks[event.task.chunk][event.task.subgraph] = event
        for chunk, tasks in sorted(chunks.items()):
            for path in self._paths(sorted(tasks)):
                # no arrow can be attached to a task of zero duration
                events = [tasks[index] for index in path if tasks[index].end_ns > tasks[index].start_ns]
                if len(events) < 2:
                    continue
                name = f"chunk {self._numbers[chunk]}"
                flow = {"pid": PROCESS, "cat": "chunk", "name": name, "id": next(self._flow_ids)}
                for step, event in enumerate(events):
                    middle_ns = (event.start_ns + event.end_ns) // 2 - self._zero_ns
                    place = {"tid": self._tracks[event.processor, event.worker], "ts": _microseconds(middle_ns)}
                    phase = "s" if step == 0 else "f" if step == len(events) - 1 else "t"
                    yield {"ph": phase, **flow, **place, **({"bp": "e"} if phase != "s" else {})}

    def _paths(self, subgraphs: Sequence[int]) -> list[list[int]]:
        """Return paths that together contain every dependency between subgraphs exactly once."""
        paths: list[list[int]] = []
        ends: dict[int, list[int]] = {}
        """Path that ends at a subgraph."""
        for index in subgraphs:
            for source in self._record.pipeline.stages[index].waits_for:
                path = ends.pop(source, None)
                if path is None:
                    path = [source]
                    paths.append(path)
                path.append(index)
                ends.setdefault(index, path)
        return paths

    def _busy_shares(self) -> Iterator[Event]:
        """Yield the busy share of each processor's workers, over equal parts of the run."""
        record = self._record
        num_samples = max(1, min(MOST_BUSY_SAMPLES, len(record.events) // TASKS_PER_BUSY_SAMPLE))
        step = max(1, -(-(record.end_ns - record.start_ns) // num_samples))
        busy = {processor.name: [0] * num_samples for processor in record.pipeline.processors}
        for event in record.events:
            start, end = event.start_ns - record.start_ns, event.end_ns - record.start_ns
            for sample in range(start // step, min(num_samples, end // step + 1)):
                overlap = min(end, (sample + 1) * step) - max(start, sample * step)
                busy[event.processor][sample] += overlap
        for processor in record.pipeline.processors:
            name = processor.name.upper()
            for sample, total in enumerate(busy[processor.name]):
                share = round(100 * total / (step * processor.workers), 1)
                yield self._counter("busy %", record.start_ns + sample * step, {name: share})
            yield self._counter("busy %", record.end_ns, {name: 0})

    def _memory(self) -> Iterator[Event]:
        """Yield the number of chunk slots in use, and the memory of slots and of filled caches."""
        record = self._record
        starts: dict[int, int] = {}
        ends: dict[int, int] = {}
        for event in record.events:
            chunk = event.task.chunk
            starts[chunk] = min(starts.get(chunk, event.start_ns), event.start_ns)
            ends[chunk] = max(ends.get(chunk, event.end_ns), event.end_ns)
        changes = sorted([(end, -1, chunk) for chunk, end in ends.items()] + [(s, 1, c) for c, s in starts.items()])
        length, slot_bytes = record.pipeline.chunk_length, record.pipeline.slot_bytes
        in_use, filled = 0, record.position
        if record.chunks:
            filled = sum({s.sequence: s.position for c in reversed(record.chunks) for s in c.segments}.values())
        for time, change, chunk in [(record.start_ns, 0, 0), *changes]:
            in_use += change
            if change < 0 and record.chunks:
                filled += record.chunks[chunk].num_tokens
            elif change < 0:
                filled += min(length, record.num_tokens - chunk * length)
            memory = {"chunk bytes": in_use * slot_bytes, "KV cache bytes": filled * record.position_bytes}
            yield self._counter("chunk", time, {"slots in use": in_use})
            yield self._counter("memory", time, memory)

    def _counter(self, name: str, time_ns: int, values: Mapping[str, float]) -> Event:
        return {
            "ph": "C",
            "pid": PROCESS,
            "tid": RUNS_TRACK,
            "ts": _microseconds(time_ns - self._zero_ns),
            "name": name + self._suffix,
            "args": values,
        }


def _microseconds(nanoseconds: int) -> float:
    return nanoseconds / 1000 + TRUNCATION_GUARD_US
